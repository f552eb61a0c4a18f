"""Global shuffle out of core, and packing of sequences into rows.

A merge of random key ranges: every row order is possible, and memory is that of one bucket. Sequences are on disk in key order, a
run for each task. A bucket is a key range of all runs; its sequences are packed in key order, and its rows shuffled. The dataset
is the buckets in order; their number depends only on the corpus. For a large corpus adjacent runs are merged first:
the rows are the same, with hundreds of times fewer files to open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from data_prep.common.arrays import range_indices
from data_prep.executor import work_files
from data_prep.executor.journal import Stages
from data_prep.executor.work_files import BuildJob, ItemResult, appending, id_dtype
from data_prep.stages.packing import pack
from data_prep.stages.sequences import HELD, SEQUENCE, TRAIN, RowSplit
from megabert.common.environment import raise_descriptor_limit

# largest bucket in tokens; smaller shards have a bucket each
MAX_BUCKET_TOKENS = 1 << 23
STREAM_SHUFFLE = 2
# sequences whose positions stay in a core's cache
SEQUENCES_AT_ONCE = 1 << 10
# maximum number of file opens in a stage: 16 s at 30 µs each, in a build of an hour
MAX_OPENS = 1 << 19
# maximum number of runs, of two open files each: half of a low limit of 4,096 open files, or a lower one
MAX_RUNS = 1024
# number of runs after merging, if there would be more files to open
MERGED_RUNS = 64


@dataclass(frozen=True)
class Bucket:
    """Key range `index` of `count` of a split."""

    split: RowSplit
    index: int
    count: int


@dataclass(frozen=True)
class Merge:
    """Runs [first, first + runs) of a split, to be merged into its run `index` in `ranges` key ranges."""

    split: RowSplit
    index: int
    first: int
    runs: int
    ranges: int


def run(stages: Stages, job: BuildJob, split: RowSplit, tokens: int) -> list[ItemResult]:
    """Pack and shuffle the sequences of a split, which have `tokens` tokens; the results count the rows of its buckets."""
    count = bucket_count(tokens, job.options.rows_per_shard * split.seq_len)
    # held-out sequences, drawn by the same stage, are shuffled before
    used = [f"pairs {split.seq_len}"] if split.kind == TRAIN else []
    if groups := merges(split, tokens, count):
        merging = f"merge {split.stem}"
        stages.map(merging, merge, job, groups)
        stages.consume(*used)
        used, split = [merging], replace(split, runs=len(groups), merged=True)
    buckets = [Bucket(split, i, count) for i in range(count)]
    packed = stages.map(f"shuffle {split.stem}", process_bucket, job, buckets, unit="bucket")
    stages.consume(*used)
    return packed


def bucket_count(tokens: int, shard_tokens: int) -> int:
    """Number of key ranges for `tokens`, each about a shard."""
    return max(1, round(tokens / min(shard_tokens, MAX_BUCKET_TOKENS)))


def merges(split: RowSplit, tokens: int, buckets: int) -> list[Merge]:
    """Groups of adjacent runs to merge first; [] if `buckets` buckets may each open every run (MAX_OPENS, MAX_RUNS).

    A merge has about MAX_BUCKET_TOKENS of all `tokens` in memory.
    """
    few = split.runs * buckets <= MAX_OPENS and split.runs <= min(MAX_RUNS, raise_descriptor_limit() // 4)
    if few or split.runs <= MERGED_RUNS:
        return []
    size = -(-split.runs // MERGED_RUNS)
    ranges = max(1, round(tokens * size / split.runs / MAX_BUCKET_TOKENS))
    firsts = range(0, split.runs, size)
    return [Merge(split, i, first, min(size, split.runs - first), ranges) for i, first in enumerate(firsts)]


def merge(job: BuildJob, item: Merge) -> ItemResult:
    """Write a merged run: like its runs, SEQUENCE records ordered by key, and their ids in that order."""
    result, written = ItemResult(), 0
    runs = _open(job, item.split, item.first, item.runs)
    stem = replace(item.split, merged=True).run(item.index)
    with appending(job, f"{stem}.meta", result) as append_meta, appending(job, f"{stem}.ids", result) as append_ids:
        for index in range(item.ranges):
            meta, ids = _gather(runs, index, item.ranges)
            lengths = meta["length"].astype(np.int64)
            append_ids(ids[range_indices(meta["start"].astype(np.int64), lengths)])
            ends = written + np.cumsum(lengths)
            meta["start"] = ends - lengths
            append_meta(meta)
            written += int(lengths.sum())
    return result


def _open(job: BuildJob, split: RowSplit, first: int, runs: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(SEQUENCE records, ids) of runs of a split."""
    return [
        (work_files.mapped(job, f"{name}.meta", SEQUENCE), work_files.mapped(job, f"{name}.ids", id_dtype(job)))
        for name in map(split.run, range(first, first + runs))
    ]


def _gather(runs: list[tuple[np.ndarray, np.ndarray]], index: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Metadata and ids of the sequences of runs in key range `index` of `count`, ordered by (key, run).

    `start` points into the ids.
    """
    metas, ids, used = [runs[0][0][:0]], [runs[0][1][:0]], 0
    for meta, ids_of_run in runs:
        records = work_files.key_range(meta, index, count)
        if not len(records):
            continue
        first = int(records["start"][0])
        tokens = int(records["start"][-1]) + int(records["length"][-1]) - first
        ids.append(work_files.copy_items(ids_of_run, slice(first, first + tokens)))
        records["start"] = records["start"] - first + used
        used += tokens
        metas.append(records)
    return work_files.sort_by_key(np.concatenate(metas)), np.concatenate(ids)


def process_bucket(job: BuildJob, bucket: Bucket) -> ItemResult:
    """Pack one bucket and write its shuffled rows: KIND-LENGTH-INDEX.rows.{ids,bounds,labels}, and .sources for held-out rows with
    several sources. Counts its rows."""
    split, result = bucket.split, ItemResult()
    meta, ids = _gather(_open(job, split, 0, split.runs), bucket.index, bucket.count)
    seq_len, slots = split.seq_len, split.slots
    lengths = meta["length"].astype(np.int64)
    row, slot, offset, rows = pack(lengths, seq_len, slots)
    seed = np.random.SeedSequence([job.options.seed, STREAM_SHUFFLE, seq_len, bucket.index])
    row = np.random.Generator(np.random.Philox(seed)).permutation(rows)[row]
    packed = np.zeros(rows * seq_len, ids.dtype)
    bounds = np.zeros((rows, slots, 2), np.uint16)
    labels = np.full((rows, slots), -1, np.int8)
    bounds[row, slot, 0], bounds[row, slot, 1] = meta["length"], meta["first"]
    labels[row, slot] = meta["label"]
    assert max(len(ids), rows * seq_len) < 1 << 31, "32-bit places"
    starts, targets = meta["start"].astype(np.int64), row * seq_len + offset
    for i in range(0, len(meta), SEQUENCES_AT_ONCE):
        few = slice(i, i + SEQUENCES_AT_ONCE)
        source, target = (range_indices(places[few], lengths[few], np.int32) for places in (starts, targets))
        packed[target] = ids[source]
    arrays = {"ids": packed, "bounds": bounds, "labels": labels}
    if job.sources and split.kind == HELD:
        arrays["sources"] = np.zeros((rows, slots, 2), np.uint8)
        arrays["sources"][row, slot] = meta["sources"]
    for suffix, array in arrays.items():
        work_files.write(job, f"{split.stem}-{bucket.index:06d}.rows.{suffix}", array, result)
    result.counts["rows"] = rows
    return result
