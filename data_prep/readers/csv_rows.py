"""Rows of CSV and TSV: separators and columns by the first row, and resynchronisation behind a bad one."""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal

from data_prep.common import utf8
from data_prep.common.errors import BadInput, Problems
from data_prep.common.records import ReadOptions
from data_prep.readers.decompress import SUFFIXES
from data_prep.readers.formats import MAX_DOCUMENT, NULL, line_runs
from megabert.common.tables import field_names, join

# names of TSV files, also packed ones
TSV_NAME = re.compile(rf"\.tsv({'|'.join(map(re.escape, SUFFIXES))})?$")
# separators of values, in the order in which they are tried
DELIMITERS = ",\t;|"
# lines of the first row at most
FIRST_LINES = 50
BAD_ROW = "bad CSV row"


def csv_texts(
    chunks: Iterator[bytes], path: str, options: ReadOptions, problems: Problems
) -> Iterator[tuple[int, str]]:
    """(last line, text) of each row of a file of separated values.

    The first row names the columns, unless --text-field has numbers of columns, from 1. The separator is the first of DELIMITERS
    with which these columns exist. Values of a .tsv file are separated by tabs and not quoted, as in `megabert.common.tables`.
    Raises BadInput if there is no such column.
    """
    lines = (line for _, run in line_runs(chunks, 0, path, problems) for line in _decoded(run, path, options, problems))
    csv.field_size_limit(MAX_DOCUMENT)
    is_tsv = bool(TSV_NAME.search(path))
    quoting: Literal[0, 3] = csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL
    # lines to read before the others, and those of the current row
    again, taken = deque(islice(lines, FIRST_LINES)), list[str]()
    columns, width, delimiter, number = _columns(list(again), path, options.text_field, is_tsv, quoting)
    first = "names" if number else "has"
    for _ in range(number):
        again.popleft()

    def reader() -> Any:
        def feed() -> Iterator[str]:
            while (line := again.popleft() if again else next(lines, None)) is not None:
                taken.append(line)
                yield line

        return csv.reader(feed(), delimiter=delimiter, quoting=quoting, strict=True)

    rows = reader()
    after_error = False  # what follows may be the rest of a bad row
    while True:
        taken.clear()
        reason = detail = ""
        try:
            row = next(rows, None)
            if row is None:
                return
            place = number + len(taken)
            if row and len(row) != width:
                reason, detail = BAD_ROW, f"a row of {len(row)} values, the first line {first} {width} columns"
            elif after_error and "".join(taken).count('"') % 2:
                reason = BAD_ROW
            "".join(row).encode()
        except UnicodeEncodeError:
            reason, detail = reason or "invalid UTF-8", utf8.INVALID
        except csv.Error as error:
            place = number + len(taken)
            reason, detail = BAD_ROW, f"{error}, in the row that begins at line {number + 1}"
            again.extendleft(reversed(taken[1:]))
            del taken[1:]
            rows = reader()
        number += len(taken)
        if reason:
            size = len("".join(taken).encode(errors="surrogateescape"))
            more = after_error and reason == BAD_ROW
            problems.bad(path, place, reason, detail, unit="line", size=size, places=0 if more else 1)
            after_error = more or ", in the row" in detail
        elif row:
            after_error = False
            text = join([row[column] or None for column in columns])
            if text is None:
                problems.dropped[NULL] += 1
            else:
                yield place, text


def _columns(
    lines: list[str], path: str, text_field: str, is_tsv: bool, quoting: Literal[0, 3]
) -> tuple[list[int], int, str, int]:
    """(columns of the text, number of columns, separator, lines of the header)."""
    delimiters = "\t" if is_tsv else DELIMITERS
    numbers = text_field.split("+") if re.fullmatch(r"[1-9]\d*(\+[1-9]\d*)*", text_field) else []
    for delimiter in delimiters:
        first = csv.reader(lines, delimiter=delimiter, quoting=quoting)
        names = next(first, [])
        wanted = field_names(text_field, names)
        if set(wanted) <= set(names):
            return [names.index(name) for name in wanted], len(names), delimiter, first.line_num
        if numbers and max(map(int, numbers)) <= len(names):
            return [int(n) - 1 for n in numbers], len(names), delimiter, 0
    shown = ", ".join(" ".join(lines[:1]).split(delimiters[0])[:20]).strip() or "none"
    raise BadInput(
        f"{path}: line 1: no column {text_field!r} (it has {shown}); name one with --text-field, or its number from 1 if the first "
        "line is a row"
    )


def _decoded(run: bytes, path: str, options: ReadOptions, problems: Problems) -> Iterator[str]:
    """The lines of a run, with line ends. Invalid bytes become U+FFFD or surrogates, so that quotation marks beside them count."""
    replace = options.encoding_errors == "replace"
    for line in run.splitlines(keepends=True):
        yield utf8.decode(line, options, problems, path) if replace else line.decode(errors="surrogateescape")
