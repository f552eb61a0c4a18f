"""Words and probabilities are those of transformers' pipeline on the exported model, and newer checkpoints are followed."""

import re
from pathlib import Path

import pytest
import torch
import transformers

import megabert
from megabert import checkpoint, hf
from megabert.checkpoint import run_lock
from megabert.commands import export, fill
from tests.helpers import runs
from tests.helpers.refusal import refusal
from tests.integration.conftest import command


@pytest.mark.parametrize("kind", runs.KINDS)
def test_words_are_those_of_the_pipeline(kind: str, tmp_path: Path) -> None:
    run = runs.make(tmp_path / "run", kind)
    export.export(run, tmp_path / "hf")
    pipeline = transformers.pipeline("fill-mask", str(tmp_path / "hf"), device="cpu")
    pretrained = hf.load(run)
    for text in (
        "the quick [MASK] jumps",
        "[MASK] sells [MASK], surely",
        "so [MASK][MASK]",
        "the [SEP]fox [CLS] [MASK]",
    ):
        answers = pipeline(text, top_k=4)
        answers = answers if isinstance(answers[0], list) else [answers]
        filled = fill.Filler(pretrained).fill(text, top=4)
        assert len(filled) == text.count("[MASK]") == len(answers)
        for words, want in zip(filled, answers, strict=True):
            assert [p for _, p in words] == pytest.approx([a["score"] for a in want], abs=1e-6)
            tokens = [pretrained.tokenizer.tokens[a["token"]].strip() for a in want]
            assert [word.removeprefix("##") for word, _ in words] == tokens


def test_a_causal_run_fills_from_the_left(tmp_path: Path, capsys) -> None:
    run = runs.make(tmp_path / "run", "uncased", causal=True)
    export.export(run, tmp_path / "hf")
    made = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")("the quick", return_tensors="pt")
    with torch.no_grad():
        peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
        want = peer(made["input_ids"][:, :-1]).logits[0, -1].softmax(-1).topk(3).values.tolist()
    filler = fill.Filler(hf.load(run))
    for text in ("the quick [MASK]", "the quick [MASK] fox jumps"):
        (words,) = filler.fill(text, top=3)
        assert [p for _, p in words] == pytest.approx(want, abs=1e-6)
    said = refusal(capsys, fill.main, "--model", run, "[MASK] and [MASK]")
    assert "the run is causal and fills in one [MASK], not 2" in said


def test_the_likeliest_words_or_a_mistake_are_printed(tmp_path: Path, capsys) -> None:
    run = runs.make(tmp_path / "run", "uncased")
    for model in (run, run / "checkpoints/step-00000000"):
        assert fill.main(["--model", str(model), "--top", "3", "the [MASK]"]) == 0
        assert re.fullmatch(r"\[MASK\](  \S+ \d+\.\d%){3}\n", capsys.readouterr().out)
    # more than the vocabulary has
    found = hf.load(run)
    (words,) = fill.Filler(found).fill("[MASK]", top=10**6)
    assert len(words) == found.tokenizer.vocab_size and sum(p for _, p in words) == pytest.approx(1, abs=1e-4)
    assert {"[PAD]", "##es", "the"} <= {word for word, _ in words}
    for text, message in (
        ("[MASK] " * 50, "the text has 52 tokens, the model takes at most 40"),
        ("caf\udce9 [MASK]", "the text is not valid UTF-8"),
    ):
        assert message in refusal(capsys, fill.main, "--model", run, text)


def test_python_names_what_is_no_text(tmp_path: Path) -> None:
    model = megabert.load(runs.make(tmp_path / "run", "uncased"))
    for given in (model.tokenizer, model.logits):
        with pytest.raises(ValueError, match="no texts; give one at least"):
            given([])
    for given in (model.tokenizer, model.logits, model.encode):
        with pytest.raises(ValueError, match=r"texts\[1\]: has '\\ud800', which is half a character; remove"):
            given(["a", "b \ud800"])
        with pytest.raises(TypeError, match=r"texts\[0\]: expected str, got int"):
            given([5])
    for given in (model.tokenizer, model.logits, model.encode, model.fill):
        with pytest.raises(TypeError, match="texts: expected str, or several, got NoneType"):
            given(None)
    assert model.encode([]).shape == (0, 32)
    for top in (0, "3", 1.5):
        with pytest.raises(ValueError, match=f"top={top!r}: must be 1 or more"):
            model.fill("[MASK]", top)
    most = model.tokenizer.vocab_size
    assert most % 128, "the embedding has padding entries"
    for ids, message in (
        ([[2, most, 3]], rf"ids 2 to {most}: the model has 0 to {most - 1}"),
        ([[2, -1, 3]], "ids -1 to 3: the model has"),
        ([2, 3], r"ids of shape \[2\], torch.int64: expected whole numbers \[n, T\]"),
        ([[2.0, 3.0]], r"ids of shape \[1, 2\], torch.float32: expected"),
        ([[], []], r"ids of shape \[2, 0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model.logits(torch.tensor(ids))


def test_it_reads_beside_a_locked_run(world, tmp_path: Path, monkeypatch) -> None:
    run = runs.make(tmp_path / "run", "uncased")
    monkeypatch.setattr(run_lock, "BEAT", 1000.0)
    run_lock.acquire(run, world)
    half = run / "checkpoints" / ".saving-00000009"
    half.mkdir()
    (half / "weights.safetensors").write_bytes(b"not yet")
    before = sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*"))
    done = command("-m", "megabert", "fill", "--model", run, "the [MASK]")
    assert done.returncode == 0 and done.stdout.count("%") == 5 and not done.stderr
    assert sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*")) == before


def test_a_checkpoint_removed_while_read_is_replaced(tmp_path: Path, monkeypatch) -> None:
    """As by a training run that saves meanwhile and keeps only its newest."""
    run = runs.make(tmp_path / "run", "uncased")
    real, calls = checkpoint.load_weights, []

    def racing(path: Path):
        calls.append(path)
        if len(calls) == 1:
            saved = run / "checkpoints"
            (saved / "step-00000000").rename(saved / "step-00000030")
            (saved / "pointer.json").write_text('{"step": 30}')
            raise FileNotFoundError("step-00000000/weights.safetensors")
        return real(path)

    monkeypatch.setattr(checkpoint, "load_weights", racing)
    assert hf.load(run).weights and len(calls) == 2
