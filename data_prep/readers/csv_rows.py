"""Splitter of CSV and TSV: delimiter and columns are taken from the first row; parsing resumes after a bad row."""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Literal

from data_prep.common import utf8
from data_prep.common.errors import NoTextField
from data_prep.readers import streams
from data_prep.readers.decompress import SUFFIXES
from data_prep.readers.lines import line_runs
from data_prep.readers.streams import NULL, Stream
from megabert.common import storage
from megabert.common.tables import field_names, join

# names of TSV files, also packed ones
TSV_NAME = re.compile(rf"\.tsv({'|'.join(map(re.escape, SUFFIXES))})?$", re.IGNORECASE)
# separators of values, in the order in which they are tried
DELIMITERS = ",\t;|"
# lines of the first row at most, and those by which separators are compared
FIRST_LINES = 50
BAD_ROW = "bad CSV row"

Quoting = Literal[0, 3]


def split_csv(stream: Stream) -> Iterator[tuple[int, str]]:
    """(last line, text) of each row of a file of separated values.

    The first row names the columns, unless --text-field has numbers of columns, from 1. The separator is the first of DELIMITERS
    with which these columns exist, for numbers the first that also cuts the first lines into equally many values, if there is one.
    Values of a .tsv file are separated by tabs and not quoted, as in `megabert.common.tables`.
    Raises NoTextField if there is no such column.
    """
    csv.field_size_limit(streams.MAX_DOCUMENT)
    problems, lines = stream.problems, _lines(stream)
    is_tsv = bool(TSV_NAME.search(storage.public(stream.path.rpartition(": ")[2])))
    quoting: Quoting = csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL
    first = list(islice(lines, FIRST_LINES))
    columns, width, delimiter, number = _columns(first, stream, "\t" if is_tsv else DELIMITERS, quoting)
    has = f"the first line {'names' if number else 'has'} {width} columns"
    has += "; a .tsv has no quoting, so if this one has, rename it .csv" * is_tsv
    after_error = False  # what follows may be the rest of a bad row
    for read, taken, row, error in _rows(chain(first[number:], lines), delimiter, quoting):
        place, begin, number = number + read, number + 1, number + len(taken)
        reason = detail = ""
        if error:
            reason, detail = BAD_ROW, f"{error}, in the row that begins at line {begin}"
        elif row and len(row) != width:
            reason, detail = BAD_ROW, f"a row of {len(row)} values, {has}"
        elif after_error and "".join(taken).count('"') % 2:
            reason = BAD_ROW
        try:
            "".join(row).encode()
        except UnicodeEncodeError:
            reason, detail = reason or "invalid UTF-8", utf8.INVALID
        if reason:
            size = len("".join(taken).encode(errors="surrogateescape"))
            more = after_error and reason == BAD_ROW
            problems.bad(stream.path, place, reason, detail, unit="line", size=size, places=0 if more else 1)
            after_error = more or error is not None
        elif row:
            after_error = False
            text = join([row[column] or None for column in columns])
            if text is None:
                problems.dropped[NULL] += 1
            else:
                yield place, text


def _columns(lines: list[str], stream: Stream, delimiters: str, quoting: Quoting) -> tuple[list[int], int, str, int]:
    """(columns of the text, number of columns, separator, lines of the header)."""
    text_field = stream.options.text_field
    numbers = text_field.split("+") if re.fullmatch(r"[1-9]\d*(\+[1-9]\d*)*", text_field) else []
    uneven: tuple[list[int], int, str, int] | None = None
    for delimiter in delimiters:
        rows = csv.reader(lines, delimiter=delimiter, quoting=quoting)
        try:
            names = list(map(str.strip, next(rows, [])))  # as `tables`
        except csv.Error:
            continue
        wanted = field_names(text_field, names)
        if set(wanted) <= set(names):
            if twice := next((name for name in wanted if names.count(name) > 1), ""):
                raise NoTextField(f"{stream.path}: line 1: two columns {twice!r}; rename one")
            return [names.index(name) for name in wanted], len(names), delimiter, rows.line_num
        if numbers and max(map(int, numbers)) <= len(names):
            found = [int(n) - 1 for n in numbers], len(names), delimiter, 0
            if _are_even(rows, len(names), cut=len(lines) == FIRST_LINES):
                return found
            uneven = uneven or found
    if uneven:
        return uneven
    shown = ", ".join(" ".join(lines[:1]).split(delimiters[0])[:20]).strip()[:300] or "none"
    raise NoTextField(
        f"{stream.path}: line 1: no column {text_field!r} (it has {shown}); name one with --text-field, or its number from 1 if "
        "the first line is a row"
    )


def _are_even(rows: Iterator[list[str]], width: int, cut: bool) -> bool:
    """Whether rows have as many values as the first, which has `width`, several. `cut`: the last one may be cut."""
    try:
        widths = [len(row) for row in rows if row]
    except csv.Error:  # reported when the rows are read
        return False
    return width > 1 and set(widths[:-1] if cut else widths) <= {width}


def _rows(
    lines: Iterator[str], delimiter: str, quoting: Quoting
) -> Iterator[tuple[int, list[str], list[str], csv.Error | None]]:
    """(number of lines read, lines of the row, values, error) of each row. A bad row loses only its first line; its
    other lines are parsed again."""
    again, taken = deque[str](), list[str]()

    def feed() -> Iterator[str]:
        while (line := again.popleft() if again else next(lines, None)) is not None:
            taken.append(line)
            yield line

    rows = csv.reader(feed(), delimiter=delimiter, quoting=quoting, strict=True)
    while True:
        taken.clear()
        try:
            row = next(rows, None)
        except csv.Error as error:
            again.extendleft(reversed(taken[1:]))
            yield len(taken), taken[:1], [], error
            rows = csv.reader(feed(), delimiter=delimiter, quoting=quoting, strict=True)
            continue
        if row is None:
            return
        yield len(taken), taken, row, None


def _lines(stream: Stream) -> Iterator[str]:
    """Lines with their ends. Invalid bytes become U+FFFD or surrogates, so that quotation marks beside them count."""
    options, problems = stream.options, stream.problems
    for _, run in line_runs(stream):
        for line in run.splitlines(keepends=True):
            if options.encoding_errors == "replace":
                yield utf8.decode(line, options, problems, stream.path)
            else:
                yield line.decode(errors="surrogateescape")
