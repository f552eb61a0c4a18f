"""Nothing read from a shard is used before its checksum was compared, and nothing in a shard is ever executed.

A dataset is a folder: `manifest.json`, a tokenizer file and shards. A shard is a plain ustar tar of blocks, one webdataset
sample a block, and its bytes are a function of its arrays alone: every header is known in advance, so a row's byte
offset follows from the manifest, rows are read through a read-only map without parsing anything, and `verify` compares
headers instead of interpreting them. Legend: n rows asked for, R rows a block, T row length, S sequences a row.

    KEY.ids.npy     uint16 | uint32 [R, T]   token ids, padded at the tail with 0
    KEY.bounds.npy  uint16 [R, S, 2]         (length, length of `[CLS] A [SEP]`) of each sequence, unused slots 0, 0
    KEY.isnext.npy  int8   [R, S]            0 = B really follows A, 1 = random B, -1 = no pair or unused slot
    KEY.crc.npy     uint32 [R]               zlib.crc32 of the row's ids, bounds and isnext bytes, in that order
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import re
import tarfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MANIFEST = "manifest.json"
TAR_UNIT = 512
TAR_END = b"\0" * (2 * TAR_UNIT)
NPY_HEADER = 128
HEADER = TAR_UNIT + NPY_HEADER
OPEN_SHARDS = 256  # maps kept open at once: each holds a file descriptor


class DamagedRow(ValueError):
    """A row whose bytes are not the bytes that were written; the text names shard, block, row and byte offset."""


# --- manifest ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """One shard as the manifest lists it: file name, rows, size in bytes, SHA-256 in hex."""

    name: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """`manifest.json`, checked strictly. `fingerprint` is the SHA-256 of its canonical JSON (sorted keys, no spaces)."""

    seq_len: int
    max_sequences: int
    rows: int
    block_rows: int
    dtype: str
    tokenizer: dict[str, Any]
    statistics: dict[str, Any]
    options: dict[str, Any]
    shards: tuple[Shard, ...]
    held_out: dict[str, Any] | None
    fingerprint: str = field(repr=False)

    @property
    def rows_per_shard(self) -> int:
        """Rows of every shard but the last."""
        return self.shards[0].rows

    @property
    def vocab_size(self) -> int:
        return self.tokenizer["vocab_size"]

    @property
    def special_ids(self) -> dict[str, int]:
        return self.tokenizer["special_ids"]

    @staticmethod
    def load(folder: str | os.PathLike[str]) -> Manifest:
        """Read and check `folder/manifest.json`. ValueError names the file and the field."""
        path = Path(folder) / MANIFEST
        try:
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"{path}: not found; a dataset is made by `python -m data_prep build`") from None
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not valid JSON ({error}); rebuild the dataset") from None
        return Manifest.parse(raw, str(path))

    @staticmethod
    def parse(raw: Any, where: str = MANIFEST) -> Manifest:
        """Check a manifest as parsed from JSON; `where` is the file name that errors begin with."""

        def bad(name: str, why: str) -> ValueError:
            return ValueError(f"{where}: {name} {why}")

        def get(table: dict[str, Any], name: str, kind: type, low: int = 0, high: int = 2**62) -> Any:
            value = table.get(name.rsplit(".", 1)[-1])
            if type(value) is not kind:
                raise bad(name, f"must be of type {kind.__name__}, is {value!r:.60}")
            if type(value) is int and not low <= value <= high:
                raise bad(name, f"must lie in {low}..{high}, is {value}")
            return value

        def sha(table: dict[str, Any], name: str) -> str:
            if not re.fullmatch("[0-9a-f]{64}", value := get(table, name, str)):
                raise bad(name, f"must be 64 hex digits, is {value!r:.60}")
            return value

        if type(raw) is not dict:
            raise bad("the file", "must hold one JSON object")
        known = {
            "schema",
            "seq_len",
            "max_sequences",
            "rows",
            "block_rows",
            "dtype",
            "tokenizer",
            "statistics",
        }
        known |= {"options", "shards", "held_out"}
        for name in sorted(known ^ raw.keys()):
            raise bad(name, "is missing" if name in known else "is not a field of schema 1")
        get(raw, "schema", int, 1, 1)
        seq_len = get(raw, "seq_len", int, 4, 65535)
        max_sequences = get(raw, "max_sequences", int, 1, seq_len)
        rows = get(raw, "rows", int, 1)
        block_rows = get(raw, "block_rows", int, 1, 2**20)
        tokenizer = get(raw, "tokenizer", dict)
        if get(tokenizer, "tokenizer.kind", str) != "sentencepiece":
            raise bad("tokenizer.kind", f"must be 'sentencepiece', is {tokenizer['kind']!r:.60}")
        if not re.fullmatch(r"(\.\./)?\w[\w.-]*", file := get(tokenizer, "tokenizer.file", str)):
            raise bad(
                "tokenizer.file", f"must name a file in the dataset's folder or its parent, is {file!r:.60}"
            )
        sha(tokenizer, "tokenizer.sha256")
        vocab = get(tokenizer, "tokenizer.vocab_size", int, 6, 2**31 - 1)
        special = get(tokenizer, "tokenizer.special_ids", dict)
        for name in special.keys() | {"pad", "unk", "cls", "sep", "mask"}:
            get(special, f"tokenizer.special_ids.{name}", int, 0, vocab - 1)
        if len(set(special.values())) < len(special) or special["pad"] != 0:
            raise bad("tokenizer.special_ids", "must be distinct, with pad 0")
        dtype = get(raw, "dtype", str)
        if dtype != (want := "uint32" if vocab > 65535 else "uint16"):
            raise bad("dtype", f"must be {want!r} for {vocab} pieces, is {dtype!r:.60}")
        shards: list[Shard] = []
        listed = get(raw, "shards", list)
        for i, entry in enumerate(listed):
            at = f"shards[{i}]"
            if type(entry) is not dict or entry.keys() != {"name", "rows", "bytes", "sha256"}:
                raise bad(at, "must hold name, rows, bytes and sha256")
            if get(entry, f"{at}.name", str) != f"shard-{i:06d}.tar":
                raise bad(f"{at}.name", f"must be 'shard-{i:06d}.tar', is {entry['name']!r:.60}")
            n = get(entry, f"{at}.rows", int, 1, rows)
            if i and (
                shards[0].rows % block_rows
                or n > shards[0].rows
                or (n < shards[0].rows and i + 1 < len(listed))
            ):
                raise bad(f"{at}.rows", f"is {n}: all shards but the last hold equal numbers of whole blocks")
            size = shard_bytes(n, block_rows, seq_len, max_sequences, dtype)
            get(entry, f"{at}.bytes", int, size, size)
            shards.append(Shard(entry["name"], n, size, sha(entry, f"{at}.sha256")))
        if sum(shard.rows for shard in shards) != rows:
            raise bad("rows", f"is {rows}, but the shards hold {sum(shard.rows for shard in shards)}")
        held_out = raw["held_out"]
        if held_out is not None:
            held_out = get(raw, "held_out", dict)
            if get(held_out, "held_out.path", str) != "held_out":
                raise bad("held_out.path", f"must be 'held_out', is {held_out['path']!r:.60}")
            get(held_out, "held_out.rows", int, 1)
            sha(held_out, "held_out.manifest_sha256")
        statistics, options = get(raw, "statistics", dict), get(raw, "options", dict)
        fingerprint = hashlib.sha256(
            json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()
        return Manifest(
            seq_len,
            max_sequences,
            rows,
            block_rows,
            dtype,
            tokenizer,
            statistics,
            options,
            tuple(shards),
            held_out,
            fingerprint,
        )


# --- layout and writing -----------------------------------------------------------------------------------------------


class _Layout:
    """Where everything is inside a block of `rows` rows: `members` maps a name to (npy header, data offset, bytes a row)."""

    def __init__(self, rows: int, seq_len: int, max_sequences: int, dtype: str) -> None:
        self.rows, self.bytes = rows, 0
        self.members: dict[str, tuple[bytes, int, int]] = {}
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "ids": (np.dtype(dtype).newbyteorder("<").str, (rows, seq_len)),
            "bounds": ("<u2", (rows, max_sequences, 2)),
            "isnext": ("|i1", (rows, max_sequences)),
            "crc": ("<u4", (rows,)),
        }
        for name, (descr, shape) in shapes.items():
            text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
            npy = (
                b"\x93NUMPY\x01\x00"
                + (NPY_HEADER - 10).to_bytes(2, "little")
                + text.ljust(NPY_HEADER - 11)
                + b"\n"
            )
            assert len(npy) == NPY_HEADER
            row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * np.dtype(descr).itemsize
            self.members[name] = (npy, self.bytes + HEADER, row_bytes)
            self.bytes += TAR_UNIT - (-(NPY_HEADER + rows * row_bytes) // TAR_UNIT) * TAR_UNIT
        sizes = {name: member[2] for name, member in self.members.items()}
        self.row = np.dtype([(name, f"V{sizes[name]}") for name in ("ids", "bounds", "isnext")])

    def header(self, name: str, block: int) -> bytes:
        """The tar and npy headers of one member: constant but for the key and the size."""
        info = tarfile.TarInfo(f"{block:09d}.{name}.npy")
        info.size, info.mode = NPY_HEADER + self.rows * self.members[name][2], 0o644
        return info.tobuf(tarfile.USTAR_FORMAT) + self.members[name][0]


def shard_bytes(rows: int, block_rows: int, seq_len: int, max_sequences: int, dtype: str) -> int:
    """Size in bytes of a shard of `rows` rows."""
    full, rest = divmod(rows, block_rows)
    size = full * _Layout(block_rows, seq_len, max_sequences, dtype).bytes + len(TAR_END)
    return size + (_Layout(rest, seq_len, max_sequences, dtype).bytes if rest else 0)


def _checksums(rows: np.ndarray) -> np.ndarray:
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
    """Write the shard of ids [n, T] (uint16 or uint32), bounds [n, S, 2] and isnext [n, S] whole or not at all.

    `first_block` is the global number of its first block. Returns its manifest entry: name, rows, bytes, sha256.
    The bytes depend on the arguments alone. OSError (a full disk) leaves no file behind.
    """
    path, n = Path(path), len(ids)
    slots = bounds.shape[1]
    assert n > 0 and ids.ndim == 2 and ids.dtype in (np.uint16, np.uint32), (
        "ids must be uint16 or uint32 [n, T]"
    )
    assert bounds.shape == (n, slots, 2) and bounds.dtype == np.uint16, "bounds must be uint16 [n, S, 2]"
    assert isnext.shape == (n, slots) and isnext.dtype == np.int8, "isnext must be int8 [n, S]"
    digest, size = hashlib.sha256(), 0
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            for first in range(0, n, block_rows):
                part = slice(first, min(n, first + block_rows))
                layout = _Layout(part.stop - first, ids.shape[1], slots, ids.dtype.name)
                packed = np.empty(layout.rows, layout.row)
                for name, array in (("ids", ids), ("bounds", bounds), ("isnext", isnext)):
                    flat = np.ascontiguousarray(array[part]).reshape(layout.rows, -1)
                    packed[name] = flat.view(layout.row[name]).ravel()
                data = bytearray(layout.bytes)
                for name, (_, offset, _) in layout.members.items():
                    payload = (_checksums(packed) if name == "crc" else packed[name]).tobytes()
                    data[offset - HEADER : offset] = layout.header(name, first_block + first // block_rows)
                    data[offset : offset + len(payload)] = payload
                size += file.write(data)
                digest.update(data)
            size += file.write(TAR_END)
            digest.update(TAR_END)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return {"name": path.name, "rows": n, "bytes": size, "sha256": digest.hexdigest()}


def write_manifest(folder: str | os.PathLike[str], manifest: dict[str, Any]) -> None:
    """Check `manifest`, then commit it as `folder/manifest.json` (sorted keys, indent 1), last and atomically."""
    path = Path(folder) / MANIFEST
    Manifest.parse(manifest, str(path))
    temporary = path.with_name(f".{MANIFEST}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(json.dumps(manifest, sort_keys=True, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """n rows: ids [n, T] in the storage type, bounds uint16 [n, S, 2], isnext int8 [n, S]."""

    ids: np.ndarray
    bounds: np.ndarray
    isnext: np.ndarray


def _inconsistent(rows: Rows, vocab_size: int) -> np.ndarray:
    """bool [n]: rows whose parts contradict each other although their checksum is right (written wrongly)."""
    n, seq_len = rows.ids.shape
    bad = (rows.bounds[:, :, 0].sum(1, dtype=np.int64) > seq_len) | (
        rows.bounds[:, :, 1] > rows.bounds[:, :, 0]
    ).any(1)
    if rows.ids.max(initial=0) >= vocab_size:
        bad |= rows.ids.max(1, initial=0) >= vocab_size
    if n and (rows.isnext.min() < -1 or rows.isnext.max() > 1):
        bad |= ((rows.isnext < -1) | (rows.isnext > 1)).any(1)
    return bad


class Dataset:
    """Verified random access to the rows of a dataset folder. Safe to fork and to pickle; maps open on first use.

    Opening checks the manifest and every shard's size: ValueError names the shard that is missing, cut or too long.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.manifest = m = Manifest.load(folder)
        self.rows = m.rows
        for shard in m.shards:
            path = self.folder / shard.name
            size = path.stat().st_size if path.is_file() else None
            if size != shard.bytes:
                state = "is missing" if size is None else f"has {size} bytes, the manifest says {shard.bytes}"
                raise ValueError(f"{path}: {state}; `python -m data_prep verify` shows what is damaged")
        self._full = _Layout(m.block_rows, m.seq_len, m.max_sequences, m.dtype)
        self._last = _Layout(m.rows % m.block_rows or m.block_rows, m.seq_len, m.max_sequences, m.dtype)
        self._maps: OrderedDict[int, dict[str, np.ndarray]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": OrderedDict()}

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / self.manifest.tokenizer["file"]

    @property
    def held_out_path(self) -> Path | None:
        """Folder of the held-out dataset, None where none was cut."""
        return self.folder / self.manifest.held_out["path"] if self.manifest.held_out else None

    def _views(self, section: int) -> dict[str, np.ndarray]:
        """Views [blocks, R] of each member over one mapped section: the full blocks of a shard, or the short last block."""
        if section in self._maps:
            self._maps.move_to_end(section)
            return self._maps[section]
        shards, tail = self.manifest.shards, section == len(self.manifest.shards)
        shard = shards[-1] if tail else shards[section]
        layout, blocks, start = self._full, shard.rows // self._full.rows, 0
        if tail:
            layout, blocks, start = self._last, 1, blocks * self._full.bytes
        with open(self.folder / shard.name, "rb") as file:
            data = mmap.mmap(file.fileno(), shard.bytes, access=mmap.ACCESS_READ)
        views = {
            name: np.ndarray(
                (blocks, layout.rows),
                "<u4" if name == "crc" else f"V{row_bytes}",
                buffer=data,
                offset=start + offset,
                strides=(layout.bytes, row_bytes),
            )
            for name, (_, offset, row_bytes) in layout.members.items()
        }
        self._maps[section] = views
        if len(self._maps) > OPEN_SHARDS:
            self._maps.popitem(last=False)
        return views

    def read(self, row_ids: np.ndarray) -> Rows:
        """Rows `row_ids` (int64 [n], any order, repeats allowed), each compared with its checksum first.

        DamagedRow names shard, block, row and byte offset of the first row that is not as written.
        """
        m, wanted = self.manifest, np.ascontiguousarray(row_ids, np.int64)
        n = len(wanted)
        if n and not (wanted.min() >= 0 and wanted.max() < self.rows):
            raise ValueError(f"{self.folder}: row ids must lie in 0..{self.rows - 1}")
        whole = (
            self.rows - self.rows % m.block_rows
        )  # rows in full blocks; the rest are a section of their own
        section = np.where(wanted < whole, wanted // m.rows_per_shard, len(m.shards))
        block, row = np.divmod(
            np.where(wanted < whole, wanted % m.rows_per_shard, wanted - whole), m.block_rows
        )
        order = np.argsort(section, kind="stable")
        section, block, row = section[order], block[order], row[order]
        cuts = [0, *(np.flatnonzero(np.diff(section)) + 1).tolist(), n] if n else []
        packed, expected = np.empty(n, self._full.row), np.empty(n, np.uint32)
        for first, last in itertools.pairwise(cuts):
            views, at = self._views(int(section[first])), (block[first:last], row[first:last])
            for name in ("ids", "bounds", "isnext"):
                packed[name][first:last] = views[name][at]
            expected[first:last] = views["crc"][at]
        wrong = _checksums(packed) != expected

        def part(name: str, dtype: str, *shape: int) -> np.ndarray:
            out = np.empty(n, self._full.row[name])
            out[order] = packed[name]
            return out.view(dtype).reshape(n, *shape)

        rows = Rows(
            part("ids", m.dtype, m.seq_len),
            part("bounds", "u2", m.max_sequences, 2),
            part("isnext", "i1", m.max_sequences),
        )
        if wrong.any():
            raise DamagedRow(
                self._place(int(wanted[order[np.argmax(wrong)]])) + " does not match its checksum"
            )
        if (bad := _inconsistent(rows, m.vocab_size)).any():
            raise DamagedRow(
                self._place(int(wanted[np.argmax(bad)])) + " holds bounds, labels or ids out of range"
            )
        return rows

    def _place(self, row_id: int) -> str:
        shard, local = divmod(row_id, self.manifest.rows_per_shard)
        block, row = divmod(local, self.manifest.block_rows)
        tail = row_id >= self.rows - self.rows % self.manifest.block_rows
        _, offset, row_bytes = (self._last if tail else self._full).members["ids"]
        byte = block * self._full.bytes + offset + row * row_bytes
        return (
            f"{self.folder / self.manifest.shards[shard].name}: block {block}, row {row} (ids at byte {byte})"
        )


# --- verification -----------------------------------------------------------------------------------------------------


def verify(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Every problem of a dataset, one line each: manifest, tokenizer, each shard's size, headers, rows, padding and hash.

    Reads every byte once in constant memory and goes on after a problem. The held-out dataset is checked too.
    """
    folder = Path(folder)
    try:
        m = Manifest.load(folder)
    except ValueError as error:
        yield str(error)
        return
    tokenizer = folder / m.tokenizer["file"]
    if not tokenizer.is_file():
        yield f"{tokenizer}: is missing"
    elif hashlib.sha256(tokenizer.read_bytes()).hexdigest() != m.tokenizer["sha256"]:
        yield f"{tokenizer}: is not the tokenizer the manifest names (SHA-256 differs)"
    for i, shard in enumerate(m.shards):
        path = folder / shard.name
        if not path.is_file():
            yield f"{path}: is missing"
            continue
        yield from _verify_shard(path, shard, i * (m.rows_per_shard // m.block_rows), m)
    if m.held_out:
        held_out = folder / m.held_out["path"]
        yield from verify(held_out)
        manifest = held_out / MANIFEST
        if (
            manifest.is_file()
            and hashlib.sha256(manifest.read_bytes()).hexdigest() != m.held_out["manifest_sha256"]
        ):
            yield f"{manifest}: is not the held-out manifest that {folder / MANIFEST} names (SHA-256 differs)"


def _verify_shard(path: Path, shard: Shard, first_block: int, m: Manifest) -> Iterator[str]:
    digest, start = hashlib.sha256(), 0
    with open(path, "rb") as file:
        for number, first in enumerate(range(0, shard.rows, m.block_rows)):
            layout = _Layout(min(m.block_rows, shard.rows - first), m.seq_len, m.max_sequences, m.dtype)
            data = file.read(layout.bytes)
            digest.update(data)
            if len(data) < layout.bytes:
                yield f"{path}: block {number} is cut at byte {start + len(data)}, the manifest says {shard.bytes} bytes"
                return
            packed, crc = np.empty(layout.rows, layout.row), np.zeros(0)
            for name, (_, offset, row_bytes) in layout.members.items():
                end = offset + layout.rows * row_bytes
                padding = data[end : end + -(NPY_HEADER + end - offset) % TAR_UNIT]
                frame = (
                    offset - HEADER,
                    data[offset - HEADER : offset],
                    layout.header(name, first_block + number),
                )
                for at, got, want in (frame, (end, padding, bytes(len(padding)))):
                    if got != want:
                        byte = start + at + next(i for i in range(len(want)) if got[i] != want[i])
                        yield f"{path}: block {number}, member {name}: header or padding is not as written at byte {byte}"
                if name == "crc":
                    crc = np.frombuffer(data, "<u4", layout.rows, offset)
                else:
                    packed[name] = np.frombuffer(data, layout.row[name], layout.rows, offset)
            rows = Rows(
                *(
                    np.ascontiguousarray(packed[name]).view(kind).reshape(layout.rows, *shape)
                    for name, kind, shape in (
                        ("ids", m.dtype, (m.seq_len,)),
                        ("bounds", "u2", (m.max_sequences, 2)),
                        ("isnext", "i1", (m.max_sequences,)),
                    )
                )
            )
            wrong = _checksums(packed) != crc
            for row in np.flatnonzero(wrong | _inconsistent(rows, m.vocab_size)):
                why = (
                    "does not match its checksum"
                    if wrong[row]
                    else "holds bounds, labels or ids out of range"
                )
                byte = start + layout.members["ids"][1] + int(row) * layout.members["ids"][2]
                yield f"{path}: block {number}, row {row} (ids at byte {byte}) {why}"
            start += layout.bytes
        if (rest := file.read(len(TAR_END) + 1)) != TAR_END:
            digest.update(rest)
            yield f"{path}: the end of the archive at byte {start} is not as written"
        else:
            digest.update(rest)
    if digest.hexdigest() != shard.sha256:
        yield f"{path}: SHA-256 is not the one in the manifest"
