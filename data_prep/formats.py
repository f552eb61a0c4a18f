"""A format is found by content and turns line runs of bytes into (offset, document) pairs.

wiki: WikiExtractor's `<doc …>` to `</doc>`; jsonl: one object a line; text: plain, where documents are a
whole file, blocks between blank lines, or lines. A line or a document that never ends costs bounded memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from data_prep.problems import BadInput, Problems

MAX_LINE = 16 << 20  # bytes; longer is no text that a sentence can be found in
MAX_DOCUMENT = 16 << 20  # bytes of one <doc> or of one blank-line block
FILE_PART = 8 << 20  # bytes; a longer `file` document is cut here, at a line end
AUTO_FILE_LIMIT = 16 << 20  # bytes on disk; up to here `auto` takes a text file as one document
HEAD = 1 << 16
TEXT_SUFFIXES = ("", ".txt", ".text")
BOM = b"\xef\xbb\xbf"
BLANK = re.compile(rb"\n[ \t\r]*\n\s*")

Document = tuple[int, bytes]


def detect(path: str, suffix: str, head: bytes, text_field: str) -> str:
    """Format name of a file from its first unpacked bytes (at most HEAD) and its suffix.

    Raises BadInput naming the file when neither says what it is.
    """
    start = head.removeprefix(BOM).lstrip()
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or head.count(0) > len(head) // 4:
        raise BadInput(f"{path}: binary or UTF-16 data, not UTF-8 text; convert it first (iconv -t UTF-8)")
    if start.startswith(b"<doc "):
        return "wiki"
    if start.startswith(b"<mediawiki"):
        raise BadInput(f"{path}: a MediaWiki XML dump; run WikiExtractor on it and give its output")
    if start.startswith(b"{"):
        line = start.split(b"\n", 1)[0]
        try:
            record = json.loads(line)
        except ValueError:
            if suffix in (".jsonl", ".ndjson") or len(line) == len(start):
                return "jsonl"
        else:
            if text_field not in record:
                raise BadInput(
                    f"{path}: byte 0: no field {text_field!r} in the JSON object (it has "
                    f"{', '.join(sorted(record)) or 'none'}); name it with --text-field"
                )
            return "jsonl"
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if suffix in TEXT_SUFFIXES:
        return "text"
    raise BadInput(
        f"{path}: unknown suffix {suffix!r} and no known content; force it with --format text|wiki|jsonl"
    )


def line_runs(
    chunks: Iterator[bytes], base: int, path: str, problems: Problems, start: int = 0, end: int | None = None
) -> Iterator[Document]:
    """Regroup chunks into runs that end at a line end; `base` is the offset of the first byte.

    A line longer than MAX_LINE is bad where it begins in [start, end) and left to that range where it does not.
    """
    parts: list[bytes] = []  # of a line whose end has not come yet
    size, offset, dropping = 0, base, False
    for chunk in chunks:
        if dropping:
            line_end = chunk.find(b"\n") + 1
            if not line_end:
                offset += len(chunk)
                if end is not None and offset >= end:
                    return
                continue
            chunk, offset, dropping = chunk[line_end:], offset + line_end, False
        cut = chunk.rfind(b"\n") + 1
        if cut:
            run = b"".join([*parts, chunk[:cut]])
            yield offset, run
            offset += len(run)
            parts, size = [], 0
        parts.append(chunk[cut:])
        size += len(chunk) - cut
        if size > MAX_LINE:
            if offset >= start and (end is None or offset < end):
                problems.bad(path, offset, "long line", f"a line longer than {MAX_LINE >> 20} MiB")
            parts, size, offset, dropping = [], 0, offset + size, True
    if size:
        yield offset, b"".join(parts)


def split_lines(runs: Iterator[Document], synced: bool) -> Iterator[Document]:
    """One document a line; without `synced` the first, partial line belongs to the range before."""
    for offset, run in runs:
        for line in run.split(b"\n"):
            if synced and line.strip():
                yield offset, line
            offset += len(line) + 1
            synced = True


def split_wiki(runs: Iterator[Document], path: str, problems: Problems) -> Iterator[Document]:
    """`<doc …>` elements without their end tag; text outside of them is ignored."""
    buffer, base = b"", 0
    for offset, run in runs:
        if buffer and base + len(buffer) != offset:  # a long line was dropped between
            buffer = b""
        if not buffer:
            base = offset
        buffer += run
        at = 0
        while (end := buffer.find(b"</doc>", at)) >= 0:
            start = buffer.rfind(b"<doc ", at, end)
            if start >= 0:
                yield base + start, buffer[start:end]
            at = end + 6
        buffer, base = buffer[at:], base + at
        if len(buffer) > MAX_DOCUMENT:
            if b"<doc " in buffer:
                problems.bad(path, base, "long document", f"a <doc> longer than {MAX_DOCUMENT >> 20} MiB")
            buffer = b""
    if (start := buffer.find(b"<doc ")) >= 0:
        problems.bad(path, base + start, "unclosed document", "a <doc> without </doc> at the file's end")


def wiki_body(element: bytes, keep_title: bool) -> bytes:
    """The end of a `<doc …>` element that follows the tag and, unless it is kept, the title line."""
    line_end = element.find(b"\n")
    body = element[element.rfind(b">", 0, line_end if line_end >= 0 else len(element)) + 1 :]
    return body if keep_title else body.lstrip(b"\r\n").partition(b"\n")[2]


def split_blank(runs: Iterator[Document], synced: bool, path: str, problems: Problems) -> Iterator[Document]:
    """Blocks between blank lines; without `synced` the first, partial block belongs to the range before."""
    buffer, base = b"", 0
    for offset, run in runs:
        if buffer and base + len(buffer) != offset:
            yield base, buffer
            buffer = b""
        if not buffer:
            base = offset
        buffer += run
        at = 0
        for match in BLANK.finditer(buffer):
            if match.end() == len(buffer):  # the blank lines may go on in the next run
                break
            if synced and buffer[at : match.start()].strip():
                yield base + at, buffer[at : match.start()]
            at, synced = match.end(), True
        buffer, base = buffer[at:], base + at
        if len(buffer) > MAX_DOCUMENT:
            problems.bad(path, base, "long document", f"a block longer than {MAX_DOCUMENT >> 20} MiB")
            buffer = b""
    if synced and buffer.strip():
        yield base, buffer


def split_file(runs: Iterator[Document]) -> Iterator[Document]:
    """The whole file as one document, or as parts of FILE_PART bytes."""
    parts: list[bytes] = []
    size, start = 0, 0
    for offset, run in runs:
        if not parts:
            start = offset
        parts.append(run)
        size += len(run)
        if size >= FILE_PART:
            yield start, b"".join(parts)
            parts, size = [], 0
    if parts:
        yield start, b"".join(parts)
