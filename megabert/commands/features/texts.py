"""Texts of a file: its lines, or one or two columns of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megabert.common import tables


def texts_of(path: Path, columns: Sequence[str] = ()) -> Iterator[tuple[str, str | None]]:
    """The texts of a file: its lines, or one or two named columns of a .tsv, .csv or .jsonl, also .gz.

    Raises ValueError naming file and line for an empty text, a missing column, and what `tables` refuses.
    """
    is_table = tables.ending(path) in tables.ENDINGS
    if is_table and not columns:
        raise ValueError(f"{path}: is a table; name the column of the text with --text")
    if columns and not is_table:
        raise ValueError(f"{path}: columns are of files that end in .tsv, .csv or .jsonl (or those and .gz)")
    if not columns:
        for number, line in tables.lines(path):
            yield tables.text_of(line, f"{path}, line {number}"), None
        return
    for where, values in tables.rows(path, columns):
        found = [
            tables.text_of(value, f"{where}, column {name!r}") for name, value in zip(columns, values, strict=True)
        ]
        yield found[0], (found[1] if len(found) > 1 else None)
