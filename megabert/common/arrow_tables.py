"""Reader of Parquet and Arrow tables, and of the folders that Hugging Face `datasets` saves, a few rows at a time.

Of pre-training's corpora and fine-tuning's files alike. Arrow files come with or without a footer, as Feather 2 and `datasets`
write them. Damaged tables and missing columns raise `BadTable`, one line.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from megabert.common import fields

BATCH_ROWS = 256
# first bytes of a file
MAGIC = ((b"PAR1", "parquet"), (b"ARROW1", "arrow"), (b"\xff\xff\xff\xff", "arrow"))
ENDINGS = (".parquet", ".arrow", ".feather")
# Text compresses 3 to 40 times. A file that unpacks to more than this is a decompression bomb. BOMB_BYTES is the largest task of
# `data_prep` (`readers/tasks.py`), so that a small file need not be unpacked to be accepted.
BOMB_BYTES, BOMB_RATIO = 96 << 20, 200
# of a saved dataset, and of a dictionary of them
STATE, SPLITS = "state.json", "dataset_dict.json"


class BadTable(ValueError):
    """A table that is damaged, or lacks a column."""


@contextlib.contextmanager
def errors(path: str) -> Iterator[None]:
    """Turns everything that pyarrow raises for damaged tables into BadTable."""
    import pyarrow

    try:
        yield
    except BadTable:
        raise
    except MemoryError:
        raise BadTable(f"{path}: damaged table (its sizes need more memory than there is)") from None
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadTable(f"{path}: damaged or truncated table ({reason})") from None


def kind_of(head: bytes) -> str:
    """ "parquet" or "arrow" (file or stream) by the first bytes, else ""."""
    return next((name for magic, name in MAGIC if head.startswith(magic)), "")


def locate(path: str, schema: Any, name: str) -> list[str]:
    """Names from the outermost column to the column `name`. Raises BadTable listing the columns."""
    import pyarrow.types as types

    names = list(schema.names)
    parts = fields.path(name, names)
    if names.count(parts[0]) != 1:
        raise BadTable(f"{path}: no column {name!r} (it has {', '.join(names) or 'none'})")
    type_ = schema.field(parts[0]).type
    for depth, part in enumerate(parts[1:], 1):
        inside = [inner.name for inner in type_] if types.is_struct(type_) else []
        if inside.count(part) != 1:
            outer = ".".join(parts[:depth])
            raise BadTable(f"{path}: no column {name!r} ({outer} has {', '.join(inside) or 'none inside'})")
        type_ = type_.field(part).type
    return parts


def type_of(schema: Any, parts: Sequence[str]) -> Any:
    """The type of a column that `locate` found, of its values where it is a dictionary."""
    import pyarrow.types as types

    type_ = schema.field(parts[0]).type
    for part in parts[1:]:
        type_ = type_.field(part).type
    return type_.value_type if types.is_dictionary(type_) else type_


def schema_of(kind: str, file: Any) -> Any:
    """The schema of an open table, which is rewound. Raises pyarrow's errors."""
    import pyarrow.parquet as parquet
    from pyarrow import ipc

    if kind == "parquet":
        schema = parquet.read_schema(file)
    else:
        has_footer = file.read(6) == b"ARROW1"
        file.seek(0)
        schema = (ipc.open_file(file) if has_footer else ipc.open_stream(file)).schema
    file.seek(0)
    return schema


def parquet_batches(
    path: str, file: Any, columns: Sequence[Sequence[str]], start: int = 0, end: int | None = None
) -> Iterator[tuple[int, list[Any]]]:
    """(number of the first row, the arrays of `columns`) of a few rows at a time, of row groups [start, end).

    Raises BadTable for a group that unpacks to much more than it is.
    """
    import pyarrow.parquet as parquet

    table = parquet.ParquetFile(file, memory_map=False, pre_buffer=False)
    metadata = table.metadata
    named = [".".join(parts) for parts in columns]
    outer = tuple(f"{name}." for name in named)  # a list's values lie below its name
    groups = range(start, metadata.num_row_groups if end is None else end)
    row = sum(metadata.row_group(i).num_rows for i in range(start))
    for i in groups:
        group = metadata.row_group(i)
        for j in range(group.num_columns):
            chunk = group.column(j)
            if chunk.path_in_schema not in named and not chunk.path_in_schema.startswith(outer):
                continue
            size, packed = chunk.total_uncompressed_size, chunk.total_compressed_size
            if size > max(BOMB_BYTES, BOMB_RATIO * packed):
                raise BadTable(f"{path}: row group {i} unpacks to more than {BOMB_RATIO} times its size")
    for batch in table.iter_batches(BATCH_ROWS, row_groups=list(groups), columns=named, use_threads=False):
        yield row, [_inside(batch, parts) for parts in columns]
        row += batch.num_rows


def arrow_batches(
    path: str, file: Any, columns: Sequence[Sequence[str]], start: int = 0, end: int | None = None
) -> Iterator[tuple[int, list[Any]]]:
    """As `parquet_batches`, of an Arrow file's or stream's batches [start, end)."""
    import pyarrow
    from pyarrow import ipc

    has_footer = file.read(6) == b"ARROW1"
    file.seek(0)
    schema = (ipc.open_file(file) if has_footer else ipc.open_stream(file)).schema
    outer = sorted({schema.get_field_index(parts[0]) for parts in columns})
    if start:  # earlier batches are skipped without being read
        file = pyarrow.memory_map(path)
    file.seek(0)
    options = ipc.IpcReadOptions(included_fields=outer, use_threads=False)
    source = ipc.open_file(file, options=options) if has_footer else ipc.open_stream(file, options=options)
    every = (source.get_batch(i) for i in range(source.num_record_batches)) if has_footer else source
    row = 0
    for number, batch in enumerate(islice(every, end)):
        if number < start:
            row += batch.num_rows
            continue
        for i in range(0, batch.num_rows, BATCH_ROWS):
            part = batch.slice(i, BATCH_ROWS)
            yield row, [_inside(part, parts) for parts in columns]
            row += part.num_rows


def batches_of(kind: str) -> Any:
    """`parquet_batches` or `arrow_batches`."""
    return parquet_batches if kind == "parquet" else arrow_batches


def _inside(batch: Any, path: Sequence[str]) -> Any:
    """The array of a column inside others, of a RecordBatch; null where one of those is."""
    import pyarrow.compute as compute

    column = batch.column(batch.schema.get_field_index(path[0]))
    return compute.struct_field(column, list(path[1:])) if len(path) > 1 else column


def plain(column: Any) -> Any:
    """An array without its dictionary. Checks the array's offsets first."""
    import pyarrow.types as types

    if types.is_dictionary(column.type):
        column.validate()
        column.indices.validate(full=True)
        return column.dictionary_decode()
    return column


# ---- saved datasets


def names_in(path: str, data: bytes) -> list[str]:
    """The names in the bytes of a saved dataset's state, or of a dictionary's list of splits. Raises BadTable."""
    try:
        record = json.loads(data.decode())
        dictionary = os.path.basename(path) == SPLITS
        names = record["splits"] if dictionary else [entry["filename"] for entry in record["_data_files"]]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise BadTable(f"{path}: not the JSON object of a saved dataset") from None
    for name in names if isinstance(names, list) else [names]:
        if not isinstance(name, str) or name in ("", ".", "..") or os.path.basename(name) != name:
            raise BadTable(f"{path}: names {name!r}, which is no file name")
    return list(names)


def files(folder: Path) -> list[Path]:
    """The tables of a dataset that `datasets` saved, one split of it. Raises BadTable for another folder."""
    splits, state = folder / SPLITS, folder / STATE
    if splits.is_file():
        shown = ", ".join(str(folder / name) for name in names_in(str(splits), splits.read_bytes()))
        raise BadTable(f"{folder}: holds several splits; name one of {shown}")
    if not state.is_file():
        raise BadTable(f"{folder}: is a folder, and no saved dataset (no {STATE}); name a file in it")
    return [folder / name for name in names_in(str(state), state.read_bytes())]


# ---- rows of any columns


def is_table(path: Path) -> bool:
    """Whether a path is a folder, or a file that is such a table by its first bytes or its name."""
    if path.is_dir() or path.suffix in ENDINGS:
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return bool(kind_of(file.read(6)))


def columns(path: Path) -> list[str]:
    """The names of the columns. Raises BadTable."""
    first = next(iter(files(path)), None) if path.is_dir() else path
    if first is None:
        raise BadTable(f"{path}: holds no table")
    with first.open("rb") as file, errors(str(first)):
        return list(schema_of(_kind(first, file), file).names)


def rows(path: Path, wanted: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    """(file and row, the values of `wanted`) of each row: texts, numbers, lists of them, or None.

    `wanted` as of `megabert.common.tables.rows`. A class number is replaced by its name where the dataset's description has one.
    Raises BadTable for a damaged file, and for a column that is missing or of another type.
    """
    for file in files(path) if path.is_dir() else [path]:
        yield from _rows(file, wanted)


def _rows(path: Path, wanted: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    shown = str(path)
    with path.open("rb") as file:
        with errors(shown):
            kind = _kind(path, file)
            schema = schema_of(kind, file)
            joined = [_alternative(shown, schema, spec) for spec in wanted]
            columns = [parts for group in joined for parts in group]
            names = [_class_names(shown, schema, parts) for parts in columns]
            batches = batches_of(kind)(shown, file, columns)
        while True:
            with errors(shown):
                batch = next(batches, None)
                if batch is None:
                    return
                row, arrays = batch
                for array in arrays:
                    array.validate(full=True)
                columns_of_batch = [plain(array).to_pylist() for array in arrays]
            for values in zip(*columns_of_batch, strict=True):
                named = [_named(value, of) for value, of in zip(values, names, strict=True)]
                cells = iter(named)
                where = f"{shown}, row {row}"
                yield (
                    where,
                    [
                        _cell(where, spec, [next(cells) for _ in group])
                        for spec, group in zip(wanted, joined, strict=True)
                    ],
                )
                row += 1


def _cell(where: str, spec: str, values: Sequence[Any]) -> Any:
    try:
        return fields.joined(values)
    except ValueError as error:
        raise BadTable(f"{where}: column {spec!r} {error}") from None


def _kind(path: Path, file: Any) -> str:
    kind = kind_of(file.read(6))
    file.seek(0)
    if not kind:
        raise BadTable(f"{path}: is neither Parquet nor Arrow")
    return kind


def _alternative(path: str, schema: Any, spec: str) -> list[list[str]]:
    """The columns of the first alternative of `spec` that exists. Raises BadTable, also for an unsupported type."""
    failed: BadTable | None = None
    for one in spec.split("|"):
        try:
            located = [locate(path, schema, name) for name in fields.names(one, schema.names)]
        except BadTable as error:
            failed = failed or error
            continue
        for parts in located:
            _check(path, ".".join(parts), type_of(schema, parts))
        return located
    assert failed is not None
    raise failed


def _check(path: str, name: str, type_: Any) -> None:
    import pyarrow.types as types

    inner = type_
    while types.is_list(inner) or types.is_large_list(inner) or types.is_fixed_size_list(inner):
        inner = inner.value_type
    good = (types.is_string, types.is_large_string, types.is_string_view, types.is_integer, types.is_floating)
    if not any(is_type(inner) for is_type in (*good, types.is_boolean, types.is_null)):
        raise BadTable(f"{path}: column {name!r} is {type_}, neither text nor numbers nor lists of them")


def _class_names(path: str, schema: Any, parts: Sequence[str]) -> list[str]:
    """The names of a column's classes in the description that `datasets` writes into a table; [] where there are none."""
    try:
        tree = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        node = tree.get("info", {}).get("features", {}).get(parts[0], {})
        while isinstance(node, dict) and isinstance(node.get("feature"), dict):
            node = node["feature"]
        names = node.get("names", []) if len(parts) == 1 and node.get("_type") == "ClassLabel" else []
    except (ValueError, AttributeError):
        raise BadTable(f"{path}: its description of the dataset is damaged") from None
    return [str(name) for name in names]


def _named(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_named(part, names) for part in value]
    if names and isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    return value
