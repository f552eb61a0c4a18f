"""Jobs and results of stages, and the files between stages: plain arrays in the work folder, recorded with size and CRC-32."""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.common.errors import BadInput, Losses, Problems, add_losses
from data_prep.common.records import ReadOptions
from data_prep.filters import rules
from data_prep.options import BuildOptions
from megabert.common.environment import match_in
from megabert.common.files import atomic_file
from megabert.data.tokenizer import Tokenizer

# fields of a result that are sums
SUMS = ("counts", "problems", "dropped", "changed", "formats", "lengths")


@dataclass(frozen=True)
class BuildJob:
    """Inputs common to all items of all stages. Its repr is part of the key of a finished item."""

    options: BuildOptions
    # a path; `tokenizer_sha256` identifies its content
    tokenizer: str = field(repr=False)
    work: str = field(repr=False)
    # not in the repr: an item without problems has the same result under "stop" and "skip"
    on_error: str = field(repr=False)
    tokenizer_sha256: str = ""
    # documents, or passages of this many tokens, whose 64-bit hash is below the limit are held out
    held_limit: int = 0
    passage: int = 0
    # of the corpora
    weights: tuple[float, ...] = (1.0,)
    # names of the sources if there are several
    sources: tuple[str, ...] = ()
    # see `ReadOptions.folders`
    folders: tuple[tuple[str, str], ...] = ()
    # folder of the output, and the URL to which its files go as they are written, "" for none
    output: str = field(default="", repr=False)
    url: str = field(default="", repr=False)

    @cached_property
    def read(self) -> ReadOptions:
        return replace(self.options.read, folders=self.folders)

    def needs_folded(self) -> bool:
        """Whether a quality rule needs folded words."""
        return any(rules.BY_NAME[name].folded for name in self.options.rules)

    def path(self, name: str) -> str:
        return os.path.join(self.work, name)


@lru_cache(maxsize=1)
def _load_tokenizer(path: str, sha256: str) -> Tokenizer:
    return Tokenizer.load(path)


def job_tokenizer(job: BuildJob) -> Tokenizer:
    """The tokenizer, loaded once by a process."""
    return _load_tokenizer(job.tokenizer, job.tokenizer_sha256)


def id_dtype(job: BuildJob) -> np.dtype:
    """The type of token ids in work files and shards."""
    return np.dtype(np.uint16 if job_tokenizer(job).vocab_size <= 65_535 else np.uint32)


@dataclass
class ItemResult:
    """The result of an item of work, or the sum of several.

    `counts`: documents, sentences, tokens, …; `problems`, `lost`, `changed` and `formats`: see `errors.Problems`; `dropped`:
    documents by reason; `lengths`: sequences by number of tokens; `facts`: values for the next stage, not summed.
    """

    counts: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    lost: Losses = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    facts: dict[str, Any] = field(default_factory=dict)
    # name -> bytes, CRC-32
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    # input bytes on disk, for the progress bar
    size: int = 0
    # bytes of memory of the process
    peak: int = 0

    @staticmethod
    def of(problems: Problems, size: int = 0) -> ItemResult:
        """A result that shares its counters but `dropped` with `problems`, so that later problems show up in it."""
        return ItemResult(
            problems=problems.counts, lost=problems.lost, changed=problems.changed, formats=problems.formats, size=size
        )

    def as_json(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @staticmethod
    def from_json(raw: dict[str, Any]) -> ItemResult:
        result = ItemResult(**raw | {name: Counter(raw.get(name, {})) for name in SUMS})
        result.lengths = Counter({int(length): count for length, count in raw["lengths"].items()})
        result.files = {name: (size, crc) for name, (size, crc) in raw["files"].items()}
        return result

    def drop(self, reason: str, documents: np.ndarray) -> None:
        """Count dropped documents, DOCUMENT records."""
        if len(documents):
            self.dropped[reason] += len(documents)
            for unit in ("sentences", "tokens"):
                self.counts[f"dropped {unit}"] += int(documents[unit].sum())


def total(results: list[ItemResult]) -> ItemResult:
    """The sum of results, without `facts` and `files`."""
    whole = ItemResult()
    for result in results:
        for name in SUMS:
            getattr(whole, name).update(getattr(result, name))
        add_losses(whole.lost, result.lost)
        whole.peak = max(whole.peak, result.peak)
    return whole


class TooLittleText(BadInput):
    """The documents that are left make no tokenizer or no row. `read`: what was read and dropped, if only a sample was."""

    read: ItemResult | None = None


def peak_memory() -> int:
    """Peak resident size of this process in bytes; 0 without /proc."""
    return int(match_in("/proc/self/status", r"VmHWM:\s*(\d+) kB") or 0) * 1024


Append = Callable[[np.ndarray], None]


@contextlib.contextmanager
def appending(job: BuildJob, name: str, result: ItemResult) -> Iterator[Append]:
    """A function that appends arrays to a file of the work folder, whose size and CRC-32 are then recorded in `result`.

    The file gets its name when complete: on a Ray cluster a second attempt at the item may write it meanwhile.
    """
    size = crc = 0
    with atomic_file(Path(job.path(name)), synced=False) as file:

        def append(array: np.ndarray) -> None:
            nonlocal size, crc
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            file.write(data)
            size, crc = size + len(data), zlib.crc32(data, crc)

        yield append
    result.files[name] = (size, crc)


def write(job: BuildJob, name: str, array: np.ndarray, result: ItemResult) -> None:
    with appending(job, name, result) as append:
        append(array)


def read(job: BuildJob, name: str, dtype: np.dtype | str, first: int = 0, count: int = -1) -> np.ndarray:
    """Items [first, first + count) of a file of the work folder; all of them by default."""
    dtype = np.dtype(dtype)
    return np.fromfile(job.path(name), dtype, count, offset=first * dtype.itemsize)


def mapped(job: BuildJob, name: str, dtype: np.dtype | str) -> np.ndarray:
    """Items of a file of the work folder, mapped into memory; `copy_items` copies some."""
    dtype = np.dtype(dtype)
    path = job.path(name)
    return np.memmap(path, dtype, "r") if os.path.getsize(path) else np.zeros(0, dtype)


def copy_items(items: np.ndarray, chosen: Any) -> np.ndarray:
    """A copy of the chosen items of a mapped file, whose pages are then released from this process.

    Access to a page maps its whole folio, up to megabytes since Linux 6.18, so many files would be mapped whole.
    """
    # indexing by an array copies already
    copy = np.array(items[chosen], copy=isinstance(chosen, slice) or None)
    if isinstance(items, np.memmap):
        items._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
    return copy


def sort_by_key(records: np.ndarray) -> np.ndarray:
    """Records with a field `key`, ordered by it."""
    return records[np.argsort(records["key"], kind="stable")]


def key_range(records: np.ndarray, index: int, count: int) -> np.ndarray:
    """Those of the records, ordered by 64-bit `key`, with keys in part `index` of `count` equal key ranges."""
    low, high = ((index + i) * (1 << 64) // count for i in (0, 1))
    keys = records["key"]
    return copy_items(records, slice(bisect_left(keys, low), bisect_left(keys, high)))


def record_output(job: BuildJob, path: Path, result: ItemResult) -> None:
    """Record a file of the output folder in `result`."""
    result.files[os.path.relpath(path, job.work)] = _checksum(path)


def files_intact(work: str, files: dict[str, tuple[int, int]]) -> bool:
    """Whether all of `files` exist with the recorded content."""
    paths = ((os.path.join(work, name), written) for name, written in files.items())
    return all(os.path.isfile(path) and _checksum(path) == written for path, written in paths)


def _checksum(path: str | Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file."""
    size = crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc
