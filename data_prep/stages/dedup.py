"""Duplicates among documents and paragraphs, found by key ranges.

Records (key, number) of all documents are sorted once a task, then compared range by range of the keys. Memory is that of one
range, and the first document in input order is kept. A range's result is the numbers to drop; a task then turns its own into a
mask over its sentences, which is all that later stages read. Of a large corpus the tasks' records are merged before ranges
read them, and the numbers to drop gathered for groups of tasks, so that files are not opened for each task and each range.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_prep.executor import work_files
from data_prep.executor.journal import Stage, Stages
from data_prep.executor.work_files import DOCUMENT, KEYED, PARAGRAPH, TASK_SHIFT, BuildJob, ItemResult, Writer
from data_prep.stages import minhash

RANGE_RECORDS = 1 << 21
# pairs whose signatures are in memory: 32 MiB
PAIRS_AT_ONCE = 1 << 14
REASONS = {"documents": "exact duplicate", "near": "near duplicate"}
LOST = "repeated paragraphs alone"

_mapped_signatures: dict[tuple[str, int], np.ndarray] = {}


@dataclass(frozen=True)
class SortedRuns:
    """Records ordered by key, a run a task or merged from several: SOURCE-0.KIND-keys to SOURCE-(count - 1).KIND-keys."""

    kind: str
    source: str
    count: int

    def open(self, job: BuildJob, first: int = 0, runs: int | None = None) -> list[np.ndarray]:
        last = self.count if runs is None else first + runs
        names = (f"{self.source}-{run:07d}.{self.kind}-keys" for run in range(first, last))
        return [work_files.mapped(job, name, KEYED) for name in names]


@dataclass(frozen=True)
class RunMerge:
    """Runs that are merged into run `index` of `into`."""

    source: SortedRuns
    into: SortedRuns
    index: int
    runs: work_files.MergeGroup


@dataclass(frozen=True)
class KeyRange:
    """Part `index` of `count` of the records of runs."""

    runs: SortedRuns
    index: int
    count: int


@dataclass(frozen=True)
class DropList:
    """Duplicates of a kind to drop, in the files STEM-FIRST.drop to STEM-(FIRST + COUNT - 1).drop."""

    kind: str
    stem: str
    first: int
    count: int

    def open(self, job: BuildJob) -> list[np.ndarray]:
        names = (f"{self.stem}-{index:06d}.drop" for index in range(self.first, self.first + self.count))
        return [work_files.mapped(job, name, "<u8") for name in names]


@dataclass(frozen=True)
class DropGather:
    """The drops of tasks [first, first + tasks) of all ranges, to be written to one file."""

    source: DropList
    into: DropList
    first: int
    tasks: int


@dataclass(frozen=True)
class TaskMask:
    """Task `task` and where its duplicates are listed."""

    task: int
    drops: tuple[DropList, ...]


def run(stages: Stages, job: BuildJob, documents: Stage) -> tuple[list[Stage], str]:
    """The stages that compare documents and paragraphs, and the mask that they write: "" where nothing is compared."""
    chosen, tasks = job.options.dedup, len(documents.results)
    if not chosen:
        return [], ""
    count = sum(result.facts["documents"] for result in documents.results)
    compared: list[Stage] = []
    drops = []
    for kind, records in (("documents", count), ("near", count * minhash.BANDS)):
        if kind in chosen:
            drops.append(find_duplicates(stages, job, SortedRuns(kind, "read", tasks), records, compared))
    kept = stages.map("keep", mask_documents, job, task_masks(tasks, drops))
    compared.append(kept)
    if "paragraphs" not in chosen:
        return compared, "keep"
    paragraphs = sum(result.facts["paragraphs"] for result in kept.results)
    repeated = find_duplicates(stages, job, SortedRuns("paragraphs", "keep", tasks), paragraphs, compared)
    compared.append(stages.map("trim", mask_paragraphs, job, task_masks(tasks, [repeated])))
    return compared, "trim"


def find_duplicates(
    stages: Stages, job: BuildJob, runs: SortedRuns, records: int, compared: list[Stage]
) -> DropList | list[DropGather]:
    """Where the duplicates of a kind are listed; the stage that listed them is added to `compared`."""
    kind, tasks = runs.kind, runs.count
    merged = None
    if groups := merges(runs, records):
        merged = stages.map(f"merge {kind}", merge, job, groups)
        runs = groups[0].into
    matched = stages.map(f"same {kind}", find, job, ranges(runs, records))
    if merged:
        stages.journal.consume(merged, matched)
    if gathers := plan_gathers(kind, len(matched.results), tasks):
        gathered = stages.map(f"gather {kind}", gather, job, gathers)
        stages.journal.consume(matched, gathered)
        compared.append(gathered)
        return gathers
    compared.append(matched)
    return DropList(kind, kind, 0, len(matched.results))


def ranges(runs: SortedRuns, records: int) -> list[KeyRange]:
    count = max(1, -(-records // RANGE_RECORDS))
    return [KeyRange(runs, i, count) for i in range(count)]


def merges(runs: SortedRuns, records: int) -> list[RunMerge]:
    """Groups of neighbouring runs to merge before ranges read them; none of a small corpus."""
    planned = work_files.plan_merges(runs.count, len(ranges(runs, records)), records, RANGE_RECORDS)
    into = SortedRuns(runs.kind, f"merged-{runs.source}", len(planned))
    return [RunMerge(runs, into, i, group) for i, group in enumerate(planned)]


def merge(job: BuildJob, item: RunMerge) -> ItemResult:
    """Write one merged run."""
    result = ItemResult()
    runs = item.source.open(job, item.runs.first, item.runs.runs)
    with Writer(job, f"{item.into.source}-{item.index:07d}.{item.into.kind}-keys", result) as file:
        for index in range(item.runs.ranges):
            parts = [work_files.key_range(run, index, item.runs.ranges) for run in runs]
            file.write(work_files.by_key(np.concatenate(parts)))
    return result


def plan_gathers(kind: str, ranges: int, tasks: int) -> list[DropGather]:
    """Groups of neighbouring tasks whose drops are gathered from so many ranges; none of a small corpus."""
    planned = work_files.plan_merges(tasks, ranges, 0, 1)
    return [
        DropGather(DropList(kind, kind, 0, ranges), DropList(kind, f"{kind}-tasks", i, 1), group.first, group.runs)
        for i, group in enumerate(planned)
    ]


def gather(job: BuildJob, item: DropGather) -> ItemResult:
    """Write the drops of a group of tasks, ordered by number."""
    result = ItemResult()
    drops = np.concatenate([_of_tasks(part, item.first, item.tasks) for part in item.source.open(job)])
    work_files.write(job, f"{item.into.stem}-{item.into.first:06d}.drop", np.sort(drops), result)
    return result


def task_masks(tasks: int, drops: list[DropList | list[DropGather]]) -> list[TaskMask]:
    """A mask for each task, from the drops of each kind of all ranges or of the gathered files."""
    of_kinds = []
    for listed in drops:
        if isinstance(listed, DropList):
            of_kinds.append([listed] * tasks)
        else:
            of_kinds.append([group.into for group in listed for _ in range(group.tasks)])
    return [TaskMask(task, tuple(of_kind[task] for of_kind in of_kinds)) for task in range(tasks)]


def find(job: BuildJob, part: KeyRange) -> ItemResult:
    """Write KIND-INDEX.drop: the numbers to drop, uint64, ascending and each once."""
    result = ItemResult()
    kind = part.runs.kind
    records = np.concatenate([work_files.key_range(run, part.index, part.count) for run in part.runs.open(job)])
    if kind == "near":
        dropped = _near(job, records)
    else:
        dropped = minhash.exact_duplicates(records["key"], records["number"])
    work_files.write(job, f"{kind}-{part.index:06d}.drop", dropped, result)
    return result


def _near(job: BuildJob, records: np.ndarray) -> np.ndarray:
    """The later number of each pair of candidates among `records` whose signatures agree; a few pairs at a time."""
    # The order of pairs is that of their numbers, so that the signatures of a few pairs lie close together.
    pairs = np.unique(minhash.near_candidates(records["key"], records["number"]), axis=0)
    parts = [pairs[:0, 1]]
    for first in range(0, len(pairs), PAIRS_AT_ONCE):
        few = pairs[first : first + PAIRS_AT_ONCE]
        numbers, place = np.unique(few, return_inverse=True)
        signatures = _signatures(job, numbers)[place.reshape(few.shape)]
        parts.append(few[minhash.verified(signatures[:, 0], signatures[:, 1]), 1])
    return np.unique(np.concatenate(parts))


def _signatures(job: BuildJob, numbers: np.ndarray) -> np.ndarray:
    """uint32 [n, PERMUTATIONS] of documents by number, ascending."""
    tasks, rows = work_files.task_and_place(numbers)
    signatures = np.empty((len(numbers), minhash.PERMUTATIONS), np.uint32)
    for task in np.unique(tasks).tolist():
        of_task = tasks == task
        signatures[of_task] = work_files.copy_of(_signatures_of(job, task), rows[of_task])
    return signatures


def _signatures_of(job: BuildJob, task: int) -> np.ndarray:
    """uint32 [documents of the task, PERMUTATIONS]; a process opens a file once, until it makes masks."""
    key = (job.work, task)
    if key not in _mapped_signatures:
        mapped = work_files.mapped(job, f"read-{task:07d}.signatures", "uint32")
        _mapped_signatures[key] = mapped.reshape(-1, minhash.PERMUTATIONS)
    return _mapped_signatures[key]


def _of_tasks(drops: np.ndarray, first: int, tasks: int) -> np.ndarray:
    """Of drops ordered by number those of tasks [first, first + tasks)."""
    edges = np.array([first, first + tasks], np.uint64) << np.uint64(TASK_SHIFT)
    low, high = np.searchsorted(drops, edges)
    return work_files.copy_of(drops, slice(low, high))


def _dropped(job: BuildJob, task: int, drops: DropList) -> np.ndarray:
    """Places in the task of what is dropped of it, each once."""
    numbers = np.concatenate([_of_tasks(part, task, 1) for part in drops.open(job)])
    return np.unique(work_files.task_and_place(numbers)[1])


def mask_documents(job: BuildJob, item: TaskMask) -> ItemResult:
    """Write keep-TASK.mask, bool [s], false in duplicate documents; and the keys of the paragraphs that are left."""
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
        left = np.repeat(keep, table["paragraphs"])
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
