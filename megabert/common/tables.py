"""Tables row by row: TSV as in GLUE (no quoting), CSV (RFC 4180), JSON lines, Parquet, Arrow, saved Hugging Face datasets.

The first three are UTF-8, gzip if the name ends in .gz; a `.csv` may have semicolons. The format is chosen by the ending of the file
name, else by the first line; a saved dataset is a folder. Tables may be larger than memory. Errors are ValueErrors that name file and
line, or row.

A field `a.b` is nested, `a[].b` in each record of a list, `a+b` joins texts, unless a record has a field of exactly that name.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from itertools import chain, islice
from pathlib import Path
from typing import Any

from megabert.common import storage
from megabert.common.errors import Failed

ENDINGS = (".tsv", ".csv", ".jsonl")
ARROW_ENDINGS = (".parquet", ".arrow", ".feather")
# first bytes of a file; an Arrow stream begins with four bytes 255
MAGIC = ((b"PAR1", "parquet"), (b"ARROW1", "arrow"), (b"\xff\xff\xff\xff", "arrow"))
FIELD = 1 << 24  # largest length of a CSV field in characters
JOINT = "\n\n"  # between joined texts: each is a paragraph
BATCH_ROWS = 256  # rows of a Parquet or Arrow table in memory at once
STATE = "state.json"  # files of a saved dataset


class _Twice:
    def __repr__(self) -> str:
        return "there twice"


TWICE = _Twice()  # the value of a column whose name another has too


class BadTable(ValueError):
    """A Parquet or Arrow table, or a saved dataset, that is damaged."""


# -- fields ----------------------------------------------------------------------------------------------------------


def field_names(spec: str, has: Any) -> list[str]:
    """The fields joined by `spec`, in order; `has` contains the existing names."""
    return [spec] if spec in has or "+" not in spec else spec.split("+")


def field_path(name: str, has: Any) -> list[str]:
    """Names from the outermost record to the field."""
    return [name] if name in has else name.split(".")


def find(record: dict[str, Any], name: str) -> Any:
    """The value of a field of a record, None inside one that is None. Raises KeyError where it has none.

    `a[].b` is a list: `b` of each record in the list `a`.
    """
    value: Any = record
    path = field_path(name, record)
    for number, part in enumerate(path, 1):
        if value is None:
            return None
        if not isinstance(value, dict):
            raise KeyError(part)
        if part.endswith("[]") and part not in value:
            items, inner = value[part[:-2]], ".".join(path[number:])
            if not isinstance(items, list | None):
                raise KeyError(part)
            return [find(item if isinstance(item, dict) else {}, inner) for item in items] if items and inner else items
        value = value[part]
    return value


def join(texts: Sequence[str | None]) -> str | None:
    """Joined texts of the fields of one record; None where all are None."""
    present = [text for text in texts if text is not None]
    return JOINT.join(present) if present else None


def read_text(value: Any, where: str) -> str:
    """A text field. Raises ValueError naming `where` if it is empty or not a text."""
    if not isinstance(value, str):
        raise ValueError(f"{where}: expected text, got {value!r:.40}")
    if not value.strip():
        raise ValueError(f"{where}: empty text; leave it out or write something")
    return value


# -- rows ------------------------------------------------------------------------------------------------------------


def rows(
    path: Path, columns: Sequence[str], headed: bool = True, cut_rows: bool = False, ragged: bool = False
) -> Iterator[tuple[str, list[Any]]]:
    """(file and line, the values of `columns`) of each row: texts; in JSON and Arrow also numbers, lists, None.

    A column is a header name, a key of the JSON objects, a number from 0 in a table without header, or alternatives
    separated by |, of which the first that exists is used. `headed` false: a table may lack a header; it does if every
    column has a numeric alternative and the first line contains none of the names. A row whose width differs from the
    first row's raises ValueError, unless `cut_rows` (its values are []) or, without a header, `ragged`. A missing
    column raises ValueError. Class numbers of a saved dataset are replaced by their names.
    """
    alternatives = [column.split("|") for column in columns]
    headless = not headed and all(any(one.isdecimal() for one in of) for of in alternatives)
    names = {one for of in alternatives for one in of if not one.isdecimal()} if headless else None
    for where, record in _records(path, names, cut_rows, ragged):
        yield where, [] if record is None else [_value(where, record, column) for column in columns]


def columns(path: Path) -> list[str]:
    """The names of a table's columns, if it has a row; for TSV or CSV the fields of the first line."""
    _, record = next(_records(path), ("", None))
    return list(record or ())


def _value(where: str, record: dict[str, Any], spec: str) -> Any:
    for one in spec.split("|"):
        try:
            values = [find(record, name) for name in field_names(one, record)]
        except KeyError:
            continue
        if any(value is TWICE for value in values):
            raise ValueError(f"{where}: column {one!r} is there twice; rename one of them")
        if len(values) == 1:
            return values[0]
        if not all(value is None or isinstance(value, str) for value in values):
            raise ValueError(f"{where}: column {one!r} joins columns that are not text")
        return join(values)
    raise ValueError(f"{where}: no column {spec!r}; its columns are {', '.join(record):.300}")


def _records(
    path: Path, header: Set[str] | None = None, cut_rows: bool = False, ragged: bool = False
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """(file and line, fields) of each row; None for one of another width if they may be cut. Empty lines are skipped. The first
    line is the header; with `header` only if it has one of these names."""
    if path.suffix in ARROW_ENDINGS or path.is_dir():
        for file in files(path):
            yield from _arrow_records(file)
        return
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is no plain file, and a table is read twice; write it to a file first")
    name = Path(path.name.removesuffix(".gz")).suffix
    first = next(lines(path), (0, ""))[1]
    if name in (".jsonl", ".json") or (first.startswith("{") and name not in ENDINGS):
        for number, line in lines(path):
            if line.strip():
                where = f"{path}, line {number}"
                if not line.lstrip().startswith("{"):
                    raise ValueError(f"{where}: is not a JSON object; a file has one on each line, not a list of them")
                record = parse_json(where, line)
                yield where, record
        return
    # STS-B's own files have tabs in a .csv.
    is_csv = name != ".tsv" and first.count("\t") <= (first.count(",") if name == ".csv" else 0)
    delimiter = ";" if name == ".csv" and ";" in first and "," not in first else ","
    table = _csv_rows(path, delimiter) if is_csv else ((n, line.split("\t")) for n, line in lines(path) if line)
    top = next(table, (0, list[str]()))
    names = [name.strip() for name in top[1]]
    of_pandas = len(names) > 1 and names == list(map(str, range(len(names))))  # of a frame without names
    headed = header is None or not header.isdisjoint(names) or of_pandas
    twice = mark_twice(names) if headed else {}
    for number, row in table if headed else chain([top], table):
        if not headed and (ragged or row is top[1]):
            names = list(map(str, range(len(row))))
        if len(row) != len(names) and not cut_rows:
            first_row = "header" if headed else "first line"
            raise ValueError(f"{path}, line {number}: has {len(row)} columns, the {first_row} has {len(names)}")
        record = dict(zip(names, row, strict=True)) | twice if len(row) == len(names) else None
        yield f"{path}, line {number}", record


def mark_twice(names: Sequence[str]) -> dict[str, Any]:
    """TWICE for each name that several columns or fields have."""
    return {name: TWICE for name, count in Counter(names).items() if count > 1}


def json_object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, with TWICE for each name that several fields have."""
    found = dict(fields)
    return found if len(found) == len(fields) else found | mark_twice([name for name, _ in fields])


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line. Lines end in LF or CRLF; other line ends of Unicode are text."""
    number = 0
    try:
        with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield number, text.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise ValueError(f"{path}, line {number}: is not UTF-8; convert the file, e.g. with iconv") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: is not a whole gzip file after line {number} ({error})") from None


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """(number of its first line, fields) of each row; empty lines are skipped."""
    csv.field_size_limit(FIELD)
    reader = csv.reader((line + "\n" for _, line in lines(path)), delimiter=delimiter, strict=True)
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


def parse_json(where: str, text: str) -> Any:
    """The value of a JSON text, as of `json_object`. Raises ValueError beginning with `where`, also for strings of invalid Unicode."""
    try:
        tree = json.loads(text, object_pairs_hook=json_object)
        if "\\u" in text:  # may be half a surrogate pair
            json.dumps(tree, ensure_ascii=False, default=repr).encode()
        return tree
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: is not JSON ({error})") from None


# -- Parquet and Arrow -----------------------------------------------------------------------------------------------


def detect_kind(head: bytes) -> str:
    """ "parquet" or "arrow" (file or stream) by the first bytes, else ""."""
    return next((name for magic, name in MAGIC if head.startswith(magic)), "")


@contextlib.contextmanager
def arrow_errors(path: str) -> Iterator[None]:
    """Turns pyarrow's errors for damaged tables into BadTable."""
    import pyarrow

    try:
        yield
    except (BadTable, Failed):
        raise
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, OverflowError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadTable(f"{path}: damaged or truncated table ({reason})") from None


def arrow_reader(path: str, columns: Sequence[str] | None = None) -> Any:
    """A reader of the outermost `columns` of an Arrow file or stream, memory-mapped if it is local. Raises pyarrow's errors."""
    import pyarrow
    from pyarrow import ipc

    file = pyarrow.PythonFile(storage.open_object(path)) if storage.is_url(path) else pyarrow.memory_map(path)
    reader: Any = ipc.open_file if file.read(6) == b"ARROW1" else ipc.open_stream
    file.seek(0)
    if columns is None:
        return reader(file)
    places = sorted(map(reader(file).schema.get_field_index, columns))
    file.seek(0)
    return reader(file, options=ipc.IpcReadOptions(included_fields=places, use_threads=False))


def batches(
    kind: str, path: str, columns: Sequence[str] | None = None, start: int = 0, end: int | None = None
) -> Iterator[tuple[int, Any]]:
    """(number of the first row, RecordBatch) of at most BATCH_ROWS rows at a time, of row groups or batches [start, end).

    `columns` are outermost ones, all by default. Raises pyarrow's errors.
    """
    import pyarrow.parquet as parquet

    row = 0
    if kind == "parquet":
        source = storage.open_object(path) if storage.is_url(path) else path
        with parquet.ParquetFile(source, memory_map=False, pre_buffer=False) as table:
            groups = range(table.num_row_groups)
            row = sum(table.metadata.row_group(i).num_rows for i in groups[:start])
            options = {"row_groups": list(groups[start:end]), "columns": columns, "use_threads": False}
            for batch in table.iter_batches(BATCH_ROWS, **options):
                yield row, batch
                row += batch.num_rows
        return
    reader = arrow_reader(path, columns)
    every = reader if hasattr(reader, "read_next_batch") else map(reader.get_batch, range(reader.num_record_batches))
    for number, batch in enumerate(islice(every, end)):
        for first in range(0, batch.num_rows if number >= start else 0, BATCH_ROWS):
            yield row + first, batch.slice(first, BATCH_ROWS)
        row += batch.num_rows


def _arrow_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and row, fields) of each row."""
    with path.open("rb") as file:
        kind = detect_kind(file.read(6))
    if not kind:
        raise BadTable(f"{path}: is neither Parquet nor Arrow")
    stream = batches(kind, str(path))
    while True:
        with arrow_errors(str(path)):
            batch = next(stream, None)
            if batch is None:
                return
            row, table = batch
            table.validate(full=True)
            classes = _class_names(table.schema)
            twice = mark_twice(table.schema.names)
            kept = [i for i, name in enumerate(table.schema.names) if name not in twice]
            records = [record | twice for record in table.select(kept).to_pylist()]
        for number, record in enumerate(records, row):
            for name, names in classes.items():
                record[name] = _named(record[name], names)
            yield f"{path}, row {number}", record


def _class_names(schema: Any) -> dict[str, list[str]]:
    """Class names by column, from the description that `datasets` writes into a table."""
    by_column = {}
    about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = (about.get("info") or {}).get("features") or {}
    for name, node in features.items():
        while isinstance(node, dict) and isinstance(node.get("feature"), dict):
            node = node["feature"]
        if isinstance(node, dict) and node.get("_type") == "ClassLabel" and name in schema.names:
            by_column[name] = [str(one) for one in node.get("names", [])]
    return by_column


def _named(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_named(part, names) for part in value]
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else value


def files(path: Path) -> list[Path]:
    """The tables of a split of a dataset saved by `datasets`, or the file. Raises BadTable for another folder."""
    if not path.is_dir():
        return [path]
    state = path / STATE
    if not state.is_file():
        raise BadTable(
            f"{path}: is a folder, and no saved dataset (no {STATE}); name a file or the folder of a split in it"
        )
    try:
        names = [entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]]
        return [path / os.path.basename(name) for name in names]
    except (ValueError, RecursionError, LookupError, TypeError):
        raise BadTable(f"{state}: not the JSON object of a saved dataset") from None
