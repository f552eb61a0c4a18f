"""Unpacking of large files that can't be cut as they are: gzip, xz, zstd, one bzip2 stream, other encodings than UTF-8.

One process reads a file from its first byte to its last and writes spools, zstd files of RANGE_BYTES of text each; a bzip2
file is read by several, a range of blocks each. The file is then cut in ranges of its text, exactly as the unpacked file
would be, and gives the same tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import zstandard

from data_prep.common.errors import Problems
from data_prep.common.records import FileRange
from data_prep.executor.work_files import BuildJob, ItemResult, Writer
from data_prep.readers import decompress, documents, encodings, spools, tasks
from megabert.common.files import write_whole

# zstd's level: a spool costs a third of its text on disk and 3 ns a byte
LEVEL = 1
# bytes of a bzip2 file that one worker unpacks
BZIP2_BYTES = 8 << 20


@dataclass(frozen=True)
class UnpackPart:
    """Part `number` of the file that is range `index` of the input."""

    index: int
    number: int
    range: FileRange


def parts_of(ranges: Sequence[tuple[int, FileRange]]) -> list[UnpackPart]:
    """All parts of the files among `ranges` that need unpacking."""
    return [
        UnpackPart(index, number, part)
        for index, (_, file) in enumerate(ranges)
        if file.unpack_first
        for number, part in enumerate(_parts(file))
    ]


def _parts(file: FileRange) -> list[FileRange]:
    """Of a bzip2 file ranges of its bytes, else all of it."""
    if file.compression != "bz2" or file.encoding != encodings.UTF8:
        return [file]
    edges = [*range(0, max(file.size - BZIP2_BYTES // 2, 1), BZIP2_BYTES), file.size]
    return [replace(file, start=a, end=b, size=b - a) for a, b in pairwise(edges)]


def unpack(job: BuildJob, part: UnpackPart) -> ItemResult:
    """Write stream-INDEX-NUMBER-I.zst, and return the fact "spools": name and unpacked bytes of each.

    The fact "whole" is false where bad input was skipped: what follows it in the file is left out.
    """
    result, problems = ItemResult(size=part.range.size), Problems(job.on_error)
    written: list[spools.Spool] = []
    spool = None
    for chunk in _text(part.range, problems):
        while chunk:
            spool = spool or _SpoolWriter(
                job, f"stream-{part.index:07d}-{part.number:06d}-{len(written):06d}.zst", result
            )
            room = documents.RANGE_BYTES - spool.size
            spool.write(chunk[:room])
            chunk = chunk[room:]
            if spool.size == documents.RANGE_BYTES:
                written.append(spool.close())
                spool = None
    if spool:
        written.append(spool.close())
    result.facts["spools"] = written
    result.facts["whole"] = not problems.counts
    result.problems = problems.counts
    return result


def _text(part: FileRange, problems: Problems) -> Iterator[bytes]:
    """The text of a part of a file in UTF-8, some MB at a time; bad places follow the policy of `problems`."""
    if part.end is not None:
        chunks = decompress.read_blocks(part.path, part.start, part.end)
    else:
        chunks = decompress.read_chunks(part.path, part.compression)
    if part.encoding != encodings.UTF8:
        chunks = encodings.recode(chunks, part.encoding, part.path, problems)
    yield from documents.watch(part, chunks, problems)


class _SpoolWriter:
    """A zstd file of the work folder."""

    def __init__(self, job: BuildJob, name: str, result: ItemResult) -> None:
        self._name = name
        self._file = Writer(job, name, result)
        self._packer = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compressobj()
        self.size = 0

    def write(self, text: bytes) -> None:
        self.size += len(text)
        self._file.write(np.frombuffer(self._packer.compress(text), np.uint8))

    def close(self) -> spools.Spool:
        self._file.write(np.frombuffer(self._packer.flush(), np.uint8))
        self._file.__exit__()
        return self._name, self.size


def cut(
    job: BuildJob, ranges: Sequence[tuple[int, FileRange]], items: Sequence[UnpackPart], results: Sequence[ItemResult]
) -> list[tuple[int, FileRange]]:
    """`ranges` with the ranges of its text in place of each unpacked file. Writes stream-INDEX.index."""
    spools_of: dict[int, list[spools.Spool]] = {}
    ended: set[int] = set()
    for item, result in zip(items, results, strict=True):
        listed = spools_of.setdefault(item.index, [])
        if item.index not in ended:
            listed += result.facts["spools"]
        if not result.facts["whole"]:
            ended.add(item.index)
    cut_ranges: list[tuple[int, FileRange]] = []
    for index, (corpus, file) in enumerate(ranges):
        if index not in spools_of:
            cut_ranges.append((corpus, file))
            continue
        name = f"stream-{index:07d}.index"
        write_whole(Path(job.path(name)), spools.index_bytes(spools_of[index]))
        text = replace(file, encoding=encodings.UTF8, index=name, unpack_first=False)
        size = sum(spool[1] for spool in spools_of[index])
        cut_ranges += [(corpus, part) for part in (tasks.cut(text, size) if size else [])]
    return cut_ranges
