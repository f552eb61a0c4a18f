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
from data_prep.common.errors import BadInput, NoTextField, Problems
from data_prep.common.records import FileRange, ReadOptions
from data_prep.readers import streams
from data_prep.readers.decompress import BOMB_BYTES, BOMB_RATIO
from data_prep.readers.files import open_regular
from data_prep.readers.streams import LONG_DOCUMENT, NULL
from megabert.common import tables
from megabert.common.tables import BadTable


class _NoColumn(BadTable):
    """A table without a column of texts of that name."""


@contextlib.contextmanager
def _arrow_errors(path: str) -> Iterator[None]:
    """Converts errors of tables to BadInput."""
    try:
        with tables.arrow_errors(path):
            yield
    except _NoColumn as error:
        raise NoTextField(str(error)) from None
    except BadTable as error:
        raise BadInput(str(error)) from None


def _row_groups(path: str) -> tuple[Any, list[Any]]:
    """The schema of a Parquet file, and the metadata of its row groups. Raises pyarrow's errors."""
    import pyarrow.parquet as parquet

    with open_regular(path) as file:
        metadata = parquet.read_metadata(file)
    return metadata.schema.to_arrow_schema(), [metadata.row_group(i) for i in range(metadata.num_row_groups)]


def _columns_of(group: Any) -> list[Any]:
    return [group.column(i) for i in range(group.num_columns)]


def count_parts(file: FileRange) -> int:
    """Number of row groups of a Parquet file, or batches of an Arrow file. Raises BadInput when it is damaged before its last part."""
    open_regular(file.path).close()
    with _arrow_errors(file.path):
        if file.format == "parquet":
            return len(_row_groups(file.path)[1])
        reader = tables.arrow_reader(file.path)  # bodies are not touched
        return reader.num_record_batches if hasattr(reader, "num_record_batches") else sum(1 for _ in reader)


def ratio(path: str) -> float:
    """Unpacked bytes per packed byte of a Parquet file's columns. Raises BadInput if its footer can't be read."""
    with _arrow_errors(path):
        chunks = [chunk for group in _row_groups(path)[1] for chunk in _columns_of(group)]
        packed = sum(chunk.total_compressed_size for chunk in chunks)
        return sum(chunk.total_uncompressed_size for chunk in chunks) / max(packed, 1)


def read_table(part: FileRange, options: ReadOptions, problems: Problems) -> Iterator[tuple[int, str]]:
    """(row number, text) of a range of a table. Null values are counted and skipped.

    Raises BadInput if the file is damaged, NoTextField if it has no such column.
    """
    path = part.path
    open_regular(path).close()
    with _arrow_errors(path):
        schema, groups = _row_groups(path) if part.format == "parquet" else (tables.arrow_reader(path).schema, [])
        columns = _find_columns(path, schema, options.text_field)
        outermost = list({names[0]: 0 for names in columns})
        read = tuple(f"{name}." for name in outermost)
        for i in range(len(groups))[part.start : part.end]:
            for chunk in _columns_of(groups[i]):
                bomb = chunk.total_uncompressed_size > max(BOMB_BYTES, BOMB_RATIO * chunk.total_compressed_size)
                if bomb and f"{chunk.path_in_schema}.".startswith(read):
                    raise BadTable(f"{path}: row group {i} unpacks to more than {BOMB_RATIO} times its size")
        stream = tables.batches(part.format, path, outermost, part.start, part.end)
    while True:
        with _arrow_errors(path):
            first, batch = next(stream, (0, None))
            if batch is None:
                return
            values = [_values(batch.column(batch.schema.get_field_index(names[0])), names[1:]) for names in columns]
        for row, record in enumerate(zip(*values, strict=True), first):
            present = [value for value in record if value is not None]
            size = sum(map(len, present))
            if not present:
                problems.dropped[NULL] += 1
            elif size > streams.MAX_DOCUMENT:
                detail = f"a text longer than {streams.MAX_DOCUMENT / 2**20:g} MiB"
                problems.bad(path, row, LONG_DOCUMENT, detail, unit="row", size=size)
            else:
                try:
                    text = tables.JOINT.join(utf8.decode(value, options, problems, path) for value in present)
                except UnicodeDecodeError:
                    problems.bad(path, row, "invalid UTF-8", utf8.INVALID, unit="row", size=size)
                    continue
                yield row, text


def _find_columns(path: str, schema: Any, text_field: str) -> list[list[str]]:
    """Names from the outermost column to each column of texts or lists of texts.

    Raises _NoColumn listing the columns, or naming the type of a column that is not text.
    """
    import pyarrow.types as types

    columns = []
    for name in tables.field_names(text_field, schema.names):
        has, type_, path_of = list(schema), schema, []
        for part in tables.field_path(name, schema.names):
            field = next((field for field in has if field.name in (part, part.removesuffix("[]"))), None)
            if field is None:
                names = ", ".join(field.name for field in has) or "none"
                raise _NoColumn(f"{path}: no column {name!r} (it has {names}); name one with --text-field")
            if [other.name for other in has].count(field.name) > 1:
                raise _NoColumn(f"{path}: two columns {field.name!r}; rename one")
            path_of.append(field.name)
            type_ = field.type
            inner = type_.value_type if part.endswith("[]") and _is_list(type_) else type_
            has = list(inner) if types.is_struct(inner) else []
        if _is_list(type_):
            type_ = type_.value_type
        if types.is_dictionary(type_):
            type_ = type_.value_type
        texts = types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary
        if not any(is_type(type_) for is_type in (*texts, types.is_null)):
            raise _NoColumn(f"{path}: column {name!r} is {type_}, not text; name another with --text-field")
        columns.append(path_of)
    return columns


def _is_list(type_: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(type_) or types.is_large_list(type_))


def _values(column: Any, path: list[str]) -> list[bytes | None]:
    """Texts of the field `path` in an Arrow array, as bytes; those of a list joined. Validates offsets, not UTF-8."""
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
