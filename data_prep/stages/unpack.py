"""Decompression of large files that cannot be read from the middle: gzip, xz, zstd, and bzip2 with few streams.

One process reads a file from its first byte to its last and writes spools, zstd files of RANGE_BYTES of text each. The file is
then cut into ranges of its text like the unpacked file, with the same tasks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

import numpy as np
import zstandard

from data_prep.common.errors import Problems
from data_prep.common.records import UNPACK, FileRange, RangeList
from data_prep.executor import output_folder
from data_prep.executor.journal import Stages
from data_prep.executor.work_files import BuildJob, ItemResult, write
from data_prep.options import BuildOptions
from data_prep.readers import decompress, documents, tasks
from megabert.common.files import write_atomically

# zstd's level: a spool costs a third of its text on disk and 3 ns a byte
LEVEL = 1


@dataclass(frozen=True)
class PackedFile:
    """The packed file at index `index` of the ranges of the input; `code` unpacks it."""

    index: int
    file: FileRange
    code: str | None = None

    @property
    def size(self) -> int:
        return self.file.size


def run(stages: Stages, job: BuildJob, ranges: Sequence[RangeList]) -> Sequence[RangeList]:
    """Unpack the files marked `unpack_first`, writing stream-INDEX.index; returns `ranges` with those of their text."""
    numbered = [item for item in enumerate(chain.from_iterable(ranges)) if item[1].unpack_first]
    code = output_folder.code()["source"] if numbered else None
    packed = [PackedFile(index, file, code) for index, file in numbered]
    # Unpacked text is kept for other options: those used by unpacking, such as the format, are in the items.
    plain = BuildJob(BuildOptions(), tokenizer="", work=job.work, on_error=job.on_error)
    results = stages.map(UNPACK, unpack, plain, packed, unit="B") if packed else []
    spools = output_folder.SPOOLS
    output_folder.remove_others(Path(job.work), spools, results, unfinished=f".{spools}.*.tmp")
    spools_of = {item.index: result.facts["spools"] for item, result in zip(packed, results, strict=True)}
    indexes = count()

    def parts(file: FileRange) -> Iterator[FileRange]:
        index = next(indexes)
        if index not in spools_of:
            yield file
            return
        name = f"stream-{index:07d}.index"
        write_atomically(Path(job.path(name)), json.dumps(spools_of[index]).encode())
        if size := sum(spool[1] for spool in spools_of[index]):
            yield from tasks.cut(replace(file, index=name, unpack_first=False), size)

    return [RangeList(chain.from_iterable(map(parts, of_corpus))) for of_corpus in ranges] if packed else ranges


def unpack(job: BuildJob, item: PackedFile) -> ItemResult:
    """Write stream-INDEX-I.zst, and return the fact "spools": name and unpacked bytes of each."""
    problems = Problems(job.on_error)
    result = ItemResult.of(problems, item.size)
    spools: list[tuple[str, int]] = []
    result.facts["spools"] = spools

    def write_spool(text: bytes) -> None:
        name = f"stream-{item.index:07d}-{len(spools):06d}.zst"
        packed = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(text)
        write(job, name, np.frombuffer(packed, np.uint8), result)
        spools.append((name, len(text)))

    text = bytearray()
    chunks = decompress.read_chunks(item.file.path, item.file.compression)
    chunks = decompress.until_damage(chunks, item.file.path, problems, documents.DAMAGED)
    for chunk in documents.watch(item.file, chunks, problems):
        text += chunk
        while len(text) >= tasks.RANGE_BYTES:
            write_spool(bytes(text[: tasks.RANGE_BYTES]))
            del text[: tasks.RANGE_BYTES]
    if text:
        write_spool(bytes(text))
    return result
