"""Label sets, learned by the command from Parquet, and predicted."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tests.helpers import finetune_problem
from tests.integration.conftest import command

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
TRAINED = [
    "--max-length",
    "32",
    "--batch",
    "16",
    "--epochs",
    "8",
    "--lr",
    "3e-3",
    "--precision",
    "fp32",
    "--dropout",
    "0",
]


def write(path: Path, count: int, seed: int) -> Path:
    """The labels are a function of a sentence's first word: whether it is even, how high its number is."""
    rows = []
    for words in finetune_problem.sentences(count, seed):
        first = int(words[0][1:])
        labels = ["even"] * (first % 2 == 0) + ["high"] * (first >= 20)
        rows.append({"t": {"text": " ".join(words[:4])}, "y": labels})
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.slow
def test_label_sets_are_learned_and_predicted(tmp_path: Path) -> None:
    finetune_problem.write_run(tmp_path / "run")
    train, dev = write(tmp_path / "train.parquet", 400, 1), write(tmp_path / "dev.parquet", 100, 2)
    task = ["--kind", "multilabel", "--text", "t.text", "--label", "y"]
    given = ("-m", "megabert.finetune", "--model", tmp_path / "run", *task, *TRAINED)
    done = command(*given, "--train", train, "--dev", dev, "--output", tmp_path / "out", **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "seed1" / "result.json").read_text())
    assert result["scores"]["dev"]["micro_f1"] >= 0.85, result["scores"]
    predict = ("-m", "megabert.finetune", "--model", tmp_path / "out" / "seed1", "--predict", dev)
    done = command(*predict, "--output", tmp_path / "p.tsv", **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "p.tsv").read_bytes() == (tmp_path / "out" / "seed1" / "predictions-dev.tsv").read_bytes()
