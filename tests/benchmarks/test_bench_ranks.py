"""The rehearsal of many ranks: what two of them do exactly, and the fits."""

from __future__ import annotations

import json

import pytest

from benchmarks import bench_ranks
from tests.conftest import ROOT
from tests.integration.conftest import command

DATA = ROOT / "tests/data/golden/dataset/held_out"


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_train_restart_and_halve(tmp_path) -> None:
    """It fails where rows are lost or repeated over two restarts, or weights are not those that were saved."""
    asked = ("--ranks", 2, "--per-node", 2, "--updates", 4, "--timeout", 0, "--data", DATA)
    done = command("benchmarks/bench_ranks.py", *asked, "--json", tmp_path / "found.json", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["quantity"]: row["values"]["2"] for row in json.loads((tmp_path / "found.json").read_text())["rows"]}
    # 3 commands of 4 updates of 8 rows; weights and moments of both ranks, and the manifest
    assert rows["run: rows, each given once"] == 96 and rows["run: files of a checkpoint"] == 5
    # the first rank of a node reads the manifest, and each the tokenizer
    assert rows["open the data: opened: dataset, rank 0"] == 2
    assert rows["open the data: opened: dataset, another rank"] == 1
    # a report goes out by one gather, whose own row is counted with the two that come in
    assert rows["sync: collectives"] == 1 and rows["sync: collective bytes"] % (3 * 8) == 0
    # two files and a note
    assert rows["save: opened: run, another rank"] == 3 < rows["save: opened: run, rank 0"]
    # each file is opened twice by the one rank that hashes it, and again for its tensors; the owner's lock by each
    assert rows["restart: opened: run, another rank"] == 7 and rows["restart: opened: safetensors"] == 4
    assert rows["start: processes started, another rank"] == 0


@pytest.mark.parametrize(
    ("values", "shape", "at_1024"),
    [
        *(([7, 7, 7], "constant", 7), ([19, 67, 259], "N", 2051), ([64, 1024, 16384], "N^2", 1024**2)),
        *(([3, 5, 7], "log2 N", 10), ([128, 32, 8], "/ N", 1)),
    ],
)
def test_growth_is_fitted_by_its_shape(values, shape, at_1024) -> None:
    text, found = bench_ranks.fitted([8, 32, 128], values)
    assert text.endswith(shape) and found == pytest.approx(at_1024)
