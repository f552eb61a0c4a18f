"""Splitters of JSON: the elements of an array in bounded memory, or an object a line; the text of a record."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from data_prep.common import utf8
from data_prep.common.errors import BadInput
from data_prep.readers import streams
from data_prep.readers.lines import split_text
from data_prep.readers.streams import NO_FIELD, NULL, SPACE, Slice, Stream
from megabert.common.tables import field_names, find, join, json_object

IN_LISTS = "a[].b of each record in a list"
TOKEN = re.compile(rb'\\.|["{}\[\],]', re.DOTALL)


def split_jsonl(stream: Stream) -> Iterator[tuple[int, str]]:
    """The texts of a record a line."""
    stream.kind = "line"
    return _texts(stream, split_text(stream))


def split_json(stream: Stream) -> Iterator[tuple[int, str]]:
    """The texts of the records in an array."""
    return _texts(stream, split_array(stream))


def split_array(stream: Stream) -> Iterator[Slice]:
    """The elements of a JSON array, found by quotation marks and brackets alone, so that a bad one costs no other.

    Elements longer than MAX_LINE are skipped. Raises BadInput if there is no array.
    """
    # `begin`: start in `buffer` of the open element, or of text outside the array; `searched`: end of the scanned part;
    # `skipped`: bytes of the open element that were dropped from the buffer because it is too long
    buffer, begin, searched, skipped = b"", 0, 0, 0
    base, depth, in_string, behind = stream.begin, 0, False, 0

    def element(end: int) -> Iterator[Slice]:
        size = skipped + end - begin
        if size > streams.MAX_LINE:
            stream.too_long(base + end - size, "a record", streams.MAX_LINE, size, "long record")
        elif body := buffer[begin:end].strip(SPACE):
            yield base + buffer.index(body, begin), body

    for chunk in stream.chunks:
        buffer += chunk
        for match in TOKEN.finditer(buffer, searched):
            mark, searched = match.group(), match.end()
            if mark == b'"':
                in_string = not in_string
                continue
            if in_string or len(mark) > 1:
                continue
            if mark in b"[{":
                depth += 1
                if depth > 1:
                    continue
                if mark == b"{":
                    raise BadInput(f"{stream.path}: no JSON array; an object a line is --format jsonl")
                behind += len(buffer[begin : searched - 1].strip(SPACE))
            elif mark in b"]}" and depth:
                depth -= 1
                if depth:
                    continue
                yield from element(searched - 1)
            elif depth == 1:
                yield from element(searched - 1)
            else:
                continue
            begin, skipped = searched, 0
        searched = max(searched, len(buffer) - buffer.endswith(b"\\"))
        if not depth:
            behind += len(buffer[begin:searched].strip(SPACE))
            begin = searched
        elif searched - begin > streams.MAX_LINE:
            skipped += searched - begin
            begin = searched
        buffer, base, begin, searched = buffer[begin:], base + begin, 0, searched - begin
    if depth:
        stream.bad(base, "bad JSON", "the array is not closed", skipped + len(buffer))
    elif behind:
        stream.bad(base, "bad JSON", "text outside of the array", behind)


def _texts(stream: Stream, records: Iterator[Slice]) -> Iterator[tuple[int, str]]:
    for offset, record in records:
        if (text := _text(record, offset, stream)) is not None:
            yield offset, text


def _text(record: bytes, offset: int, stream: Stream) -> str | None:
    """The text of a record, or of a string; None if it has none, which is counted."""
    options, problems = stream.options, stream.problems

    def bad(reason: str, detail: str, at: int = 0) -> str | None:
        stream.bad(offset + at, reason, detail, len(record))
        return None

    try:
        hook = json_object if _may_repeat(record, options.text_field) else None  # it takes half as long again
        value = json.loads(utf8.decode(record, options, problems, stream.path), object_pairs_hook=hook)
    except UnicodeDecodeError as error:
        return bad("invalid UTF-8", utf8.INVALID, error.start)
    except (ValueError, RecursionError) as error:
        return bad("bad JSON line", f"not a JSON object on one line ({error})")
    if isinstance(value, str):
        value = {options.text_field: value}
    texts: list[str | None] = []
    for name in field_names(options.text_field, value if isinstance(value, dict) else ()):
        try:
            text = _joined(find(value, name))
        except (KeyError, TypeError):
            has = ""
            if isinstance(value, dict):
                has = f" (it has {', '.join(sorted(value)[:20]) or 'none'}); name it with --text-field, {IN_LISTS}"
            return bad(NO_FIELD, f"no field {name!r} in the JSON line{has}")
        except ValueError:
            return bad(NO_FIELD, f"field {name!r} is not a string or a list of strings, or is there twice; {IN_LISTS}")
        if text is not None and (halves := utf8.LONE_SURROGATE.findall(text)):
            if options.encoding_errors == "stop":
                return bad("lone surrogate", f"half a surrogate pair in field {name!r}")
            text = utf8.LONE_SURROGATE.sub("\ufffd", text)
            problems.add(stream.path, utf8.REPLACED, places=len(halves))
        texts.append(text)
    joined = join(texts)
    if joined is None:
        problems.dropped[NULL] += 1
    return joined


def _may_repeat(record: bytes, text_field: str) -> bool:
    names = {text_field, *re.split(r"[+.]|\[\]", text_field)} - {""}
    return any(record.count(b'"%s"' % name.encode(errors="surrogateescape")) > 1 for name in names)


def _joined(value: Any) -> str | None:
    """A text, or the texts of a list, joined. Raises ValueError for another value."""
    if isinstance(value, list):
        return join([_joined(item) for item in value])
    if value is not None and not isinstance(value, str):
        raise ValueError
    return value
