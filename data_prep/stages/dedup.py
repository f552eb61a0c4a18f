"""Duplicates among documents and paragraphs, found by key ranges.

Records (key, document number) are sorted within each task, then compared one key range at a time, which bounds memory.
The first document in input order is kept. A range yields the numbers of the documents to drop; each task turns its
numbers into a mask over its sentences for later stages. The result depends only on word hashes and document numbers,
not on the order of execution. Legend: c pairs, n keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_prep.common.records import ReadTask
from data_prep.executor import work_files
from data_prep.executor.journal import Stages
from data_prep.executor.work_files import BuildJob, ItemResult
from data_prep.stages.kept import DOCUMENT, KEYED, PARAGRAPH, TASK_SHIFT, KeptDocuments, keyed, numbers, task_and_index
from data_prep.stages.minhash import BANDS, PERMUTATIONS
from megabert.common.environment import raise_descriptor_limit

STAGES = ("same documents", "same near", "keep", "same paragraphs", "trim")
RANGE_RECORDS = 1 << 21
# pairs whose signatures are in memory at once: 32 MiB
PAIRS_AT_ONCE = 1 << 14
REASONS = {"documents": "exact duplicate", "near": "near duplicate"}
ONLY_REPEATED = "nothing but repeated paragraphs"

_mapped_signatures: dict[tuple[str, int], np.ndarray] = {}


@dataclass(frozen=True)
class KeyRange:
    """Part `index` of `count` of the keys of a kind, sorted by `tasks` in the files SOURCE-TASK.KIND-keys."""

    kind: str
    source: str
    tasks: int
    index: int
    count: int


@dataclass(frozen=True)
class TaskMask:
    """Task `task`, and the number of ranges in which duplicates of each kind were found."""

    task: int
    ranges: tuple[tuple[str, int], ...]


def run(stages: Stages, job: BuildJob, tasks: list[ReadTask], documents: list[ItemResult]) -> list[KeptDocuments]:
    """Find duplicates among the documents that reading kept; returns the remaining documents of each task."""
    mask = _find_duplicates(stages, job, documents) if job.options.dedup else ""
    return [
        KeptDocuments(
            task=task.index,
            corpus=task.corpus,
            mask=mask,
            held_tokens=result.counts["held-out tokens"],
            sources=tuple(result.facts["sources"]),
        )
        for task, result in zip(tasks, documents, strict=True)
    ]


def _find_duplicates(stages: Stages, job: BuildJob, documents: list[ItemResult]) -> str:
    """Compare documents and paragraphs; returns the name of their mask."""
    chosen, tasks = job.options.dedup, len(documents)

    def find_all(kind: str, source: str, records: int) -> tuple[str, int]:
        ranges = max(1, -(-records // RANGE_RECORDS))
        stages.map(f"same {kind}", find, job, [KeyRange(kind, source, tasks, i, ranges) for i in range(ranges)])
        return kind, ranges

    count = sum(result.counts["kept documents"] for result in documents)
    keys = {"documents": count, "near": count * BANDS}
    found = tuple(find_all(kind, "read", records) for kind, records in keys.items() if kind in chosen)
    masked = stages.map("keep", mask_documents, job, [TaskMask(task, found) for task in range(tasks)])
    if "paragraphs" not in chosen:
        return "keep"
    repeated = find_all("paragraphs", "keep", sum(result.facts["paragraphs"] for result in masked))
    stages.map("trim", mask_paragraphs, job, [TaskMask(task, (repeated,)) for task in range(tasks)])
    return "trim"


def find(job: BuildJob, part: KeyRange) -> ItemResult:
    """Write KIND-INDEX.drop: the numbers to drop, uint64, ascending and unique."""
    result = ItemResult()
    names = (f"{part.source}-{task:07d}.{part.kind}-keys" for task in range(part.tasks))
    runs = (work_files.mapped(job, name, KEYED) for name in names)
    records = np.concatenate([work_files.key_range(run, part.index, part.count) for run in runs])
    if part.kind == "near":
        dropped = _find_near(job, records)
    else:
        dropped = exact_duplicates(records["key"], records["number"])
    work_files.write(job, f"{part.kind}-{part.index:06d}.drop", dropped, result)
    return result


def _find_near(job: BuildJob, records: np.ndarray) -> np.ndarray:
    """The larger number of each pair of candidates in `records` whose signatures agree; a few pairs at a time.

    That needs no table of all documents and no order of pairs, and a dropped document resembles an earlier one. Connected components of
    the pairs (union-find) would also drop a document that resembles no earlier one, because a later one resembles both.
    """
    # Pairs are ordered by their numbers, so that the signatures of a few pairs are close together.
    pairs = np.unique(near_candidates(records["key"], records["number"]), axis=0)
    parts = [pairs[:0, 1]]
    for first in range(0, len(pairs), PAIRS_AT_ONCE):
        few = pairs[first : first + PAIRS_AT_ONCE]
        distinct, place = np.unique(few, return_inverse=True)
        signatures = _signatures(job, distinct)[place.reshape(few.shape)]
        common = (signatures[:, 0] == signatures[:, 1]).sum(1)
        same = common >= job.options.near_threshold * PERMUTATIONS
        parts.append(few[same, 1])
    return np.unique(np.concatenate(parts))


def _groups(keys: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids ordered by key and then id [n]; whether the key equals the previous one [n]; the first id with the key [n]."""
    order = np.lexsort((ids, keys))
    keys, ids = keys[order], ids[order]
    again = np.zeros(len(keys), bool)
    again[1:] = keys[1:] == keys[:-1]
    first = np.maximum.accumulate(np.where(again, 0, np.arange(len(keys))))
    return ids, again, ids[first]


def exact_duplicates(keys: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The ids to drop, ascending: all but the smallest of every key. keys, ids: uint64 [n], all of a range of keys; unique ids."""
    ids, again, _ = _groups(keys, ids)
    return np.sort(ids[again])


def near_candidates(keys: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """[c, 2], c < 2 n: unique pairs (smaller id, larger id) to compare.

    keys, ids: uint64 [n], all of one band in a range of keys. Each document is paired with the first of its key and with the one
    before it, not with all: a key shared by a million documents leads to two million pairs instead of 10^12.
    """
    ids, again, first = _groups(keys, ids)
    at = np.flatnonzero(again)
    with_first = np.stack([first[at], ids[at]], 1)
    with_before = np.stack([ids[at - 1], ids[at]], 1)
    return np.concatenate([with_first, with_before[with_before[:, 0] != with_first[:, 0]]])


def _signatures(job: BuildJob, documents: np.ndarray) -> np.ndarray:
    """uint32 [n, PERMUTATIONS] of documents by number, ascending. Up to half of the files that may be open are cached until masks
    are made."""
    tasks, rows = task_and_index(documents)
    signatures = np.empty((len(documents), PERMUTATIONS), np.uint32)
    for task in np.unique(tasks).tolist():
        if (key := (job.work, task)) not in _mapped_signatures:
            if 2 * len(_mapped_signatures) >= raise_descriptor_limit():
                _mapped_signatures.clear()
            mapped = work_files.mapped(job, f"read-{task:07d}.signatures", "uint32")
            _mapped_signatures[key] = mapped.reshape(-1, PERMUTATIONS)
        of_task = tasks == task
        signatures[of_task] = work_files.copy_items(_mapped_signatures[key], rows[of_task])
    return signatures


def _find_dropped(job: BuildJob, task: int, kind: str, ranges: int) -> np.ndarray:
    """Indices in the task of its dropped documents or paragraphs, unique."""
    edges = np.array([task, task + 1], np.uint64) << np.uint64(TASK_SHIFT)
    parts = []
    for index in range(ranges):
        listed = work_files.mapped(job, f"{kind}-{index:06d}.drop", "<u8")
        low, high = np.searchsorted(listed, edges)
        parts.append(work_files.copy_items(listed, slice(low, high)))
    return np.unique(task_and_index(np.concatenate(parts))[1])


def mask_documents(job: BuildJob, item: TaskMask) -> ItemResult:
    """Write keep-TASK.mask, bool [s], false in duplicate documents, and the keys of the remaining paragraphs."""
    _mapped_signatures.clear()
    result = ItemResult()
    table = work_files.read(job, f"read-{item.task:07d}.documents", DOCUMENT)
    keep = np.ones(len(table), bool)
    for kind, ranges in item.ranges:
        places = _find_dropped(job, item.task, kind, ranges)
        places = places[keep[places]]
        keep[places] = False
        result.drop(REASONS[kind], table[places])
    work_files.write(job, f"keep-{item.task:07d}.mask", np.repeat(keep, table["sentences"]), result)
    if "paragraphs" in job.options.dedup:
        hashes = work_files.read(job, f"read-{item.task:07d}.paragraphs", PARAGRAPH)["hash"]
        # a hash of 0 marks a paragraph that is too short to compare
        left = np.repeat(keep, table["paragraphs"]) & (hashes != 0)
        records = work_files.sort_by_key(keyed(hashes[left], numbers(item.task, 0, len(hashes))[left]))
        work_files.write(job, f"keep-{item.task:07d}.paragraphs-keys", records, result)
        result.facts["paragraphs"] = len(records)
    return result


def mask_paragraphs(job: BuildJob, item: TaskMask) -> ItemResult:
    """Write trim-TASK.mask, bool [s], false in duplicate documents and in repeated paragraphs."""
    result, stem = ItemResult(), f"read-{item.task:07d}"
    table = work_files.read(job, f"{stem}.documents", DOCUMENT)
    paragraphs = work_files.read(job, f"{stem}.paragraphs", PARAGRAPH)
    lengths = work_files.read(job, f"{stem}.sentences", "uint32")
    before = work_files.read(job, f"keep-{item.task:07d}.mask", "bool")
    repeated = np.zeros(len(paragraphs), bool)
    for kind, ranges in item.ranges:
        repeated[_find_dropped(job, item.task, kind, ranges)] = True
    after = before & ~np.repeat(repeated, paragraphs["sentences"])
    work_files.write(job, f"trim-{item.task:07d}.mask", after, result)
    document = np.repeat(np.arange(len(table)), table["sentences"])
    had, has = (np.bincount(document[mask], minlength=len(table)) > 0 for mask in (before, after))
    dropped = before & ~after
    if emptied := int((had & ~has).sum()):
        result.dropped[ONLY_REPEATED] += emptied
    result.counts["repeated paragraphs"] += int(repeated.sum())
    result.counts["dropped sentences"] += int(dropped.sum())
    result.counts["dropped tokens"] += int(lengths[dropped].sum())
    return result
