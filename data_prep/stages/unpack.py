"""Unpacking of large files that can't be cut as they are: gzip, xz, zstd, one bzip2 stream, other encodings than UTF-8.

One process reads a file from its first byte to its last and writes spools, zstd files of RANGE_BYTES of text each; a bzip2
file is read by several, a range of blocks each. The file is then cut in ranges of its text, exactly as the unpacked file
would be, and gives the same tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import zstandard

from data_prep.common.errors import Problems
from data_prep.common.records import Piece
from data_prep.executor.work_files import Done, Job, Writer
from data_prep.readers import encodings, tasks, unpacked
from megabert.common.files import write_whole

LEVEL = 1  # of zstd: a spool costs a third of its text on disk and 3 ns a byte


@dataclass(frozen=True)
class Part:
    """Part `number` of the file that is piece `index` of the input."""

    index: int
    number: int
    piece: Piece


def parts(pieces: Sequence[tuple[int, Piece]]) -> list[Part]:
    """All parts of the files among `pieces` that need unpacking."""
    return [
        Part(index, number, part)
        for index, (_, piece) in enumerate(pieces)
        if piece.stream
        for number, part in enumerate(tasks.unpacking(piece))
    ]


def unpack(job: Job, part: Part) -> Done:
    """Write stream-INDEX-NUMBER-I.zst, and leave the fact "spools": name and unpacked bytes of each.

    The fact "whole" is false where bad input was skipped: what follows it in the file is left out.
    """
    done, problems = Done(size=part.piece.size), Problems(job.on_error)
    done.facts["spools"] = _spool(job, part, done, problems)
    done.facts["whole"] = not problems.counts
    done.problems = problems.counts
    return done


def _spool(job: Job, part: Part, done: Done, problems: Problems) -> list[unpacked.Spool]:
    found: list[unpacked.Spool] = []
    stem = f"stream-{part.index:07d}-{part.number:06d}"
    spool = None
    for chunk in tasks.unpack(part.piece, problems):
        while chunk:
            spool = spool or _Spool(job, f"{stem}-{len(found):06d}.zst", done)
            room = tasks.RANGE_BYTES - spool.size
            spool.write(chunk[:room])
            chunk = chunk[room:]
            if spool.size == tasks.RANGE_BYTES:
                found.append(spool.close())
                spool = None
    if spool:
        found.append(spool.close())
    return found


class _Spool:
    """A zstd file of the work folder."""

    def __init__(self, job: Job, name: str, done: Done) -> None:
        self._name, self._done = name, done
        self._file = Writer(job, name, done)
        self._packer = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compressobj()
        self.size = 0

    def write(self, text: bytes) -> None:
        self.size += len(text)
        self._file.write(np.frombuffer(self._packer.compress(text), np.uint8))

    def close(self) -> unpacked.Spool:
        self._file.write(np.frombuffer(self._packer.flush(), np.uint8))
        self._file.__exit__()
        return self._name, self.size


def cut(
    job: Job, pieces: Sequence[tuple[int, Piece]], items: Sequence[Part], results: Sequence[Done]
) -> list[tuple[int, Piece]]:
    """`pieces` with the ranges of its text in place of each unpacked file. Writes stream-INDEX.index."""
    spools: dict[int, list[unpacked.Spool]] = {}
    ended: set[int] = set()
    for item, done in zip(items, results, strict=True):
        found = spools.setdefault(item.index, [])
        if item.index not in ended:
            found += done.facts["spools"]
        if not done.facts["whole"]:
            ended.add(item.index)
    cut_pieces: list[tuple[int, Piece]] = []
    for index, (corpus, piece) in enumerate(pieces):
        if index not in spools:
            cut_pieces.append((corpus, piece))
            continue
        name = f"stream-{index:07d}.index"
        write_whole(Path(job.path(name)), unpacked.index_bytes(spools[index]))
        text = replace(piece, encoding=encodings.UTF8, index=name, stream=False)
        size = sum(spool[1] for spool in spools[index])
        cut_pieces += [(corpus, part) for part in (tasks.cut(text, size) if size else [])]
    return cut_pieces
