"""Shuffle and shards of few and of very many tasks."""

from functools import cache

import numpy as np
import pytest

from data_prep.readers import tasks
from data_prep.stages import packing, shuffle
from data_prep.stages.sequences import TRAIN, RowSplit
from megabert.data.shards import Dataset
from tests.helpers.prep_builds import build_here


@pytest.fixture(scope="module")
def make(corpus, tokenizer_file, tmp_path_factory):
    """Build the corpus with many small tasks, once into a folder of a name; returns the folder."""

    @cache
    def run(name):
        output = tmp_path_factory.mktemp("shuffle") / name
        options = {"tokenizer": tokenizer_file, "held_out": 0.02, "rows_per_shard": 4096, "workers": 1}
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(tasks, "TASK_BYTES", (1 << 20, 1 << 20))
            patched.setattr(shuffle, "MAX_BUCKET_TOKENS", 1 << 16)
            build_here(corpus, output, **options)
        return output

    return run


def test_merged_runs_give_the_same_bytes(make, monkeypatch):
    few, merged, original = make("few"), [], shuffle.merge
    monkeypatch.setattr(shuffle, "MAX_OPENS", 1)
    monkeypatch.setattr(shuffle, "MERGED_RUNS", 2)

    def merge(job, item):
        merged.append((item.index, item.runs, item.ranges))
        return original(job, item)

    monkeypatch.setattr(shuffle, "merge", merge)
    many = make("many")
    assert [index for index, _, _ in merged] == [0, 1]
    assert sum(runs for _, runs, _ in merged) == 6 and all(ranges > 3 for _, _, ranges in merged)
    for name in ("manifest.json", "shard-000000.tar", "held_out/manifest.json"):
        assert (many / name).read_bytes() == (few / name).read_bytes()


def test_neighbouring_rows_are_strangers(make):
    """The share of rare tokens is the same in each tenth of the rows, and that of a row says nothing of the next."""
    dataset = Dataset(make("few"))
    rows = dataset.read(np.arange(dataset.rows)).ids
    half = np.median(rows[rows > 4])
    share = ((rows > half) & (rows > 4)).sum(1) / (rows > 4).sum(1)
    tenths = np.array_split(share, 10)
    for part in tenths:
        assert abs(part.mean() - share.mean()) < 5 * share.std() / np.sqrt(len(part))
    assert abs(np.corrcoef(share[:-1], share[1:])[0, 1]) < 5 / np.sqrt(len(share))


def test_slots_are_as_few_as_fill_rows():
    for lengths, slots in (({128: 1000}, 1), ({64: 1000, 128: 100}, 2), ({32: 4000}, 4)):
        assert packing.choose_slots(lengths, 128) == slots
    # A second slot would save 20 rows of 5,040: less than half a percent.
    assert packing.choose_slots({128: 5000, 100: 20, 28: 20}, 128) == 1


def test_rows_of_many_tasks_open_few_files():
    tasks, tokens = 16_400, 250_000_000_000
    buckets = shuffle.bucket_count(tokens, 65_536 * 128)
    merges = shuffle.merges(RowSplit(TRAIN, 128, tasks, 4, "out"), tokens, buckets)
    assert sum(merge.runs for merge in merges) == tasks and len(merges) <= 64
    assert tasks + buckets * len(merges) < buckets * tasks / 200
    assert max(tokens / tasks * merge.runs / merge.ranges for merge in merges) < 1.1 * (1 << 23)
    # 20 GB of text: opening takes seconds, and merging would write it all once more
    assert not shuffle.merges(RowSplit(TRAIN, 128, 640, 4, "out"), 5_000_000_000, 600)
