"""What is read, in which order and in which pieces follows from the input alone, never from who reads it.

A task is what one worker takes at a time: several small files, one compressed file, or a byte range of a large
plain one. A document belongs to the range that its first byte is in.
"""

from __future__ import annotations

import glob
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

from data_prep import formats, pydoc_source, streams
from data_prep.problems import BadInput, Problems

TASK_BYTES = 4 << 20  # of text, as far as the size on disk tells
RANGE_BYTES = 32 << 20  # of a plain file that is cut
LOOK_BACK = 1 << 16  # bytes before a range that are read to see where its first document begins
EXPANSION = 4  # unpacked bytes a compressed one, a rough figure that only steers grouping
PYDOC = "pydoc"


@dataclass(frozen=True)
class Piece:
    """Part of a file: bytes [start, end) of it, or all of it when `end` is None. `format` may be "auto"."""

    path: str
    compression: str = ""
    format: str = "auto"
    start: int = 0
    end: int | None = None
    size: int = 0  # bytes on disk, for the progress bar


@dataclass(frozen=True)
class Task:
    index: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class ReadOptions:
    """How files become documents. `text_documents` is auto | file | blank-line | line."""

    format: str = "auto"
    text_documents: str = "auto"
    text_field: str = "text"
    keep_titles: bool = False


def _expand(item: str) -> list[str]:
    """Files of one input item, sorted: a file, a folder (hidden files left out) or a glob."""
    if os.path.isdir(item):
        found = []
        for folder, folders, names in os.walk(item):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            found += [os.path.join(folder, name) for name in sorted(names) if not name.startswith(".")]
        return sorted(found)
    if os.path.lexists(item):
        return [item]
    found = sorted(path for path in glob.glob(item, recursive=True) if not os.path.isdir(path))
    if not found:
        raise BadInput(f"--input {item}: no such file or folder, and no file matches it")
    return found


def plan(inputs: list[str], options: ReadOptions, problems: Problems) -> list[Task]:
    """Tasks of all inputs in order. A file named twice is read once. Empty files are counted and left out.

    Raises BadInput naming the file that can't be read.
    """
    pieces: list[Piece] = []
    seen: set[str] = set()
    for item in inputs:
        if item == PYDOC and not os.path.exists(item):
            pieces += [Piece(path, format=PYDOC, size=size) for path, size in pydoc_source.files()]
            continue
        for path in _expand(item):
            real = os.path.realpath(path)
            if real not in seen:
                seen.add(real)
                pieces += _cut(path, options, problems)
    tasks: list[Task] = []
    group: list[Piece] = []
    weight = 0
    for piece in pieces:
        group.append(piece)
        weight += piece.size * (EXPANSION if piece.compression else 1)
        if weight >= TASK_BYTES:
            tasks.append(Task(len(tasks), tuple(group)))
            group, weight = [], 0
    if group:
        tasks.append(Task(len(tasks), tuple(group)))
    return tasks


def _cut(path: str, options: ReadOptions, problems: Problems) -> list[Piece]:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            problems.bad(path, None, "not a regular file")
            return []
        if not status.st_size:
            problems.counts["empty file"] += 1
            return []
        with open(path, "rb") as file:
            head = file.read(formats.HEAD)
    except OSError as error:
        problems.bad(path, None, "unreadable file", f"can't be read: {error.strerror}")
        return []
    size = status.st_size
    suffix = os.path.splitext(path)[1]
    compression = streams.compression_of(head)
    named = streams.SUFFIXES.get(suffix)
    if named and compression != named:
        problems.bad(path, 0, "not what its suffix says", f"no {named} data in spite of its suffix {suffix}")
        return []
    if compression:
        return [Piece(path, compression, options.format, size=size)]
    format_ = _format(path, head, options, problems)
    if format_ is None:
        return []
    if size <= RANGE_BYTES * 3 // 2 or (format_ == "text" and _documents(options, size, "") == "file"):
        return [Piece(path, "", format_, size=size)]
    edges = [*range(0, size - RANGE_BYTES // 2, RANGE_BYTES), size]
    return [Piece(path, "", format_, a, b, b - a) for a, b in pairwise(edges)]


def _format(path: str, head: bytes, options: ReadOptions, problems: Problems) -> str | None:
    if options.format != "auto":
        return options.format
    suffix = os.path.splitext(path)[1]
    if suffix in streams.SUFFIXES:
        suffix = os.path.splitext(os.path.splitext(path)[0])[1]
    try:
        return formats.detect(path, suffix, head, options.text_field)
    except BadInput as error:
        if problems.policy == "stop":
            raise
        del error  # its reason is the count below
        problems.counts["unknown format"] += 1
        return None


def _documents(options: ReadOptions, size: int, compression: str) -> str:
    if options.text_documents != "auto":
        return options.text_documents
    limit = formats.AUTO_FILE_LIMIT // (EXPANSION if compression else 1)
    return "file" if size <= limit else "blank-line"


@dataclass(frozen=True)
class Document:
    """One document as read. `text` is str when a parser already decoded it, else UTF-8 bytes to be checked."""

    path: str
    offset: int
    text: bytes | str
    markup: bool


def read(piece: Piece, options: ReadOptions, problems: Problems) -> Iterator[Document]:
    """Documents of a piece in file order; bad places follow the policy of `problems`."""
    path = piece.path
    if piece.format == PYDOC:
        for text in pydoc_source.documents(path):
            yield Document(path, 0, text, False)
        return
    try:
        yield from _read_file(piece, options, problems)
    except BadInput:
        if problems.policy == "stop":
            raise
        problems.counts["damaged or truncated file"] += 1
    except OSError as error:
        problems.bad(path, None, "unreadable file", f"can't be read: {error.strerror}")


def _read_file(piece: Piece, options: ReadOptions, problems: Problems) -> Iterator[Document]:
    path = piece.path
    # A range starts reading a little early, to see whether its first byte begins a line or a document.
    begin = max(0, piece.start - LOOK_BACK)
    chunks = streams.read_chunks(path, piece.compression, begin)
    first = next(chunks, b"")
    if not first:
        problems.counts["empty file"] += 1
        return
    format_ = piece.format
    if format_ == "auto":
        found = _format(path, first[: formats.HEAD], options, problems)
        if found is None:
            return
        format_ = found
    if begin == 0 and first.startswith(formats.BOM):
        first, begin = first[3:], 3
    runs = formats.line_runs(chain([first], chunks), begin, path, problems, piece.start, piece.end)
    synced = piece.start == 0
    if format_ == "wiki":
        documents = formats.split_wiki(runs, path, problems)
    elif format_ == "jsonl":
        documents = formats.split_lines(runs, synced)
    else:
        kind = _documents(options, piece.size if piece.end is None else 1 << 62, piece.compression)
        if kind == "file":
            documents = formats.split_file(runs)
        elif kind == "line":
            documents = formats.split_lines(runs, synced)
        else:
            documents = formats.split_blank(runs, synced, path, problems)
    for offset, body in documents:
        if offset < piece.start:
            continue
        if piece.end is not None and offset >= piece.end:
            break
        if format_ == "jsonl":
            text = _json_text(body, offset, path, options, problems)
            if text is not None:
                yield Document(path, offset, text, False)
        elif format_ == "wiki":
            text_bytes = formats.wiki_body(body, options.keep_titles)
            yield Document(path, offset + len(body) - len(text_bytes), text_bytes, True)
        else:
            yield Document(path, offset, body, False)


def _json_text(line: bytes, offset: int, path: str, options: ReadOptions, problems: Problems) -> str | None:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        problems.bad(path, offset + error.start, "invalid UTF-8")
        return None
    except (ValueError, RecursionError) as error:
        problems.bad(path, offset, "bad JSON line", f"not a JSON object on one line ({error})")
        return None
    if not isinstance(record, dict) or options.text_field not in record:
        problems.bad(path, offset, "no text field", f"no field {options.text_field!r} in the JSON line")
        return None
    text = record[options.text_field]
    if not isinstance(text, str):
        problems.bad(path, offset, "no text field", f"field {options.text_field!r} is not a string")
        return None
    return text
