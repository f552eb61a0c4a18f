"""Documents of a range of a file: format detection by content, then one pass.

Each document is returned once and in order for any division of the file: a range is read from a position where its first document
can be recognised, and beyond its end until its last document is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TypeVar

from data_prep.common import utf8
from data_prep.common.errors import BadInput, Problems, Unfinished
from data_prep.common.records import ARCHIVES, AUTO, PYDOC, TABLES, UNCUT, FileRange, RawDocument, ReadOptions
from data_prep.readers import archives, boundaries, decompress, files, formats, mediawiki, pydoc_corpus, spools, tables
from data_prep.readers.archives import DamagedArchive
from data_prep.readers.boundaries import OTHERS, SAMPLED_FILES, TextSample
from data_prep.readers.decompress import BOMB_BYTES, BOMB_RATIO, PLAIN_CHUNK, RangeEnd
from data_prep.readers.formats import ELEMENTS
from megabert.common.tables import field_names, find, join, kind_of

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
                if first and inspect(file, first[:HEAD_BYTES], options).format == "text":
                    sampled += 1
                    size = file.size * (EXPANSION if file.compression else 1)
                    yield TextSample.of(first, size, boundaries.sample_size(len(some)))


def _sample_members(part: FileRange, options: ReadOptions) -> Iterator[TextSample]:
    """The beginnings of the first members of an archive that are plain text."""
    with contextlib.suppress(DamagedArchive):
        for name, open_member in islice(archives.members(part), SAMPLED_FILES):
            with contextlib.suppress(BadInput), open_member() as content:
                first = next(archives.chunks(name, content), b"")
                member = FileRange(name, format=options.format)
                if first and inspect(member, first[:HEAD_BYTES], options).format == "text":
                    yield TextSample.of(first, len(first), boundaries.sample_size(SAMPLED_FILES))


def _member_documents(part: FileRange, options: ReadOptions, problems: Problems) -> Iterator[RawDocument]:
    """Documents of the members of an archive, each with a detected format. Those that can't be read follow the policy."""
    kind = options.text_documents
    if kind == AUTO:
        kind = boundaries.decide(list(_sample_members(part, options)))
    for name, open_member in archives.members(part):
        path = f"{part.path}: {name}"
        member = FileRange(path, format=options.format, documents=kind)
        try:
            with open_member() as content:
                chunks = archives.chunks(path, content)
                yield from _chunk_documents(chunks, 0, member, path, RangeEnd(), options, problems)
        except DamagedArchive:
            raise
        except BadInput:
            if problems.policy == "stop":
                raise
            problems.counts["unreadable member of an archive"] += 1


def watch(part: FileRange, items: Iterator[Item], problems: Problems) -> Iterator[Item]:
    """`items` read from a file that must not change meanwhile; errors of the file follow the policy."""
    try:
        if change := _change(part):
            raise BadInput(change)
        yield from items
        if change := _change(part):
            raise BadInput(change)
    except BadInput as error:
        if problems.policy == "stop":
            raise Unfinished(_change(part) or str(error)) from None  # documents of other files are kept
        problems.counts["damaged or truncated file"] += 1
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
    compression = decompress.compression_of(head)
    named = decompress.SUFFIXES.get(suffix)
    if named and compression != named:
        raise BadInput(f"{file.path}: byte 0: no {named} data in spite of its suffix {suffix}")
    file = replace(file, compression=compression, opened=True)
    if not compression:
        return inspect(file, head, options)
    if TAR_NAME.search(file.path):
        return replace(file, format="tar")
    if file.size <= RANGE_BYTES // EXPANSION * 3 // 2 and not _must_unpack(file, head):
        return file
    text = next(decompress.read_chunks(file.path, compression), b"")
    file = inspect(file, text[:HEAD_BYTES], options)
    return file if file.format in UNCUT else replace(file, unpack_first=_must_unpack(file, head))


def inspect(part: FileRange, head: bytes, options: ReadOptions) -> FileRange:
    """The range with its format, by the first unpacked bytes. Raises BadInput if they don't determine it."""
    path, format_ = part.path, options.format
    if archive := archives.kind_of(head):
        return replace(part, format=archive)
    if format_ in (AUTO, *TABLES) and (table := kind_of(head)):
        if part.compression:
            raise BadInput(f"{path}: a table inside {part.compression} data; unpack it first")
        return replace(part, format=table)
    if format_ in TABLES:
        raise BadInput(f"{path}: no Parquet or Arrow file")
    if format_ == AUTO:
        stem, suffix = os.path.splitext(path)
        if suffix in decompress.SUFFIXES:
            suffix = os.path.splitext(stem)[1]
        format_ = formats.detect(path, suffix, head[: formats.HEAD])
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
    if part.compression and not part.index:
        stream: int | None = 0
        if part.end is not None:
            stream = decompress.first_stream(path, part.start, part.end)
            if stream is None:
                return
            range_end = RangeEnd()
        chunks = decompress.read_chunks(path, part.compression, stream or 0, part.end, range_end)
        path, begin = f"{path}: bz2 stream at byte {stream}" if stream else path, 0
    else:
        text = spools.SpooledText(part, folder) if part.index else spools.PlainText(part.path)
        if part.start and part.format not in ELEMENTS:
            head = text.read(0, formats.HEAD)
            begin = formats.sync_point(
                lambda at, size: formats.with_line_feeds(text.read(at, size), head), part.start, _kind(part)
            )
            chunks = (formats.with_line_feeds(chunk, head) for chunk in text.chunks(begin))
        else:
            chunks = text.chunks(begin)
    yield from _chunk_documents(chunks, begin, part, path, range_end, options, problems)


def _chunk_documents(
    chunks: Iterator[bytes],
    begin: int,
    part: FileRange,
    path: str,
    range_end: RangeEnd,
    options: ReadOptions,
    problems: Problems,
) -> Iterator[RawDocument]:
    """Documents of unpacked text; `begin` is the offset of its first byte."""
    first = next(chunks, b"")
    if not first:
        problems.counts["empty file"] += 1
        return
    if part.format == AUTO:
        part = inspect(part, first[:HEAD_BYTES], options)
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
        yield from _elements(chunks, begin, part, path, range_end, options, problems)
    elif part.format == "csv":
        for line, text in formats.csv_texts(chunks, path, options, problems):
            yield RawDocument(path, line, text, False)
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
) -> Iterator[RawDocument]:
    """Documents of `<doc>` or `<page>` elements."""
    for offset, body in formats.split_elements(chunks, begin, part.format, path, problems, range_end):
        if part.format == "wiki":
            text = formats.wiki_body(body)
            yield RawDocument(path, offset + len(body) - len(text), text, True)
            continue
        if options.encoding_errors == "replace":  # else the XML parser reports invalid bytes
            body = utf8.decode(body, options, problems).encode()
        if (article := mediawiki.article(body, offset, path, problems)) is not None:
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
    for offset, body in bodies:
        if end is not None and offset >= end:
            return
        if offset < start:
            continue
        if part.format == "jsonl":
            text = _json_text(body, offset, path, options, problems)
            if text is not None:
                yield RawDocument(path, offset, text, False)
        else:
            yield RawDocument(path, offset, body, False, kind)


def _json_text(line: bytes, offset: int, path: str, options: ReadOptions, problems: Problems) -> str | None:
    """The text of a JSON record; None if it has none, which is counted."""
    try:
        record = json.loads(utf8.decode(line, options, problems))
    except UnicodeDecodeError as error:
        problems.bad(path, offset + error.start, "invalid UTF-8", utf8.INVALID)
        return None
    except (ValueError, RecursionError) as error:
        problems.bad(path, offset, "bad JSON line", f"not a JSON object on one line ({error})")
        return None
    texts: list[str | None] = []
    for name in field_names(options.text_field, record if isinstance(record, dict) else ()):
        try:
            text = find(record, name)
        except (KeyError, TypeError):
            has = ""
            if isinstance(record, dict):
                has = f" (it has {', '.join(sorted(record)[:20]) or 'none'}); name it with --text-field"
            problems.bad(path, offset, "no text field", f"no field {name!r} in the JSON line{has}")
            return None
        if text is not None and not isinstance(text, str):
            problems.bad(path, offset, "no text field", f"field {name!r} is not a string")
            return None
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            problems.bad(path, offset, "lone surrogate", f"half a surrogate pair in field {name!r}")
            return None
        texts.append(text)
    joined = join(texts)
    if joined is None:
        problems.dropped[formats.NULL] += 1
    return joined
