"""Reader of Parquet and Arrow tables.

Rows become texts a few at a time; nothing else of the file is kept in memory. Several workers can share a Parquet file by its
row groups, an Arrow file (with or without a footer, as Feather 2 and Hugging Face `datasets` write them) by its batches. A
row has a number, from 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

from data_prep.common.errors import BadInput, Problems
from data_prep.readers import fields, formats
from data_prep.readers.decompress import BOMB_BYTES, BOMB_RATIO, open_regular

BATCH_ROWS = 256

Row = tuple[int, str]


@contextlib.contextmanager
def _arrow_errors(path: str) -> Iterator[None]:
    """Everything that pyarrow raises for bytes that are not a table, as BadInput."""
    import pyarrow

    try:
        yield
    except BadInput:
        raise
    except MemoryError:
        raise BadInput(f"{path}: damaged table (its sizes ask for more memory than there is)") from None
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, IndexError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{path}: damaged or truncated table ({reason})") from None


def _columns(path: str, schema: Any, text_field: str) -> list[list[str]]:
    """Names from the outermost column to each text column. Raises BadInput as `_column` does."""
    return [_column(path, schema, name) for name in fields.names(text_field, schema.names)]


def _column(path: str, schema: Any, field: str) -> list[str]:
    """Names from the outermost column to the text column.

    Raises BadInput listing the columns, or naming its type when that is no text.
    """
    import pyarrow.types as types

    names = list(schema.names)
    parts = fields.path(field, names)
    if names.count(parts[0]) != 1:
        listed = ", ".join(names) or "none"
        raise BadInput(f"{path}: no column {field!r} (it has {listed}); name one with --text-field")
    type_ = schema.field(parts[0]).type
    for depth, part in enumerate(parts[1:], 1):
        inside = [inner.name for inner in type_] if types.is_struct(type_) else []
        if inside.count(part) != 1:
            outer = ".".join(parts[:depth])
            raise BadInput(
                f"{path}: no column {field!r} ({outer} has {', '.join(inside) or 'none inside'}); "
                "name one with --text-field"
            )
        type_ = type_.field(part).type
    if types.is_dictionary(type_):
        type_ = type_.value_type
    if not (_is_text(type_) or types.is_null(type_)):
        raise BadInput(f"{path}: column {field!r} is {type_}, not text; name another with --text-field")
    return parts


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


def read_table(
    path: str, format_: str, start: int, end: int | None, text_field: str, problems: Problems
) -> Iterator[Row]:
    """(row number, text) of a table, of its row groups or batches [start, end). Null values are counted and left out.

    Raises BadInput where the file is damaged or has no such column.
    """
    with open_regular(path) as file:
        batches = (
            _parquet(path, file, start, end, text_field)
            if format_ == "parquet"
            else _arrow(path, file, start, end, text_field)
        )
        while True:
            with _arrow_errors(path):
                batch = next(batches, None)
                if batch is None:
                    return
                row, columns = batch
                values = [_values(column) for column in columns]
            for record in zip(*values, strict=True):
                text = None
                try:
                    text = fields.join([None if value is None else value.decode() for value in record])
                    if text is None:
                        problems.dropped[formats.NULL] += 1
                except UnicodeDecodeError:
                    problems.bad(path, row, "invalid UTF-8", unit="row")
                if text is not None:
                    yield row, text
                row += 1


def _inside(batch: Any, path: list[str]) -> Any:
    """The array of a column inside others, of a RecordBatch; null where one of those is."""
    import pyarrow.compute as compute

    column = batch.column(batch.schema.get_field_index(path[0]))
    return compute.struct_field(column, path[1:]) if path[1:] else column


def _values(column: Any) -> list[bytes | None]:
    """Values of an array as bytes: whether they are UTF-8 is for us to say. Checks the array's offsets first."""
    import pyarrow
    import pyarrow.types as types

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


def _parquet(
    path: str, file: Any, start: int, end: int | None, text_field: str
) -> Iterator[tuple[int, list[Any]]]:
    import pyarrow.parquet as parquet

    table = parquet.ParquetFile(file, memory_map=False, pre_buffer=False)
    metadata = table.metadata
    columns = _columns(path, table.schema_arrow, text_field)
    named = [".".join(parts) for parts in columns]
    groups = range(start, metadata.num_row_groups if end is None else end)
    row = sum(metadata.row_group(i).num_rows for i in range(start))
    for i in groups:
        group = metadata.row_group(i)
        for j in range(group.num_columns):
            chunk = group.column(j)
            if chunk.path_in_schema not in named:
                continue
            size, packed = chunk.total_uncompressed_size, chunk.total_compressed_size
            if size > max(BOMB_BYTES, BOMB_RATIO * packed):
                raise BadInput(f"{path}: row group {i} unpacks to more than {BOMB_RATIO} times its size")
    for batch in table.iter_batches(BATCH_ROWS, row_groups=list(groups), columns=named, use_threads=False):
        yield row, [_inside(batch, parts) for parts in columns]
        row += batch.num_rows


def _arrow(
    path: str, file: Any, start: int, end: int | None, text_field: str
) -> Iterator[tuple[int, list[Any]]]:
    import pyarrow
    from pyarrow import ipc

    has_footer = file.read(6) == b"ARROW1"
    file.seek(0)
    source = ipc.open_file(file) if has_footer else ipc.open_stream(file)
    columns = _columns(path, source.schema, text_field)
    outer = sorted({source.schema.get_field_index(parts[0]) for parts in columns})
    if start:  # the batches before are passed over without being read
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
