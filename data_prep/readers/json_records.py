"""JSON: the elements of an array in bounded memory, and the text of a record."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from data_prep.common import utf8
from data_prep.common.errors import BadInput, Problems
from data_prep.common.records import ReadOptions
from data_prep.readers.formats import MAX_LINE, NULL, SPACE, Slice
from megabert.common.tables import field_names, find, join

TOKEN = re.compile(rb'\\.|["{}\[\],]', re.DOTALL)


def split_array(chunks: Iterator[bytes], base: int, path: str, problems: Problems) -> Iterator[Slice]:
    """The elements of a JSON array, found by quotation marks and brackets alone, so that a bad one costs no other.

    `base` is the offset of the first byte. Elements longer than MAX_LINE are skipped. Raises BadInput if there is no array.
    """
    # of the buffer: beginning of the open element, end of the searched part; `skipped`: bytes of a too long element before
    buffer, begin, searched, skipped = b"", 0, 0, 0
    depth, in_string, behind = 0, False, 0

    def element(end: int) -> Iterator[Slice]:
        size = skipped + end - begin
        if size > MAX_LINE:
            detail = f"a record longer than {MAX_LINE / 2**20:g} MiB"
            problems.bad(path, base + end - size, "long record", detail, size=size)
        elif body := buffer[begin:end].strip(SPACE):
            yield base + buffer.index(body, begin), body

    for chunk in chunks:
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
                    raise BadInput(f"{path}: no JSON array; an object a line is --format jsonl")
            elif mark in b"]}":
                depth = max(depth - 1, 0)
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
        elif searched - begin > MAX_LINE:
            skipped += searched - begin
            begin = searched
        buffer, base, begin, searched = buffer[begin:], base + begin, 0, searched - begin
    if depth:
        problems.bad(path, base, "bad JSON", "the array is not closed", size=skipped + len(buffer))
    elif behind:
        problems.bad(path, base, "bad JSON", "text outside of the array", size=behind)


def extract_text(line: bytes, offset: int, path: str, options: ReadOptions, problems: Problems) -> str | None:
    """The text of a JSON record, or of a string; None if it has none, which is counted."""

    def bad(reason: str, detail: str, at: int = offset) -> str | None:
        problems.bad(path, at, reason, detail, size=len(line))
        return None

    try:
        record = json.loads(utf8.decode(line, options, problems, path))
    except UnicodeDecodeError as error:
        return bad("invalid UTF-8", utf8.INVALID, offset + error.start)
    except (ValueError, RecursionError) as error:
        return bad("bad JSON line", f"not a JSON object on one line ({error})")
    texts: list[str | None] = []
    if isinstance(record, str):
        record = {options.text_field: record}
    for name in field_names(options.text_field, record if isinstance(record, dict) else ()):
        try:
            text = _joined(find(record, name))
        except (KeyError, TypeError):
            has = ""
            if isinstance(record, dict):
                has = f" (it has {', '.join(sorted(record)[:20]) or 'none'}); name it with --text-field"
            return bad("no text field", f"no field {name!r} in the JSON line{has}")
        except ValueError:
            return bad("no text field", f"field {name!r} is not a string, or a list of strings")
        if text is not None and (halves := utf8.LONE_SURROGATE.findall(text)):
            if options.encoding_errors == "stop":
                return bad("lone surrogate", f"half a surrogate pair in field {name!r}")
            text = utf8.LONE_SURROGATE.sub("\ufffd", text)
            problems.add(path, utf8.REPLACED, places=len(halves))
        texts.append(text)
    joined = join(texts)
    if joined is None:
        problems.dropped[NULL] += 1
    return joined


def _joined(value: Any) -> str | None:
    """A text, or the texts of a list, joined. Raises ValueError for another value."""
    if isinstance(value, list):
        return join([_joined(item) for item in value])
    if value is not None and not isinstance(value, str):
        raise ValueError
    return value
