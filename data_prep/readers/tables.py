"""Reader of Parquet and Arrow tables.

Rows become texts a few at a time; nothing else of the file is kept in memory. Several workers can share a Parquet file by its
row groups, an Arrow file (with or without a footer, as Feather 2 and Hugging Face `datasets` write them) by its batches. Rows
are numbered from 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from data_prep.common.errors import BadInput, Problems
from data_prep.common.records import FileRange
from data_prep.readers import formats
from data_prep.readers.files import open_regular
from megabert.common import arrow_tables, fields
from megabert.common.arrow_tables import BadTable

Row = tuple[int, str]


@contextlib.contextmanager
def _arrow_errors(path: str) -> Iterator[None]:
    """Everything that pyarrow raises for bytes that are not a table, as BadInput."""
    try:
        with arrow_tables.errors(path):
            yield
    except BadTable as error:
        raise BadInput(str(error)) from None


def _columns(path: str, schema: Any, text_field: str) -> list[list[str]]:
    """Names from the outermost column to each text column.

    Raises BadTable listing the columns, or naming the type of one that is no text.
    """
    import pyarrow.types as types

    columns = []
    for name in fields.names(text_field, schema.names):
        try:
            parts = arrow_tables.locate(path, schema, name)
        except BadTable as error:
            raise BadTable(f"{error}; name one with --text-field") from None
        type_ = arrow_tables.type_of(schema, parts)
        if not (_is_text(type_) or types.is_null(type_)):
            raise BadTable(f"{path}: column {name!r} is {type_}, not text; name another with --text-field")
        columns.append(parts)
    return columns


def _is_text(type_: Any) -> bool:
    import pyarrow.types as types

    return any(
        is_type(type_)
        for is_type in (
            types.is_string,
            types.is_large_string,
            types.is_string_view,
            types.is_binary,
            types.is_large_binary,
        )
    )


def row_groups(path: str) -> int:
    """Number of row groups of a Parquet file. Raises BadInput when its footer can't be read."""
    import pyarrow.parquet as parquet

    with open_regular(path) as file, _arrow_errors(path):
        return int(parquet.read_metadata(file).num_row_groups)


def batches(path: str) -> int:
    """Number of batches of an Arrow file. Raises BadInput when it is damaged before its last batch."""
    import pyarrow
    from pyarrow import ipc

    open_regular(path).close()
    with _arrow_errors(path), pyarrow.memory_map(path) as file:  # bodies are not touched
        if file.read(6) == b"ARROW1":
            return int(ipc.open_file(file).num_record_batches)
        file.seek(0)
        return sum(1 for _ in ipc.open_stream(file))


def ratio(path: str) -> float:
    """Unpacked bytes a packed one of a Parquet file's columns. Raises BadInput when its footer can't be read."""
    import pyarrow.parquet as parquet

    with open_regular(path) as file, _arrow_errors(path):
        metadata = parquet.read_metadata(file)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        chunks = [group.column(j) for group in groups for j in range(group.num_columns)]
        packed = sum(chunk.total_compressed_size for chunk in chunks)
        return sum(chunk.total_uncompressed_size for chunk in chunks) / max(packed, 1)


def read_table(part: FileRange, text_field: str, problems: Problems) -> Iterator[Row]:
    """(row number, text) of a range of a table. Null values are counted and left out.

    Raises BadInput where the file is damaged or has no such column.
    """
    path = part.path
    with open_regular(path) as file:
        with _arrow_errors(path):
            schema = arrow_tables.schema_of(part.format, file)
            columns = _columns(path, schema, text_field)
        batches = arrow_tables.batches_of(part.format)(path, file, columns, part.start, part.end)
        while True:
            with _arrow_errors(path):
                batch = next(batches, None)
                if batch is None:
                    return
                row, arrays = batch
                values = [_values(array) for array in arrays]
            for record in zip(*values, strict=True):
                text = None
                values_of = [value for value in record if value is not None]
                try:
                    if sum(map(len, values_of)) > formats.MAX_DOCUMENT:
                        detail = f"a text longer than {formats.MAX_DOCUMENT / 2**20:g} MiB"
                        problems.bad(path, row, "long document", detail, unit="row")
                    elif values_of:
                        text = fields.join([value.decode() for value in values_of])
                    else:
                        problems.dropped[formats.NULL] += 1
                except UnicodeDecodeError:
                    problems.bad(path, row, "invalid UTF-8", unit="row")
                if text is not None:
                    yield row, text
                row += 1


def _values(column: Any) -> list[bytes | None]:
    """Values of an array as bytes, whose UTF-8 the caller checks. Checks the array's offsets first."""
    import pyarrow
    import pyarrow.types as types

    column = arrow_tables.plain(column)
    if types.is_null(column.type):
        return [None] * len(column)
    binary = column.cast(pyarrow.large_binary()) if types.is_string_view(column.type) else column
    if types.is_string(column.type):
        binary = column.view(pyarrow.binary())
    elif types.is_large_string(column.type):
        binary = column.view(pyarrow.large_binary())
    binary.validate(full=True)
    return binary.to_pylist()
