"""Documents of one piece of a file: format and encoding by content, then one pass.

Wherever a file is cut, each document comes out once and in order: a range starts to read at a place from which the
first document that is its own can be told, and reads on past its end until its last document is whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from data_prep.common.errors import BadInput, Problems
from data_prep.common.records import AUTO, TABLES, Document, Piece, ReadOptions
from data_prep.readers import decompress, encodings, files, formats, mediawiki, unpacked
from data_prep.readers.decompress import Edge
from data_prep.readers.formats import ELEMENTS
from megabert.common import arrow_tables, fields

SNIFF = 1 << 18  # bytes that decide the encoding
UNTOLD = "text files that do not tell what a document is"
UNTOLD_DOCUMENTS = "documents of text files that do not tell"
EXPANSION = 4  # unpacked bytes a compressed one, a rough figure that only steers grouping


def inspect(piece: Piece, head: bytes, options: ReadOptions, whole: bool) -> Piece:
    """The piece with its format, its encoding and what a document is in it, by the first unpacked bytes.

    `whole`: these are all. Raises BadInput where they don't tell the format or the encoding.
    """
    path, format_ = piece.path, options.format
    if format_ in (AUTO, *TABLES) and (found := arrow_tables.kind_of(head)):
        if piece.compression:
            raise BadInput(f"{path}: a table inside {piece.compression} data; unpack it first")
        return replace(piece, format=found, encoding=encodings.UTF8)
    if format_ in TABLES:
        raise BadInput(f"{path}: no Parquet or Arrow file")
    encoding = encodings.check(options.encoding)
    if encoding == AUTO:  # XML is in UTF-8 where it names nothing else, and a dump names nothing else
        is_dump = formats.XML_HEAD.match(head.removeprefix(formats.BOM).lstrip())
        encoding = encodings.UTF8 if is_dump else encodings.decide(path, head)
    if encoding != encodings.UTF8:
        head = b"".join(encodings.recode(iter([head]), encoding, path, Problems("skip")))
    if format_ == AUTO:
        stem, suffix = os.path.splitext(files.name(path))
        if suffix in decompress.SUFFIXES:
            suffix = os.path.splitext(stem)[1]
        format_ = formats.detect(path, suffix, head[: formats.HEAD])
    piece = replace(piece, format=format_, encoding=encoding)
    if format_ != "text" or options.text_documents != AUTO:
        return piece
    kind, told = formats.text_kind(head, whole=whole)
    return replace(piece, documents=kind, told=told)


def text_documents(piece: Piece, options: ReadOptions, problems: Problems, folder: str) -> Iterator[Document]:
    """Documents of a piece that is no table; its index is in `folder`. Raises BadInput where the file itself is bad."""
    path, edge, begin = piece.path, Edge(piece.end), piece.start
    if piece.compression and piece.end is not None and not piece.index:
        stream = decompress.first_stream(path, piece.start, piece.end)
        if stream is None:
            return
        edge = Edge()
        chunks = decompress.read_chunks(path, piece.compression, stream, piece.end, edge)
        path, begin = f"{path}: bz2 stream at byte {stream}" if stream else path, 0
    elif piece.compression and not piece.index:
        chunks = decompress.read_chunks(path, piece.compression)
    else:
        text = unpacked.text_of(piece, folder)
        if piece.start and piece.format not in ELEMENTS:
            begin = formats.sync_point(text, piece.start, _kind(piece, options))
        chunks = text.chunks(begin)
    first = next(chunks, b"")
    if not first:
        problems.counts["empty file"] += 1
        return
    unseen = piece.format == "text" and options.text_documents == AUTO and not piece.documents
    if piece.format == AUTO or piece.encoding == AUTO or unseen:
        piece = inspect(piece, first[:SNIFF], options, whole=len(first) <= SNIFF)
    synced = begin == 0
    if piece.encoding == encodings.UTF8 and begin == 0 and first.startswith(formats.BOM):
        first, begin = first[3:], 3
    chunks = chain([first], chunks)
    if piece.encoding != encodings.UTF8:
        chunks = encodings.recode(chunks, piece.encoding, path, problems)
    if piece.format in ELEMENTS:
        yield from _elements(chunks, begin, piece, options, problems, path, edge)
    else:
        kind = _kind(piece, options)
        if not piece.start and piece.format == "text":
            problems.noted[UNTOLD] += not piece.told
        for document in _lines(chunks, begin, synced, piece, kind, options, problems):
            problems.noted[UNTOLD_DOCUMENTS] += not piece.told
            yield document


def _elements(
    chunks: Iterator[bytes], begin: int, piece: Piece, options: ReadOptions, problems: Problems, path: str, edge: Edge
) -> Iterator[Document]:
    for offset, body in formats.split_elements(chunks, begin, piece.format, path, problems, edge):
        if piece.format == "wiki":
            text = formats.wiki_body(body, options.keep_titles)
            yield Document(path, offset + len(body) - len(text), text, True)
        elif (article := mediawiki.article(body, offset, path, options.keep_titles, problems)) is not None:
            yield Document(path, offset, article, True)


def _kind(piece: Piece, options: ReadOptions) -> str:
    """What a document is in a file of lines: file, blank-line or line."""
    if piece.format == "jsonl":
        return "line"
    return piece.documents if options.text_documents == AUTO else options.text_documents


def _lines(
    chunks: Iterator[bytes], begin: int, synced: bool, piece: Piece, kind: str, options: ReadOptions, problems: Problems
) -> Iterator[Document]:
    path, start, end = piece.path, piece.start, piece.end
    runs = formats.line_runs(chunks, begin, path, problems, start, end)
    if kind == "file":
        found = formats.split_file(runs, synced)
    elif kind == "line":
        found = formats.split_lines(runs, begin, synced)
    else:
        found = formats.split_blank(runs, begin, synced, path, problems, start, end)
    for offset, body in found:
        if end is not None and offset >= end:
            return
        if offset < start:
            continue
        if piece.format == "jsonl":
            text = _json_text(body, offset, path, options.text_field, problems)
            if text is not None:
                yield Document(path, offset, text, False)
        else:
            yield Document(path, offset, body, False)


def _json_text(line: bytes, offset: int, path: str, field: str, problems: Problems) -> str | None:
    """The text of a record; None where there is none."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        problems.bad(path, offset + error.start, "invalid UTF-8")
        return None
    except (ValueError, RecursionError) as error:
        problems.bad(path, offset, "bad JSON line", f"not a JSON object on one line ({error})")
        return None
    texts: list[str | None] = []
    for name in fields.names(field, record if isinstance(record, dict) else ()):
        try:
            text = fields.find(record, name)
        except (KeyError, TypeError):
            has = f" (it has {', '.join(sorted(record)[:20]) or 'none'}); name it with --text-field" if isinstance(record, dict) else ""  # fmt: skip
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
    joined = fields.join(texts)
    if joined is None:
        problems.dropped[formats.NULL] += 1
    return joined
