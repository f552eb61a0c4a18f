"""Splitters of plain text: a document is a line, what stands between separators, or the file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import dropwhile, takewhile

from data_prep.readers import streams
from data_prep.readers.streams import HEAD, LONG_DOCUMENT, SPACE, Slice, Stream

# bytes after which a `file` document is cut, at a line end
FILE_PART = 8 << 20
# bytes searched at once; a line inside them cannot be too long
STEP = 1 << 20
SPACES = re.compile(rb"\s")
CLOSERS = r"[\"')}\]»”’」』）]*"
# an end of a sentence at the end of a line, in the scripts that mark it
SENTENCE_END = re.compile(rf"[.!?…؟。！？｡۔।॥։።။།]{CLOSERS}$")
# WikiText's heading of an article, ` = Title = `; those of sections have more marks
HEADING_LINE = re.compile(rb" ?= [^=\r\n][^\r\n]*(?<!=) =[ \t]*(?:\r?\n|\Z)")
# separators; whitespace at the beginning and end of a document does not matter
BLANK = re.compile(rb"\n[ \t\r]*\n[ \t\r\n]*")
HEADING = re.compile(rb"\n(?=" + HEADING_LINE.pattern + rb")")
LONE_CR = re.compile(rb"\r(?!\n)")
LONG_LINE = "long line"


def split_text(stream: Stream) -> Iterator[Slice]:
    """Documents of plain text, by the splitter of their kind."""
    found = takewhile(lambda document: stream.end is None or document[0] < stream.end, BY_KIND[stream.kind](stream))
    return dropwhile(lambda document: document[0] < stream.start, found)


def with_line_feeds(text: bytes, head: bytes) -> bytes:
    """`text` with line feeds for carriage returns if its file, which begins with `head`, has no line feeds (classic Mac OS). The last byte
    of `head`, or of `text`, may be half of a line end."""
    return LONE_CR.sub(b"\n", text) if b"\r" in head[:-1] and b"\n" not in head else text


def chunks_with_line_feeds(chunks: Iterator[bytes], head: bytes) -> Iterator[bytes]:
    """The chunks `with_line_feeds`; a CR at the end of one is with the next."""
    held = b""
    for chunk in chunks:
        text, held = held + chunk, b"\r" * chunk.endswith(b"\r")
        yield with_line_feeds(text[: len(text) - len(held)], head)
    if held:
        yield with_line_feeds(held, head)


def find_start(read: Callable[[int, int], bytes], start: int, kind: str) -> int:
    """Offset from which a range that begins at `start` has to be read to find the beginning of its first document.

    `read(offset, size)` returns text. For lines the result is one byte before the range; for parts of a file, one byte
    before the last multiple of FILE_PART; for separators, the start of the last non-blank line before the range, which
    also shows whether that line is too long.
    """
    if kind == "line":
        return start - 1
    if kind == "file":
        return max(start // FILE_PART * FILE_PART - 1, 0)
    last = _last(read, start, rb"[^ \t\r\n]", 2 * streams.MAX_LINE + 2)
    return _last(read, last, rb"\n", streams.MAX_LINE + 1)


def _last(read: Callable[[int, int], bytes], before: int, pattern: bytes, most: int) -> int:
    """Offset of the last matching byte before `before`, else `most` bytes before it (at least 0)."""
    least = max(before - most, 0)
    while before > least:
        begin = max(before - HEAD, least)
        matches = list(re.finditer(pattern, read(begin, before - begin)))
        if matches:
            return begin + matches[-1].start()
        before = begin
    return least


def split_file(stream: Stream) -> Iterator[Slice]:
    """The whole file as one document, or as parts that end at the first line end at or after each multiple of FILE_PART.

    If no line ends within MAX_LINE of it, a part ends at the first space, or else between two characters, so that no byte is lost.
    """
    base, synced, buffer = stream.begin, stream.synced, bytearray()
    for chunk in stream.chunks:
        buffer += chunk
        while end := _part_end(buffer, (base // FILE_PART + 1) * FILE_PART - base):
            if synced:
                yield base, bytes(buffer[:end])
            del buffer[:end]
            base, synced = base + end, True
    if synced and buffer:
        yield base, bytes(buffer)


def _part_end(text: bytearray, cut: int) -> int:
    """The end of a part that may end from `cut` on; 0 if more text has to be read to find it."""
    if line_end := text.find(b"\n", cut - 1, cut + streams.MAX_LINE) + 1:
        return line_end
    if len(text) < cut + streams.MAX_LINE:
        return 0
    if space := SPACES.search(text, cut - 1, cut + streams.MAX_LINE):
        return space.end()
    return next((at for at in range(cut, cut + 3) if text[at] & 0xC0 != 0x80), cut + 3)


def line_runs(stream: Stream) -> Iterator[Slice]:
    """The chunks regrouped into runs that end at a line end, without lines longer than MAX_LINE."""
    line, offset = b"", stream.begin  # a line whose end was not read yet
    long: int | None = None  # offset of a line that is skipped
    step = min(STEP, streams.MAX_LINE)
    for chunk in (some[i : i + step] for some in stream.chunks for i in range(0, len(some), step)):
        line_end = chunk.find(b"\n")
        if long is None and len(line) + (len(chunk) if line_end < 0 else line_end) > streams.MAX_LINE:
            if stream.holds(offset):
                stream.too_long(offset, "a line", streams.MAX_LINE, reason=LONG_LINE)
            long, line, offset = offset, b"", offset + len(line)
        if long is not None:
            offset += line_end + 1 or len(chunk)
            if line_end < 0:
                if not stream.holds(long) and stream.end is not None and offset >= stream.end:
                    return
                continue
            if stream.holds(long):
                stream.lost(LONG_LINE, offset - long)
            chunk, long = chunk[line_end + 1 :], None
        if cut := chunk.rfind(b"\n") + 1:
            yield offset, line + chunk[:cut]
            offset, line = offset + len(line) + cut, b""
        line += chunk[cut:]
    if long is not None and stream.holds(long):
        stream.lost(LONG_LINE, offset - long)
    if line:
        yield offset, line


def split_lines(stream: Stream) -> Iterator[Slice]:
    """A document a line."""
    synced = stream.synced
    for offset, run in line_runs(stream):
        synced = synced or offset != stream.begin  # the partial line was skipped as too long
        for line in run.split(b"\n"):
            if synced and line.strip():
                yield offset, line
            offset += len(line) + 1
            synced = True


def split_blocks(separator: re.Pattern[bytes], stream: Stream) -> Iterator[Slice]:
    """Documents between separators. A skipped too long line ends a document."""
    buffer, base, synced = b"", stream.begin, stream.synced
    searched = 0  # from here on an unseen separator may begin
    long: int | None = None  # offset of a document that is dropped

    def document(begin: int, end: int, closed: bool = True) -> Iterator[Slice]:
        """The document at [begin, end) of the buffer, unless it is dropped."""
        nonlocal long
        if synced and end - begin > streams.MAX_DOCUMENT:
            if stream.holds(base + begin):
                stream.too_long(base + begin, "a document", streams.MAX_DOCUMENT)
                long = base + begin
        elif synced and (text := buffer[begin:end]).strip():
            yield base + begin, text
        if long is not None and closed:
            stream.lost(LONG_DOCUMENT, base + end - long)
            long = None

    for offset, run in line_runs(stream):
        if base + len(buffer) != offset:  # a long line was skipped in between
            yield from document(0, len(buffer))
            buffer, base, synced, searched = b"", offset, True, 0
        if not buffer and synced:  # more blank lines
            stripped = run.lstrip(SPACE)
            base, run = base + len(run) - len(stripped), stripped
        text_end = len(run.rstrip(SPACE))
        following = len(buffer) + text_end if text_end else searched
        buffer += run
        at = 0
        for match in separator.finditer(buffer, searched):
            yield from document(at, match.start())
            at, synced = match.end(), True
        if synced and following - at > streams.MAX_DOCUMENT:
            yield from document(at, len(buffer), closed=False)
            synced = False  # up to the next separator
        if not synced:  # only line ends with which a separator may begin
            at = max(at, following)
        buffer, base, searched = buffer[at:], base + at, max(following - at, 0)
    yield from document(0, len(buffer))


# by what a document is
BY_KIND: dict[str, Callable[[Stream], Iterator[Slice]]] = {
    "file": split_file,
    "line": split_lines,
    "blank-line": partial(split_blocks, BLANK),
    "heading": partial(split_blocks, HEADING),
}
