"""Documents of a range of a file, in one pass: it is opened as streams, which splitters cut into documents.

Each document is returned once and in order for any division of the file: a range is read from a position where its first document
can be recognised, and beyond its end until its last document is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain, repeat
from typing import TypeVar

from data_prep.common.errors import EMPTY, BadInput, Damaged, NoTextField, Problems, Unfinished, UnknownFormat
from data_prep.common.records import ARCHIVES, AUTO, PYDOC, TABLES, FileRange, RawDocument, ReadOptions
from data_prep.readers import archives, boundaries, decompress, detection, files, lines, mediawiki, pydoc_corpus
from data_prep.readers.archives import DamagedArchive
from data_prep.readers.boundaries import TextSample
from data_prep.readers.csv_rows import split_csv
from data_prep.readers.decompress import PLAIN_CHUNK
from data_prep.readers.elements import ELEMENTS, split_wiki
from data_prep.readers.json_records import split_json, split_jsonl
from data_prep.readers.streams import NO_FIELD, Document, Stream
from data_prep.readers.tables import read_table
from data_prep.readers.wet import split_wet

# reasons of problems
UNKNOWN = "unknown format"
DAMAGED = "damaged or truncated file"
UNREADABLE_MEMBER = "unreadable member of an archive"
# counted under "stop" too
NO_DOCUMENT, HIDDEN_MEMBER = "file without a document", "hidden member of an archive, or a link, left out"
ABOUT_MEMBER = "member of an archive that describes data, left out"
# among the kinds of `Problems.guesses`: an archive with a split for evaluation beside others
EVALUATION_MEMBER = "evaluation"
# of a file that is dropped, by its error; else DAMAGED
REASONS: dict[type[BadInput], str] = {UnknownFormat: UNKNOWN, NoTextField: NO_FIELD}

# what splits a stream into (place, text) of each document, by its format: one of `records.FORMATS`
SPLITTERS: dict[str, Callable[[Stream], Iterator[Document]]] = {
    "text": lines.split_text,
    "wiki": split_wiki,
    "mediawiki": mediawiki.split_mediawiki,
    "jsonl": split_jsonl,
    "json": split_json,
    "csv": split_csv,
    "wet": split_wet,
}

Item = TypeVar("Item")


def read_documents(
    part: FileRange, options: ReadOptions, problems: Problems, folder: str = ""
) -> Iterator[RawDocument]:
    """Documents of a range in file order; bad places follow the policy of `problems`. `folder` is the work folder."""
    before, found = problems.total(), False
    guessing, known = options.text_documents == AUTO and not part.start, options.kind_in(part.path)
    for document in watch(part, _documents(part, options, problems, folder), problems):
        if guessing and document.kind and (not known or document.path != part.path):
            problems.guesses.setdefault(document.kind, {})[part.path] = None
        found = True
        yield document
    is_whole = not part.start and (part.end is None or part.size == (part.stamp or (0,))[0])
    if is_whole and not found and problems.total() == before and part.format != PYDOC:
        problems.add(part.path, NO_DOCUMENT, part.size)


def watch(part: FileRange, items: Iterator[Item], problems: Problems) -> Iterator[Item]:
    """`items` read from a file that must not change meanwhile; errors of the file follow the policy."""
    lost, before = part.size, problems.counts[DAMAGED]  # `lost`: until there is an item
    try:
        if change := _change(part):
            raise BadInput(change)
        for item in items:
            lost = 0
            yield item
        if change := _change(part):
            raise BadInput(change)
    except BadInput as error:
        if problems.policy == "stop":
            # Unfinished, not BadInput: the build keeps its finished items and can be resumed
            raise Unfinished(_change(part) or str(error)) from None
        if problems.counts[DAMAGED] == before:  # else `until_damage` has counted it
            reason = REASONS.get(type(error), DAMAGED)
            problems.add(part.path, reason, (isinstance(error, Damaged) and error.lost) or lost)
    except OSError as error:
        problems.unreadable(part.path, error)


def _change(part: FileRange) -> str:
    """An error message for a file that changed since it was planned, else ""."""
    size, changed = files.status(part.path)
    if part.stamp is None or part.stamp == (size, changed):
        return ""
    return (
        f"{part.path}: changed while it was read ({part.stamp[0]} bytes when the build began, now {size}); "
        "wait until it is complete, or read a copy"
    )


def _documents(part: FileRange, options: ReadOptions, problems: Problems, folder: str) -> Iterator[RawDocument]:
    part = part if part.opened else detection.identify(part, options)
    if part.format in (PYDOC, *TABLES) and not part.start:
        problems.formats[part.format] += 1
    yield from SOURCES.get(part.format, _read_text)(part, options, problems, folder)


def _read_rows(part: FileRange, options: ReadOptions, problems: Problems, folder: str) -> Iterator[RawDocument]:
    is_module = part.format == PYDOC
    rows = zip(repeat(0), pydoc_corpus.documents(part.path)) if is_module else read_table(part, options, problems)
    for row, text in rows:
        yield RawDocument(part.path, row, text, False)


def _read_members(part: FileRange, options: ReadOptions, problems: Problems, folder: str) -> Iterator[RawDocument]:
    """Documents of the members of an archive, each with a detected format. Those that can't be read follow the policy."""
    kind = options.text_documents
    if kind == AUTO:
        kind = boundaries.decide_members(part, options)

    def left_out(name: str) -> None:
        problems.add(f"{part.path}: {name}", ABOUT_MEMBER if files.describes_data(name) else HIDDEN_MEMBER)

    first = dict[bool, str]()  # name of a split for evaluation, and of another member
    for name, size, open_member in archives.members(part, left_out):
        path = f"{part.path}: {name}"
        first.setdefault(any(map(files.EVALUATION_SPLIT.fullmatch, name.split("/"))), path)
        try:
            with open_member() as content:
                chunks = archives.chunks(path, content, size)
                chunks = decompress.until_damage(chunks, path, problems, UNREADABLE_MEMBER)
                yield from _split(Stream(path, chunks, options, problems, options.format, kind))
        except DamagedArchive:
            raise
        except BadInput as error:
            if problems.policy == "stop":
                raise
            reason = NO_FIELD if isinstance(error, NoTextField) else UNREADABLE_MEMBER
            problems.add(path, reason, size)
    if len(first) == 2:
        problems.guesses.setdefault(EVALUATION_MEMBER, {})[first[True]] = None


# what reads a file that is not a stream of text, by its format
SOURCES: dict[str, Callable[[FileRange, ReadOptions, Problems, str], Iterator[RawDocument]]] = {
    **dict.fromkeys((PYDOC, *TABLES), _read_rows),
    **dict.fromkeys(ARCHIVES, _read_members),
}


def _read_text(part: FileRange, options: ReadOptions, problems: Problems, folder: str) -> Iterator[RawDocument]:
    """Documents of a file of text, or of a range of one; that of a packed file has its index in `folder`."""
    kind = options.kind_in(part.path)
    if not kind and part.start and part.format == "text":  # else by its first chunk
        kind = boundaries.decide_files([part], options) or "file"
    stream = Stream(part.path, iter(()), options, problems, part.format, kind, start=part.start, end=part.end)
    stream.first = not part.start
    if part.start and part.format == "mediawiki":
        stream.no_text = _no_text(replace(part, start=0, end=None, size=0), folder)
    head = b""
    if part.compression and not part.index:
        stream.start, stream.end = 0, None
        if part.end is None:
            chunks = decompress.read_chunks(part.path, part.compression)
            stream.chunks = decompress.until_damage(chunks, part.path, problems, DAMAGED)
        else:
            at = decompress.first_stream(part.path, part.start, part.end)
            if at is None:
                return
            stream.path += f": bz2 stream at byte {at}" if at else ""
            stream.chunks = decompress.read_chunks(part.path, part.compression, at, part.end, stream.end_at)
    else:
        stream.begin = part.start
        if part.start and part.format not in ELEMENTS:
            head = _read_at(part, folder, 0, PLAIN_CHUNK)
            stream.begin = lines.find_start(
                # one more byte, since a CR at the end may be half of a line end
                lambda at, size: lines.with_line_feeds(_read_at(part, folder, at, size + 1), head)[:size],
                part.start,
                "line" if part.format == "jsonl" else kind,
            )
            stream.synced = stream.begin == 0
        stream.chunks = _chunks_from(part, folder, stream.begin)
    yield from _split(stream, head, part.compression)


def _chunks_from(part: FileRange, folder: str, begin: int) -> Iterator[bytes]:
    """The unpacked text of a file from byte `begin` on, 0 for a packed one without spools."""
    if part.index:
        return decompress.read_spools(folder, part.index, begin)
    return decompress.read_chunks(part.path, part.compression, begin)


def _read_at(part: FileRange, folder: str, begin: int, size: int) -> bytes:
    return decompress.as_file(_chunks_from(part, folder, begin)).read(size)


@lru_cache(maxsize=8)
def _no_text(file: FileRange, folder: str) -> frozenset[str]:
    """Namespaces of links without text, from the head of the dump that a range belongs to; the defaults if the head is
    damaged, which the first range reports."""
    try:
        return mediawiki.read_head(_chunks_from(file, folder, 0))[0]
    except BadInput:
        return mediawiki.NO_TEXT


def _split(stream: Stream, head: bytes = b"", compression: str = "") -> Iterator[RawDocument]:
    """Documents of a stream of any format. `head`: the first bytes of its file, if the stream begins later."""
    problems, before = stream.problems, stream.problems.counts.total()
    first = next(stream.chunks, b"")
    if not first:
        if problems.counts.total() == before:  # otherwise the file is damaged from its start, which is already counted
            problems.add(stream.path, EMPTY)
        return
    if stream.format in (AUTO, *TABLES):
        stream.format = detection.detect(stream.path, first, stream.options, compression)
        if stream.format in SOURCES:
            raise UnknownFormat(
                f"{stream.path}: a {stream.format} file inside another; extract it first (a compressed tar needs "
                "the suffix .tar.gz, .tar.zst, …)"
            )
    if stream.format == detection.INDEX:
        problems.add(stream.path, detection.INDEX)
        return
    if stream.first:
        problems.formats[stream.format] += 1
    if stream.format == "text" and not stream.kind:
        stream.kind = boundaries.decide([TextSample(first[:PLAIN_CHUNK], len(first), len(first) < PLAIN_CHUNK)])
    head = head or first[:PLAIN_CHUNK]
    if stream.begin == 0 and first.startswith(detection.BOM):
        first, stream.begin = first[3:], 3
    stream.chunks = chain([first], stream.chunks)
    markup, kind = stream.format in ELEMENTS, stream.kind if stream.format == "text" else ""
    if not markup:
        stream.chunks = lines.chunks_with_line_feeds(stream.chunks, head)
    for place, text in SPLITTERS[stream.format](stream):
        yield RawDocument(stream.path, place, text, markup, kind)
