"""Writers of vectors: .npz, .parquet and .safetensors files, in parts, so that they may be larger than memory.

Parts are spooled beside the output (`megabert.common.spool`), so that the same command goes on after a kill; the output
appears when all are there.

Tokens: `vectors` [N, D] and `ids` int32 [N] of all texts behind each other, those of text i in
`offsets[i]:offsets[i + 1]` (int64 [n + 1]). Pooled: `vectors` [n, D]. Both: `truncated` bool [n], the texts that lost
their end. Parquet has a row a text: `vector`, or lists `vectors`, `ids`, `pieces`. What the vectors are is told by
`about` (.npz: JSON in an array; else in the file's metadata), what the ids mean by `pieces`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megabert.common.atomic_io import appearing_file
from megabert.common.spool import Spool

COPIED = 1 << 20  # bytes at once
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


class Column:
    """An array of unknown length in a file of its own, until its length is known."""

    def __init__(self, file: IO[bytes], dtype: str, *shape: int) -> None:
        self.file, self.dtype, self.tail = file, np.dtype(dtype), shape
        self.row = self.dtype.itemsize * math.prod(shape)  # bytes
        self.rows = file.tell() // self.row

    def add(self, values: np.ndarray) -> None:
        assert values.shape[1:] == self.tail
        self.file.write(np.ascontiguousarray(values, self.dtype).data)
        self.rows += len(values)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.tail)

    @property
    def size(self) -> int:
        return self.rows * self.row

    def copy_to(self, target: IO[bytes]) -> None:
        self.file.seek(0)
        shutil.copyfileobj(self.file, target, COPIED)

    def read(self, first: int, rows: int) -> np.ndarray:
        """[rows, …]"""
        self.file.seek(first * self.row)
        return np.frombuffer(self.file.read(rows * self.row), self.dtype).reshape(-1, *self.tail)


class Writer:
    """Columns of parts; `texts` are those that were written before this process began."""

    def __init__(self, spool: Spool, form: Form) -> None:
        self.spool, self.form = spool, form
        files = spool.files
        self.columns = {
            "vectors": Column(files["vectors"], form.dtype, form.width),
            "truncated": Column(files["truncated"], "bool"),
        }
        if not form.pooled:
            self.columns |= {"ids": Column(files["ids"], "int32"), "offsets": Column(files["offsets"], "int64")}
            if not self.columns["offsets"].rows:
                self.columns["offsets"].add(np.zeros(1))
        self.parts = Column(files["parts"], "int64")  # texts of each
        self.texts = self.columns["truncated"].rows
        self.truncated = int(spool.state.get("truncated", 0))

    def add(self, part: Part) -> None:
        self.columns["vectors"].add(part.vectors)
        self.columns["truncated"].add(part.truncated)
        self.parts.add(np.array([len(part.lengths)]))
        self.truncated += int(part.truncated.sum())
        if not self.form.pooled:
            tokens = self.columns["ids"].rows
            self.columns["ids"].add(part.ids)
            self.columns["offsets"].add(tokens + part.lengths.cumsum())
        self.spool.advance({"truncated": self.truncated})


def _npz(file: BinaryIO, writer: Writer) -> None:
    """np.savez and safetensors' save_file take whole arrays: 586 MB of vectors, mapped from a file, made 629 and 612 MB of
    resident memory (numpy 2, safetensors 0.8). Copied as here, more than 60 MB of vectors take less than 15 (a test)."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, column in writer.columns.items():
            header = {
                "descr": np.lib.format.dtype_to_descr(column.dtype),
                "fortran_order": False,
                "shape": column.shape,
            }
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, header)
                column.copy_to(member)
        about, pieces = _told(writer.form)
        for name, values in (about | pieces).items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, np.array(values), allow_pickle=False)


def _safetensors(file: BinaryIO, writer: Writer) -> None:
    """The published layout: the header's length (u64), a JSON header, the tensors' bytes, the widest type first so that
    each is aligned."""
    about, pieces = _told(writer.form)
    ordered = sorted(writer.columns.items(), key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": about | {name: json.dumps(values) for name, values in pieces.items()}}
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


def _parquet(file: BinaryIO, writer: Writer) -> None:
    """A row group a part."""
    form, columns = writer.form, writer.columns
    vector = pa.list_(pa.float32() if form.dtype == "float32" else pa.float16(), form.width)
    fields: dict[str, pa.DataType] = {"vector": vector}
    if not form.pooled:
        fields = {"ids": pa.list_(pa.int32()), "pieces": pa.list_(pa.string()), "vectors": pa.list_(vector)}
    schema = pa.schema([*fields.items(), ("truncated", pa.bool_())], {"about": json.dumps(form.about)})
    first = 0
    # Dictionaries of vectors would only be tried and given up.
    with pq.ParquetWriter(file, schema, use_dictionary=False) as target:
        for texts in writer.parts.read(0, writer.parts.rows).tolist():
            start, rows = first, texts
            if not form.pooled:
                offsets = columns["offsets"].read(first, texts + 1)
                start, rows = int(offsets[0]), int(offsets[-1] - offsets[0])
            flat = pa.array(columns["vectors"].read(start, rows).reshape(-1))
            vectors = pa.FixedSizeListArray.from_arrays(flat, form.width)
            found = [vectors]
            if not form.pooled:
                ids = columns["ids"].read(start, rows)
                pieces = pa.array([form.pieces[i] for i in ids.tolist()], pa.string())
                own = pa.array((offsets - start).astype(np.int32))
                found = [pa.ListArray.from_arrays(own, values) for values in (pa.array(ids), pieces, vectors)]
            truncated = pa.array(columns["truncated"].read(first, texts))
            target.write_table(pa.table([*found, truncated], schema=schema))
            first += texts


def _told(form: Form) -> tuple[dict[str, str], dict[str, list[str]]]:
    """(`about`, `pieces` where there are ids)."""
    return {"about": json.dumps(form.about)}, {} if form.pooled else {"pieces": form.pieces}


WRITERS: dict[str, Callable[[BinaryIO, Writer], None]] = {
    ".npz": _npz,
    ".parquet": _parquet,
    ".safetensors": _safetensors,
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
def appearing(path: Path, form: Form, facts: Mapping[str, Any]) -> Iterator[Writer]:
    """A writer of parts, whose file is `path` when the block ends without an error.

    After a kill it goes on where the one before it was, if `facts` (all that decides the vectors) are the same. Raises as
    `check` and `Spool`, and OSError.
    """
    check(path)
    names = ["vectors", "truncated", "parts", *([] if form.pooled else ["ids", "offsets"])]
    decides = {"about": form.about, "width": form.width, "dtype": form.dtype, "pooled": form.pooled, **facts}
    with Spool(path, decides, names) as spool:
        writer = Writer(spool, form)
        yield writer
        spool.commit()
        with appearing_file(path) as file:
            WRITERS[path.suffix](file, writer)
        spool.finish()
