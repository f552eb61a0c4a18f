"""Formats of text: splitting of chunks of bytes into (offset, document) pairs.

wiki: WikiExtractor's `<doc …>` to `</doc>`; mediawiki: `<page>` to `</page>`; jsonl: one object a line; text: plain, with documents that are a file, blocks between blank lines, or lines. Beginning and end of
a document depend only on the bytes, not on chunks or ranges. Memory is bounded also for lines and documents without an end.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator

from data_prep.common.errors import Problems
from data_prep.readers.decompress import RangeEnd

# bytes; longer lines are not text with sentences
MAX_LINE = 16 << 20
# most bytes of an element or of a block
MAX_DOCUMENT = 16 << 20
# bytes after which a `file` document is cut, at a line end
FILE_PART = 8 << 20
# bytes searched at once; a line inside them cannot be too long
STEP = 1 << 20
# bytes for format detection
HEAD = 1 << 16
BOM = b"\xef\xbb\xbf"
SPACE = b" \t\r\n"
SPACES = re.compile(rb"\s")
BLANK = re.compile(rb"\n[ \t\r]*\n[ \t\r\n]*")
CLOSERS = r"[\"')}\]»”’」』）]*"
# an end of a sentence at the end of a line, in the scripts that mark it
SENTENCE_END = re.compile(rf"[.!?…؟。！？｡۔।॥։።။།]{CLOSERS}$")
# WikiText's heading of an article, ` = Title = `; those of sections have more marks
HEADING_LINE = re.compile(rb" ?= [^=\r\n][^\r\n]*(?<!=) =[ \t]*(?:\r?\n|\Z)")
# what stands between two documents, by their kind; whitespace at the beginning and end of a document does not matter
SEPARATORS = {"blank-line": BLANK, "heading": re.compile(rb"\n(?=" + HEADING_LINE.pattern + rb")")}
# "offset:id:title" of each page of a multistream dump: a file beside it, which is left out and counted
INDEX, INDEX_LINES = "index of a dump, left out", re.compile(rb"(?:\d+:\d+:[^\n]+\n){3}")
# names, and the patterns of their opening and closing tags, up to the attributes
ELEMENTS = {"wiki": ("doc", rb"<doc(?=[ >])", b"</doc>"), "mediawiki": ("page", rb"<page>", b"</page>")}
DOC_TAG = re.compile(rb'<doc(?:\s+[\w:.-]+="[^"]*")*\s*>')
TITLE = re.compile(rb'\stitle="(.*?)"(?:>|\s+[\w:.-]+=")')

# the rule that drops records without text
NULL = "null value"
LONG_LINE, LONG_DOCUMENT = "long line", "long document"

# (offset, bytes)
Slice = tuple[int, bytes]


def line_runs(
    chunks: Iterator[bytes], base: int, path: str, problems: Problems, start: int = 0, end: int | None = None
) -> Iterator[Slice]:
    """Regroup chunks into runs that end at a line end; `base` is the offset of the first byte.

    A line longer than MAX_LINE is skipped, and reported if it begins in [start, end).
    """
    # part of a line whose end was not read yet
    parts: list[bytes] = []
    size, offset, dropping = 0, base, False
    long_line = -1  # offset of the line that is dropped, if it is reported

    def count_long_line() -> None:
        nonlocal long_line
        if long_line >= 0:
            problems.add(path, LONG_LINE, offset - long_line, places=0)
            long_line = -1

    step = min(STEP, MAX_LINE)
    slices = (chunk[i : i + step] for chunk in chunks for i in range(0, len(chunk), step))
    for chunk in slices:
        line_end = chunk.find(b"\n")
        if not dropping and size + (line_end if line_end >= 0 else len(chunk)) > MAX_LINE:
            if offset >= start and (end is None or offset < end):
                problems.bad(path, offset, LONG_LINE, f"a line longer than {MAX_LINE / 2**20:g} MiB")
                long_line = offset
            parts, size, offset, dropping = [], 0, offset + size, True
        if dropping:
            if line_end < 0:
                offset += len(chunk)
                if long_line < 0 and end is not None and offset >= end:
                    return
                continue
            chunk, offset, dropping = chunk[line_end + 1 :], offset + line_end + 1, False
            count_long_line()
        cut = chunk.rfind(b"\n") + 1
        if cut:
            run = b"".join([*parts, chunk[:cut]])
            yield offset, run
            offset += len(run)
            parts, size = [], 0
        if cut < len(chunk):
            parts.append(chunk[cut:])
            size += len(chunk) - cut
    count_long_line()
    if size:
        yield offset, b"".join(parts)


def sync_point(read: Callable[[int, int], bytes], start: int, kind: str) -> int:
    """Offset from which a range of a file of lines has to be read to find the beginning of its first document.

    `read` returns the text at (offset, bytes). For lines it is one byte before the range, for parts of a file one byte before the
    last multiple of FILE_PART. For others it is the start of the line with the last non-space byte before the range, which also
    shows whether that line is too long.
    """
    if kind == "line":
        return start - 1
    if kind == "file":
        return max(start // FILE_PART * FILE_PART - 1, 0)
    last = _last(read, start, rb"[^ \t\r\n]", 2 * MAX_LINE + 2)
    return _last(read, last, rb"\n", MAX_LINE + 1)


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


def split_lines(runs: Iterator[Slice], base: int, synced: bool) -> Iterator[Slice]:
    """One document a line; without `synced` the first, partial line (at `base`) belongs to the previous range."""
    for offset, run in runs:
        synced = synced or offset != base  # the partial line was skipped as too long
        for line in run.split(b"\n"):
            if synced and line.strip():
                yield offset, line
            offset += len(line) + 1
            synced = True


def split_elements(
    chunks: Iterator[bytes], base: int, format_: str, path: str, problems: Problems, range_end: RangeEnd
) -> Iterator[Slice]:
    """Elements, without their end tag, that begin at or after `base` (of the first byte) and before `range_end.end`.

    Text outside of elements is ignored. An element is unclosed if another begins or the file ends inside it.
    """
    name, opening, closing = ELEMENTS[format_]
    tags = re.compile(opening + b"|" + closing)
    keep = len(closing) - 1  # length of a possibly partial tag
    begin: int | None = None  # offset of the open element
    is_long = False  # the open element, which is reported with its bytes at the next tag
    buffer, at = b"", 0  # at: end of the searched part of `buffer`

    def bad(start: int, end: int) -> None:
        if is_long:
            problems.add(path, LONG_DOCUMENT, end - start, places=0)
        elif end - start > MAX_DOCUMENT:
            detail = f"a <{name}> longer than {MAX_DOCUMENT / 2**20:g} MiB"
            problems.bad(path, start, LONG_DOCUMENT, detail, size=end - start)
        else:
            detail = f"a <{name}> without </{name}>"
            problems.bad(path, start, "unclosed document", detail, size=end - start)

    for chunk in chunks:
        buffer += chunk
        for match in tags.finditer(buffer, at):
            place = base + match.start()
            if match.group() != closing:
                if begin is not None:
                    bad(begin, place)
                if range_end.end is not None and place >= range_end.end:
                    return
                begin = place
            elif begin is not None:
                if is_long or place - begin > MAX_DOCUMENT:
                    bad(begin, place)
                else:
                    yield begin, buffer[begin - base : match.start()]
                begin = None
            is_long, at = False, match.end()
        at = max(at, len(buffer) - keep)
        if begin is not None and not is_long and base + at - begin > MAX_DOCUMENT:
            bad(begin, begin + MAX_DOCUMENT + 1)
            begin, is_long = begin + MAX_DOCUMENT + 1, True
        if begin is None and range_end.end is not None and base + at >= range_end.end:
            return
        cut = at if begin is None or is_long else begin - base
        buffer, base, at = buffer[cut:], base + cut, at - cut
    if begin is not None:
        bad(begin, base + len(buffer))


def wiki_body(element: bytes) -> tuple[bytes, bool]:
    """The text of a `<doc …>` element after the tag and the title, and whether there is one.

    The title is the first line if it equals the tag's `title`, or if a blank line follows it and it does not end like a sentence.
    Without `title` all lines are text.
    """
    tag = DOC_TAG.match(element)
    first_line = element.find(b"\n") + 1 or len(element)
    # a title may hold quotation marks
    tag_end = tag.end() if tag else max(element.rfind(b'">', 0, first_line) + 1, element.find(b">")) + 1
    body = element[tag_end:].lstrip(b"\r\n")
    title = TITLE.search(element[:tag_end])
    line, _, rest = body.partition(b"\n")
    if title is None or not line.strip():
        return body, False
    named, shown = (html.unescape(text.decode(errors="replace")).split() for text in (title[1], line))
    apart = not rest.partition(b"\n")[0].strip() and not SENTENCE_END.search(shown[-1])
    return (rest, True) if named == shown or apart else (body, False)


def split_at(
    kind: str, runs: Iterator[Slice], base: int, synced: bool, path: str, problems: Problems, start: int = 0,
    end: int | None = None,
) -> Iterator[Slice]:  # fmt: skip
    """Documents between the separators of a kind of SEPARATORS; one that is too long is bad input if it begins in [start, end).

    `base` is the offset of the first byte. Without `synced` the first, partial document belongs to the previous range. A skipped too
    long line ends a document.
    """
    buffer = b""
    long_document = -1  # offset of one that is dropped, if it is reported

    def document(offset: int, end_offset: int) -> Iterator[Slice]:
        nonlocal long_document
        text = buffer[offset - base : end_offset - base]
        if len(text) > MAX_DOCUMENT:
            if offset >= start and (end is None or offset < end):
                detail = f"a document longer than {MAX_DOCUMENT / 2**20:g} MiB"
                problems.bad(path, offset, LONG_DOCUMENT, detail)
                long_document = offset
        elif text.strip():
            yield offset, text

    def count_long_document(end_offset: int) -> None:
        nonlocal long_document
        if long_document >= 0:
            problems.add(path, LONG_DOCUMENT, end_offset - long_document, places=0)
            long_document = -1

    searched = 0  # from here on an unseen separator may begin
    for offset, run in runs:
        if base + len(buffer) != offset:  # a long line was skipped in between
            if synced:
                yield from document(base, base + len(buffer))
            count_long_document(base + len(buffer))
            buffer, base, synced, searched = b"", offset, True, 0
        if not buffer and synced:  # more blank lines
            stripped = run.lstrip(SPACE)
            base, run = base + len(run) - len(stripped), stripped
        text_end = len(run.rstrip(SPACE))
        following = len(buffer) + text_end if text_end else searched
        buffer += run
        at = 0
        for match in SEPARATORS[kind].finditer(buffer, searched):
            if synced:
                yield from document(base + at, base + match.start())
            count_long_document(base + match.start())
            at, synced = match.end(), True
        if synced and following - at > MAX_DOCUMENT:
            yield from document(base + at, base + len(buffer))
            synced = False  # up to the next separator
        if not synced:  # only line ends with which a separator may begin
            at = max(at, following)
        buffer, base, searched = buffer[at:], base + at, max(following - at, 0)
    if synced:
        yield from document(base, base + len(buffer))
    count_long_document(base + len(buffer))


def split_file(chunks: Iterator[bytes], base: int, synced: bool) -> Iterator[Slice]:
    """The whole file as one document, or as parts that end at the first line end at or after each multiple of FILE_PART.

    If no line ends within MAX_LINE of it, a part ends at the first space, or else between two characters, so that no byte is lost.
    Without `synced` the text between `base`, where reading began, and the first such end belongs to the previous range.
    """
    buffer = bytearray()
    for chunk in chunks:
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
    if line_end := text.find(b"\n", cut - 1, cut + MAX_LINE) + 1:
        return line_end
    if len(text) < cut + MAX_LINE:
        return 0
    if space := SPACES.search(text, cut - 1, cut + MAX_LINE):
        return space.end()
    return next((at for at in range(cut, cut + 3) if text[at] & 0xC0 != 0x80), cut + 3)


def with_line_feeds(text: bytes, head: bytes) -> bytes:
    """`text` with line feeds for carriage returns if its file, which begins with `head`, has no line feeds (classic Mac OS)."""
    return text.replace(b"\r", b"\n") if b"\r" in head and b"\n" not in head else text
