"""Records of the input: a corpus names files, a task reads ranges of files, a range holds documents."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice, starmap
from operator import attrgetter
from pathlib import PurePath

AUTO = "auto"
# an input that is no path: the documentation of the installed Python modules
PYDOC = "pydoc"
TABLES = ("parquet", "arrow")
ARCHIVES = ("zip", "tar")
# formats of files that only one worker can read, from the beginning
UNCUT = ("csv", *ARCHIVES)
# ranges that a `RangeList` packs together
PACKED_AT_ONCE = 1024
TEXT_DOCUMENTS = (AUTO, "file", "blank-line", "line")
FORMATS = ("text", "wiki", "mediawiki", "jsonl", "csv", *TABLES)
# sources at most, each a curve of a run: more are files that a shell listed
MOST_SOURCES = 32


@dataclass(frozen=True)
class ReadOptions:
    """How files become documents. `text_documents` is auto | file | blank-line | line; `text_field` is as
    `megabert.common.tables` takes it."""

    format: str = AUTO
    text_documents: str = AUTO
    text_field: str = "text"


@dataclass(frozen=True)
class Corpus:
    """Inputs (files, folders, globs or the word pydoc) that belong together, and how often they are read."""

    name: str
    paths: tuple[str, ...]
    weight: float = 1.0


def source_names(corpora: Sequence[Corpus]) -> tuple[str, ...]:
    """What held-out figures are reported by: the corpora, or the inputs of one that is alone. () where there is but one, or more
    than MOST_SOURCES."""
    names = [corpus.name for corpus in corpora]
    if len(corpora) == 1:
        parts = [[part for part in PurePath(path).parts if not re.search(r"[*?[]", part)] for path in corpora[0].paths]
        # as much of the ends of their paths as distinguishes them
        for depth in range(1, 2 + max(map(len, parts))):
            names = [re.sub(r"[^\w.-]+", "_", "_".join(of_path[-depth:])) or "input" for of_path in parts]
            if len(set(names)) == len(names):
                break
        else:
            names = [f"{number}_{name}" for number, name in enumerate(names, 1)]
    return tuple(names) if 1 < len(names) <= MOST_SOURCES else ()


@dataclass(frozen=True, slots=True)
class FileRange:
    """Range [start, end) of a file: of its bytes, its bzip2 streams by their first byte, its row groups or batches.

    The whole file when `end` is None. `format` may be "auto" where only opening or unpacking decides. With `index`, a name in
    the work folder, [start, end) are bytes of the unpacked text in the spools of that index (`readers.spools`).
    """

    path: str
    compression: str = ""
    format: str = AUTO
    start: int = 0
    end: int | None = None
    # bytes on disk, for the progress bar
    size: int = 0
    # (bytes, time of the last change in ns) of the file when it was planned
    stamp: tuple[int, int] | None = None
    # False: planned by its name and size alone
    opened: bool = True
    # what a document is in a text file, once its first bytes were read: file or blank-line
    documents: str = ""
    # a large file that is unpacked before it can be cut
    unpack_first: bool = False
    index: str = ""
    # its place among `source_names`, 0 where there are none
    source: int = 0


RANGE_FIELDS = tuple(field.name for field in fields(FileRange))


class RangeList:
    """Ranges of files in order, as compressed columns: an input of ten million files takes tens of bytes each.

    Objects are made where it is iterated over. `size` is the sum of theirs.
    """

    def __init__(self, ranges: Iterable[FileRange]) -> None:
        self.size = self._length = 0
        self._packed: list[bytes] = []
        rest = iter(ranges)
        while some := list(islice(rest, PACKED_AT_ONCE)):
            self.size += sum(part.size for part in some)
            self._length += len(some)
            columns = list(zip(*map(attrgetter(*RANGE_FIELDS), some), strict=True))
            self._packed.append(zlib.compress(json.dumps(columns).encode(), 1))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[FileRange]:
        for packed in self._packed:
            columns = dict(zip(RANGE_FIELDS, json.loads(zlib.decompress(packed)), strict=True))
            columns["stamp"] = [stamp and tuple(stamp) for stamp in columns["stamp"]]
            yield from starmap(FileRange, zip(*columns.values(), strict=True))

    def __repr__(self) -> str:
        """Of the ranges alone: it is part of the key of a finished item."""
        return f"RangeList({list(self)})"


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Ranges of files that one worker reads at a time; `corpus` is the corpus's place among the corpora."""

    index: int
    ranges: RangeList
    corpus: int = 0

    @property
    def size(self) -> int:
        return self.ranges.size


@dataclass(frozen=True)
class RawDocument:
    """One document as read. `text` is str when a parser already decoded it, else UTF-8 bytes to be checked.

    `offset` is in bytes of the unpacked file, for a table a row. In a range of a bzip2 file it counts
    from the first stream of the range, which `path` then names after the file. `markup`: extracted from markup, so that its
    paragraphs are lines.
    """

    path: str
    offset: int
    text: bytes | str
    markup: bool
