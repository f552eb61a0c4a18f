"""Global shuffle out of core, and packing of sequences into rows.

A merge of random key ranges: every row order is possible, and memory is that of one bucket. Sequences are on disk in key order, a
run for each task. A bucket is a key range of all runs; its sequences are packed in key order, and its rows shuffled. The dataset
is the buckets in order, whose number depends only on the corpus. For a large corpus adjacent runs are merged first, which leads to
the same rows with hundreds of times fewer opened files.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from data_prep.executor import work_files
from data_prep.executor.journal import Stage, Stages
from data_prep.executor.work_files import SEQUENCE, BuildJob, ItemResult, Writer

# largest bucket in tokens; smaller shards have a bucket each
MAX_BUCKET_TOKENS = 1 << 23
STREAM_SHUFFLE = 2
# sequences whose positions stay in a core's cache
SEQUENCES_AT_ONCE = 1 << 10
# sequences packed to choose the number of slots
SEQUENCES_TRIED = 1 << 17


@dataclass(frozen=True)
class RowSplit:
    """The train or held-out rows of one length: runs KIND-LENGTH-0 to KIND-LENGTH-(runs - 1), shards in `folder`.

    Merged runs are merged-KIND-LENGTH-0 and so on. `slots` is the largest number of sequences a row.
    """

    kind: str
    seq_len: int
    slots: int
    runs: int
    dtype: str
    folder: str = field(repr=False)
    merged: bool = False

    @property
    def stem(self) -> str:
        return f"{self.kind}-{self.seq_len}"

    def run(self, index: int) -> str:
        """Common part of the names of a run's files."""
        return f"{'merged-' if self.merged else ''}{self.stem}-{index:07d}"


@dataclass(frozen=True)
class ShuffleBucket:
    """Key range `index` of `count` of a split."""

    split: RowSplit
    index: int
    count: int


@dataclass(frozen=True)
class SplitMerge:
    """Runs of a split to merge into its run `index`."""

    split: RowSplit
    index: int
    runs: work_files.MergeGroup


def run(stages: Stages, job: BuildJob, tokens: int, split: RowSplit, drawn: Stage | None) -> tuple[RowSplit, Stage]:
    """Pack and shuffle the sequences of a split, which have `tokens` tokens. Returns the stage whose results count its rows.

    `drawn`: the stage that drew them, if nothing else reads its files.
    """
    shard_tokens = job.options.rows_per_shard * split.seq_len
    used = [] if drawn is None else [drawn]
    if groups := merges(split, tokens, len(buckets(split, tokens, shard_tokens))):
        merged = stages.map(f"merge {split.stem}", merge, job, groups)
        for stage in used:
            stages.journal.consume(stage, merged)
        used, split = [merged], replace(split, runs=len(groups), merged=True)
    packed = stages.map(
        f"shuffle {split.stem}", process_bucket, job, buckets(split, tokens, shard_tokens), unit="bucket"
    )
    for stage in used:
        stages.journal.consume(stage, packed)
    return split, packed


def choose_slots(lengths: Counter[int], seq_len: int) -> int:
    """The smallest number of sequences a row (1, 2, 4, 8, 16) whose fill is within half a percent of that of 16.

    A slot takes five bytes in every row, so unused ones would be a tenth of a shard of short rows. `lengths` counts sequences by
    length; a sample of them with the same shares is packed.
    """
    total = sum(lengths.values())
    scale = min(1.0, SEQUENCES_TRIED / total)
    sizes = sorted(lengths)
    trial = np.repeat(np.array(sizes, np.int64), [max(1, round(lengths[n] * scale)) for n in sizes])
    rows = {slots: pack(trial, seq_len, slots)[3] for slots in (1, 2, 4, 8, 16)}
    return next(slots for slots in rows if rows[slots] <= rows[16] * 1.005)


def buckets(split: RowSplit, tokens: int, shard_tokens: int) -> list[ShuffleBucket]:
    """Number of key ranges for `tokens`, each about a shard."""
    count = max(1, round(tokens / min(shard_tokens, MAX_BUCKET_TOKENS)))
    return [ShuffleBucket(split, i, count) for i in range(count)]


def merges(split: RowSplit, tokens: int, buckets: int) -> list[SplitMerge]:
    """Groups of adjacent runs to merge before this many buckets are made."""
    planned = work_files.plan_merges(split.runs, buckets, tokens, MAX_BUCKET_TOKENS)
    return [SplitMerge(split, i, runs) for i, runs in enumerate(planned)]


def merge(job: BuildJob, item: SplitMerge) -> ItemResult:
    """Write a merged run: like its runs, SEQUENCE records ordered by key, and their ids in that order."""
    result, written = ItemResult(), 0
    runs = _open(job, item.split, item.runs.first, item.runs.runs)
    stem = replace(item.split, merged=True).run(item.index)
    with Writer(job, f"{stem}.meta", result) as metas, Writer(job, f"{stem}.ids", result) as file:
        for index in range(item.runs.ranges):
            meta, ids = _gather(runs, index, item.runs.ranges)
            lengths = meta["length"].astype(np.int64)
            ends = np.cumsum(lengths)
            source = np.repeat(meta["start"].astype(np.int64) - (ends - lengths), lengths)
            file.write(ids[source + np.arange(len(source))])
            meta["start"] = written + ends - lengths
            metas.write(meta)
            written += len(source)
    return result


def _open(job: BuildJob, split: RowSplit, first: int, runs: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(SEQUENCE records, ids) of runs of a split."""
    names = [split.run(run) for run in range(first, first + runs)]
    return [
        (work_files.mapped(job, f"{name}.meta", SEQUENCE), work_files.mapped(job, f"{name}.ids", split.dtype))
        for name in names
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
    return work_files.by_key(np.concatenate(metas)), np.concatenate(ids)


def process_bucket(job: BuildJob, bucket: ShuffleBucket) -> ItemResult:
    """Pack one bucket and write its shuffled rows: KIND-LENGTH-INDEX.rows.{ids,bounds,labels}, and .sources for held-out rows with
    several sources. Counts its rows."""
    split = bucket.split
    result = ItemResult()
    meta, ids = _gather(_open(job, split, 0, split.runs), bucket.index, bucket.count)
    seq_len, slots = split.seq_len, split.slots
    lengths = meta["length"].astype(np.int64)
    row, slot, offset, rows = pack(lengths, seq_len, slots)
    rng = np.random.Generator(
        np.random.Philox(np.random.SeedSequence([job.options.seed, STREAM_SHUFFLE, split.seq_len, bucket.index]))
    )
    row = rng.permutation(rows)[row] if rows else row
    packed = np.zeros(rows * seq_len, split.dtype)
    bounds = np.zeros((rows, slots, 2), np.uint16)
    labels = np.full((rows, slots), -1, np.int8)
    bounds[row, slot, 0], bounds[row, slot, 1] = meta["length"], meta["first"]
    labels[row, slot] = meta["label"]
    assert max(len(ids), rows * seq_len) < 1 << 31, "32-bit places"
    starts, targets = meta["start"].astype(np.int32), (row * seq_len + offset).astype(np.int32)
    for i in range(0, len(meta), SEQUENCES_AT_ONCE):
        few = slice(i, i + SEQUENCES_AT_ONCE)
        size = lengths[few]
        within = np.arange(int(size.sum()), dtype=np.int32)
        within -= np.repeat((np.cumsum(size) - size).astype(np.int32), size)
        packed[within + np.repeat(targets[few], size)] = ids[within + np.repeat(starts[few], size)]
    arrays = {"ids": packed, "bounds": bounds, "labels": labels}
    if job.sources and split.kind == "heldout":
        arrays["sources"] = np.zeros((rows, slots, 2), np.uint8)
        arrays["sources"][row, slot] = meta["sources"]
    for suffix, array in arrays.items():
        work_files.write(job, f"{split.stem}-{bucket.index:06d}.rows.{suffix}", array, result)
    result.counts["rows"] = rows
    return result


def pack(lengths: np.ndarray, capacity: int, max_sequences: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Place sequences of `lengths` [n] in rows of `capacity` tokens, at most `max_sequences` a row.

    Returns (row, slot, offset), each int64 [n], and the number of rows. Best fit decreasing: the longest sequence first, in the given
    order for equal lengths, into the row with the smallest sufficient space. Equal lengths are placed together: there are at most
    `capacity` distinct lengths and remainders, so the cost is that of the distinct lengths and the copies.
    """
    n = len(lengths)
    row, slot, offset = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    values, firsts = np.unique(-lengths[by_length], return_index=True)
    bounds = [*firsts.tolist(), n]
    shortest = int(lengths.min()) if n else 0
    open_rows: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]  # rows by remaining space
    used: np.ndarray = np.zeros(n, np.int64)  # number of sequences of each row
    has_room = np.zeros(capacity + 1, bool)
    rows = 0
    for value, begin, end in zip(values.tolist(), bounds, bounds[1:], strict=False):
        length = -value
        while begin < end:
            fits = int(np.argmax(has_room[length:])) + length
            if has_room[fits]:
                candidates = open_rows[fits].pop()
                has_room[fits] = bool(open_rows[fits])
                taken = candidates[: end - begin]
                if len(taken) < len(candidates):
                    open_rows[fits].append(candidates[len(taken) :])
                    has_room[fits] = True
            else:
                fits = capacity
                together = min(capacity // length, max_sequences)
                opened = -(-(end - begin) // together)
                taken = np.arange(rows, rows + opened)
                rows += opened
            items = by_length[begin : begin + len(taken)]
            row[items], slot[items], offset[items] = taken, used[taken], capacity - fits
            used[taken] += 1
            left = fits - length
            if left >= shortest:
                unfilled = taken[used[taken] < max_sequences]
                if len(unfilled):
                    open_rows[left].append(unfilled)
                    has_room[left] = True
            begin += len(taken)
    return row, slot, offset, rows
