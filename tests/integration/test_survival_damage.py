"""Nothing damaged is trained on: a rank's damaged row ends the whole job, or is left out and counted alike everywhere."""

from __future__ import annotations

import shutil

import pytest

from megabert.data.shards import DamagedRow, Dataset
from tests.helpers.job import Job
from tests.integration.conftest import metrics

pytestmark = pytest.mark.dist


def damaged_rows(folder, count: int) -> list[int]:
    """Flips one bit in each of `count` rows of the first shard, and gives their ids."""
    dataset = Dataset(folder)
    layout, path = dataset._full, folder / dataset.manifest.shards[0].name
    data = bytearray(path.read_bytes())
    _, offset, row_bytes = layout.members["ids"]
    rows = list(range(3, 3 + 7 * count, 7))
    assert rows[-1] < min(layout.rows, dataset.rows)
    for row in rows:
        data[offset + row * row_bytes + 5] ^= 1
    path.write_bytes(data)
    return rows


@pytest.fixture
def damaged(dataset, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(dataset, folder)
    return folder


@pytest.mark.slow
def test_stop_ends_every_rank_with_one_line(damaged, tmp_path):
    (row,) = damaged_rows(damaged, 1)
    with pytest.raises(DamagedRow):
        Dataset(damaged).read([row])
    job = Job(damaged, tmp_path / "run", "schedule.total_steps=300", "checkpoint.interval=1000")
    assert job.codes(150) == [2, 2], job.output
    (line,) = [text for text in job.output.splitlines() if "error:" in text]
    assert line.startswith("error: rank ") and "shard-000000.tar: block 0, row 3 (ids at byte" in line
    assert "Traceback" not in job.output


@pytest.mark.slow
def test_skip_leaves_them_out_names_each_once_and_counts_them(damaged, tmp_path):
    rows = damaged_rows(damaged, 5)
    total = Dataset(damaged).rows
    steps = -(-2 * total // 16)  # two epochs
    job = Job(damaged, tmp_path / "run", "data.on_damage=skip", "--stop-after", steps)
    assert job.codes(200) == [0, 0], job.output
    told = [text for text in job.output.splitlines() if "left out:" in text]
    for row in rows:
        assert 1 <= sum(f"block 0, row {row} (ids" in text for text in told) <= 2  # each rank that met it, once
    counts = [m["data/damaged_rows"] for m in metrics(tmp_path / "run") if "data/damaged_rows" in m]
    assert counts[-1] in (2 * len(rows), 2 * len(rows) + 1), counts  # the last log line may lie in the third epoch
    assert counts == sorted(counts)
