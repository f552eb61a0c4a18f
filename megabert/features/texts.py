"""A text comes from a line that can be named, and a file may be larger than memory."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TABLES = (".tsv", ".csv", ".jsonl")


def texts_of(path: Path, columns: Sequence[str] = ()) -> Iterator[tuple[str, str | None]]:
    """The texts of a file: its lines, or one or two named columns of a .tsv (unquoted), .csv or .jsonl, also .gz.

    Raises ValueError naming file and line for an empty text, a missing column, and what is no UTF-8.
    """
    if not columns:
        if _kind(path) in TABLES:
            raise ValueError(f"{path}: is a table; name the column of the text with --text")
        for number, line in _lines(path):
            yield _text(line, f"{path} line {number}"), None
        return
    for number, row in _rows(path):
        where = f"{path} line {number}"
        for column in columns:
            if column not in row:
                raise ValueError(f"{where}: no column {column!r}; there are {', '.join(map(str, row))}")
        found = [_text(row[column], f"{where}, column {column!r}") for column in columns]
        yield found[0], (found[1] if len(found) > 1 else None)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: is no text but {value!r:.40}")
    if not value.strip():
        raise ValueError(f"{where}: empty text; leave it out or write something")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{where}: has half a surrogate pair, which is no character")
    return value.strip()


def _kind(path: Path) -> str:
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
        number = 0
        try:
            for number, line in enumerate(file, 1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} line {number}: not UTF-8 ({error.reason})") from None
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: damaged behind line {number} ({error})") from None


def _rows(path: Path) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Line number and fields by name."""
    kind = _kind(path)
    if kind == ".jsonl":
        for number, line in _lines(path):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"{path} line {number}: is no JSON object")
            yield number, row
    elif kind in TABLES:
        header: list[str] = []
        for number, values in (_csv if kind == ".csv" else _tsv)(path):
            if header and len(values) != len(header):
                raise ValueError(
                    f"{path} line {number}: {len(values)} columns, but the header has {len(header)}"
                )
            if header:
                yield number, dict(zip(header, values, strict=True))
            header = header or values
    else:
        raise ValueError(f"{path}: columns are of files that end in .tsv, .csv or .jsonl (or those and .gz)")


def _tsv(path: Path) -> Iterator[tuple[int, list[str]]]:
    for number, line in _lines(path):
        yield number, line.rstrip("\r\n").split("\t")


def _csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The number is that of a row's last line."""
    reader = csv.reader(line for _, line in _lines(path))
    try:
        for values in reader:
            yield reader.line_num, values
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num}: {error}") from None
