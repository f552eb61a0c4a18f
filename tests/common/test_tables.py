"""Tables are read a row at a time, by one set of rules for every command."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from megabert.common import tables


def test_a_long_text_is_a_field_of_csv(tmp_path):
    text = "word, " * 40_000
    (tmp_path / "t.csv").write_text(f'x\n"{text}"\n')
    assert [row[1] for row in tables.rows(tmp_path / "t.csv", ["x"])] == [[text]]


@pytest.mark.parametrize("name", ["t.tsv", "t.csv", "t.jsonl"])
def test_rows_are_streamed(name: str, tmp_path: Path) -> None:
    """10,000 rows, damaged behind the middle: the first ones are there before that is seen."""
    row = {"t.tsv": "a\tb\n", "t.csv": "a,b\n", "t.jsonl": '{"x": "a", "y": "b"}\n'}[name]
    header = {"t.tsv": "x\ty\n", "t.csv": "x,y\n", "t.jsonl": ""}[name]
    data = gzip.compress((header + "".join(f"{row}" for _ in range(10_000))).encode(), compresslevel=0)
    path = tmp_path / f"{name}.gz"
    path.write_bytes(data[: len(data) * 3 // 4])
    found = tables.rows(path, ["y", "x"])
    first = 1 if name == "t.jsonl" else 2
    assert next(found) == (f"{path}, line {first}", ["b", "a"])
    with pytest.raises(ValueError, match=rf"{path}: is not a whole gzip file after line \d{{4}} "):
        list(found)


def test_empty_lines_are_rows_only_inside_a_tsv(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_text("x\na\n\nb\n\n\n")
    assert list(tables.rows(path, ["x"])) == [(f"{path}, line {n}", [v]) for n, v in ((2, "a"), (3, ""), (4, "b"))]
    for name, text in (("t.csv", "x\na\n\nb\n\n"), ("t.jsonl", '\n{"x": "a"}\n\n{"x": "b"}\n')):
        path = tmp_path / name
        path.write_text(text)
        assert list(tables.rows(path, ["x"])) == [(f"{path}, line {n}", [v]) for n, v in ((2, "a"), (4, "b"))]


def test_numbers_are_columns_only_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_text("0\t1\na\tb\n")
    assert [values for _, values in tables.rows(path, ["1"])] == [["b"]]
    assert [values for _, values in tables.rows(path, ["0"], headed=False)] == [["0"], ["a"]]
