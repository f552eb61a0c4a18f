"""Texts whose characters a tokenizer lacks are reported wherever a model is given text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from megabert import hf
from megabert.commands import export, features, fill
from megabert.finetune.datasets import QuestionExample, SentenceExample, TextExample
from megabert.finetune.encoding import encode
from megabert.finetune.tasks import PRESETS, custom
from megabert.objectives.minimal_pairs import SentenceScorer
from tests.helpers import runs

KNOWN, UNKNOWN = "the quick fox", "the щука"
PLAIN, TAG = custom("classify", text=["text"], label="label"), custom("tag")


@pytest.fixture(params=["unigram", "uncased"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return runs.make(tmp_path / "run", request.param)


def warned(err: str, count: int, texts: int) -> bool:
    return err.startswith(f"warning: {count} of {texts} texts are more than 10% [UNK]: ") and err.count("\n") == 1


def test_features_and_fill_warn_of_unknown_texts(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text(f"{KNOWN}\n{UNKNOWN}\n{KNOWN}\n{UNKNOWN}\n")
    command = ["--model", str(run), "--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.npy")]
    assert features.main(command) == 0
    assert warned(capsys.readouterr().err, 2, 4)
    assert fill.main(["--model", str(run), f"{UNKNOWN} [MASK]"]) == 0
    assert warned(capsys.readouterr().err, 1, 1)
    assert fill.main(["--model", str(run), f"{KNOWN} [MASK]"]) == 0
    assert not capsys.readouterr().err


def test_pairs_and_finetuning_warn_of_unknown_texts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = hf.load(run)
    cpu = torch.device("cpu")
    scorer = SentenceScorer(found.language_model(cpu), found.config, found.tokenizer, cpu, line=True)
    scorer.encode([KNOWN, UNKNOWN])
    assert warned(capsys.readouterr().err, 1, 2)
    texts = [TextExample(str(i), "", text, None, "x") for i, text in enumerate([KNOWN, UNKNOWN, UNKNOWN])]
    encode(PLAIN, texts, found.tokenizer, ("x", "y"), 40)
    assert warned(capsys.readouterr().err, 2, 3)
    words = [SentenceExample("0", "", tuple(UNKNOWN.split()), ("O", "X"))]
    encode(TAG, words, found.tokenizer, ("O", "X"), 40)
    assert warned(capsys.readouterr().err, 1, 1)
    questions = [QuestionExample("q", "", "the fox", UNKNOWN, ())]
    encode(PRESETS["squad1.1"], questions, found.tokenizer, (), 40)
    assert warned(capsys.readouterr().err, 1, 1)
    encode(PLAIN, texts[:1], found.tokenizer, ("x", "y"), 40)
    assert not capsys.readouterr().err


def test_an_exported_run_has_our_ids_of_long_words(run: Path, tmp_path: Path) -> None:
    export.export(run, tmp_path / "hf")
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("the " + "sea" * 100, "shells" * 200):
        ids = peer(text, add_special_tokens=False)["input_ids"]
        for model in (run, tmp_path / "hf"):
            tokenizer = hf.load(model).tokenizer
            assert tokenizer.encode_texts([text]) == [ids] and tokenizer.unk_id not in ids
