"""Records of the input: a corpus names files, a task reads ranges of files, a range holds documents."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice, starmap
from operator import attrgetter
from pathlib import PurePath

from megabert.common import storage
from megabert.data.names import distinct_ends

AUTO = "auto"
# an input that is not a path: the documentation of the installed Python modules
PYDOC = "pydoc"
TABLES = ("parquet", "arrow")
ARCHIVES = ("zip", "tar")
# formats of files that one worker has to read from the beginning
UNCUT = ("csv", "json", "wet", *ARCHIVES)
# ranges in a column of a `RangeList`
PACKED_AT_ONCE = 1024
TEXT_DOCUMENTS = (AUTO, "file", "blank-line", "line", "heading")
FORMATS = ("text", "wiki", "mediawiki", "jsonl", "json", "csv", "wet", *TABLES)
# folder of the records of finished items in a work folder, and the stage whose results a build with other options reuses
JOURNAL, UNPACK = "journal", "unpack"
# most sources, each a curve of a run; more inputs are probably files listed by a shell
MOST_SOURCES = 32


@dataclass(frozen=True)
class ReadOptions:
    """How to split files into documents. `text_documents`: one of TEXT_DOCUMENTS; `folders`: the kinds of documents that were found
    for auto, by folder; `text_field`: as of `megabert.common.tables`; `encoding_errors`: stop | replace."""

    format: str = AUTO
    text_documents: str = AUTO
    text_field: str = "text"
    encoding_errors: str = "stop"
    folders: tuple[tuple[str, str], ...] = ()

    @cached_property
    def _kinds(self) -> dict[str, str]:
        return dict(self.folders)

    def kind_in(self, path: str) -> str:
        """The kind of documents in a file of text by the options; "" if it is not known."""
        if self.text_documents != AUTO:
            return self.text_documents
        folder = find_folder(path, self._kinds)
        return self._kinds[folder] if folder is not None else ""


def normalized(path: str) -> str:
    """`os.path.normpath`, and a URL as it is."""
    return path.rstrip("/") if storage.is_url(path) else os.path.normpath(path)


def find_folder(path: str, known: Container[str]) -> str | None:
    """The innermost of the `known` folders above a file."""
    folder = normalized(os.path.dirname(path))
    while folder not in known:
        above = os.path.dirname(folder) or "."
        if folder in (above, os.pardir) or folder.endswith(f"{os.sep}{os.pardir}"):
            return None
        folder = above
    return folder


@dataclass(frozen=True)
class Corpus:
    """A group of inputs (files, folders, globs or the word pydoc) with a weight."""

    name: str
    paths: tuple[str, ...]
    weight: float = 1.0


def source_names(corpora: Sequence[Corpus]) -> tuple[str, ...]:
    """Names of the sources of held-out figures: the corpora, or the inputs of a single corpus. () if there is only one, or more than
    MOST_SOURCES."""
    names = [corpus.name for corpus in corpora]
    if len(corpora) == 1:
        paths = map(storage.public, corpora[0].paths)
        parts = ([part for part in PurePath(path).parts if not re.search(r"[*?[]", part)] for path in paths)
        names = distinct_ends([[re.sub(r"[^\w.-]+", "_", part) for part in of_path] or ["input"] for of_path in parts])
    return tuple(names) if 1 < len(names) <= MOST_SOURCES else ()


@dataclass(frozen=True, slots=True)
class FileRange:
    """Range [start, end) of a file: of bytes, of bzip2 streams by their first byte, of row groups or batches.

    The whole file if `end` is None. `format` is "auto" until the file was opened or unpacked. With `index`, a name in the work
    folder, [start, end) are bytes of the unpacked text in the spools of that index (`readers.decompress`).
    """

    path: str
    compression: str = ""
    format: str = AUTO
    start: int = 0
    end: int | None = None
    # bytes on disk, or of the unpacked text with `index`: for tasks of similar size and the progress bar
    size: int = 0
    # (bytes, modification time in ns) of the file when it was planned
    stamp: tuple[int, int] | None = None
    # False: planned only by name and size
    opened: bool = True
    # a large file that has to be unpacked before it is cut
    unpack_first: bool = False
    index: str = ""
    # index into `source_names`, 0 if there are none
    source: int = 0

    def __repr__(self) -> str:
        """Part of the keys of finished items: an address with a version is without its query, as a signature that is renewed."""
        path = storage.public(self.path) if self.stamp and self.stamp[1] else self.path
        return f"FileRange{(path, *attrgetter(*RANGE_FIELDS[1:])(self))}"


RANGE_FIELDS = tuple(field.name for field in fields(FileRange))


class RangeList:
    """Ranges of files in order, as compressed columns: tens of bytes a file for an input of ten million files.

    Iteration creates the objects. `size` is the sum of their sizes.
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
        """Depends only on the ranges, since it is part of the key of a finished item."""
        return f"RangeList({list(self)})"


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Ranges of files that one worker reads; `corpus` is the index of the corpus."""

    index: int
    ranges: RangeList
    corpus: int = 0

    @property
    def size(self) -> int:
        return self.ranges.size


@dataclass(frozen=True)
class RawDocument:
    """A raw document. `text` is str if a parser has decoded it, else UTF-8 bytes to check.

    `offset` is in bytes of the unpacked file, or a row of a table. In a range of a bzip2 file it counts from the first stream of
    the range, which `path` then includes. `markup`: extracted from markup, so paragraphs are lines.
    """

    path: str
    offset: int
    text: bytes | str
    markup: bool
    # of plain text: as of TEXT_DOCUMENTS
    kind: str = ""
