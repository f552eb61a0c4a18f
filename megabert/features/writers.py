"""Writers of vectors: .npz, .parquet and .safetensors files, in parts, so that they may be larger than memory.

Tokens: `vectors` [N, D] and `ids` int32 [N] of all texts behind each other, those of text i in
`offsets[i]:offsets[i + 1]` (int64 [n + 1]). Pooled: `vectors` [n, D]. Both: `truncated` bool [n], the texts that lost
their end. Parquet has a row a text: `vector`, or lists `vectors`, `ids`, `pieces`. What the vectors are is told by
`about` (.npz: JSON in an array; else in the file's metadata), what the ids mean by `pieces`.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megabert.common.atomic_io import appearing_file

COPIED = 1 << 24  # bytes at once
SAFETENSORS = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "bool": "BOOL"}


@dataclass(frozen=True)
class Form:
    """What does not change from part to part; `pieces` are the tokenizer's, by id, and `about` is for the reader."""

    width: int
    dtype: str  # "float32" or "float16"
    pooled: bool
    pieces: list[str]
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """The next n texts in the order of the input, N tokens in all."""

    vectors: np.ndarray  # [n, D] where pooled, else [N, D]
    ids: np.ndarray  # int32 [N]
    lengths: np.ndarray  # int64 [n], tokens of each text
    truncated: np.ndarray  # bool [n]


class Writer(Protocol):
    def add(self, part: Part) -> None: ...

    def finish(self) -> None: ...


class Column:
    """An array of unknown length, kept in a nameless file until its length is known."""

    def __init__(self, file: IO[bytes], dtype: str, *shape: int) -> None:
        self.file, self.dtype, self.tail, self.rows = file, np.dtype(dtype), shape, 0

    def add(self, values: np.ndarray) -> None:
        assert values.shape[1:] == self.tail
        self.file.write(np.ascontiguousarray(values, self.dtype).data)
        self.rows += len(values)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.tail)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def copy_to(self, target: IO[bytes]) -> None:
        self.file.seek(0)
        shutil.copyfileobj(self.file, target, COPIED)


class Arrays:
    """.npz and .safetensors want the length of an array before its values, so `write` comes at the end.

    np.savez and safetensors' save_file take whole arrays: 586 MB of vectors, mapped from a file, made 629 and 612 MB of
    resident memory (numpy 2, safetensors 0.8). Copied as here, more than 60 MB of vectors take less than 15 (a test).
    """

    def __init__(self, file: BinaryIO, form: Form, stack: ExitStack, write: Callable[..., None]) -> None:
        def column(dtype: str, *shape: int) -> Column:
            folder = Path(file.name).parent
            return Column(stack.enter_context(tempfile.TemporaryFile(dir=folder)), dtype, *shape)

        self.file, self.form, self.write = file, form, write
        self.columns = {"vectors": column(form.dtype, form.width), "truncated": column("bool")}
        if not form.pooled:
            self.columns |= {"ids": column("int32"), "offsets": column("int64")}
            self.columns["offsets"].add(np.zeros(1))
        self.tokens = 0

    def add(self, part: Part) -> None:
        self.columns["vectors"].add(part.vectors)
        self.columns["truncated"].add(part.truncated)
        if not self.form.pooled:
            self.columns["ids"].add(part.ids)
            self.columns["offsets"].add(self.tokens + part.lengths.cumsum())
            self.tokens += int(part.lengths.sum())

    def finish(self) -> None:
        about = {"about": json.dumps(self.form.about)}
        pieces = {} if self.form.pooled else {"pieces": self.form.pieces}
        self.write(self.file, self.columns, about, pieces)


def _npz(
    file: BinaryIO, columns: Mapping[str, Column], about: dict[str, str], pieces: dict[str, list[str]]
) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, column in columns.items():
            header = {
                "descr": np.lib.format.dtype_to_descr(column.dtype),
                "fortran_order": False,
                "shape": column.shape,
            }
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, header)
                column.copy_to(member)
        for name, values in (about | pieces).items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, np.array(values), allow_pickle=False)


def _safetensors(
    file: BinaryIO, columns: Mapping[str, Column], about: dict[str, str], pieces: dict[str, list[str]]
) -> None:
    """The published layout: the header's length (u64), a JSON header, the tensors' bytes, the widest type first so that
    each is aligned."""
    ordered = sorted(columns.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {
        "__metadata__": about | {name: json.dumps(values) for name, values in pieces.items()}
    }
    end = 0
    for name, column in ordered:
        start, end = end, end + column.size
        kind = SAFETENSORS[column.dtype.name]
        header[name] = {"dtype": kind, "shape": list(column.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, column in ordered:
        column.copy_to(file)


class Parquet:
    """A row group a part."""

    def __init__(self, file: BinaryIO, form: Form, stack: ExitStack) -> None:
        self.form = form
        vector = pa.list_(pa.float32() if form.dtype == "float32" else pa.float16(), form.width)
        fields: dict[str, pa.DataType] = {"vector": vector}
        if not form.pooled:
            fields = {
                "ids": pa.list_(pa.int32()),
                "pieces": pa.list_(pa.string()),
                "vectors": pa.list_(vector),
            }
        metadata = {"about": json.dumps(form.about)}
        self.schema = pa.schema([*fields.items(), ("truncated", pa.bool_())], metadata)
        # Dictionaries of vectors would only be tried and given up.
        self.writer = stack.enter_context(pq.ParquetWriter(file, self.schema, use_dictionary=False))

    def add(self, part: Part) -> None:
        flat = pa.array(np.ascontiguousarray(part.vectors, self.form.dtype).reshape(-1))
        vectors = pa.FixedSizeListArray.from_arrays(flat, self.form.width)
        columns = [vectors]
        if not self.form.pooled:
            offsets = pa.array(np.concatenate([[0], part.lengths.cumsum()]).astype(np.int32))
            pieces = [self.form.pieces[i] for i in part.ids.tolist()]
            columns = [
                pa.ListArray.from_arrays(offsets, values)
                for values in (pa.array(part.ids), pa.array(pieces, pa.string()), vectors)
            ]
        self.writer.write_table(pa.table([*columns, pa.array(part.truncated)], schema=self.schema))

    def finish(self) -> None:
        self.writer.close()


WRITERS: dict[str, Callable[[BinaryIO, Form, ExitStack], Writer]] = {
    ".npz": lambda file, form, stack: Arrays(file, form, stack, _npz),
    ".parquet": Parquet,
    ".safetensors": lambda file, form, stack: Arrays(file, form, stack, _safetensors),
}


def check(path: Path) -> None:
    """Raises ValueError for a file that cannot become one: another ending, or there already, or in no folder."""
    if path.suffix not in WRITERS:
        raise ValueError(f"{path}: must end in {', '.join(WRITERS)}")
    if os.path.lexists(path):
        raise ValueError(f"{path}: is there already; name another file")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent}: no such folder")


@contextmanager
def appearing(path: Path, form: Form) -> Iterator[Writer]:
    """A writer of parts, whose file is `path` when the block ends without an error. Raises as `check`, and OSError."""
    check(path)
    with appearing_file(path) as file, ExitStack() as stack:
        writer = WRITERS[path.suffix](file, form, stack)
        yield writer
        writer.finish()
