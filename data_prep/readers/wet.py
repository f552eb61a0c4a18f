"""Splitter of WET files, the text of web pages as of Common Crawl: WARC records of type `conversion`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from data_prep.readers import streams
from data_prep.readers.decompress import PLAIN_CHUNK, as_file
from data_prep.readers.streams import HEAD, UNCLOSED, Slice, Stream

BAD = "bad WARC record"
# the beginning of a record, which a wrong Content-Length puts inside the one before; lines of a page that shows one end without \r
NEXT = re.compile(rb"\r\n\r\nWARC/\d\.\d\r\n[\w-]+:")
# lines of a header at most
HEADER_LINES = 100
TYPES = ("warcinfo", "response", "request", "metadata", "resource", "revisit", "continuation")


def split_wet(stream: Stream) -> Iterator[Slice]:
    """The content of each record of type `conversion`. Records of other types are counted and dropped."""
    file, offset, lost = as_file(stream.chunks), 0, 0
    while True:
        line = file.readline(HEAD)
        if lost and (not line or line.startswith(b"WARC/")):
            stream.bad(offset - lost, BAD, "no header of a WARC record", lost)
            lost = 0
        if not line:
            return
        offset += len(line)
        if not line.startswith(b"WARC/"):
            lost += len(line) if lost or line.strip() else 0
            continue
        header: dict[bytes, bytes] = {}
        for _ in range(HEADER_LINES):
            line = file.readline(HEAD)
            offset += len(line)
            if not line.strip():
                break
            name, _, value = line.partition(b":")
            header[name.strip().lower()] = value.strip()
        size, kind = header.get(b"content-length", b""), header.get(b"warc-type", b"").decode(errors="replace").lower()
        if not size.isdigit() or len(size) > 18:
            stream.bad(offset, BAD, "a WARC record without its Content-Length")
            continue
        left = int(size)
        if kind == "conversion" and left <= streams.MAX_DOCUMENT:
            body = file.read(left)
            if len(body) < left:
                detail = f"a WARC record of {left} bytes ends after {len(body)}"
                stream.bad(offset, UNCLOSED, detail, len(body))
                return
            if inner := NEXT.search(body):
                detail = "a WARC record whose Content-Length reaches into the next record"
                stream.bad(offset + inner.start(), BAD, detail, left - inner.start())
                body = body[: inner.start()]
            yield offset, body
            offset += left
            continue
        if kind == "conversion":
            stream.too_long(offset, "a record", streams.MAX_DOCUMENT, left)
        else:
            stream.problems.dropped[f"WARC record of type {kind if kind in TYPES else 'unknown'}"] += 1
        while left and (data := file.read(min(left, PLAIN_CHUNK))):
            left, offset = left - len(data), offset + len(data)
