"""Tasks of reading: the input cut into pieces that workers take, and the documents of a piece.

The cut and its order follow from the input alone, never from who reads it. A task is what one worker takes at a time:
several small files of one corpus, one compressed file, or part of a large one. A document belongs to the range of its file
that its first byte (for bzip2: its stream) is in.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from data_prep.common.errors import BadInput, Problems, Unfinished
from data_prep.common.records import TABLES, Corpus, Document, Piece, ReadOptions, Task
from data_prep.readers import arrow, decompress, documents, encodings, find_files, formats, pydoc_corpus
from data_prep.readers.documents import EXPANSION, SNIFF

__all__ = ["Corpus", "Document", "Piece", "ReadOptions", "Task", "plan_tasks", "read_piece"]

TASK_BYTES = (4 << 20, 64 << 20)  # of text, as far as the size on disk tells: least and most
TASKS = 16_384  # from which on tasks grow
RANGE_BYTES = 32 << 20  # of a plain file that is cut
PYDOC = "pydoc"


def plan_tasks(corpora: Sequence[Corpus], options: ReadOptions, problems: Problems) -> list[Task]:
    """Tasks of all corpora in order. A file named twice is read once. Empty files are counted and left out.

    Raises BadInput naming the file that can't be read.
    """
    encodings.check(options.encoding)
    pieces: list[tuple[int, Piece]] = []
    seen: set[str] = set()
    for number, corpus in enumerate(corpora):
        for item in corpus.paths:
            if item == PYDOC and not os.path.exists(item):
                sizes = dict(pydoc_corpus.files())
                paths = iter(sizes)
            else:
                sizes, paths = {}, find_files.expand(item, problems)
            for path in paths:
                real = os.path.realpath(path)
                if real not in seen:
                    seen.add(real)
                    module = [Piece(path, format=PYDOC, size=sizes[path])] if path in sizes else []
                    pieces += [(number, piece) for piece in module or _cut(path, options, problems)]
    total = sum(_weight(piece) for _, piece in pieces)
    size = min(max(total // TASKS, TASK_BYTES[0]), TASK_BYTES[1])
    tasks: list[Task] = []
    group: list[Piece] = []
    weight = 0
    for i, (number, piece) in enumerate(pieces):
        group.append(piece)
        weight += _weight(piece)
        if weight >= size or i + 1 == len(pieces) or pieces[i + 1][0] != number:
            tasks.append(Task(len(tasks), tuple(group), number))
            group, weight = [], 0
    return tasks


def _weight(piece: Piece) -> int:
    return piece.size * (EXPANSION if piece.compression or piece.format == "parquet" else 1)


def _cut(path: str, options: ReadOptions, problems: Problems) -> list[Piece]:
    """Pieces of one file; none when it is empty or bad."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            problems.bad(path, None, "not a regular file")
            return []
        if not status.st_size:
            problems.counts["empty file"] += 1
            return []
        with decompress.open_regular(path) as file:
            head = file.read(SNIFF)
        whole = Piece(
            path, "", options.format, size=status.st_size, encoding=encodings.check(options.encoding)
        )
        whole = replace(whole, stamp=(status.st_size, status.st_mtime_ns))
        return _ranges(whole, head, options, problems)
    except OSError as error:
        problems.bad(path, None, "unreadable file", f"can't be read: {error.strerror}")
    except BadInput:
        if problems.policy == "stop":
            raise
        problems.counts["unknown format"] += 1
    return []


def _ranges(whole: Piece, head: bytes, options: ReadOptions, problems: Problems) -> list[Piece]:
    path, size = whole.path, whole.size
    suffix = os.path.splitext(path)[1]
    compression = decompress.compression_of(head)
    named = decompress.SUFFIXES.get(suffix)
    if named and compression != named:
        problems.bad(path, 0, "not what its suffix says", f"no {named} data in spite of its suffix {suffix}")
        return []
    if compression and not (compression == "bz2" and size > RANGE_BYTES // EXPANSION * 3 // 2):
        return [replace(whole, compression=compression)]
    if compression:
        head = next(decompress.read_chunks(path, compression), b"")[:SNIFF]
    whole = documents.inspect(replace(whole, compression=compression), head, options)
    step = RANGE_BYTES // (EXPANSION if compression else 1)
    if whole.format == "parquet":
        count = arrow.row_groups(path)
        edges = sorted({i * count // max(size // step, 1) for i in range(max(size // step, 1) + 1)})
    elif (
        (compression and whole.format not in formats.ELEMENTS)
        or whole.format in TABLES
        or whole.encoding != encodings.UTF8
        or (whole.format == "text" and documents.documents_of(options, size, "") == "file")
        or size <= step * 3 // 2
    ):
        return [whole]
    else:
        edges = [*range(0, size - step // 2, step), size]
    last = edges[-1] or 1
    return [
        replace(whole, start=a, end=b, size=size * b // last - size * a // last) for a, b in pairwise(edges)
    ]


def read_piece(piece: Piece, options: ReadOptions, problems: Problems) -> Iterator[Document]:
    """Documents of a piece in file order; bad places follow the policy of `problems`."""
    path = piece.path
    if piece.format == PYDOC:
        for text in pydoc_corpus.documents(path):
            yield Document(path, 0, text, False)
        return
    try:
        _check_unchanged(piece)
        if piece.format in TABLES:
            rows = arrow.read_table(path, piece.format, piece.start, piece.end, options.text_field, problems)
            for row, text in rows:
                yield Document(path, row, text, False)
        else:
            yield from documents.text_documents(piece, options, problems)
        _check_unchanged(piece)
    except BadInput as error:
        if problems.policy == "stop":
            changed = _change(piece) if str(error).startswith(path) else None
            raise Unfinished(changed or str(error)) from None  # what was read of other files stays
        problems.counts["damaged or truncated file"] += 1
    except OSError as error:
        problems.bad(path, None, "unreadable file", f"can't be read: {error.strerror}")


def _change(piece: Piece) -> str | None:
    """What to say of a file that is not the one that was planned; None where it is."""
    status = os.stat(piece.path)
    if piece.stamp is None or piece.stamp == (status.st_size, status.st_mtime_ns):
        return None
    return (
        f"{piece.path}: changed while it was read ({piece.stamp[0]} bytes when the build began, now "
        f"{status.st_size}); let it be finished first, or give a copy"
    )


def _check_unchanged(piece: Piece) -> None:
    if changed := _change(piece):
        raise BadInput(changed)
