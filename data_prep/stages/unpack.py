"""Unpacking of large compressed files that can't be cut as they are: gzip, xz, zstd, bzip2 of few streams.

One process reads a file from its first byte to its last and writes spools, zstd files of RANGE_BYTES of text each. The file is
then cut into ranges of its text like the unpacked file, with the same tasks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

import numpy as np
import zstandard

from data_prep.common.errors import Problems
from data_prep.common.records import FileRange, RangeList
from data_prep.executor.work_files import BuildJob, ItemResult, write
from data_prep.options import BuildOptions
from data_prep.readers import decompress, documents, spools, tasks
from megabert.common.files import write_whole

# zstd's level: a spool costs a third of its text on disk and 3 ns a byte
LEVEL = 1


@dataclass(frozen=True)
class PackedFile:
    """The packed file at index `index` of the ranges of the input."""

    index: int
    file: FileRange


def packed_files(ranges: Sequence[RangeList]) -> list[PackedFile]:
    """The files among `ranges` that need unpacking."""
    numbered = enumerate(chain.from_iterable(ranges))
    return [PackedFile(index, file) for index, file in numbered if file.unpack_first]


def without_options(job: BuildJob) -> BuildJob:
    """The job for the keys of unpacked files; the options used by unpacking, such as the format, are in its items."""
    return BuildJob(BuildOptions(), tokenizer="", work=job.work, on_error=job.on_error)


def unpack(job: BuildJob, item: PackedFile) -> ItemResult:
    """Write stream-INDEX-I.zst, and return the fact "spools": name and unpacked bytes of each."""
    result, problems = ItemResult(size=item.file.size), Problems(job.on_error)
    written: list[spools.Spool] = []

    def write_spool(text: bytes) -> None:
        name = f"stream-{item.index:07d}-{len(written):06d}.zst"
        packed = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(text)
        write(job, name, np.frombuffer(packed, np.uint8), result)
        written.append((name, len(text)))

    text = bytearray()
    chunks = decompress.read_chunks(item.file.path, item.file.compression)
    chunks = decompress.until_damage(chunks, item.file.path, problems, documents.DAMAGED)
    for chunk in documents.watch(item.file, chunks, problems):
        text += chunk
        while len(text) >= documents.RANGE_BYTES:
            write_spool(bytes(text[: documents.RANGE_BYTES]))
            del text[: documents.RANGE_BYTES]
    if text:
        write_spool(bytes(text))
    result.facts["spools"] = written
    result.problems, result.lost = problems.counts, problems.lost
    return result


def cut(
    job: BuildJob, ranges: Sequence[RangeList], items: Sequence[PackedFile], results: Sequence[ItemResult]
) -> list[RangeList]:
    """`ranges` in which each unpacked file is replaced by ranges of its text. Writes stream-INDEX.index."""
    spools_of = {item.index: result.facts["spools"] for item, result in zip(items, results, strict=True)}
    indexes = count()

    def parts(file: FileRange) -> list[FileRange]:
        index = next(indexes)
        if index not in spools_of:
            return [file]
        name = f"stream-{index:07d}.index"
        write_whole(Path(job.path(name)), json.dumps(spools_of[index]).encode())
        size = sum(spool[1] for spool in spools_of[index])
        return tasks.cut(replace(file, index=name, unpack_first=False), size) if size else []

    return [RangeList(chain.from_iterable(map(parts, of_corpus))) for of_corpus in ranges]
