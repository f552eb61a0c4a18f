"""What a terabyte of text asks of the file system, counted with as many tasks and no text in them."""

import contextlib
import time

import numpy as np
import pytest

from data_prep.executor import journal as journal_module
from data_prep.executor import work_files
from data_prep.executor.journal import Journal, Stages
from data_prep.executor.pool import Pool
from data_prep.executor.work_files import BuildJob
from data_prep.options import BuildOptions
from data_prep.stages import dedup, shuffle
from data_prep.stages.write import plan_shards

TASKS = 16_400
RECORDS = 4  # of a task


@pytest.fixture
def opened(monkeypatch):
    """Names of work files in the order in which they are opened for reading."""
    names = []
    real = work_files.mapped

    def mapped(job, name, dtype):
        names.append(name)
        return real(job, name, dtype)

    monkeypatch.setattr(work_files, "mapped", mapped)
    return names


def test_duplicates_of_many_tasks_open_a_file_few_times(tmp_path, monkeypatch, opened):
    monkeypatch.setattr(dedup, "RANGE_RECORDS", 1024)
    monkeypatch.setattr(journal_module, "SWEPT", 0)
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 1 << 64, TASKS * RECORDS, np.uint64)
    copied = rng.choice(len(keys), 2_000, replace=False)
    keys[copied[1_000:]] = keys[copied[:1_000]]
    numbers = np.repeat(np.arange(TASKS, dtype=np.uint64) << np.uint64(32), RECORDS)
    numbers += np.tile(np.arange(RECORDS, dtype=np.uint64), TASKS)
    for task in range(TASKS):
        here = slice(task * RECORDS, (task + 1) * RECORDS)
        records = np.sort(work_files.keyed(keys[here], numbers[here]), order="key")
        (tmp_path / f"read-{task:07d}.documents-keys").write_bytes(records.tobytes())
    job = BuildJob(BuildOptions(), "", str(tmp_path), "stop")
    with contextlib.closing(Journal(tmp_path, Pool(1))) as journal:
        stages, runs = Stages(journal, progress=False), dedup.SortedRuns("documents", "read", TASKS)
        made = []
        drops = dedup.find_duplicates(stages, job, runs, len(keys), made)
        journal.flush()
    masks = dedup.task_masks(TASKS, [drops])
    assert len(dedup.ranges(runs, len(keys))) == 65  # each of which would open each task's file
    assert len(opened) < 2 * TASKS
    assert sum(drop.count for mask in masks for drop in mask.drops) == TASKS
    names = [f"{name}.drop" for name in ("documents-tasks-000000", "documents-tasks-000063")]
    assert all((tmp_path / name).exists() for name in names) and not list(tmp_path.glob("merged-*"))
    found = [np.fromfile(path, dedup.PARTNERS)["number"] for path in sorted(tmp_path.glob("documents-tasks-*"))]
    later = np.maximum(numbers[copied[1_000:]], numbers[copied[:1_000]])
    assert np.concatenate(found).tolist() == np.sort(later).tolist()


def test_rows_of_many_tasks_open_a_file_few_times():
    tokens = 250_000_000_000
    part = shuffle.RowSplit("train", 128, 4, TASKS, "uint16", "out")
    buckets = len(shuffle.buckets(part, tokens, 65_536 * 128))
    merges = shuffle.merges(part, tokens, buckets)
    assert sum(merge.runs.runs for merge in merges) == TASKS and len(merges) <= 64
    assert TASKS + buckets * len(merges) < buckets * TASKS / 200
    assert max(tokens / TASKS * merge.runs.runs / merge.runs.ranges for merge in merges) < 1.1 * (1 << 23)
    # 20 GB of text: opening takes seconds, and merging would write it all once more
    assert not shuffle.merges(shuffle.RowSplit("train", 128, 4, 640, "uint16", "out"), 5_000_000_000, 600)


def test_shards_of_many_buckets_are_planned_in_one_pass():
    rows = np.random.default_rng(0).integers(60_000, 70_000, TASKS).tolist()
    began = time.process_time()
    plans = plan_shards(shuffle.RowSplit("train", 128, 4, TASKS, "uint16", "out"), rows, 65_536)
    assert time.process_time() - began < 2
    assert [plan.first_row for plan in plans] == list(range(0, sum(rows), 65_536))
    assert sum(plan.rows for plan in plans) == sum(rows)
    assert sum(len(plan.slices) for plan in plans) < 2 * TASKS + len(plans)
    first = np.concatenate([[0], np.cumsum(rows)])
    for plan in plans[:: TASKS // 10]:
        starts = [int(first[bucket]) + at for bucket, at, _ in plan.slices]
        assert (
            starts[0] == plan.first_row
            and starts[1:] == [start + count for start, (_, _, count) in zip(starts, plan.slices, strict=True)][:-1]
        )
