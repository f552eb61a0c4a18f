"""Duplicates among documents and paragraphs, found by key ranges.

Records of all documents are sorted once a task and met range by range on disk. Memory is one range's, and the first in
input order is the one that stays. A range's result is the numbers to drop; a task then turns the numbers that are its own
into a mask over its sentences, which is all that later stages read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from data_prep.executor import work_files
from data_prep.executor.work_files import DOCUMENT, KEYED, PARAGRAPH, TASK_SHIFT, Done, Job
from data_prep.stages import read
from data_prep.text import minhash

RANGE_RECORDS = 1 << 21
PAIRS_AT_ONCE = 1 << 14  # whose signatures are in memory: 32 MiB
EXAMPLE_TOKENS = 60
REASONS = {"documents": "exact duplicate", "near": "near duplicate"}
LOST = "repeated paragraphs alone"
PARTNERS = np.dtype([("number", "<u8"), ("kept", "<u8")])


@dataclass(frozen=True)
class KeyRange:
    """Part `index` of `count` of the records that `tasks` tasks left in SOURCE-TASK.KIND-keys."""

    kind: str
    source: str
    index: int
    count: int
    tasks: int


@dataclass(frozen=True)
class TaskMask:
    """Task `task`, whose duplicates are listed by the ranges of `kinds`: (kind, number of ranges)."""

    task: int
    kinds: tuple[tuple[str, int], ...]


def ranges(kind: str, source: str, tasks: int, records: int) -> list[KeyRange]:
    count = max(1, -(-records // RANGE_RECORDS))
    return [KeyRange(kind, source, i, count, tasks) for i in range(count)]


def find(job: Job, part: KeyRange) -> Done:
    """Write KIND-INDEX.drop: PARTNERS ordered by number, each number once."""
    done = Done()
    names = (f"{part.source}-{task:07d}.{part.kind}-keys" for task in range(part.tasks))
    records = np.concatenate(
        [work_files.key_range(job, name, KEYED, part.index, part.count) for name in names]
    )
    if part.kind == "near":
        dropped, kept = _near(job, records)
    else:
        dropped, kept = minhash.exact_duplicates(records["key"], records["number"])
    found = np.empty(len(dropped), PARTNERS)
    found["number"], found["kept"] = dropped, kept
    work_files.write(job, f"{part.kind}-{part.index:06d}.drop", found, done)
    return done


def _near(job: Job, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(dropped, kept) numbers of the candidates among `records` whose signatures agree; a few pairs at a time."""
    # The order of pairs is that of their numbers, so that the signatures of a few pairs lie close together.
    pairs = np.unique(minhash.near_candidates(records["key"], records["number"]), axis=0)
    parts = [pairs[:0]]
    for first in range(0, len(pairs), PAIRS_AT_ONCE):
        few = pairs[first : first + PAIRS_AT_ONCE]
        numbers, place = np.unique(few, return_inverse=True)
        signatures = _signatures(job, numbers)[place.reshape(few.shape)]
        parts.append(few[minhash.verified(signatures[:, 0], signatures[:, 1])])
    found = np.concatenate(parts)
    dropped, first_place = np.unique(found[:, 1], return_index=True)
    return dropped, found[first_place, 0]


def _signatures(job: Job, numbers: np.ndarray) -> np.ndarray:
    """uint32 [n, PERMUTATIONS] of documents by number, ascending."""
    tasks, rows = work_files.task_and_place(numbers)
    found = np.empty((len(numbers), minhash.PERMUTATIONS), np.uint32)
    for task in np.unique(tasks).tolist():
        mapped = np.memmap(job.path(f"read-{task:07d}.signatures"), np.uint32, "r")
        here = tasks == task
        found[here] = mapped.reshape(-1, minhash.PERMUTATIONS)[rows[here]]
    return found


def _dropped(job: Job, task: int, kind: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(place in the task, number that was kept) of what the ranges of `kind` drop of a task, each place once."""
    parts = []
    for index in range(count):
        path = job.path(f"{kind}-{index:06d}.drop")
        if os.path.getsize(path):
            mapped = np.memmap(path, PARTNERS, "r")
            low, high = np.searchsorted(
                mapped["number"], np.array([task, task + 1], np.uint64) << np.uint64(TASK_SHIFT)
            )
            parts.append(np.array(mapped[low:high]))
    found = np.concatenate(parts) if parts else np.zeros(0, PARTNERS)
    places, first = np.unique(work_files.task_and_place(found["number"])[1], return_index=True)
    return places, found["kept"][first]


def mask_documents(job: Job, item: TaskMask) -> Done:
    """Write keep-TASK.mask, bool [s], false in duplicate documents; and the keys of the paragraphs that are left."""
    done = Done()
    table = work_files.read(job, f"read-{item.task:07d}.documents", DOCUMENT)
    tokenizer = read.encoder_of(job)[0]
    keep = np.ones(len(table), bool)
    starts = np.cumsum(table["tokens"], dtype=np.int64) - table["tokens"]
    for kind, ranges_of_it in item.kinds:
        places, kept = _dropped(job, item.task, kind, ranges_of_it)
        new = keep[places]
        places, kept = places[new], kept[new]
        keep[places] = False
        examples = []
        for place, number in zip(places[: work_files.EXAMPLES].tolist(), kept.tolist(), strict=False):
            count = min(EXAMPLE_TOKENS, int(table["tokens"][place]))
            stem = f"read-{item.task:07d}"
            tokens = work_files.read(
                job, f"{stem}.tokens", work_files.id_dtype(tokenizer), int(starts[place]), count
            )
            task, other = divmod(number, 1 << TASK_SHIFT)
            examples.append(f"[as document {other} of part {task}] {tokenizer.decode(tokens)}")
        sizes = table[places]
        done.drop(
            REASONS[kind], len(places), int(sizes["sentences"].sum()), int(sizes["tokens"].sum()), examples
        )
    work_files.write(job, f"keep-{item.task:07d}.mask", np.repeat(keep, table["sentences"]), done)
    if "paragraphs" in job.options.dedup:
        paragraphs = work_files.read(job, f"read-{item.task:07d}.paragraphs", PARAGRAPH)
        numbers = (item.task << TASK_SHIFT) + np.arange(len(paragraphs), dtype=np.uint64)
        left = np.repeat(keep, table["paragraphs"])
        records = work_files.keyed(paragraphs["hash"][left], numbers[left])
        work_files.write(job, f"keep-{item.task:07d}.paragraphs-keys", work_files.by_key(records), done)
        done.facts["paragraphs"] = int(left.sum())
    return done


def mask_paragraphs(job: Job, item: TaskMask) -> Done:
    """Write trim-TASK.mask, bool [s], false in duplicate documents and in repeated paragraphs."""
    done = Done()
    table = work_files.read(job, f"read-{item.task:07d}.documents", DOCUMENT)
    paragraphs = work_files.read(job, f"read-{item.task:07d}.paragraphs", PARAGRAPH)
    before = work_files.read(job, f"keep-{item.task:07d}.mask", "bool")
    ((kind, count),) = item.kinds
    repeated = np.zeros(len(paragraphs), bool)
    repeated[_dropped(job, item.task, kind, count)[0]] = True
    after = before & ~np.repeat(repeated, paragraphs["sentences"])
    work_files.write(job, f"trim-{item.task:07d}.mask", after, done)
    lengths = work_files.read(job, f"read-{item.task:07d}.sentences", "uint32")
    done.counts["repeated paragraphs"] += int(repeated.sum())
    document = np.repeat(np.arange(len(table)), table["sentences"])
    had, has = (np.bincount(document[mask], minlength=len(table)) > 0 for mask in (before, after))
    gone = before & ~after
    done.drop(LOST, int((had & ~has).sum()), 0, 0, [])
    done.counts["dropped sentences"] += int(gone.sum())
    done.counts["dropped tokens"] += int(lengths[gone].sum())
    return done
