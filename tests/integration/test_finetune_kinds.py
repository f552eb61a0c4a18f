"""Label sets and choices, learned by the command from Parquet and CSV, and predicted."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tests.helpers import finetune_problem
from tests.integration.conftest import command

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
TRAINED = (
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
)


def rows(kind: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """The label is a function of a sentence's first word: whether it is even, how high its number is."""
    words = finetune_problem.sentences(2 * count, seed)
    for one, two in zip(words[::2], words[1::2], strict=True):
        first = int(one[0][1:])
        a, b = (" ".join(sentence[:4]) for sentence in (one, two))
        if kind == "multilabel":
            yield {"t": {"text": a}, "y": ["even"] * (first % 2 == 0) + ["high"] * (first >= 20)}
        else:
            even, odd = (f"w{first - first % 2} {b}", f"w{first - first % 2 + 1} {b}")
            swapped = int(two[0][1:]) % 2
            yield {"q": "w1", "x": (even, odd)[swapped], "z": (odd, even)[swapped], "y": swapped}


def write(path: Path, table: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(table), path)
    else:
        with path.open("w", newline="") as file:
            out = csv.DictWriter(file, table[0])
            out.writeheader()
            out.writerows(table)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, ending, columns, metric, least",
    [
        ("multilabel", ".parquet", "--text t.text --label y --class-weights balanced", "micro_f1", 0.85),
        ("choose", ".csv", "--text q --choices x z --label y", "accuracy", 0.8),
    ],
)
def test_other_kinds_are_learned_and_predicted(
    kind: str, ending: str, columns: str, metric: str, least: float, tmp_path: Path
) -> None:
    finetune_problem.write_run(tmp_path / "run")
    train, dev = (
        write(tmp_path / f"{name}{ending}", list(rows(kind, count, seed)))
        for name, count, seed in (("train", 400, 1), ("dev", 100, 2))
    )
    given = ("-m", "megabert.finetune", "--model", tmp_path / "run", "--kind", kind, *columns.split(), *TRAINED)
    done = command(*given, "--train", train, "--dev", dev, "--output", tmp_path / "out", **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out" / "seed1" / "result.json").read_text())
    assert result["scores"]["dev"][metric] >= least, result["scores"]
    predict = ("-m", "megabert.finetune", "--model", tmp_path / "out" / "seed1", "--predict", dev)
    files = ("--output", tmp_path / "p.tsv", "--scores", tmp_path / "p.jsonl")
    done = command(*predict, *files, **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "p.tsv").read_bytes()
    assert written == (tmp_path / "out" / "seed1" / "predictions-dev.tsv").read_bytes()
    assert len((tmp_path / "p.jsonl").read_text().splitlines()) == 100
