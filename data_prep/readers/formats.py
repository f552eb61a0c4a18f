"""Formats of text: detection by content, and splitting of chunks of bytes into (offset, document) pairs.

wiki: WikiExtractor's `<doc …>` to `</doc>`; mediawiki: `<page>` to `</page>`; jsonl: one object a line; csv: a row, possibly
quoted over several lines; text: plain, with documents that are a file, blocks between blank lines, or lines. Beginning and end of
a document depend only on the bytes, not on chunks or ranges. Memory is bounded also for lines and documents without an end.
"""

from __future__ import annotations

import csv
import html
import json
import re
from collections.abc import Callable, Iterator
from typing import Literal

from data_prep.common import utf8
from data_prep.common.errors import BadInput, Problems
from data_prep.common.records import ReadOptions
from data_prep.readers.decompress import SUFFIXES, RangeEnd
from megabert.common.tables import field_names, join

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
TEXT_SUFFIXES = ("", ".txt", ".text")
# names of TSV files, also packed ones
TSV_NAME = re.compile(rf"\.tsv({'|'.join(map(re.escape, SUFFIXES))})?$")
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
XML_HEAD = re.compile(rb"(?:<\?xml[^>]*\?>\s*)?(?:<!--.*?-->\s*)*<(mediawiki\b|!DOCTYPE)", re.DOTALL)
# names, and the patterns of their opening and closing tags, up to the attributes
ELEMENTS = {"wiki": ("doc", rb"<doc(?=[ >])", b"</doc>"), "mediawiki": ("page", rb"<page>", b"</page>")}
DOC_TAG = re.compile(rb'<doc(?:\s+[\w:.-]+="[^"]*")*\s*>')
TITLE = re.compile(rb'\stitle="(.*?)"(?:>|\s+[\w:.-]+=")')

# separators of values, in the order in which they are tried
DELIMITERS = ",\t;|"
# the rule that drops records without text
NULL = "null value"

# (offset, bytes)
Slice = tuple[int, bytes]


def detect(path: str, suffix: str, head: bytes) -> str:
    """Format name of a file of text from its first unpacked bytes (at most HEAD, UTF-8) and its suffix.

    Raises BadInput naming the file when neither decides it.
    """
    start = head.removeprefix(BOM).lstrip()
    if head.count(0) > len(head) // 4:
        raise BadInput(f"{path}: binary data (or UTF-16: convert it to UTF-8 first)")
    if start.startswith((b"<doc ", b"<doc>")):
        return "wiki"
    if match := XML_HEAD.match(start):
        if match[1] == b"!DOCTYPE":
            raise BadInput(f"{path}: XML or HTML with a DOCTYPE, which is not a MediaWiki dump")
        return "mediawiki"
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if suffix in (".csv", ".tsv"):
        return "csv"
    if start.startswith(b"{"):
        line = start.split(b"\n", 1)[0]
        try:
            json.loads(line)
            return "jsonl"
        except (ValueError, RecursionError):
            if len(line) == len(start):  # a line longer than the head
                return "jsonl"
    if suffix in TEXT_SUFFIXES:
        return "text"
    raise BadInput(
        f"{path}: unknown suffix {suffix!r} and no known content; force it with --format text|wiki|mediawiki|jsonl|csv"
    )


def line_runs(
    chunks: Iterator[bytes], base: int, path: str, problems: Problems, start: int = 0, end: int | None = None
) -> Iterator[Slice]:
    """Regroup chunks into runs that end at a line end; `base` is the offset of the first byte.

    A line longer than MAX_LINE is skipped, and reported if it begins in [start, end).
    """
    # part of a line whose end was not read yet
    parts: list[bytes] = []
    size, offset, dropping = 0, base, False
    step = min(STEP, MAX_LINE)
    slices = (chunk[i : i + step] for chunk in chunks for i in range(0, len(chunk), step))
    for chunk in slices:
        line_end = chunk.find(b"\n")
        if not dropping and size + (line_end if line_end >= 0 else len(chunk)) > MAX_LINE:
            if offset >= start and (end is None or offset < end):
                problems.bad(path, offset, "long line", f"a line longer than {MAX_LINE / 2**20:g} MiB")
            parts, size, offset, dropping = [], 0, offset + size, True
        if dropping:
            if line_end < 0:
                offset += len(chunk)
                if end is not None and offset >= end:
                    return
                continue
            chunk, offset, dropping = chunk[line_end + 1 :], offset + line_end + 1, False
        cut = chunk.rfind(b"\n") + 1
        if cut:
            run = b"".join([*parts, chunk[:cut]])
            yield offset, run
            offset += len(run)
            parts, size = [], 0
        if cut < len(chunk):
            parts.append(chunk[cut:])
            size += len(chunk) - cut
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
    buffer, at = b"", 0  # at: end of the searched part of `buffer`

    def bad(start: int, end: int) -> None:
        if end - start > MAX_DOCUMENT:
            problems.bad(path, start, "long document", f"a <{name}> longer than {MAX_DOCUMENT / 2**20:g} MiB")
        else:
            problems.bad(path, start, "unclosed document", f"a <{name}> without </{name}>")

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
                if place - begin > MAX_DOCUMENT:
                    bad(begin, place)
                else:
                    yield begin, buffer[begin - base : match.start()]
                begin = None
            at = match.end()
        at = max(at, len(buffer) - keep)
        if begin is not None and base + at - begin > MAX_DOCUMENT:
            bad(begin, base + at)
            begin = None
        if begin is None and range_end.end is not None and base + at >= range_end.end:
            return
        cut = at if begin is None else begin - base
        buffer, base, at = buffer[cut:], base + cut, at - cut
    if begin is not None:
        bad(begin, base + len(buffer))


def wiki_body(element: bytes) -> bytes:
    """The text of a `<doc …>` element after the tag and the title.

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
        return body
    named, shown = (html.unescape(text.decode(errors="replace")).split() for text in (title[1], line))
    apart = not rest.partition(b"\n")[0].strip() and not SENTENCE_END.search(shown[-1])
    return rest if named == shown or apart else body


def split_at(
    kind: str, runs: Iterator[Slice], base: int, synced: bool, path: str, problems: Problems, start: int = 0,
    end: int | None = None,
) -> Iterator[Slice]:  # fmt: skip
    """Documents between the separators of a kind of SEPARATORS; one that is too long is bad input if it begins in [start, end).

    `base` is the offset of the first byte. Without `synced` the first, partial document belongs to the previous range. A skipped too
    long line ends a document.
    """
    buffer = b""

    def document(offset: int, text: bytes) -> Iterator[Slice]:
        if len(text) > MAX_DOCUMENT:
            if offset >= start and (end is None or offset < end):
                problems.bad(path, offset, "long document", f"a document longer than {MAX_DOCUMENT / 2**20:g} MiB")
        elif text.strip():
            yield offset, text

    searched = 0  # from here on an unseen separator may begin
    for offset, run in runs:
        if base + len(buffer) != offset:  # a long line was skipped in between
            if synced:
                yield from document(base, buffer)
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
                yield from document(base + at, buffer[at : match.start()])
            at, synced = match.end(), True
        if synced and following - at > MAX_DOCUMENT:
            yield from document(base + at, buffer[at:])
            synced = False  # up to the next separator
        if not synced:  # only line ends with which a separator may begin
            at = max(at, following)
        buffer, base, searched = buffer[at:], base + at, max(following - at, 0)
    if synced:
        yield from document(base, buffer)


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


def csv_texts(
    chunks: Iterator[bytes], path: str, options: ReadOptions, problems: Problems
) -> Iterator[tuple[int, str]]:
    """(last line, text) of each row of a file of separated values, whose first row names the columns.

    The separator is the first of DELIMITERS with which these columns exist. Values of a .tsv file are separated by tabs and not
    quoted, as in `megabert.common.tables`. Raises BadInput if there is no such column.
    """
    lines = (line for _, run in line_runs(chunks, 0, path, problems) for line in _decoded(run, options, problems))
    header = next(lines, "")
    csv.field_size_limit(MAX_DOCUMENT)
    is_tsv = TSV_NAME.search(path)
    delimiters = "\t" if is_tsv else DELIMITERS
    quoting: Literal[0, 3] = csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL
    for delimiter in delimiters:
        names = next(csv.reader([header], delimiter=delimiter, quoting=quoting), [])
        wanted = field_names(options.text_field, names)
        if set(wanted) <= set(names):
            break
    else:
        shown = ", ".join(next(csv.reader([header], delimiter=delimiters[0]), [])[:20]) or "none"
        raise BadInput(f"{path}: line 1: no column {options.text_field!r} (it has {shown}); name one with --text-field")
    rows = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    while True:
        try:
            row = next(rows, None)
            "".join(row or ()).encode()
        except UnicodeEncodeError:
            problems.bad(path, rows.line_num + 1, "invalid UTF-8", utf8.INVALID, unit="line")
            continue
        except csv.Error as error:
            problems.bad(path, rows.line_num + 1, "bad CSV row", str(error), unit="line")
            continue
        if row is None:
            return
        if row and len(row) != len(names):
            detail = f"a row of {len(row)} values, the first line names {len(names)} columns"
            problems.bad(path, rows.line_num + 1, "bad CSV row", detail, unit="line")
        elif row:
            text = join([row[names.index(name)] or None for name in wanted])
            if text is None:
                problems.dropped[NULL] += 1
            else:
                yield rows.line_num + 1, text


def _decoded(run: bytes, options: ReadOptions, problems: Problems) -> Iterator[str]:
    """The lines of a run, with line ends. Invalid bytes become U+FFFD or surrogates, so that quotation marks beside them count."""
    replace = options.encoding_errors == "replace"
    for line in run.splitlines(keepends=True):
        yield utf8.decode(line, options, problems) if replace else line.decode(errors="surrogateescape")
