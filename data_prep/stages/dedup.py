"""Duplicates among documents and paragraphs, found by key ranges.

Records of all documents are sorted once a task and met range by range on disk. Memory is one range's, and the first in
input order is the one that stays. A range's result is the numbers to drop; a task then turns the numbers that are its own
into a mask over its sentences, which is all that later stages read. Of a large corpus the tasks' records are merged before
ranges meet them, and the numbers to drop gathered for groups of tasks: nobody opens a file for each task and each range.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data_prep.executor import work_files
from data_prep.executor.work_files import DOCUMENT, KEYED, PARAGRAPH, TASK_SHIFT, Done, Job, Writer
from data_prep.stages import read
from data_prep.text import minhash

RANGE_RECORDS = 1 << 21
PAIRS_AT_ONCE = 1 << 14  # whose signatures are in memory: 32 MiB
EXAMPLE_TOKENS = 60
REASONS = {"documents": "exact duplicate", "near": "near duplicate"}
LOST = "repeated paragraphs alone"
PARTNERS = np.dtype([("number", "<u8"), ("kept", "<u8")])

_mapped_signatures: dict[tuple[str, int], np.ndarray] = {}


@dataclass(frozen=True)
class Runs:
    """Records ordered by key, a run a task or merged from several: SOURCE-0.KIND-keys to SOURCE-(count - 1).KIND-keys."""

    kind: str
    source: str
    count: int

    def open(self, job: Job, first: int = 0, runs: int | None = None) -> list[np.ndarray]:
        last = self.count if runs is None else first + runs
        names = (f"{self.source}-{run:07d}.{self.kind}-keys" for run in range(first, last))
        return [work_files.mapped(job, name, KEYED) for name in names]


@dataclass(frozen=True)
class Merge:
    """Runs that are merged into run `index` of `into`."""

    source: Runs
    into: Runs
    index: int
    runs: work_files.Merge


@dataclass(frozen=True)
class KeyRange:
    """Part `index` of `count` of the records of runs."""

    runs: Runs
    index: int
    count: int


@dataclass(frozen=True)
class Drops:
    """What is dropped of a task as a duplicate of a kind: in the files STEM-FIRST.drop to STEM-(FIRST + COUNT - 1).drop."""

    kind: str
    stem: str
    first: int
    count: int

    def open(self, job: Job) -> list[np.ndarray]:
        names = (f"{self.stem}-{index:06d}.drop" for index in range(self.first, self.first + self.count))
        return [work_files.mapped(job, name, PARTNERS) for name in names]


@dataclass(frozen=True)
class Gather:
    """The drops of tasks [first, first + tasks) of all ranges, to be put in one file."""

    source: Drops
    into: Drops
    first: int
    tasks: int


@dataclass(frozen=True)
class TaskMask:
    """Task `task` and where its duplicates are listed."""

    task: int
    drops: tuple[Drops, ...]


def ranges(runs: Runs, records: int) -> list[KeyRange]:
    count = max(1, -(-records // RANGE_RECORDS))
    return [KeyRange(runs, i, count) for i in range(count)]


def merges(runs: Runs, records: int) -> list[Merge]:
    """Groups of neighbouring runs to merge before ranges meet them; none of a corpus that is not large."""
    planned = work_files.plan_merges(runs.count, len(ranges(runs, records)), records, RANGE_RECORDS)
    into = Runs(runs.kind, f"merged-{runs.source}", len(planned))
    return [Merge(runs, into, i, group) for i, group in enumerate(planned)]


def merge(job: Job, item: Merge) -> Done:
    """Write one merged run."""
    done = Done()
    runs = item.source.open(job, item.runs.first, item.runs.runs)
    with Writer(job, f"{item.into.source}-{item.index:07d}.{item.into.kind}-keys", done) as file:
        for index in range(item.runs.ranges):
            parts = [work_files.key_range(run, index, item.runs.ranges) for run in runs]
            file.write(work_files.by_key(np.concatenate(parts)))
    return done


def gathers(kind: str, found: int, tasks: int) -> list[Gather]:
    """Groups of neighbouring tasks whose drops are gathered from `found` ranges; none of a corpus that is not large."""
    planned = work_files.plan_merges(tasks, found, 0, 1)
    return [
        Gather(Drops(kind, kind, 0, found), Drops(kind, f"{kind}-tasks", i, 1), group.first, group.runs)
        for i, group in enumerate(planned)
    ]


def gather(job: Job, item: Gather) -> Done:
    """Write the drops of a group of tasks, ordered by number."""
    done = Done()
    parts = [_of_tasks(found, item.first, item.tasks) for found in item.source.open(job)]
    drops = np.concatenate(parts)
    order = np.argsort(drops["number"], kind="stable")
    work_files.write(job, f"{item.into.stem}-{item.into.first:06d}.drop", drops[order], done)
    return done


def task_masks(tasks: int, drops: list[Drops | list[Gather]]) -> list[TaskMask]:
    """A mask for each task, from what all ranges or the gathered files of each kind drop."""
    of_kinds = []
    for found in drops:
        if isinstance(found, Drops):
            of_kinds.append([found] * tasks)
        else:
            of_kinds.append([group.into for group in found for _ in range(group.tasks)])
    return [TaskMask(task, tuple(of_kind[task] for of_kind in of_kinds)) for task in range(tasks)]


def find(job: Job, part: KeyRange) -> Done:
    """Write KIND-INDEX.drop: PARTNERS ordered by number, each number once."""
    done = Done()
    kind = part.runs.kind
    records = np.concatenate([work_files.key_range(run, part.index, part.count) for run in part.runs.open(job)])
    if kind == "near":
        dropped, kept = _near(job, records)
    else:
        dropped, kept = minhash.exact_duplicates(records["key"], records["number"])
    found = np.empty(len(dropped), PARTNERS)
    found["number"], found["kept"] = dropped, kept
    work_files.write(job, f"{kind}-{part.index:06d}.drop", found, done)
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
        here = tasks == task
        found[here] = work_files.copy_of(_signatures_of(job, task), rows[here])
    return found


def _signatures_of(job: Job, task: int) -> np.ndarray:
    """uint32 [documents of the task, PERMUTATIONS]; a process opens a file once, until it makes masks."""
    key = (job.work, task)
    if key not in _mapped_signatures:
        mapped = work_files.mapped(job, f"read-{task:07d}.signatures", "uint32")
        _mapped_signatures[key] = mapped.reshape(-1, minhash.PERMUTATIONS)
    return _mapped_signatures[key]


def _of_tasks(drops: np.ndarray, first: int, tasks: int) -> np.ndarray:
    """Of drops ordered by number those of tasks [first, first + tasks)."""
    edges = np.array([first, first + tasks], np.uint64) << np.uint64(TASK_SHIFT)
    low, high = np.searchsorted(drops["number"], edges)
    return work_files.copy_of(drops, slice(low, high))


def dropped(job: Job, task: int, drops: Drops) -> tuple[np.ndarray, np.ndarray]:
    """(place in the task, number that was kept) of what is dropped of a task, each place once."""
    found = np.concatenate([_of_tasks(part, task, 1) for part in drops.open(job)])
    places, first = np.unique(work_files.task_and_place(found["number"])[1], return_index=True)
    return places, found["kept"][first]


def mask_documents(job: Job, item: TaskMask) -> Done:
    """Write keep-TASK.mask, bool [s], false in duplicate documents; and the keys of the paragraphs that are left."""
    _mapped_signatures.clear()
    done = Done()
    table = work_files.read(job, f"read-{item.task:07d}.documents", DOCUMENT)
    tokenizer = read.encoder_of(job)[0]
    keep = np.ones(len(table), bool)
    starts = np.cumsum(table["tokens"], dtype=np.int64) - table["tokens"]
    for drops in item.drops:
        places, kept = dropped(job, item.task, drops)
        new = keep[places]
        places, kept = places[new], kept[new]
        keep[places] = False
        examples = []
        for place, number in zip(places[: work_files.EXAMPLES].tolist(), kept.tolist(), strict=False):
            count = min(EXAMPLE_TOKENS, int(table["tokens"][place]))
            stem = f"read-{item.task:07d}"
            tokens = work_files.read(job, f"{stem}.tokens", work_files.id_dtype(tokenizer), int(starts[place]), count)
            task, other = divmod(number, 1 << TASK_SHIFT)
            examples.append(f"[as document {other} of part {task}] {tokenizer.decode(tokens)}")
        sizes = table[places]
        done.drop(REASONS[drops.kind], len(places), int(sizes["sentences"].sum()), int(sizes["tokens"].sum()), examples)
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
    (drops,) = item.drops
    repeated = np.zeros(len(paragraphs), bool)
    repeated[dropped(job, item.task, drops)[0]] = True
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
