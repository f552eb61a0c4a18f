"""Reader of Parquet and Arrow tables.

Rows are converted to texts a few at a time; nothing else of the file is kept in memory. Several workers can share a Parquet file
by row groups, and an Arrow file (with or without a footer, as written by Feather 2 and Hugging Face `datasets`) by batches. Rows
are numbered from 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from data_prep.common import utf8
from data_prep.common.errors import BadInput, Problems
from data_prep.common.records import FileRange, ReadOptions
from data_prep.readers import formats
from data_prep.readers.decompress import BOMB_BYTES, BOMB_RATIO
from data_prep.readers.files import open_regular
from megabert.common import tables
from megabert.common.tables import BadTable

Row = tuple[int, str]


@contextlib.contextmanager
def _arrow_errors(path: str) -> Iterator[None]:
    """Converts pyarrow's errors for damaged tables to BadInput."""
    try:
        with tables.arrow_errors(path):
            yield
    except BadTable as error:
        raise BadInput(str(error)) from None


def _columns(path: str, schema: Any, text_field: str) -> list[list[str]]:
    """Names from the outermost column to each column of texts or lists of texts.

    Raises BadTable listing the columns, or naming the type of a column that is not text.
    """
    import pyarrow.types as types

    columns = []
    for name in tables.field_names(text_field, schema.names):
        parts = tables.field_path(name, schema.names)
        has, type_, path_of = list(schema), schema, []
        for part in parts:
            (field,) = [field for field in has if field.name in (part, part.removesuffix("[]"))] or [None]
            if field is None:
                names = ", ".join(field.name for field in has) or "none"
                raise BadTable(f"{path}: no column {name!r} (it has {names}); name one with --text-field")
            path_of.append(field.name)
            type_ = field.type
            inner = type_.value_type if part.endswith("[]") and _is_list(type_) else type_
            has = list(inner) if types.is_struct(inner) else []
        if _is_list(type_):
            type_ = type_.value_type
        if types.is_dictionary(type_):
            type_ = type_.value_type
        if not (_is_text(type_) or types.is_null(type_)):
            raise BadTable(f"{path}: column {name!r} is {type_}, not text; name another with --text-field")
        columns.append(path_of)
    return columns


def _is_list(type_: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(type_) or types.is_large_list(type_))


def _is_text(type_: Any) -> bool:
    import pyarrow.types as types

    texts = types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary
    return any(is_type(type_) for is_type in texts)


def row_groups(path: str) -> int:
    """Number of row groups of a Parquet file. Raises BadInput when its footer can't be read."""
    import pyarrow.parquet as parquet

    with open_regular(path) as file, _arrow_errors(path):
        return int(parquet.read_metadata(file).num_row_groups)


def batches(path: str) -> int:
    """Number of batches of an Arrow file. Raises BadInput when it is damaged before its last batch."""
    open_regular(path).close()
    with _arrow_errors(path):
        reader = tables.arrow_reader(path)  # bodies are not touched
        return reader.num_record_batches if hasattr(reader, "num_record_batches") else sum(1 for _ in reader)


def ratio(path: str) -> float:
    """Unpacked bytes per packed byte of a Parquet file's columns. Raises BadInput if its footer can't be read."""
    import pyarrow.parquet as parquet

    with open_regular(path) as file, _arrow_errors(path):
        metadata = parquet.read_metadata(file)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        chunks = [group.column(j) for group in groups for j in range(group.num_columns)]
        packed = sum(chunk.total_compressed_size for chunk in chunks)
        return sum(chunk.total_uncompressed_size for chunk in chunks) / max(packed, 1)


def read_table(part: FileRange, options: ReadOptions, problems: Problems) -> Iterator[Row]:
    """(row number, text) of a range of a table. Null values are counted and skipped.

    Raises BadInput if the file is damaged or has no such column.
    """
    path = part.path
    open_regular(path).close()
    with _arrow_errors(path):
        columns = _columns(path, _schema(part), options.text_field)
        if part.format == "parquet":
            _refuse_bombs(part, columns)
        stream = tables.batches(part.format, path, list({parts[0]: 0 for parts in columns}), part.start, part.end)
    while True:
        with _arrow_errors(path):
            row, batch = next(stream, (0, None))
            if batch is None:
                return
            values = [_values(batch.column(batch.schema.get_field_index(names[0])), names[1:]) for names in columns]
        for record in zip(*values, strict=True):
            text = None
            present = [value for value in record if value is not None]
            try:
                size = sum(map(len, present))
                if size > formats.MAX_DOCUMENT:
                    detail = f"a text longer than {formats.MAX_DOCUMENT / 2**20:g} MiB"
                    problems.bad(path, row, "long document", detail, unit="row", size=size)
                elif present:
                    text = tables.join([utf8.decode(value, options, problems, path) for value in present])
                else:
                    problems.dropped[formats.NULL] += 1
            except UnicodeDecodeError:
                problems.bad(path, row, "invalid UTF-8", utf8.INVALID, unit="row", size=size)
            if text is not None:
                yield row, text
            row += 1


def _schema(part: FileRange) -> Any:
    import pyarrow.parquet as parquet

    if part.format != "parquet":
        return tables.arrow_reader(part.path).schema
    with open_regular(part.path) as file:
        return parquet.read_schema(file)


def _refuse_bombs(part: FileRange, columns: list[list[str]]) -> None:
    """Raises BadTable for a row group of a Parquet file whose columns unpack to much more than their size."""
    import pyarrow.parquet as parquet

    with open_regular(part.path) as file:
        metadata = parquet.read_metadata(file)
    for i in range(metadata.num_row_groups)[part.start : part.end]:
        group = metadata.row_group(i)
        for chunk in map(group.column, range(group.num_columns)):
            wanted = any(chunk.path_in_schema.startswith(parts[0]) for parts in columns)
            if wanted and chunk.total_uncompressed_size > max(BOMB_BYTES, BOMB_RATIO * chunk.total_compressed_size):
                raise BadTable(f"{part.path}: row group {i} unpacks to more than {BOMB_RATIO} times its size")


def _values(column: Any, path: list[str]) -> list[bytes | None]:
    """Texts at the end of `path` in an array, as bytes, after a check of the offsets; the caller checks UTF-8. Those of a list are
    joined."""
    import pyarrow
    import pyarrow.compute as compute
    import pyarrow.types as types

    if types.is_struct(column.type):
        return _values(compute.struct_field(column, path[0]), path[1:])
    if _is_list(column.type):
        column.validate()
        edges = column.offsets.to_numpy()  # int32 or int64 [n + 1]
        if edges[0] < 0 or (np.diff(edges) < 0).any() or edges[-1] > len(column.values):
            raise ValueError("offsets of a list")
        inner = _values(column.values[edges[0] : edges[-1]], path)
        places = (edges - edges[0]).tolist()
        lists = ([text for text in inner[a:b] if text is not None] for a, b in pairwise(places))
        null = column.is_null().to_pylist()
        joint = tables.JOINT.encode()
        return [joint.join(texts) if texts and not n else None for texts, n in zip(lists, null, strict=True)]
    if types.is_dictionary(column.type):
        column.validate()
        column.indices.validate(full=True)
        column = column.dictionary_decode()
    if types.is_null(column.type):
        return [None] * len(column)
    binary = column.cast(pyarrow.large_binary()) if types.is_string_view(column.type) else column
    if types.is_string(column.type):
        binary = column.view(pyarrow.binary())
    elif types.is_large_string(column.type):
        binary = column.view(pyarrow.large_binary())
    binary.validate(full=True)
    return binary.to_pylist()
