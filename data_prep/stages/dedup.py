"""Duplicates among documents and paragraphs, found by key ranges.

Records (key, number) are sorted within each task, then compared by ranges of keys. Memory is that of one range, and the first
document in input order is kept. The result of a range is the numbers to drop; each task converts its numbers to a mask over its
sentences for later stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_prep.executor import work_files
from data_prep.executor.journal import Stage, Stages
from data_prep.executor.work_files import DOCUMENT, KEYED, PARAGRAPH, TASK_SHIFT, BuildJob, ItemResult
from data_prep.stages import minhash

RANGE_RECORDS = 1 << 21
# pairs whose signatures are in memory at once: 32 MiB
PAIRS_AT_ONCE = 1 << 14
REASONS = {"documents": "exact duplicate", "near": "near duplicate"}
LOST = "repeated paragraphs alone"

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
class DropList:
    """Duplicates of a kind to drop, in the files KIND-0.drop to KIND-(ranges - 1).drop."""

    kind: str
    ranges: int


@dataclass(frozen=True)
class TaskMask:
    """Task `task` and the lists of its duplicates."""

    task: int
    drops: tuple[DropList, ...]


def run(stages: Stages, job: BuildJob, documents: Stage) -> tuple[list[Stage], str]:
    """Run the stages that compare documents and paragraphs; returns them and the name of their mask, "" if nothing is compared."""
    chosen, tasks = job.options.dedup, len(documents.results)
    if not chosen:
        return [], ""
    count = sum(result.facts["documents"] for result in documents.results)
    compared: list[Stage] = []
    for kind, records in (("documents", count), ("near", count * minhash.BANDS)):
        if kind in chosen:
            compared.append(stages.map(f"same {kind}", find, job, ranges(kind, "read", tasks, records)))
    drops = tuple(DropList(stage.name.removeprefix("same "), len(stage.results)) for stage in compared)
    kept = stages.map("keep", mask_documents, job, [TaskMask(task, drops) for task in range(tasks)])
    compared.append(kept)
    if "paragraphs" not in chosen:
        return compared, "keep"
    paragraphs = sum(result.facts["paragraphs"] for result in kept.results)
    same = stages.map("same paragraphs", find, job, ranges("paragraphs", "keep", tasks, paragraphs))
    repeated = DropList("paragraphs", len(same.results))
    trimmed = stages.map("trim", mask_paragraphs, job, [TaskMask(task, (repeated,)) for task in range(tasks)])
    return [*compared, same, trimmed], "trim"


def ranges(kind: str, source: str, tasks: int, records: int) -> list[KeyRange]:
    count = max(1, -(-records // RANGE_RECORDS))
    return [KeyRange(kind, source, tasks, i, count) for i in range(count)]


def find(job: BuildJob, part: KeyRange) -> ItemResult:
    """Write KIND-INDEX.drop: the numbers to drop, uint64, ascending and unique."""
    result = ItemResult()
    names = (f"{part.source}-{task:07d}.{part.kind}-keys" for task in range(part.tasks))
    runs = (work_files.mapped(job, name, KEYED) for name in names)
    records = np.concatenate([work_files.key_range(run, part.index, part.count) for run in runs])
    if part.kind == "near":
        dropped = _near(job, records)
    else:
        dropped = minhash.exact_duplicates(records["key"], records["number"])
    work_files.write(job, f"{part.kind}-{part.index:06d}.drop", dropped, result)
    return result


def _near(job: BuildJob, records: np.ndarray) -> np.ndarray:
    """The larger number of each pair of candidates in `records` whose signatures agree; a few pairs at a time."""
    # Pairs are ordered by their numbers, so that the signatures of a few pairs are close together.
    pairs = np.unique(minhash.near_candidates(records["key"], records["number"]), axis=0)
    parts = [pairs[:0, 1]]
    for first in range(0, len(pairs), PAIRS_AT_ONCE):
        few = pairs[first : first + PAIRS_AT_ONCE]
        numbers, place = np.unique(few, return_inverse=True)
        signatures = _signatures(job, numbers)[place.reshape(few.shape)]
        same = minhash.verified(signatures[:, 0], signatures[:, 1], job.options.near_threshold)
        parts.append(few[same, 1])
    return np.unique(np.concatenate(parts))


def _signatures(job: BuildJob, numbers: np.ndarray) -> np.ndarray:
    """uint32 [n, PERMUTATIONS] of documents by number, ascending."""
    tasks, rows = work_files.task_and_place(numbers)
    signatures = np.empty((len(numbers), minhash.PERMUTATIONS), np.uint32)
    for task in np.unique(tasks).tolist():
        of_task = tasks == task
        signatures[of_task] = work_files.copy_items(_compute_signatures(job, task), rows[of_task])
    return signatures


def _compute_signatures(job: BuildJob, task: int) -> np.ndarray:
    """uint32 [documents of the task, PERMUTATIONS]; the open file is cached until masks are made."""
    key = (job.work, task)
    if key not in _mapped_signatures:
        mapped = work_files.mapped(job, f"read-{task:07d}.signatures", "uint32")
        _mapped_signatures[key] = mapped.reshape(-1, minhash.PERMUTATIONS)
    return _mapped_signatures[key]


def _dropped(job: BuildJob, task: int, drops: DropList) -> np.ndarray:
    """Indices in the task of its dropped documents or paragraphs, unique."""
    edges = np.array([task, task + 1], np.uint64) << np.uint64(TASK_SHIFT)
    numbers = []
    for index in range(drops.ranges):
        listed = work_files.mapped(job, f"{drops.kind}-{index:06d}.drop", "<u8")
        low, high = np.searchsorted(listed, edges)
        numbers.append(work_files.copy_items(listed, slice(low, high)))
    return np.unique(work_files.task_and_place(np.concatenate(numbers))[1])


def mask_documents(job: BuildJob, item: TaskMask) -> ItemResult:
    """Write keep-TASK.mask, bool [s], false in duplicate documents, and the keys of the remaining paragraphs."""
    _mapped_signatures.clear()
    result = ItemResult()
    stem = f"read-{item.task:07d}"
    table = work_files.read(job, f"{stem}.documents", DOCUMENT)
    keep = np.ones(len(table), bool)
    for drops in item.drops:
        places = _dropped(job, item.task, drops)
        places = places[keep[places]]
        keep[places] = False
        sizes = table[places]
        sentences, dropped_tokens = int(sizes["sentences"].sum()), int(sizes["tokens"].sum())
        result.drop(REASONS[drops.kind], len(places), sentences, dropped_tokens)
    work_files.write(job, f"keep-{item.task:07d}.mask", np.repeat(keep, table["sentences"]), result)
    if "paragraphs" in job.options.dedup:
        paragraphs = work_files.read(job, f"{stem}.paragraphs", PARAGRAPH)
        numbers = (item.task << TASK_SHIFT) + np.arange(len(paragraphs), dtype=np.uint64)
        # a hash of 0 marks a paragraph that is too short to compare
        left = np.repeat(keep, table["paragraphs"]) & (paragraphs["hash"] != 0)
        records = work_files.keyed(paragraphs["hash"][left], numbers[left])
        work_files.write(job, f"keep-{item.task:07d}.paragraphs-keys", work_files.by_key(records), result)
        result.facts["paragraphs"] = int(left.sum())
    return result


def mask_paragraphs(job: BuildJob, item: TaskMask) -> ItemResult:
    """Write trim-TASK.mask, bool [s], false in duplicate documents and in repeated paragraphs."""
    result = ItemResult()
    table = work_files.read(job, f"read-{item.task:07d}.documents", DOCUMENT)
    paragraphs = work_files.read(job, f"read-{item.task:07d}.paragraphs", PARAGRAPH)
    before = work_files.read(job, f"keep-{item.task:07d}.mask", "bool")
    (drops,) = item.drops
    repeated = np.zeros(len(paragraphs), bool)
    repeated[_dropped(job, item.task, drops)] = True
    after = before & ~np.repeat(repeated, paragraphs["sentences"])
    work_files.write(job, f"trim-{item.task:07d}.mask", after, result)
    lengths = work_files.read(job, f"read-{item.task:07d}.sentences", "uint32")
    result.counts["repeated paragraphs"] += int(repeated.sum())
    document = np.repeat(np.arange(len(table)), table["sentences"])
    had, has = (np.bincount(document[mask], minlength=len(table)) > 0 for mask in (before, after))
    dropped = before & ~after
    result.drop(LOST, int((had & ~has).sum()), 0, 0)
    result.counts["dropped sentences"] += int(dropped.sum())
    result.counts["dropped tokens"] += int(lengths[dropped].sum())
    return result
