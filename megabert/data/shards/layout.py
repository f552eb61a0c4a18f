"""Byte layout of a shard, and its writer. The offset of every header and row is known before a byte is read."""

from __future__ import annotations

import hashlib
import os
import tarfile
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megabert.common.files import atomic_file

TAR_UNIT = 512
TAR_END = b"\0" * (2 * TAR_UNIT)
NPY_HEADER = 128
HEADER = TAR_UNIT + NPY_HEADER
# digits of a block's number, which a member's name begins with
KEY = 9
# offset of the sum of a header's bytes in a tar header, six octal digits
CHECKSUM = 148


class BlockLayout:
    """Offsets inside a block of `rows` rows: `members` maps a name to (npy header, data offset, bytes a row)."""

    def __init__(self, rows: int, seq_len: int, max_sequences: int, dtype: str) -> None:
        self.rows, self.bytes = rows, 0
        self.members: dict[str, tuple[bytes, int, int]] = {}
        self._headers: dict[str, tuple[bytes, bytes, int]] = {}
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "ids": (np.dtype(dtype).newbyteorder("<").str, (rows, seq_len)),
            "bounds": ("<u2", (rows, max_sequences, 2)),
            "isnext": ("|i1", (rows, max_sequences)),
            "crc": ("<u4", (rows,)),
        }
        for name, (descr, shape) in shapes.items():
            text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
            npy = b"\x93NUMPY\x01\x00" + (NPY_HEADER - 10).to_bytes(2, "little") + text.ljust(NPY_HEADER - 11) + b"\n"
            assert len(npy) == NPY_HEADER
            row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * np.dtype(descr).itemsize
            size = NPY_HEADER + rows * row_bytes
            self.members[name] = (npy, self.bytes + HEADER, row_bytes)
            self._headers[name] = _tar_header(name, size)
            self.bytes += TAR_UNIT - (-size // TAR_UNIT) * TAR_UNIT
        self.row = np.dtype([(name, f"V{self.members[name][2]}") for name in ("ids", "bounds", "isnext")])

    def header(self, name: str, block: int) -> bytes:
        """The tar and npy headers of one member: constant except for the key and its share of tar's checksum."""
        key = b"%09d" % block
        assert len(key) == KEY
        before, after, rest = self._headers[name]
        return b"%s%s%06o%s%s" % (key, before, rest + sum(key), after, self.members[name][0])

    def views(self, data: Any, start: int, blocks: int) -> dict[str, np.ndarray]:
        """Views [blocks, rows] of each member of the blocks in `data` from byte `start` on; no bytes are read.

        Checksums are uint32; a row of any other member is one opaque element.
        """
        return {
            name: np.ndarray(
                (blocks, self.rows),
                "<u4" if name == "crc" else f"V{row_bytes}",
                buffer=data,
                offset=start + offset,
                strides=(self.bytes, row_bytes),
            )
            for name, (_, offset, row_bytes) in self.members.items()
        }


def _tar_header(name: str, size: int) -> tuple[bytes, bytes, int]:
    """Parts of member 0's ustar header: before and after the checksum, and the checksum less the key's share."""
    info = tarfile.TarInfo(f"{0:0{KEY}d}.{name}.npy")
    info.size, info.mode = size, 0o644
    header = info.tobuf(tarfile.USTAR_FORMAT)
    end = CHECKSUM + 6
    return header[KEY:CHECKSUM], header[end:], int(header[CHECKSUM:end], 8) - sum(header[:KEY])


@lru_cache(maxsize=64)  # all shards of a dataset but the last have the same size
def shard_bytes(rows: int, block_rows: int, seq_len: int, max_sequences: int, dtype: str) -> int:
    """Size in bytes of a shard of `rows` rows."""
    full, rest = divmod(rows, block_rows)
    size = full * BlockLayout(block_rows, seq_len, max_sequences, dtype).bytes + len(TAR_END)
    return size + (BlockLayout(rest, seq_len, max_sequences, dtype).bytes if rest else 0)


def checksums(rows: np.ndarray) -> np.ndarray:
    """zlib.crc32 of each packed row, uint32 [n]; `rows` is a structured array of ids, bounds, isnext."""
    return np.fromiter(map(zlib.crc32, rows.view(f"V{rows.itemsize}").tolist()), np.uint32, len(rows))


def write_shard(
    path: str | os.PathLike[str],
    first_block: int,
    ids: np.ndarray,
    bounds: np.ndarray,
    isnext: np.ndarray,
    block_rows: int = 256,
) -> dict[str, Any]:
    """Write the shard of ids [n, T] (uint16 or uint32), bounds [n, S, 2] and isnext [n, S] atomically.

    `first_block` is the global number of its first block. Returns its manifest entry: name, rows, bytes, sha256.
    The bytes depend on the arguments alone. OSError (a full disk) leaves no file behind.
    """
    path, n = Path(path), len(ids)
    max_sequences = bounds.shape[1]
    assert n > 0 and ids.ndim == 2 and ids.dtype in (np.uint16, np.uint32), "ids must be uint16 or uint32 [n, T]"
    assert bounds.shape == (n, max_sequences, 2) and bounds.dtype == np.uint16, "bounds must be uint16 [n, S, 2]"
    assert isnext.shape == (n, max_sequences) and isnext.dtype == np.int8, "isnext must be int8 [n, S]"
    digest, size = hashlib.sha256(), 0
    with atomic_file(path) as file:
        for first in range(0, n, block_rows):
            part = slice(first, min(n, first + block_rows))
            layout = BlockLayout(part.stop - first, ids.shape[1], max_sequences, ids.dtype.name)
            packed = np.empty(layout.rows, layout.row)
            for name, array in (("ids", ids), ("bounds", bounds), ("isnext", isnext)):
                flat = np.ascontiguousarray(array[part]).reshape(layout.rows, -1)
                packed[name] = flat.view(layout.row[name]).ravel()
            data = bytearray(layout.bytes)
            for name, (_, offset, _) in layout.members.items():
                payload = (checksums(packed) if name == "crc" else packed[name]).tobytes()
                data[offset - HEADER : offset] = layout.header(name, first_block + first // block_rows)
                data[offset : offset + len(payload)] = payload
            size += file.write(data)
            digest.update(data)
        size += file.write(TAR_END)
        digest.update(TAR_END)
    return {"name": path.name, "rows": n, "bytes": size, "sha256": digest.hexdigest()}
