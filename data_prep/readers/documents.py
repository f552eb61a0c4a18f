"""Documents of a range of a file: format detection by content, then one pass.

Each document is returned once and in order for any division of the file: a range is read from a position where its first document
can be recognised, and beyond its end until its last document is complete.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, dropwhile, islice, takewhile
from typing import TypeVar

from data_prep.common import utf8
from data_prep.common.errors import BadInput, Damaged, Problems, Unfinished, UnknownFormat
from data_prep.common.records import ARCHIVES, AUTO, PYDOC, TABLES, UNCUT, FileRange, RawDocument, ReadOptions
from data_prep.readers import (
    archives,
    boundaries,
    csv_rows,
    decompress,
    detection,
    files,
    formats,
    json_records,
    mediawiki,
    pydoc_corpus,
    spools,
    tables,
    wet,
)
from data_prep.readers.archives import DamagedArchive
from data_prep.readers.boundaries import OTHERS, SAMPLED_FILES, TextSample
from data_prep.readers.decompress import BOMB_BYTES, BOMB_RATIO, PLAIN_CHUNK, RangeEnd
from data_prep.readers.formats import ELEMENTS, Slice
from megabert.common.tables import detect_kind

# first bytes of a file for format detection
HEAD_BYTES = 1 << 18
# bytes of text in a range of a divided file
RANGE_BYTES = 32 << 20
# largest unpacked size of a compressed file in one task, in RANGE_BYTES
MOST_UNCUT = 3
# positions of a bzip2 file where a stream is searched
PROBES = 4
# unpacked bytes per compressed byte, a rough figure only for grouping
EXPANSION = 4
# endings of compressed tars
TAR_NAME = re.compile(r"\.(tar\.\w+|tgz|tbz2?|txz|tzst)$")

# reasons of problems
UNKNOWN = "unknown format"
DAMAGED = "damaged or truncated file"
UNREADABLE_MEMBER = "unreadable member of an archive"
# what is dropped of a `<doc>` element
TITLE = "title of a <doc>"

Item = TypeVar("Item")


def read_documents(
    part: FileRange, options: ReadOptions, problems: Problems, folder: str = ""
) -> Iterator[RawDocument]:
    """Documents of a range in file order; bad places follow the policy of `problems`. `folder` is the work folder."""
    if part.format == PYDOC:
        for text in pydoc_corpus.documents(part.path):
            yield RawDocument(part.path, 0, text, False)
        return
    yield from watch(part, _documents(part, options, problems, folder), problems)


def _documents(part: FileRange, options: ReadOptions, problems: Problems, folder: str) -> Iterator[RawDocument]:
    if not part.opened:
        part = identify(part, options)
    if part.format in TABLES:
        for row, text in tables.read_table(part, options, problems):
            yield RawDocument(part.path, row, text, False)
    elif part.format in ARCHIVES:
        yield from _member_documents(part, options, problems)
    else:
        kind = options.kind_in(part.path)
        if not kind and part.start:
            kind = boundaries.decide(list(sample_texts([part], options)))
        yield from _text_documents(replace(part, documents=kind), options, problems, folder)


def sample_texts(some: Sequence[FileRange], options: ReadOptions) -> Iterator[TextSample]:
    """The beginnings of those of the files that are plain text. One that can't be read is reported by its reader."""
    sampled = 0
    for tried, file in enumerate(some):
        if tried == OTHERS and not sampled:
            return
        with contextlib.suppress(BadInput, OSError):
            file = file if file.opened else identify(file, options)
            if file.format in (AUTO, "text"):
                first = next(decompress.read_chunks(file.path, file.compression), b"")
                if first and _inspected(file, first, options).format == "text":
                    sampled += 1
                    size = file.size * (EXPANSION if file.compression else 1)
                    yield TextSample.of(first, size, boundaries.sample_size(len(some)))


def _sample_members(part: FileRange, options: ReadOptions) -> Iterator[TextSample]:
    """The beginnings of the first members of an archive that are plain text."""
    with contextlib.suppress(DamagedArchive):
        for name, size, open_member in islice(archives.members(part), SAMPLED_FILES):
            with contextlib.suppress(BadInput), open_member() as content:
                first = next(archives.chunks(name, content, size), b"")
                if first and _inspected(FileRange(name, format=options.format), first, options).format == "text":
                    yield TextSample.of(first, len(first), boundaries.sample_size(SAMPLED_FILES))


def _member_documents(part: FileRange, options: ReadOptions, problems: Problems) -> Iterator[RawDocument]:
    """Documents of the members of an archive, each with a detected format. Those that can't be read follow the policy."""
    kind = options.text_documents
    if kind == AUTO:
        kind = boundaries.decide(list(_sample_members(part, options)))
    for name, size, open_member in archives.members(part):
        path = f"{part.path}: {name}"
        member = FileRange(path, format=options.format, documents=kind)
        try:
            with open_member() as content:
                chunks = decompress.until_damage(
                    archives.chunks(path, content, size), path, problems, UNREADABLE_MEMBER
                )
                yield from _chunk_documents(chunks, 0, member, path, RangeEnd(), options, problems)
        except DamagedArchive:
            raise
        except BadInput:
            if problems.policy == "stop":
                raise
            problems.add(path, UNREADABLE_MEMBER, size)


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
            raise Unfinished(_change(part) or str(error)) from None  # documents of other files are kept
        if problems.counts[DAMAGED] == before:  # else `until_damage` has counted it
            reason = UNKNOWN if isinstance(error, UnknownFormat) else DAMAGED
            problems.add(part.path, reason, (isinstance(error, Damaged) and error.lost) or lost)
    except OSError as error:
        problems.unreadable(part.path, error)


def _change(part: FileRange) -> str:
    """An error message for a file that changed since it was planned, else ""."""
    size, changed = files.status(part.path)
    if part.stamp is None or part.stamp == (size, changed):
        return ""
    return (
        f"{part.path}: changed while it was read ({part.stamp[0]} bytes when the build began, now {size}); let it be finished "
        "first, or give a copy"
    )


def identify(file: FileRange, options: ReadOptions) -> FileRange:
    """A whole file with properties from its first bytes: compression, format, whether it has to be unpacked before it is cut.

    The text of a small compressed file is examined by its reader. Raises BadInput if the bytes don't determine the format.
    """
    with files.open_regular(file.path) as opened:
        head = opened.read(HEAD_BYTES)
    suffix = os.path.splitext(file.path)[1]
    compression = decompress.detect_compression(head)
    named = decompress.SUFFIXES.get(suffix)
    if named and compression != named:
        raise BadInput(f"{file.path}: byte 0: no {named} data in spite of its suffix {suffix}")
    file = replace(file, compression=compression, opened=True)
    if not compression:
        file = inspect(file, head, options, whole=file.size <= HEAD_BYTES)
        if file.format == "zip":
            archives.refuse_documents(file.path)
        return file
    if TAR_NAME.search(file.path):
        return replace(file, format="tar")
    if file.size <= RANGE_BYTES // EXPANSION * 3 // 2 and not _must_unpack(file, head):
        return file
    text = next(decompress.read_chunks(file.path, compression), b"")
    file = _inspected(file, text, options)
    return file if file.format in UNCUT else replace(file, unpack_first=_must_unpack(file, head))


def _inspected(part: FileRange, first: bytes, options: ReadOptions) -> FileRange:
    """`inspect` by the first chunk of a file."""
    return inspect(part, first[:HEAD_BYTES], options, whole=len(first) <= HEAD_BYTES)


def inspect(part: FileRange, head: bytes, options: ReadOptions, whole: bool) -> FileRange:
    """The range with its format, by the first unpacked bytes; `whole`: these are all. Raises BadInput if they don't determine it."""
    path, format_ = part.path, options.format
    if archive := archives.detect_archive(head):
        return replace(part, format=archive)
    if format_ in (AUTO, *TABLES) and (table := detect_kind(head)):
        if part.compression:
            raise BadInput(f"{path}: a table inside {part.compression} data; unpack it first")
        return replace(part, format=table)
    if format_ in TABLES:
        raise BadInput(f"{path}: no Parquet or Arrow file")
    if format_ == AUTO:
        whole_head = whole and len(head) <= formats.HEAD
        format_ = detection.detect(path, detection.file_suffix(path), head[: formats.HEAD], whole_head)
    return replace(part, format=format_)


def _must_unpack(file: FileRange, head: bytes) -> bool:
    """Whether a compressed file is large and can't be cut while packed; `head`: its first bytes."""
    if file.size <= RANGE_BYTES // EXPANSION * 3 // 2:  # by the usual ratio; a few files pack much better
        if max(BOMB_BYTES, BOMB_RATIO * file.size) <= MOST_UNCUT * RANGE_BYTES:  # more is refused
            return False
        return decompress.ratio(head, file.compression) * file.size > MOST_UNCUT * RANGE_BYTES
    if file.compression != "bz2" or file.format not in ELEMENTS:
        return True
    # Ranges of a bzip2 file are even if streams begin everywhere.
    step = RANGE_BYTES // EXPANSION
    places = (1 + i * (file.size - 1) // PROBES for i in range(PROBES))
    return any(decompress.first_stream(file.path, at, min(at + step, file.size)) is None for at in places)


def _text_documents(part: FileRange, options: ReadOptions, problems: Problems, folder: str) -> Iterator[RawDocument]:
    """Documents of a range that is not of a table; its index is in `folder`. Raises BadInput for errors of the file."""
    path, range_end, begin = part.path, RangeEnd(part.end), part.start
    no_text = (
        _no_text(replace(part, start=0, end=None, size=0), folder)
        if part.start and part.format == "mediawiki"
        else None
    )
    if part.compression and not part.index:
        stream: int | None = 0
        if part.end is not None:
            stream = decompress.first_stream(path, part.start, part.end)
            if stream is None:
                return
            range_end = RangeEnd()
        chunks = decompress.read_chunks(path, part.compression, stream or 0, part.end, range_end)
        if part.end is None:
            chunks = decompress.until_damage(chunks, path, problems, DAMAGED)
        path, begin = f"{path}: bz2 stream at byte {stream}" if stream else path, 0
    else:
        text = _open_text(part, folder)
        if part.start and part.format not in ELEMENTS:
            head = text.read(0, formats.HEAD)
            begin = formats.sync_point(
                lambda at, size: formats.with_line_feeds(text.read(at, size), head), part.start, _kind(part)
            )
            chunks = (formats.with_line_feeds(chunk, head) for chunk in text.chunks(begin))
        else:
            chunks = text.chunks(begin)
    yield from _chunk_documents(chunks, begin, part, path, range_end, options, problems, no_text)


@lru_cache(maxsize=8)
def _no_text(file: FileRange, folder: str) -> frozenset[str]:
    """The namespaces by the head of a dump, of which a range is read; those of any language if it is damaged, as its first range says."""
    try:
        packed = file.compression and not file.index
        chunks = decompress.read_chunks(file.path, file.compression) if packed else _open_text(file, folder).chunks(0)
        return mediawiki.read_head(chunks)[0]
    except BadInput:
        return mediawiki.NO_TEXT


def _open_text(part: FileRange, folder: str) -> spools.SpooledText | spools.PlainText:
    return spools.SpooledText(part, folder) if part.index else spools.PlainText(part.path)


def _chunk_documents(
    chunks: Iterator[bytes],
    begin: int,
    part: FileRange,
    path: str,
    range_end: RangeEnd,
    options: ReadOptions,
    problems: Problems,
    no_text: frozenset[str] | None = None,
) -> Iterator[RawDocument]:
    """Documents of unpacked text; `begin` is the offset of its first byte. `no_text`: of a dump whose head is not in `chunks`."""
    before = problems.counts.total()
    first = next(chunks, b"")
    if not first:
        if problems.counts.total() == before:  # else nothing is left of a damaged one
            problems.add(path, "empty file")
        return
    if part.format == AUTO:
        part = _inspected(part, first, options)
        if part.format == formats.INDEX:
            problems.add(path, formats.INDEX)
            return
        if part.format in (*ARCHIVES, *TABLES):
            raise BadInput(
                f"{path}: a {part.format} file inside another; unpack it first (a packed tar is named .tar.…)"
            )
    if part.format == "text" and not part.documents:
        size = part.size * (EXPANSION if part.compression else 1)
        part = replace(part, documents=boundaries.decide([TextSample.of(first, size, PLAIN_CHUNK)]))
    synced = begin == 0
    if begin == 0 and first.startswith(formats.BOM):
        first, begin = first[3:], 3
    chunks = chain([first], chunks)
    if synced and part.format not in ELEMENTS:
        head = first[: formats.HEAD]
        chunks = (formats.with_line_feeds(chunk, head) for chunk in chunks)
    if part.format in ELEMENTS:
        yield from _elements(chunks, begin, part, path, range_end, options, problems, no_text)
    elif part.format == "csv":
        for line, row in csv_rows.csv_texts(chunks, path, options, problems):
            yield RawDocument(path, line, row, False)
    elif part.format == "wet":
        for offset, body in wet.split_wet(decompress.as_file(chunks), path, problems):
            yield RawDocument(path, offset, body, False)
    elif part.format == "json":
        yield from _json(json_records.split_array(chunks, begin, path, problems), path, options, problems)
    else:
        yield from _lines(chunks, begin, synced, part, options, problems)


def _elements(
    chunks: Iterator[bytes],
    begin: int,
    part: FileRange,
    path: str,
    range_end: RangeEnd,
    options: ReadOptions,
    problems: Problems,
    no_text: frozenset[str] | None,
) -> Iterator[RawDocument]:
    """Documents of `<doc>` or `<page>` elements."""
    if no_text is None and part.format == "mediawiki":
        no_text, chunks = mediawiki.read_head(chunks)
    for offset, body in formats.split_elements(chunks, begin, part.format, path, problems, range_end):
        if part.format == "wiki":
            text, titled = formats.wiki_body(body)
            if titled:
                problems.changed[TITLE] += 1
            yield RawDocument(path, offset + len(body) - len(text), text, True)
            continue
        if options.encoding_errors == "replace":  # else the XML parser reports invalid bytes
            body = utf8.decode(body, options, problems, path).encode()
        if (article := mediawiki.article(body, offset, path, problems, no_text or mediawiki.NO_TEXT)) is not None:
            yield RawDocument(path, offset, article, True)


def _kind(part: FileRange) -> str:
    """The kind of documents in a file of lines."""
    return "line" if part.format == "jsonl" else part.documents


def _lines(
    chunks: Iterator[bytes], begin: int, synced: bool, part: FileRange, options: ReadOptions, problems: Problems
) -> Iterator[RawDocument]:
    """Documents of a file of lines: plain text or JSON lines."""
    path, start, end, kind = part.path, part.start, part.end, _kind(part)
    runs = formats.line_runs(chunks, begin, path, problems, start, end)
    if kind == "file":
        bodies = formats.split_file(chunks, begin, synced)
    elif kind == "line":
        bodies = formats.split_lines(runs, begin, synced)
    else:
        bodies = formats.split_at(kind, runs, begin, synced, path, problems, start, end)
    bodies = takewhile(lambda body: end is None or body[0] < end, bodies)
    bodies = dropwhile(lambda body: body[0] < start, bodies)
    if part.format == "jsonl":
        yield from _json(bodies, path, options, problems)
    else:
        for offset, body in bodies:
            yield RawDocument(path, offset, body, False, kind)


def _json(records: Iterator[Slice], path: str, options: ReadOptions, problems: Problems) -> Iterator[RawDocument]:
    """Documents of JSON records."""
    for offset, record in records:
        if (text := json_records.extract_text(record, offset, path, options, problems)) is not None:
            yield RawDocument(path, offset, text, False)
