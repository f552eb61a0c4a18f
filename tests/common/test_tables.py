"""Tables of every kind are read a row at a time, by one set of rules for every command."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from megabert.common import tables
from tests.helpers.prep_reading import write_table

ROWS = [
    {"title": "A", "inner": {"body": "one"}, "label": 1, "many": [0, 1], "number": 2.5},
    {"title": "B", "inner": {"body": "two"}, "label": 0, "many": [], "number": None},
    {"title": None, "inner": {"body": "three"}, "label": -1, "many": [1], "number": 1.0},
]
CLASS = {"names": ["bad", "good"], "_type": "ClassLabel"}
FEATURES = {"info": {"features": {"label": CLASS, "many": {"feature": CLASS, "_type": "List"}}}}
KINDS = ("t.parquet", "t.arrow", "t.feather", "saved")


def write(folder, name, rows, features=True):
    """`saved` is a folder as `datasets` leaves it, in two tables."""
    path = folder / name
    table = pa.Table.from_pylist(rows)
    if features:
        table = table.replace_schema_metadata({"huggingface": json.dumps(FEATURES)})
    if name != "saved":
        return write_table(path, table, rows=2)
    path.mkdir()
    parts = [write(path, f"data-{i}.arrow", rows[i::2], features) for i in range(2)]
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": p.name} for p in parts]}))
    (path / "dataset_info.json").write_text("{}")
    return path


@pytest.mark.parametrize("about", [{}, {"info": None}, {"info": {"features": None}}])
def test_a_table_may_be_described_in_part(about, tmp_path):
    table = pa.Table.from_pylist(ROWS).replace_schema_metadata({"huggingface": json.dumps(about)})
    parquet.write_table(table, tmp_path / "t.parquet")
    assert [row[0] for _, row in tables.rows(tmp_path / "t.parquet", ["label"])] == [row["label"] for row in ROWS]


@pytest.mark.parametrize("name", KINDS)
def test_rows_have_values_and_class_names(name, tmp_path):
    path = write(tmp_path, name, ROWS)
    found = list(tables.rows(path, ["inner.body", "absent|label", "many", "number", "title+inner.body"]))
    want = [
        ["one", "good", ["bad", "good"], 2.5, "A\n\none"],
        ["two", "bad", [], None, "B\n\ntwo"],
        ["three", -1, ["good"], 1.0, "three"],
    ]
    places = [f"{path}, row {i}" for i in range(3)]
    if name == "saved":
        want = [want[0], want[2], want[1]]
        places = [f"{path}/data-0.arrow, row 0", f"{path}/data-0.arrow, row 1", f"{path}/data-1.arrow, row 0"]
    assert found == list(zip(places, want, strict=True))
    assert tables.columns(path) == list(ROWS[0])
    bare = write(tmp_path, "bare.parquet", ROWS, features=False)
    assert [values for _, values in tables.rows(bare, ["label"])] == [[1], [0], [-1]]


def test_columns_are_joined_in_every_kind_of_table(tmp_path):
    for name, text in (
        ("t.jsonl", '{"a": "x", "b": "y", "a+c": "z"}\n'),
        ("t.tsv", "a\tb\ta+c\nx\ty\tz\n"),
        ("s.csv", '\ufeffa;b;a+c\nx;y;"z, ;"\n'),
        ("t.csv", f'a,b,a+c\nx,y,"{"z" * 200_000}"\n'),
    ):
        path = tmp_path / name
        path.write_text(text)
        ((_, (joined, c, either)),) = tables.rows(path, ["a+b", "a+c", "c|b"])
        assert (joined, c[0], either) == ("x\n\ny", "z", "y")
        with pytest.raises(ValueError, match=r"no column 'a\+d'"):
            list(tables.rows(path, ["a+d"]))


def test_a_name_of_two_columns_cannot_be_read(tmp_path):
    """Others beside it can."""
    arrays = [pa.array(["x"]), pa.array(["y"]), pa.array(["z"])]
    parquet.write_table(pa.table(arrays, names=["a", "b", "a"]), tmp_path / "t.parquet")
    (tmp_path / "t.tsv").write_text("a\tb\ta\nx\ty\tz\n")
    (tmp_path / "t.csv").write_text("a,b,a\nx,y,z\n")
    (tmp_path / "t.jsonl").write_text('{"a": "x", "b": "y", "a": "\\u007a"}\n')
    for name, row in (("t.parquet", "row 0"), ("t.tsv", "line 2"), ("t.csv", "line 2"), ("t.jsonl", "line 1")):
        assert [values for _, values in tables.rows(tmp_path / name, ["b"])] == [["y"]]
        for column in ("a", "b+a", "c|a"):
            with pytest.raises(ValueError, match=rf"{name}, {row}: column '.*a' is there twice; rename one of them"):
                list(tables.rows(tmp_path / name, [column]))
    (tmp_path / "bare.tsv").write_text("x\tx\n")
    assert [values for _, values in tables.rows(tmp_path / "bare.tsv", ["1"], headed=False)] == [["x"]]


def test_damaged_tables_are_one_line(tmp_path):
    path = write(tmp_path, "t.parquet", ROWS)
    whole = path.read_bytes()
    (tmp_path / "plain").mkdir()
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "state.json").write_text("[]")
    files = {"cut.parquet": whole[:-9], "half.parquet": whole[: len(whole) // 2], "empty.parquet": b"PAR1" + bytes(40)}
    for name, data in (files | {"text.parquet": b"a\tb\n"}).items():
        (tmp_path / name).write_bytes(data)
    for name, column, message in (
        ("t.parquet", "body", r", row 0: no column 'body'; its columns are title, inner, label, many, number"),
        ("t.parquet", "inner.text", r", row 0: no column 'inner\.text'"),
        ("t.parquet", "title+number", r", row 0: column 'title\+number' joins columns that are not text"),
        *((name, "title", ": damaged or truncated table") for name in files),
        ("text.parquet", "title", ": is neither Parquet nor Arrow"),
        ("plain", "title", r": is a folder, and no saved dataset \(no state\.json\)"),
        ("list", "title", "/state.json: not the JSON object of a saved dataset"),
    ):
        with pytest.raises(ValueError, match=name + message):
            list(tables.rows(tmp_path / name, [column]))


@pytest.mark.parametrize("name", ["t.tsv", "t.csv", "t.jsonl"])
def test_rows_are_streamed(name, tmp_path):
    """10,000 rows, damaged behind the middle: the first ones are there before that is seen."""
    header, row = {"t.tsv": ("x\ty\n", "a\tb\n"), "t.csv": ("x,y\n", "a,b\n")}.get(name, ("", '{"x": "a", "y": "b"}\n'))
    data = gzip.compress((header + row * 10_000).encode(), compresslevel=0)
    path = tmp_path / f"{name}.gz"
    path.write_bytes(data[: len(data) * 3 // 4])
    found = tables.rows(path, ["y", "x"])
    assert next(found) == (f"{path}, line {1 + bool(header)}", ["b", "a"])
    with pytest.raises(ValueError, match=rf"{path}: is not a whole gzip file after line \d{{4}} "):
        list(found)


def test_empty_lines_are_skipped(tmp_path):
    lines = "x\na\n\nb\n\n"
    for name, text in (("t.tsv", lines), ("t.csv", lines), ("t.jsonl", '\n{"x": "a"}\n\n{"x": "b"}\n')):
        path = tmp_path / name
        path.write_text(text)
        assert list(tables.rows(path, ["x"])) == [(f"{path}, line {n}", [v]) for n, v in ((2, "a"), (4, "b"))]
    path = tmp_path / "t.tsv"  # numbers are columns only without a header
    path.write_text("0\t1\na\tb\n")
    assert [values for _, values in tables.rows(path, ["1"])] == [["b"]]
    assert [values for _, values in tables.rows(path, ["0"], headed=False)] == [["a"]]  # a frame without names
    path.write_text("1\t0\na\tb\n")
    assert [values for _, values in tables.rows(path, ["0"], headed=False)] == [["1"], ["a"]]
