"""Global shuffle out of core, and packing of sequences into rows.

It is a merge of random key ranges: every row order is possible and memory is one bucket's. Sequences lie on disk ordered by
key, a run a task. A bucket is a key range of all runs; its sequences, in key order, are packed, its rows shuffled. Buckets
in order are the dataset. Their number follows from the corpus, not from workers. Of a large corpus neighbouring runs are
merged first: the rows are the same, and files are opened hundreds of times less.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from data_prep.executor import work_files
from data_prep.executor.work_files import SEQUENCE, Done, Job, Writer
from data_prep.tokens.packing import pack

MAX_BUCKET_TOKENS = 1 << 23  # a shard's worth where a shard is smaller
_STREAM = 2
_SEQUENCES_AT_ONCE = 1 << 10  # whose places stay in a core's cache
_SEQUENCES_TRIED = 1 << 17


@dataclass(frozen=True)
class Part:
    """A dataset in the making: its runs are KIND-LENGTH-0 to KIND-LENGTH-(runs - 1), its shards go to `folder`.

    Merged runs are MERGED-KIND-LENGTH-0 and so on.
    """

    kind: str
    seq_len: int
    slots: int  # sequences a row at most
    runs: int
    dtype: str
    folder: str = field(repr=False)
    merged: bool = False

    @property
    def stem(self) -> str:
        return f"{self.kind}-{self.seq_len}"

    def run(self, index: int) -> str:
        """Stem of the names of a run's files."""
        return f"{'merged-' if self.merged else ''}{self.stem}-{index:07d}"


@dataclass(frozen=True)
class Bucket:
    """Key range `index` of `count` of a part."""

    part: Part
    index: int
    count: int


@dataclass(frozen=True)
class Merge:
    """Runs of a part that are merged into its run `index`."""

    part: Part
    index: int
    runs: work_files.Merge


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


def buckets(part: Part, tokens: int, shard_tokens: int) -> list[Bucket]:
    """As many key ranges as `tokens` need, each about a shard's worth."""
    count = max(1, round(tokens / min(shard_tokens, MAX_BUCKET_TOKENS)))
    return [Bucket(part, i, count) for i in range(count)]


def merges(part: Part, tokens: int, buckets: int) -> list[Merge]:
    """Groups of neighbouring runs to merge before so many buckets are made of them."""
    planned = work_files.plan_merges(part.runs, buckets, tokens, MAX_BUCKET_TOKENS)
    return [Merge(part, i, runs) for i, runs in enumerate(planned)]


def merge(job: Job, item: Merge) -> Done:
    """Write one merged run: as its runs, SEQUENCE records ordered by key, and their ids in that order."""
    done, written = Done(), 0
    runs = _open(job, item.part, item.runs.first, item.runs.runs)
    stem = replace(item.part, merged=True).run(item.index)
    with Writer(job, f"{stem}.meta", done) as metas, Writer(job, f"{stem}.ids", done) as file:
        for index in range(item.runs.ranges):
            meta, ids = _gather(runs, index, item.runs.ranges)
            lengths = meta["length"].astype(np.int64)
            ends = np.cumsum(lengths)
            source = np.repeat(meta["start"].astype(np.int64) - (ends - lengths), lengths)
            file.write(ids[source + np.arange(len(source))])
            meta["start"] = written + ends - lengths
            metas.write(meta)
            written += len(source)
    return done


def _open(job: Job, part: Part, first: int, runs: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(SEQUENCE records, ids) of runs of a part."""
    names = [part.run(run) for run in range(first, first + runs)]
    return [
        (work_files.mapped(job, f"{name}.meta", SEQUENCE), work_files.mapped(job, f"{name}.ids", part.dtype))
        for name in names
    ]


def _gather(runs: list[tuple[np.ndarray, np.ndarray]], index: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Metadata and ids of the sequences of runs in key range `index` of `count`, ordered by (key, run).

    `start` points into the ids.
    """
    metas, ids, used = [runs[0][0][:0]], [runs[0][1][:0]], 0
    for meta, its in runs:
        found = work_files.key_range(meta, index, count)
        if not len(found):
            continue
        first = int(found["start"][0])
        tokens = int(found["start"][-1]) + int(found["length"][-1]) - first
        ids.append(work_files.copy_of(its, slice(first, first + tokens)))
        found["start"] = found["start"] - first + used
        used += tokens
        metas.append(found)
    return work_files.by_key(np.concatenate(metas)), np.concatenate(ids)


def process_bucket(job: Job, bucket: Bucket) -> Done:
    """Pack one bucket and write its shuffled rows: KIND-LENGTH-INDEX.rows.{ids,bounds,labels}. Counts its rows."""
    part = bucket.part
    clock = time.perf_counter
    done = Done()
    before = clock()
    meta, ids = _gather(_open(job, part, 0, part.runs), bucket.index, bucket.count)
    done.seconds["shuffle"] += clock() - before
    before = clock()
    seq_len, slots = part.seq_len, part.slots
    lengths = meta["length"].astype(np.int64)
    row, slot, offset, rows = pack(lengths, seq_len, slots)
    rng = np.random.Generator(
        np.random.Philox(np.random.SeedSequence([job.options.seed, _STREAM, part.seq_len, bucket.index]))
    )
    row = rng.permutation(rows)[row] if rows else row
    done.seconds["pack"] += clock() - before
    before = clock()
    packed = np.zeros(rows * seq_len, part.dtype)
    bounds = np.zeros((rows, slots, 2), np.uint16)
    labels = np.full((rows, slots), -1, np.int8)
    bounds[row, slot, 0], bounds[row, slot, 1] = meta["length"], meta["first"]
    labels[row, slot] = meta["label"]
    assert max(len(ids), rows * seq_len) < 1 << 31, "32-bit places"
    starts, targets = meta["start"].astype(np.int32), (row * seq_len + offset).astype(np.int32)
    for i in range(0, len(meta), _SEQUENCES_AT_ONCE):
        few = slice(i, i + _SEQUENCES_AT_ONCE)
        size = lengths[few]
        within = np.arange(int(size.sum()), dtype=np.int32)
        within -= np.repeat((np.cumsum(size) - size).astype(np.int32), size)
        packed[within + np.repeat(targets[few], size)] = ids[within + np.repeat(starts[few], size)]
    for suffix, array in (("ids", packed), ("bounds", bounds), ("labels", labels)):
        work_files.write(job, f"{part.stem}-{bucket.index:06d}.rows.{suffix}", array, done)
    done.seconds["shuffle"] += clock() - before
    done.counts["rows"] = rows
    return done
