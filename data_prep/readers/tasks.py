"""Tasks of reading: the input cut into pieces that workers take, and the documents of a piece.

The cut and its order follow from the input alone, never from who reads it. A task is what one worker takes at a time:
several small files of one corpus, one compressed file, or part of a large one. A document belongs to the range of its file
that its first byte (for bzip2: its stream) is in. A large file that can't be read from everywhere is unpacked first, and what
comes out is cut as the unpacked file would be.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice, pairwise
from typing import TypeVar

from data_prep.common.errors import BadInput, Problems, Unfinished
from data_prep.common.records import AUTO, TABLES, Corpus, Document, Piece, ReadOptions, Task
from data_prep.readers import (
    arrow,
    bzip2_blocks,
    decompress,
    documents,
    encodings,
    files,
    find_files,
    formats,
    pydoc_corpus,
)  # fmt: skip
from data_prep.readers.documents import EXPANSION, SNIFF
from megabert.common.arrow_tables import BOMB_BYTES, BOMB_RATIO

__all__ = [
    "Corpus",
    "Document",
    "Piece",
    "ReadOptions",
    "Task",
    "group",
    "list_pieces",
    "plan_tasks",
    "read_piece",
    "unpacked_bytes",
]

TASK_BYTES = (4 << 20, 64 << 20)  # of text, as far as the size on disk tells: least and most
TASKS = 16_384  # from which on tasks grow
RANGE_BYTES = 32 << 20  # of a file that is cut
BZIP2_BYTES = 8 << 20  # of a bzip2 file, unpacked by one worker
MOST_UNCUT = 3  # times RANGE_BYTES that a compressed file may unpack to in one task
PROBES = 4  # places of a bzip2 file that are looked at for a stream
SMALL = 4 << 20  # bytes (packed: a quarter): a smaller file with a suffix of NAMED is first opened by who reads it
NAMED = {".txt": "", ".text": "", ".jsonl": "", ".ndjson": "", ".arrow": "", ".parquet": "", **decompress.SUFFIXES}
LISTED_AT_ONCE = 256  # files that one thread looks at
THREADS = 16  # that wait for the file system
PYDOC = "pydoc"
RATIO_PIECES = 8  # of a corpus, by which its unpacked bytes are estimated

Item = TypeVar("Item")


def plan_tasks(corpora: Sequence[Corpus], options: ReadOptions, problems: Problems) -> list[Task]:
    """Tasks of all corpora in order, each large file that has to be unpacked first as one piece.

    Raises BadInput naming the file that can't be read.
    """
    return group(list_pieces(corpora, options, problems))


def list_pieces(
    corpora: Sequence[Corpus],
    options: ReadOptions,
    problems: Problems,
    skip: Callable[[str], bool] = lambda path: False,
) -> list[tuple[int, Piece]]:
    """(corpus, piece) of all files in order. A file named twice is read once. Empty files are counted and left out.

    `options` are those of a corpus that has none of its own; a file that `skip` is true of is none. Raises BadInput naming the file that can't be read.
    """
    pieces: list[tuple[int, Piece]] = []
    seen: set[str] = set()
    _real_folder.cache_clear()
    found: Iterator[Looked]
    with ThreadPoolExecutor(THREADS) as threads:
        for number, corpus in enumerate(corpora):
            own = corpus.read or options
            encodings.check(own.encoding)
            for item in corpus.paths:
                if item == PYDOC and not os.path.exists(item):
                    modules = [(path, [Piece(path, format=PYDOC, size=size)]) for path, size in pydoc_corpus.files()]
                    found = ((os.path.realpath(path), module, Problems("skip")) for path, module in modules)
                else:
                    found = _look_at_all(find_files.expand(item, problems, own.split), own, problems.policy, threads)
                for real, its, its_problems in found:
                    if real not in seen and not skip(real):
                        seen.add(real)
                        problems.counts += its_problems.counts
                        pieces += [(number, piece) for piece in its]
    return pieces


def group(pieces: Sequence[tuple[int, Piece]]) -> list[Task]:
    """Tasks of pieces in order; neighbours of one corpus are put together."""
    total = sum(_weight(piece) for _, piece in pieces)
    size = min(max(total // TASKS, TASK_BYTES[0]), TASK_BYTES[1])
    tasks: list[Task] = []
    members: list[Piece] = []
    weight = 0
    for i, (number, piece) in enumerate(pieces):
        members.append(piece)
        weight += _weight(piece)
        if weight >= size or i + 1 == len(pieces) or pieces[i + 1][0] != number:
            tasks.append(Task(len(tasks), tuple(members), number))
            members, weight = [], 0
    return tasks


def _weight(piece: Piece) -> int:
    grows = piece.format == "parquet" or (piece.compression and not piece.index)
    return piece.size * (EXPANSION if grows else 1)


Looked = tuple[str, list[Piece], Problems]  # the path without links, its pieces, what is wrong with it


def _look_at_all(
    paths: Iterator[str], options: ReadOptions, policy: str, threads: ThreadPoolExecutor
) -> Iterator[Looked]:
    """What `_look_at` says of each path, in order; BadInput where it is raised."""
    look = partial(_look_at, options, policy)
    some = iter(lambda: list(islice(paths, LISTED_AT_ONCE)), [])
    for looked in threads.map(lambda names: [look(name) for name in names], some):
        for found in looked:
            if isinstance(found, BadInput):
                raise found
            yield found


def _look_at(options: ReadOptions, policy: str, path: str) -> Looked | BadInput:
    problems = Problems(policy)
    try:
        return _real(path), _cut(path, options, problems), problems
    except BadInput as error:
        return error


def _real(path: str) -> str:
    if files.is_url(path):
        return path
    if os.path.islink(path):
        return os.path.realpath(path)
    folder, name = os.path.split(path)
    return os.path.join(_real_folder(folder), name)


@lru_cache(maxsize=1024)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


def unpacked_bytes(tasks: Sequence[Task]) -> int:
    """Bytes of the unpacked files of tasks, by the ratio that the openings of some compressed ones have."""
    pieces = [piece for task in tasks for piece in task.pieces]
    packed = [piece for piece in pieces if not piece.index and (piece.compression or piece.format == "parquet")]
    size = sum(piece.size for piece in pieces)
    if not packed:
        return size
    tried = packed[:: -(-len(packed) // RATIO_PIECES)]
    ratio = sum(map(_ratio, tried)) / len(tried)
    return int(size + (ratio - 1) * sum(piece.size for piece in packed))


def _ratio(piece: Piece) -> float:
    """Unpacked bytes a byte of a file on disk; EXPANSION where it can't be read, which reading it will say."""
    try:
        if piece.format == "parquet":
            return arrow.ratio(piece.path)
        with files.open_regular(piece.path) as file:
            return decompress.ratio(file.read(SNIFF), piece.compression)
    except (BadInput, OSError):
        return EXPANSION


def _cut(path: str, options: ReadOptions, problems: Problems) -> list[Piece]:
    """Pieces of one file; none when it is empty or bad."""
    try:
        status = files.status(path)
        if not status.regular:
            problems.bad(path, None, "not a regular file")
            return []
        if not status.size:
            problems.counts["empty file"] += 1
            return []
        whole = Piece(
            path, "", options.format, size=status.size, encoding=encodings.check(options.encoding),
            stamp=(status.size, status.stamp),
        )  # fmt: skip
        suffix = os.path.splitext(files.name(path))[1]
        small = min(SMALL, RANGE_BYTES // EXPANSION)
        if suffix in NAMED and status.size < (small // EXPANSION if NAMED[suffix] else small):
            format_ = suffix[1:] if suffix[1:] in TABLES and options.format == AUTO else options.format
            return [replace(whole, compression=NAMED[suffix], format=format_, opened=False)]
        return _opened(whole, options, problems)
    except OSError as error:
        problems.unreadable(path, error)
    return []


def _opened(whole: Piece, options: ReadOptions, problems: Problems) -> list[Piece]:
    """Pieces of a file by its first bytes; none when they do not tell what it is."""
    with files.open_regular(whole.path) as file:
        head = file.read(SNIFF)
    suffix = os.path.splitext(files.name(whole.path))[1]
    compression = decompress.compression_of(head)
    named = decompress.SUFFIXES.get(suffix)
    if named and compression != named:
        detail = f"no {named} data in spite of its suffix {suffix}"
        problems.bad(whole.path, 0, "not what its suffix says", detail)
        return []
    try:
        return _ranges(replace(whole, compression=compression, opened=True), head, options)
    except BadInput:
        if problems.policy == "stop":
            raise
        problems.counts["unknown format"] += 1
        return []


def _ranges(whole: Piece, head: bytes, options: ReadOptions) -> list[Piece]:
    path, size = whole.path, whole.size
    step = RANGE_BYTES // (EXPANSION if whole.compression else 1)
    text = head
    if whole.compression:
        if size <= step * 3 // 2 and not _is_stream(whole, head):
            return [whole]
        text = next(decompress.read_chunks(path, whole.compression), b"")
    all_of_it = len(text) <= SNIFF if whole.compression else size <= SNIFF
    whole = documents.inspect(whole, text[:SNIFF], options, whole=all_of_it)
    if whole.format in TABLES:
        parts = max(size // step, 1)
        if whole.format == "arrow" and (parts == 1 or files.is_url(path)):  # to skip batches is to fetch them
            return [whole]
        count = arrow.row_groups(path) if whole.format == "parquet" else arrow.batches(path)
        edges = sorted({i * count // parts for i in range(parts + 1)})
        last = edges[-1] or 1
        return [replace(whole, start=a, end=b, size=size * b // last - size * a // last) for a, b in pairwise(edges)]
    if _is_stream(whole, head):
        return [replace(whole, stream=True)]
    return cut(whole, size)


def cut(whole: Piece, size: int) -> list[Piece]:
    """Ranges of a file of `size` bytes that can be read from everywhere."""
    step = RANGE_BYTES // (EXPANSION if whole.compression and not whole.index else 1)
    if size <= step * 3 // 2:
        return [replace(whole, size=size)]
    edges = [*range(0, size - step // 2, step), size]
    return [replace(whole, start=a, end=b, size=b - a) for a, b in pairwise(edges)]


def _is_stream(piece: Piece, head: bytes) -> bool:
    """Whether a file of text is large and can't be cut as it is; `head` are its first bytes."""
    if not piece.compression:
        return piece.encoding != encodings.UTF8 and piece.size > RANGE_BYTES * 3 // 2
    if piece.size <= RANGE_BYTES // EXPANSION * 3 // 2:  # by the usual ratio; a few files pack much better
        if max(BOMB_BYTES, BOMB_RATIO * piece.size) <= MOST_UNCUT * RANGE_BYTES:  # more is refused
            return False
        return decompress.ratio(head, piece.compression) * piece.size > MOST_UNCUT * RANGE_BYTES
    by_streams = piece.compression == "bz2" and piece.encoding == encodings.UTF8 and piece.format in formats.ELEMENTS
    return not (by_streams and _has_streams(piece.path, piece.size, RANGE_BYTES // EXPANSION))


def _has_streams(path: str, size: int, step: int) -> bool:
    """Whether streams begin all over a bzip2 file, so that ranges of `step` bytes share it evenly."""
    places = (1 + i * (size - 1) // PROBES for i in range(PROBES))
    return all(decompress.first_stream(path, at, min(at + step, size)) is not None for at in places)


def unpacking(piece: Piece) -> list[Piece]:
    """The parts in which a file that needs it is unpacked: of a bzip2 file ranges of its bytes, else all of it."""
    if piece.compression != "bz2" or piece.encoding != encodings.UTF8:
        return [piece]
    edges = [*range(0, max(piece.size - BZIP2_BYTES // 2, 1), BZIP2_BYTES), piece.size]
    return [replace(piece, start=a, end=b, size=b - a) for a, b in pairwise(edges)]


def unpack(part: Piece, problems: Problems) -> Iterator[bytes]:
    """The text of a part of a file in UTF-8, some MB at a time; bad places follow the policy of `problems`."""
    if part.end is not None:
        chunks = bzip2_blocks.read_blocks(part.path, part.start, part.end)
    else:
        chunks = decompress.read_chunks(part.path, part.compression)
    if part.encoding != encodings.UTF8:
        chunks = encodings.recode(chunks, part.encoding, part.path, problems)
    yield from _watched(part, chunks, problems)


def read_piece(piece: Piece, options: ReadOptions, problems: Problems, folder: str = "") -> Iterator[Document]:
    """Documents of a piece in file order; bad places follow the policy of `problems`. `folder` is the work folder."""
    if piece.format == PYDOC:
        for text in pydoc_corpus.documents(piece.path):
            yield Document(piece.path, 0, text, False)
        return
    yield from _watched(piece, _documents(piece, options, problems, folder), problems)


def _documents(piece: Piece, options: ReadOptions, problems: Problems, folder: str) -> Iterator[Document]:
    for part in [piece] if piece.opened else _opened(piece, options, problems):
        if part.format in TABLES:
            for row, text in arrow.read_table(
                part.path, part.format, part.start, part.end, options.text_field, problems
            ):
                yield Document(part.path, row, text, False)
        else:
            yield from documents.text_documents(part, options, problems, folder)


def _watched(piece: Piece, items: Iterator[Item], problems: Problems) -> Iterator[Item]:
    """`items` of a file that must stay as it was planned; what is bad about the file itself follows the policy."""
    path = piece.path
    try:
        _check_unchanged(piece)
        yield from items
        _check_unchanged(piece)
    except BadInput as error:
        if problems.policy == "stop":
            changed = _change(piece) if str(error).startswith(path) else None
            raise Unfinished(changed or str(error)) from None  # what was read of other files stays
        problems.counts["damaged or truncated file"] += 1
    except OSError as error:
        problems.unreadable(path, error)


def _change(piece: Piece) -> str | None:
    """What to say of a file that is not the one that was planned; None where it is."""
    status = files.status(piece.path)
    if piece.stamp is None or piece.stamp == (status.size, status.stamp):
        return None
    return (
        f"{piece.path}: changed while it was read ({piece.stamp[0]} bytes when the build began, now "
        f"{status.size}); let it be finished first, or give a copy"
    )


def _check_unchanged(piece: Piece) -> None:
    if changed := _change(piece):
        raise BadInput(changed)
