"""Files between the stages of a build: plain arrays in the work folder, each recorded with its size and CRC-32.

A stage maps a function over items of work; an item reads files of earlier stages and returns an `ItemResult`. A document is
identified by its number: the task that read it, and its index among the documents which that task kept.
"""

from __future__ import annotations

import mmap
import os
import zlib
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.common.errors import BadInput, Losses, add_losses
from data_prep.common.records import ReadOptions
from data_prep.filters.rules import needs_folded
from data_prep.options import BuildOptions
from megabert.common.environment import match_in
from megabert.common.files import appearing_file
from megabert.data.tokenizer import Tokenizer

# a document's number is task << TASK_SHIFT | index; a paragraph's likewise
TASK_SHIFT = 32
# most files opened in a stage: at 30 microseconds each 16 s of a build of an hour
MAX_OPENS = 1 << 19
# number of runs after merging, if there would be more files to open
MERGED_RUNS = 64

DOCUMENT = np.dtype(
    [
        ("hash", "<u8"),
        ("bytes", "<u4"),
        ("sentences", "<u4"),
        ("tokens", "<u4"),
        ("paragraphs", "<u4"),
        ("source", "u1"),
    ]
)
PARAGRAPH = np.dtype([("hash", "<u8"), ("sentences", "<u4")])
# a key to group by, and the number of its document or paragraph
KEYED = np.dtype([("key", "<u8"), ("number", "<u8")])
# `sources`: those of A and B of held-out sequences
SEQUENCE = np.dtype(
    [("key", "<u8"), ("start", "<u8"), ("length", "<u2"), ("first", "<u2"), ("label", "i1"), ("sources", "u1", (2,))]
)


@dataclass(frozen=True)
class BuildJob:
    """Inputs common to all items of all stages. Its repr is part of the key of a finished item."""

    options: BuildOptions
    # a path; `tokenizer_sha256` identifies its content
    tokenizer: str = field(repr=False)
    work: str = field(repr=False)
    # an item that finished under "stop" is the same under "skip"
    on_error: str = field(repr=False)
    tokenizer_sha256: str = ""
    # documents, or passages of this many tokens, whose 64-bit hash is below the limit are held out
    held_limit: int = 0
    passage: int = 0
    # of the corpora
    weights: tuple[float, ...] = (1.0,)
    # names of the sources if there are several
    sources: tuple[str, ...] = ()
    # as of `ReadOptions.folders`
    folders: tuple[tuple[str, str], ...] = ()
    # the output folder, and the URL to which its files go as they are written; "" for none
    upload: tuple[str, str] = field(default=("", ""), repr=False)

    @cached_property
    def read(self) -> ReadOptions:
        return replace(self.options.read, folders=self.folders)

    def needs_folded(self) -> bool:
        """Whether a quality rule needs folded words."""
        return needs_folded(self.options.rules)

    def needs_texts(self) -> bool:
        """Whether the texts of documents are needed after encoding."""
        return self.options.save_text or bool(self.options.own_filters)

    def path(self, name: str) -> str:
        return os.path.join(self.work, name)


@dataclass
class ItemResult:
    """The result of an item of work, or the sum of several.

    `counts` are documents, sentences, tokens and the like; `problems`, `lost` and `changed` are as of `errors.Problems`; `dropped`
    maps a reason to documents; `histograms` maps a name to counts by value; `facts` are figures of an item for planning the next stage.
    """

    counts: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    lost: Losses = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    histograms: dict[str, Counter[int]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    # name -> bytes, CRC-32
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    # input bytes on disk, for the progress bar
    size: int = 0
    # bytes of memory of the process
    peak: int = 0

    def as_json(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @staticmethod
    def from_json(raw: dict[str, Any]) -> ItemResult:
        result = ItemResult(**raw)
        for name in ("counts", "problems", "dropped", "changed"):
            setattr(result, name, Counter(getattr(result, name)))
        result.histograms = {
            name: Counter({int(value): n for value, n in counts.items()}) for name, counts in raw["histograms"].items()
        }
        result.files = {name: (size, crc) for name, (size, crc) in raw["files"].items()}
        return result

    def identity(self) -> dict[str, Any]:
        """The fields that depend only on input and options: all but memory."""
        return self.as_json() | {"peak": 0}

    def drop(self, reason: str, documents: int, sentences: int, tokens: int) -> None:
        """Count dropped documents."""
        if documents:
            self.dropped[reason] += documents
            self.counts["dropped sentences"] += sentences
            self.counts["dropped tokens"] += tokens

    def count(self, name: str, values: np.ndarray) -> None:
        distinct, counts = np.unique(values, return_counts=True)
        self.histograms.setdefault(name, Counter()).update(dict(zip(distinct.tolist(), counts.tolist(), strict=True)))


def total(results: list[ItemResult]) -> ItemResult:
    """The sum of results, without `facts` and `files`."""
    whole = ItemResult()
    for result in results:
        whole.counts.update(result.counts)
        whole.problems.update(result.problems)
        add_losses(whole.lost, result.lost)
        whole.dropped.update(result.dropped)
        whole.changed.update(result.changed)
        for name, counts in result.histograms.items():
            whole.histograms.setdefault(name, Counter()).update(counts)
        whole.peak = max(whole.peak, result.peak)
    return whole


class TooLittleText(BadInput):
    """The documents that are left make no tokenizer or no row. `read`: what was read and dropped, if only a sample was."""

    read: ItemResult | None = None


def peak_memory() -> int:
    """Peak resident size of this process in bytes; 0 without /proc."""
    return int(match_in("/proc/self/status", r"VmHWM:\s*(\d+) kB") or 0) * 1024


class Writer:
    """Appends arrays to a file of the work folder and records its size and CRC-32 in `result`.

    The file has its name once it is complete: on a cluster another attempt of the item may be writing it too.
    """

    def __init__(self, job: BuildJob, name: str, result: ItemResult) -> None:
        self._done, self._name = result, name
        self._size, self._crc = 0, 0
        self._appearing = appearing_file(Path(job.path(name)), synced=False)
        self._file = self._appearing.__enter__()

    def __enter__(self) -> Writer:
        return self

    def write(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self._file.write(data)
        self._size += len(data)
        self._crc = zlib.crc32(data, self._crc)

    def __exit__(self, *failed: Any) -> None:
        self._appearing.__exit__(*failed)
        self._done.files[self._name] = (self._size, self._crc)


def write(job: BuildJob, name: str, array: np.ndarray, result: ItemResult) -> None:
    with Writer(job, name, result) as file:
        file.write(array)


def read(job: BuildJob, name: str, dtype: np.dtype | str, first: int = 0, count: int = -1) -> np.ndarray:
    """Items [first, first + count) of a file of the work folder; all of them by default."""
    dtype = np.dtype(dtype)
    return np.fromfile(job.path(name), dtype, count, offset=first * dtype.itemsize)


def keyed(keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """KEYED records from keys uint64 [n] and numbers uint64 [n]."""
    records = np.empty(len(keys), KEYED)
    records["key"], records["number"] = keys, numbers
    return records


def by_key(records: np.ndarray) -> np.ndarray:
    return records[np.argsort(records["key"], kind="stable")]


def mapped(job: BuildJob, name: str, dtype: np.dtype | str) -> np.ndarray:
    """Items of a file of the work folder, mapped into memory; `copy_items` copies some."""
    dtype = np.dtype(dtype)
    path = job.path(name)
    return np.memmap(path, dtype, "r") if os.path.getsize(path) else np.zeros(0, dtype)


def copy_items(items: np.ndarray, chosen: Any) -> np.ndarray:
    """A copy of the chosen items of a mapped file, whose pages are then released from this process.

    Access to a page maps the whole folio that caches it, up to megabytes since Linux 6.18, so access to many files would map all of
    them.
    """
    # indexing by an array copies already
    copy = np.array(items[chosen], copy=isinstance(chosen, slice) or None)
    if isinstance(items, np.memmap):
        items._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
    return copy


def key_range(records: np.ndarray, index: int, count: int) -> np.ndarray:
    """Those of the records, ordered by 64-bit `key`, with keys in part `index` of `count` equal key ranges."""
    low, high = ((index + i) * (1 << 64) // count for i in (0, 1))
    keys = records["key"]
    return copy_items(records, slice(bisect_left(keys, low), bisect_left(keys, high)))


class MergeGroup(NamedTuple):
    """Runs [first, first + runs), to be merged into one in `ranges` key ranges."""

    first: int
    runs: int
    ranges: int


def plan_merges(runs: int, readers: int, records: int, at_once: int) -> list[MergeGroup]:
    """Groups of adjacent runs to merge before `readers` read key ranges of them; none if all may open every run.

    A merge has about `at_once` of all `records` in memory.
    """
    if runs * readers <= MAX_OPENS or runs <= MERGED_RUNS:
        return []
    size = -(-runs // MERGED_RUNS)
    ranges = max(1, round(records * size / runs / at_once))
    return [MergeGroup(first, min(size, runs - first), ranges) for first in range(0, runs, size)]


def task_and_place(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(task, index in it), both int64 [n], of documents or paragraphs by number, uint64 [n]."""
    places = numbers & np.uint64((1 << TASK_SHIFT) - 1)
    return (numbers >> np.uint64(TASK_SHIFT)).astype(np.int64), places.astype(np.int64)


def checksum(path: str | Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file."""
    size = crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def is_whole(work: str, files: dict[str, tuple[int, int]]) -> bool:
    """Whether all of `files` exist with the recorded content."""
    paths = ((os.path.join(work, name), written) for name, written in files.items())
    return all(os.path.isfile(path) and checksum(path) == written for path, written in paths)


def id_dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 65_535 else np.uint32)
