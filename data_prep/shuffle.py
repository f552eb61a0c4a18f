"""The global shuffle is a merge of random key ranges: every row order is possible and memory is one bucket's.

Units lie on disk ordered by key. A bucket is a key range of all of them; its sequences, in key order, are packed,
its rows shuffled. Buckets in order are the dataset. Their number follows from the corpus, not from workers.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

import numpy as np

from data_prep.options import BLOCK_ROWS
from data_prep.packing import pack
from data_prep.units import META, Done, Job, peak_memory, write_arrays
from megabert import shards

MAX_BUCKET_TOKENS = 1 << 23  # a shard's worth where a shard is smaller
_STREAM = 2
_SEQUENCES_AT_ONCE = 1 << 14
_SEQUENCES_TRIED = 1 << 17


@dataclass(frozen=True)
class Bucket:
    """Key range number `index` of `count`, over unit files `names` with ids of `dtype`; `kind` names its output."""

    kind: str
    index: int
    count: int
    names: tuple[str, ...]
    dtype: str


@dataclass(frozen=True)
class ShardPlan:
    """Rows [first_row, first_row + rows) of the dataset as pieces (bucket, first row in it, rows of it, its rows)."""

    kind: str
    index: int
    first_row: int
    rows: int
    pieces: tuple[tuple[int, int, int], ...]
    folder: str
    dtype: str


def choose_slots(lengths: Counter[int], seq_len: int) -> int:
    """The fewest sequences a row (1, 2, 4, 8, 16) that fill rows within half a percent of what 16 would.

    A slot costs five bytes in every row, so that unused ones would be a tenth of a shard of short rows. `lengths`
    counts sequences by length; a sample of them with the same shares is packed.
    """
    total = sum(lengths.values())
    scale = min(1.0, _SEQUENCES_TRIED / total)
    sizes = sorted(lengths)
    trial = np.repeat(np.array(sizes, np.int64), [max(1, round(lengths[n] * scale)) for n in sizes])
    rows = {slots: pack(trial, seq_len, slots)[3] for slots in (1, 2, 4, 8, 16)}
    return next(slots for slots in rows if rows[slots] <= rows[16] * 1.005)


def buckets(kind: str, units: list[tuple[str, int, int]], dtype: str, shard_tokens: int) -> list[Bucket]:
    """As many key ranges as the tokens of all units need, each about a shard's worth."""
    size = min(shard_tokens, MAX_BUCKET_TOKENS)
    count = max(1, round(sum(tokens for _, _, tokens in units) / size))
    names = tuple(name for name, _, _ in units)
    return [Bucket(kind, i, count, names, dtype) for i in range(count)]


def _gather(job: Job, bucket: Bucket) -> tuple[np.ndarray, np.ndarray]:
    """Metadata and ids of a bucket's sequences, ordered by (key, unit); `start` points into the ids."""
    low, high = ((bucket.index + i) * (1 << 64) // bucket.count for i in (0, 1))
    metas, ids, used = [], [], 0
    for name in bucket.names:
        path = os.path.join(job.work, name)
        mapped = np.memmap(path + ".meta", META, "r")
        key = mapped["key"]
        begin, end = bisect_left(key, low), bisect_left(key, high)
        if begin == end:
            continue
        part = np.array(mapped[begin:end])
        first = int(part["start"][0])
        tokens = int(part["start"][-1]) + int(part["length"][-1]) - first
        itemsize = np.dtype(bucket.dtype).itemsize
        ids.append(np.fromfile(path + ".ids", bucket.dtype, tokens, offset=first * itemsize))
        part["start"] = part["start"] - first + used
        used += tokens
        metas.append(part)
    if not metas:
        return np.zeros(0, META), np.zeros(0, bucket.dtype)
    meta = np.concatenate(metas)
    return meta[np.argsort(meta["key"], kind="stable")], np.concatenate(ids)


def process_bucket(job: Job, bucket: Bucket) -> Done:
    """Pack one bucket and write its shuffled rows: KIND-INDEX.rows.{ids,bounds,labels}. Counts its rows."""
    clock = time.perf_counter
    done = Done()
    before = clock()
    meta, ids = _gather(job, bucket)
    done.seconds["shuffle"] += clock() - before
    before = clock()
    seq_len, slots = job.options.seq_len, job.slots
    lengths = meta["length"].astype(np.int64)
    row, slot, offset, rows = pack(lengths, seq_len, slots)
    rng = np.random.Generator(
        np.random.Philox(np.random.SeedSequence([job.options.seed, _STREAM, bucket.index]))
    )
    row = rng.permutation(rows)[row] if rows else row
    done.seconds["pack"] += clock() - before
    before = clock()
    packed = np.zeros(rows * seq_len, bucket.dtype)
    bounds = np.zeros((rows, slots, 2), np.uint16)
    labels = np.full((rows, slots), -1, np.int8)
    bounds[row, slot, 0], bounds[row, slot, 1] = meta["length"], meta["first"]
    labels[row, slot] = meta["label"]
    starts, targets = meta["start"].astype(np.int64), row * seq_len + offset
    for i in range(0, len(meta), _SEQUENCES_AT_ONCE):
        part = slice(i, i + _SEQUENCES_AT_ONCE)
        size = lengths[part]
        within = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
        packed[within + np.repeat(targets[part], size)] = ids[within + np.repeat(starts[part], size)]
    stem = os.path.join(job.work, f"{bucket.kind}-{bucket.index:06d}.rows")
    write_arrays(stem + ".ids", packed)
    write_arrays(stem + ".bounds", bounds)
    write_arrays(stem + ".labels", labels)
    done.seconds["shuffle"] += clock() - before
    done.counts["rows"] = rows
    done.peak = peak_memory()
    return done


def plan_shards(
    kind: str, bucket_rows: list[int], rows_per_shard: int, folder: str, dtype: str
) -> list[ShardPlan]:
    """Cut the rows of all buckets, in order, into shards."""
    edges = np.concatenate([[0], np.cumsum(bucket_rows)])
    plans = []
    for index, first in enumerate(range(0, int(edges[-1]), rows_per_shard)):
        last = min(first + rows_per_shard, int(edges[-1]))
        pieces = [
            (
                b,
                max(first, int(edges[b])) - int(edges[b]),
                min(last, int(edges[b + 1])) - max(first, int(edges[b])),
            )
            for b in range(len(bucket_rows))
            if edges[b] < last and edges[b + 1] > first
        ]
        plans.append(ShardPlan(kind, index, first, last - first, tuple(pieces), folder, dtype))
    return plans


def process_shard(job: Job, plan: ShardPlan) -> tuple[dict[str, object], Done]:
    """Write one shard. Returns its manifest entry."""
    clock = time.perf_counter
    before = clock()
    seq_len, slots = job.options.seq_len, job.slots
    arrays = []
    for suffix, dtype, shape in (
        ("ids", plan.dtype, (seq_len,)),
        ("bounds", "uint16", (slots, 2)),
        ("labels", "int8", (slots,)),
    ):
        width = int(np.prod(shape))
        parts = [
            np.fromfile(
                os.path.join(job.work, f"{plan.kind}-{bucket:06d}.rows.{suffix}"),
                dtype,
                rows * width,
                offset=first * width * np.dtype(dtype).itemsize,
            )
            for bucket, first, rows in plan.pieces
        ]
        arrays.append(np.concatenate(parts).reshape(plan.rows, *shape))
    path = os.path.join(plan.folder, f"shard-{plan.index:06d}.tar")
    ids, bounds, labels = arrays
    entry = shards.write_shard(path, plan.first_row // BLOCK_ROWS, ids, bounds, labels, BLOCK_ROWS)
    done = Done(peak=peak_memory())
    done.seconds["write"] += clock() - before
    return entry, done
