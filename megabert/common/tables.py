"""Reader of tables row by row: TSV as in GLUE (no quoting), CSV (RFC 4180), JSON lines, Parquet and Arrow.

The first three are UTF-8, gzip where the name ends in .gz; all may be larger than memory. The file name's ending decides between
them, or else the first line; Parquet and Arrow (`megabert.common.arrow_tables`) are recognised by their first bytes, and a saved
dataset is a folder. Every mistake is a ValueError that names file and line, or row.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megabert.common import arrow_tables, fields

ENDINGS = (".tsv", ".csv", ".jsonl")
# most characters of a field of CSV
FIELD = 1 << 24


def ending(path: Path) -> str:
    """The name's ending, without .gz."""
    return Path(path.name.removesuffix(".gz")).suffix


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line; it ends in LF or CRLF, other line ends of Unicode's are text."""
    for number, line in _raw_lines(path):
        yield number, line.removesuffix("\n").removesuffix("\r")


def _raw_lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            for number, line in enumerate(file, 1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: is a folder; name a file in it") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}, line {number}: is not UTF-8; convert the file, e.g. with iconv") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: is not a whole gzip file after line {number} ({error})") from None


def rows(
    path: Path, columns: Sequence[str], headed: bool = True, cut_rows: bool = False
) -> Iterator[tuple[str, list[Any]]]:
    """(file and line, the values of `columns`) of each row.

    A column is a name of the header, or a key of the JSON objects, or alternatives with | between, of which the first that
    exists is taken; in tables without a header (`headed` false) a number from 0. `a.b` is nested in JSON or Arrow, `a+b` are two
    joined (`megabert.common.fields`). With `cut_rows` rows of another width than the first come without values; else they raise
    ValueError, as a missing column does.
    """
    if arrow_tables.is_table(path):
        yield from arrow_tables.rows(path, columns)
        return
    table = _table(path)
    if table is None:
        yield from _json_rows(path, columns)
        return
    _, header = next(table, (0, [])) if headed else (0, [])
    places: list[list[int]] = []
    width = len(header)
    for number, row in table:
        if not places:
            width = width or len(row)
            places = [_places(path, column, header, width) for column in columns]
        if len(row) == width:
            yield f"{path}, line {number}", [fields.joined([row[i] for i in group]) for group in places]
        elif cut_rows:
            yield f"{path}, line {number}", []
        else:
            first = "header" if headed else "first line"
            raise ValueError(f"{path}, line {number}: has {len(row)} columns, the {first} has {width}")


def columns(path: Path) -> list[str]:
    """The names that the first line of a table has as a header, the keys of its first JSON object, an Arrow table's columns."""
    if arrow_tables.is_table(path):
        return arrow_tables.columns(path)
    table = _table(path)
    if table is None:
        first = parse_json(f"{path}, line 1", _start(path))
        return list(first) if isinstance(first, dict) else []
    return [column.strip() for column in next(table, (0, []))[1]]


def text_of(value: Any, where: str) -> str:
    """A text field without surrounding space. Raises ValueError naming `where` it is no text, or empty."""
    if not isinstance(value, str):
        raise ValueError(f"{where}: is no text but {value!r:.40}")
    if not value.strip():
        raise ValueError(f"{where}: empty text; leave it out or write something")
    return value.strip()


def _start(path: Path) -> str:
    return next(lines(path), (0, ""))[1]


def _table(path: Path) -> Iterator[tuple[int, list[str]]] | None:
    """(number of its line, fields) of each row of a TSV or CSV file; None of JSON lines."""
    name, start = ending(path), _start(path)
    if name in (".jsonl", ".json") or (start.startswith("{") and name not in ENDINGS):
        return None
    return _csv_rows(path) if name == ".csv" or ("\t" not in start and name != ".tsv") else _tsv_rows(path)


def _places(path: Path, column: str, header: Sequence[str], width: int) -> list[int]:
    """Places of the columns that `column` joins; usually one."""
    if not header:
        if int(column) >= width:
            raise ValueError(f"{path}: no column {column}; its first line has columns 0 to {width - 1}")
        return [int(column)]
    names = [name.strip() for name in header]
    for spec in column.split("|"):
        wanted = fields.names(spec, names)
        if all(name in names for name in wanted):
            return [names.index(name) for name in wanted]
    raise ValueError(f"{path}: no column {column!r}; its columns are {', '.join(header):.300}")


def _tsv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, fields) of each row; empty lines at the end are skipped."""
    empty: list[int] = []
    for number, line in lines(path):
        if not line:
            empty.append(number)
            continue
        yield from ((n, [""]) for n in empty)
        empty.clear()
        yield number, line.split("\t")


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(number of its first line, fields) of each row; empty lines are skipped."""
    csv.field_size_limit(FIELD)
    reader = csv.reader((line for _, line in _raw_lines(path)), strict=True)
    while True:
        number = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"{path}, line {number}: is not CSV ({error})") from None
        if row is None:
            return
        if row:
            yield number, row


def _json_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    """(file and line, values) of each row; empty lines are skipped."""
    for number, line in lines(path):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        row = parse_json(where, line)
        if not isinstance(row, dict):
            raise ValueError(f"{where}: is no JSON object")
        yield where, [_json_value(where, row, column) for column in columns]


def _json_value(where: str, row: dict[str, Any], column: str) -> Any:
    for spec in column.split("|"):
        try:
            values = [fields.find(row, name) for name in fields.names(spec, row)]
        except KeyError:
            continue
        try:
            return fields.joined(values)
        except ValueError as error:
            raise ValueError(f"{where}: column {spec!r} {error}") from None
    raise ValueError(f"{where}: no column {column!r}; its columns are {', '.join(row):.300}")


def parse_json(where: str, text: str) -> Any:
    """The value of a JSON text; the message of its ValueError begins with `where`."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: is not JSON ({error})") from None
    if re.search(r"\\u[dD][89a-fA-F]", text):  # may be half a surrogate pair
        try:
            json.dumps(tree, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"{where}: holds {half!a}, half a character") from None
    return tree
