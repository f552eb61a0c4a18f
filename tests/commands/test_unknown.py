"""Texts whose characters a tokenizer lacks are reported wherever a model is given text."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megabert import hf
from megabert.commands import features, fill
from megabert.finetune.files import QuestionExample, SentenceExample, TextExample
from megabert.finetune.run import encode_splits
from megabert.finetune.settings import Settings
from megabert.finetune.tasks import PRESETS, custom
from megabert.objectives.minimal_pairs import SentenceScorer
from tests.helpers import runs

SETTINGS = Settings(max_length=40, stride=20)
KNOWN, UNKNOWN = "the quick fox", "the щука"
PLAIN, TAG = custom("classify", text=["text"], label="label"), custom("tag")


@pytest.fixture(params=["unigram", "uncased"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return runs.make(tmp_path / "run", request.param)


def warned(err: str, source: object) -> bool:
    """Whether one line names the source and a share between 1% and all of its tokens."""
    match = re.fullmatch(r"warning: (.*): ([0-9.]+)% of its tokens are \[UNK\]: \S+ lacks their characters; .*\n", err)
    return match is not None and match[1] == str(source) and 1 < float(match[2]) < 80


def test_features_and_fill_warn_of_unknown_texts(run: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "in.txt").write_text(f"{KNOWN}\n{UNKNOWN}\n{KNOWN}\n{UNKNOWN}\n")
    command = ["--model", str(run), "--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.npy")]
    assert features.main(command) == 0
    assert warned(capsys.readouterr().err, tmp_path / "in.txt")
    assert fill.main(["--model", str(run), f"{UNKNOWN} [MASK]"]) == 0
    assert warned(capsys.readouterr().err, "the text")
    assert fill.main(["--model", str(run), f"{KNOWN} [MASK]"]) == 0
    assert not capsys.readouterr().err


def test_pairs_and_finetuning_warn_of_unknown_texts(run: Path, capsys) -> None:
    found, cpu = hf.load(run), torch.device("cpu")
    scorer = SentenceScorer(found.language_model(cpu), found.config, found.tokenizer, cpu, line=True)
    scorer.encode([KNOWN, UNKNOWN])
    assert warned(capsys.readouterr().err, "the minimal pairs")
    known, unknown = (TextExample(text, "", text, None, label) for text, label in ((KNOWN, "x"), (UNKNOWN, "y")))
    encode_splits(PLAIN, {"train": [known, replace(known, label="y")], "dev": [unknown]}, found.tokenizer, SETTINGS)
    assert warned(capsys.readouterr().err, "the dev file")
    words = [SentenceExample("0", "", tuple(UNKNOWN.split()), ("O", "X"))]
    encode_splits(TAG, {"train": words}, found.tokenizer, SETTINGS)
    assert warned(capsys.readouterr().err, "the train file")
    asked = {"train": [QuestionExample("q", "", "the fox", UNKNOWN, ())]}
    encode_splits(PRESETS["squad1.1"], asked, found.tokenizer, SETTINGS)
    assert warned(capsys.readouterr().err, "the train file")
