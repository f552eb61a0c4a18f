"""From text in each script to a model that tags it: a build of its sentences, a model over its tokenizer, fine-tuned."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from data_prep.__main__ import main as data_prep
from megabert.checkpoint import write_start
from megabert.common.scripts import writes_without_spaces
from megabert.config import Config, ModelConfig
from megabert.data.tokenizer import Tokenizer
from tests.helpers import runs
from tests.integration.conftest import ROOT, command

SAMPLES = ROOT / "tests" / "data_prep" / "scripts"
LANGUAGES = sorted(path.stem for path in SAMPLES.glob("*.txt"))


def write_tags(path: Path, lines: list[str], count: int, seed: int) -> None:
    """Sentences whose words are tagged by their first characters; Chinese, Japanese and Thai by characters."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for line in rng.choices(lines, k=count):
            words = list("".join(line.split())) if writes_without_spaces(line[0]) else line.split()
            cut = rng.randrange(max(1, len(words) - 10))
            for word in words[cut : cut + 10]:
                file.write(f"{word} {'AB'[ord(word[0]) % 2]}\n")
            file.write("\n")


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_tags_are_learned_in_every_script(language: str, tmp_path: Path) -> None:
    lines = (SAMPLES / f"{language}.txt").read_text(encoding="utf-8").splitlines()
    text = "".join(json.dumps({"text": " ".join(lines[i:] + lines[:i])}) + "\n" for i in range(len(lines)))
    (tmp_path / "text.jsonl").write_text(text, encoding="utf-8")
    options = ["--vocab-size", "400", "--model-type", "bpe", "--character-coverage", "1", "--workers", "1", "--quiet"]
    assert (
        data_prep(["build", "--input", str(tmp_path / "text.jsonl"), "--output", str(tmp_path / "data"), *options]) == 0
    )
    tokenizer = Tokenizer.load(tmp_path / "data" / "tokenizer.model")
    model = ModelConfig(vocab_size=tokenizer.vocab_size, layers=2, hidden=32, heads=2, max_positions=64)
    state = {
        "config": Config(model=model).model_dump(),
        "dataset": "d" * 64,
        "tokenizer": tokenizer.sha256,
        "seconds": 0.0,
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tokenizer.model").write_bytes(tokenizer.data)
    write_start(tmp_path / "run", runs.model(model).state_dict(), state)
    for name, count in (("train", 300), ("dev", 60)):
        write_tags(tmp_path / f"{name}.conll", lines, count, seed=count)
    done = command(
        *("-m", "megabert.finetune", "--model", tmp_path / "run", "--kind", "tag", "--text", 0, "--label", 1),
        *("--metric", "accuracy", "--train", tmp_path / "train.conll", "--dev", tmp_path / "dev.conll"),
        *("--output", tmp_path / "tags", "--max-length", 64, "--batch", 16, "--epochs", 12, "--lr", "2e-3"),
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    (result,) = (tmp_path / "tags").glob("*/result.json")
    assert json.loads(result.read_text())["scores"]["dev"]["accuracy"] > 0.9, result.read_text()
