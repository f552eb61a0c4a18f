"""Shuffle and shards of few and of very many tasks."""

import numpy as np
import pytest

from data_prep.executor import work_files
from data_prep.readers import tasks
from data_prep.stages import shuffle
from megabert.data.shards import Dataset
from tests.helpers.prep_builds import build_here


@pytest.fixture
def make(corpus, tokenizer_file, tmp_path, monkeypatch):
    """Build the corpus with many small tasks; returns the folder."""
    monkeypatch.setattr(tasks, "TASK_BYTES", (1 << 20, 1 << 20))
    monkeypatch.setattr(shuffle, "MAX_BUCKET_TOKENS", 1 << 16)

    def run(name):
        options = {"tokenizer": tokenizer_file, "held_out": 0.02, "rows_per_shard": 4096, "workers": 1}
        build_here(corpus, tmp_path / name, **options)
        return tmp_path / name

    return run


def test_merged_runs_give_the_same_bytes(make, monkeypatch):
    few, merged, original = make("few"), [], shuffle.merge
    monkeypatch.setattr(work_files, "MAX_OPENS", 1)
    monkeypatch.setattr(work_files, "MERGED_RUNS", 2)

    def merge(job, item):
        merged.append((item.index, item.runs.runs, item.runs.ranges))
        return original(job, item)

    monkeypatch.setattr(shuffle, "merge", merge)
    many = make("many")
    assert [index for index, _, _ in merged] == [0, 1]
    assert sum(runs for _, runs, _ in merged) == 6 and all(ranges > 3 for _, _, ranges in merged)
    for name in ("manifest.json", "shard-000000.tar", "held_out/manifest.json"):
        assert (many / name).read_bytes() == (few / name).read_bytes()


def test_neighbouring_rows_are_strangers(make):
    """The share of rare tokens is the same in each tenth of the rows, and that of a row says nothing of the next."""
    dataset = Dataset(make("whole"))
    rows = dataset.read(np.arange(dataset.rows)).ids
    half = np.median(rows[rows > 4])
    share = ((rows > half) & (rows > 4)).sum(1) / (rows > 4).sum(1)
    tenths = np.array_split(share, 10)
    for part in tenths:
        assert abs(part.mean() - share.mean()) < 5 * share.std() / np.sqrt(len(part))
    assert abs(np.corrcoef(share[:-1], share[1:])[0, 1]) < 5 / np.sqrt(len(share))


def test_slots_are_as_few_as_fill_rows():
    for lengths, slots in (({128: 1000}, 1), ({64: 1000, 128: 100}, 2), ({32: 4000}, 4)):
        assert shuffle.choose_slots(lengths, 128) == slots
    # A second slot would save 20 rows of 5,040: less than half a percent.
    assert shuffle.choose_slots({128: 5000, 100: 20, 28: 20}, 128) == 1


def test_rows_of_many_tasks_open_few_files():
    tasks, tokens = 16_400, 250_000_000_000
    part = shuffle.RowSplit("train", 128, 4, tasks, "uint16", "out")
    buckets = len(shuffle.buckets(part, tokens, 65_536 * 128))
    merges = shuffle.merges(part, tokens, buckets)
    assert sum(merge.runs.runs for merge in merges) == tasks and len(merges) <= 64
    assert tasks + buckets * len(merges) < buckets * tasks / 200
    assert max(tokens / tasks * merge.runs.runs / merge.runs.ranges for merge in merges) < 1.1 * (1 << 23)
    # 20 GB of text: opening takes seconds, and merging would write it all once more
    assert not shuffle.merges(shuffle.RowSplit("train", 128, 4, 640, "uint16", "out"), 5_000_000_000, 600)
