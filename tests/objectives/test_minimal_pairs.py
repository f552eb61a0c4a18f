"""Scores of sentences are those of a plain loop over transformers' model on the exported folder; tables are as BLiMP's."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers

from benchmarks.race.dataset import default_text
from megabert import hf
from megabert.commands import export, pairs
from megabert.hf import tokenizer_export
from megabert.objectives import minimal_pairs
from megabert.objectives.minimal_pairs import PairsWhileTraining, SentenceScorer, build_table, score_sentences
from megabert.objectives.pairs import Pair, read_pairs
from tests.helpers import runs, tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.refusal import refusal

LONG = "fox the she over the lazy dog by the sea shore"
SENTENCES = ["the quick brown fox jumps", "she sells sea shells", "the", LONG]
SCORES = {"right": -1.0, "wrong": -2.0, "same": -2.0}


def plain_scores(folder: Path, sentences: list[str], causal: bool) -> list[float]:
    """By transformers alone, one masked copy after another."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    peer, found = auto.from_pretrained(folder, is_decoder=causal).eval(), []
    for sentence in sentences:
        ids, total = tokenizer(sentence, return_tensors="pt")["input_ids"], 0.0
        for i in range(1, ids.shape[1] - 1):
            seen = ids.clone()
            seen[0, i] = tokenizer.mask_token_id
            with torch.no_grad():
                logits = peer(ids).logits[0, i - 1] if causal else peer(seen).logits[0, i]
            total += logits.log_softmax(-1)[ids[0, i]].item()
        found.append(total)
    return found


def test_the_model_is_told_that_scores_are_causal(tmp_path: Path) -> None:
    """Attention over whole sequences knows it from that alone."""
    pretrained, told, cpu = hf.load(runs.make(tmp_path, "uncased")), [], torch.device("cpu")
    model = pretrained.language_model(cpu, torch.float32)

    def recorded(**inputs: Any) -> torch.Tensor:
        told.append(inputs["causal"])
        return model(**inputs)

    for causal in (True, False):
        scorer = SentenceScorer(recorded, pretrained.config, pretrained.tokenizer, cpu, line=False, causal=causal)  # type: ignore[arg-type]
        encoded = scorer.encode(SENTENCES)
        scorer.score(encoded, scorer.jobs(encoded)[0])
    assert told == [True, False]


@pytest.mark.parametrize(("trained", "score"), [(False, None), (True, None), (False, True), (True, False)])
def test_scores_are_those_of_a_plain_loop(trained: bool, score: bool | None, tmp_path: Path) -> None:
    """Of a model trained causally or not, scored causally or not (None: as it was trained)."""
    run = runs.make(tmp_path / "run", "uncased", causal=trained)
    export.export(run, tmp_path / "hf")
    pretrained = hf.load(run)
    want = plain_scores(tmp_path / "hf", SENTENCES, trained if score is None else score)
    np.testing.assert_allclose(score_sentences(pretrained, SENTENCES, causal=score), want, rtol=1e-5)
    with pytest.raises(ValueError, match="'' has 0 tokens; the model scores 1 to"):
        score_sentences(pretrained, ["the", ""])


def test_long_sentences_are_split_over_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the scores of whole ones."""
    pretrained = hf.load(runs.make(tmp_path, "uncased"))
    want = score_sentences(pretrained, SENTENCES)
    packs = [mock.Mock(wraps=pack) for pack in (minimal_pairs.pack, minimal_pairs.pack_line)]
    monkeypatch.setattr(minimal_pairs, "pack", packs[0])
    monkeypatch.setattr(minimal_pairs, "pack_line", packs[1])
    monkeypatch.setitem(minimal_pairs.BATCH_TOKENS, "cpu", 30)
    np.testing.assert_allclose(score_sentences(pretrained, SENTENCES), want, rtol=1e-5)
    sizes = [sum(map(len, call.args[0])) for pack in packs for call in pack.call_args_list]
    assert max(sizes) <= 30 and len(sizes) > len(SENTENCES)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_accuracy_of_published_pairs_is_a_plain_scripts(causal: bool, tmp_path: Path) -> None:
    """Four pairs of each paradigm of BLiMP and Zorro, on the exported folder: equal to a tenth of a point."""
    published = default_text() / "minimal_pairs"
    if not published.is_dir():
        pytest.skip(f"{published} is not there")
    run = runs.make(tmp_path / "run", str(default_text() / "bert-base-uncased-vocab.txt"), causal=causal)
    export.export(run, tmp_path / "hf")
    out = tmp_path / "table.json"
    options = ["--pairs", str(published), "--each", "4", "--json", str(out)]
    assert pairs.main(["--model", str(tmp_path / "hf"), *options]) == 0
    found, each = json.loads(out.read_text()), read_pairs(published, each=4)
    sentences = minimal_pairs.list_sentences(each)
    want = build_table(each, dict(zip(sentences, plain_scores(tmp_path / "hf", sentences, causal), strict=True)))
    assert found["pairs"] > 200 and found["ties"] < 4
    for name, values in want["paradigms"].items():
        assert 100 * found["paradigms"][name]["accuracy"] == pytest.approx(100 * values["accuracy"], abs=0.1), name


def test_fields_ties_and_equal_names_of_tables() -> None:
    of = [("right", "wrong", "a"), ("wrong", "right", "a"), ("right", "same", "b"), ("wrong", "same", "c")]
    table = build_table([Pair(good, bad, name, "f" if name != "c" else "g") for good, bad, name in of], SCORES)
    assert table["fields"] == {"f": 0.75, "g": 0.5}
    assert table["paradigms"]["a"] == {"field": "f", "pairs": 2, "accuracy": 0.5}
    assert (table["accuracy"], table["pairs"], table["ties"]) == (pytest.approx(2 / 3), 4, 1)
    right, wrong = ("right", "wrong"), ("wrong", "right")
    table = build_table([Pair(*right, "a", "f"), Pair(*wrong, "a", "g"), Pair(*right, "b", "g")], SCORES)
    assert {name: values["pairs"] for name, values in table["paradigms"].items()} == {"f/a": 1, "g/a": 1, "b": 1}
    assert table["accuracy"] == pytest.approx(2 / 3) and table["pairs"] == 3


def test_both_benchmarks_files_are_read(tmp_path: Path) -> None:
    more = {"field": "syntax", "UID": "x_1"}
    lines = [json.dumps({"sentence_good": f"good {i}", "sentence_bad": f"bad {i}"} | more) + "\n" for i in range(3)]
    (tmp_path / "x_1.jsonl").write_text("".join(lines))
    (tmp_path / "npi-matrix_question.txt").write_text("wrong a\nright a\nwrong b\nright b\n")
    assert read_pairs(tmp_path, each=1) == [
        Pair("right a", "wrong a", "npi-matrix_question", "npi"),
        Pair("good 0", "bad 0", "x_1", "syntax"),
    ]
    assert len(read_pairs(tmp_path)) == 5
    twice = '{"sentence_good": "a", "sentence_bad": "b", "UID": "c", "UID": "d"}'
    for wrong in ('{"sentence_good": "alone"}', '{"sentence_good": "a text", "sentence_bad": null}', twice):
        (tmp_path / "x_2.jsonl").write_text(f"{lines[0]}{wrong}\n")
        with pytest.raises(ValueError, match=r"x_2\.jsonl, line 2: no object with sentence_good and sentence_bad"):
            read_pairs(tmp_path / "x_2.jsonl")
    for good, message in ((" ", "sentence_good is empty; remove the pair"), (r"\ud800", "is not JSON")):
        (tmp_path / "x_2.jsonl").write_text(f'{lines[0]}{{"sentence_good": "{good}", "sentence_bad": "a"}}\n')
        with pytest.raises(ValueError, match=rf"x_2\.jsonl, line 2: {message}"):
            read_pairs(tmp_path / "x_2.jsonl")
    for folder in ("one", "two"):  # which have files of one name
        (tmp_path / "same" / folder).mkdir(parents=True)
        (tmp_path / "same" / folder / "npi-any.txt").write_text(f"wrong {folder}\nright {folder}\nwrong x\nright x\n")
    same = [(pair.paradigm, pair.good) for pair in read_pairs(tmp_path / "same", each=1)]
    assert same == [("one/npi-any", "right one"), ("two/npi-any", "right two")]


def test_the_command_prints_and_writes_its_table(tmp_path: Path, capsys, monkeypatch) -> None:
    run, file, out = runs.make(tmp_path / "run", "uncased"), tmp_path / "npi-question.txt", tmp_path / "out.json"
    file.write_text("the fox the\nthe quick fox\n" * 3)
    command = ["--model", str(run), "--pairs", str(file)]
    assert pairs.main([*command, "--json", str(out), "--score", "causal"]) == 0
    assert json.loads(out.read_text())["score"] == "causal" and capsys.readouterr().out
    assert "already exists; name another file" in refusal(capsys, pairs.main, *command, "--json", out)
    out.unlink()
    monkeypatch.setattr(pairs, "model_folder", lambda source: run)
    command[1] = "https://me:secret@host/run?key=secret"
    assert pairs.main([*command, "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["score"] == "masked" and written["pairs"] == 3 and written["accuracy"] in (0, 0.5, 1)
    assert written["model"] == "https://host/run"
    shown = capsys.readouterr().out
    assert "2 sentences in " in shown and " a minute" in shown
    mean = f"{100 * written['accuracy']:.2f}  mean of 1 paradigms (3 pairs"
    assert mean in shown and "npi-question (3 pairs)" in shown


class Numbers:
    """A tokenizer of numbers."""

    pad_id, unk_id, cls_id, sep_id, mask_id = 0, -1, 1, 2, 3

    def encode_texts(self, texts):
        return [[int(word) for word in text.split()] for text in texts]


def figures_of(world) -> tuple[dict[str, float], int]:
    config = tiny.config(zero__stage=3 if world.size > 1 else 0)
    engine = tiny.engine(config, world)
    scorer = SentenceScorer(engine.module, config, Numbers(), world.device, line=False)
    pairs = [Pair(f"9 {i} 7 {i + 1} 8", f"9 {i} 7 8", f"p{i % 2}", ("a/b", "語/b")[i % 2]) for i in range(20, 61)]
    called, own = mock.Mock(), mock.patch.object(tokenizer_export, "encode", Numbers.encode_texts)
    with own, mock.patch.object(minimal_pairs, "BATCH_TOKENS", {"cpu": 100}):
        return PairsWhileTraining(pairs, scorer, world).evaluate(called), called.call_count


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_share_the_sentences(world) -> None:
    alone, batches = figures_of(world)
    together = run_ranks(3, figures_of, timeout=120)
    assert [found for found, _ in together] == [alone] * 3
    assert list(alone) == ["eval/pairs_accuracy", "eval/pairs_a_b", "eval/pairs_語_b"]
    assert batches % 3 and [calls for _, calls in together] == [-(-batches // 3)] * 3
