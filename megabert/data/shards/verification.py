"""Verification of a dataset: every byte is compared with its expected value, and differences are reported with their offsets.

Nothing is parsed: headers and padding are known in advance, rows have checksums, files have hashes. Shards are checked
independently, so a caller may distribute them over processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megabert.common import storage
from megabert.common.errors import describe
from megabert.common.files import canonical
from megabert.data.shards.dataset import CONTRADICTION, MISMATCH, inconsistent, read_sources, unpack
from megabert.data.shards.layout import HEADER, NPY_HEADER, TAR_END, TAR_UNIT, BlockLayout, checksums
from megabert.data.shards.manifest import MANIFEST, Manifest, Shard
from megabert.data.shards.remote import copy_beside_shards, is_tokenizer

# bytes read at once: they stay in a core's cache for hash, checksums and comparisons
SPAN_BYTES = 1 << 19


def verify(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Every problem of a dataset, one line each, as `plan` orders them. Reads every byte once in constant memory."""
    for part in plan(folder):
        if isinstance(part, str):
            yield part
        else:
            yield from part.problems()


def plan(folder: str | os.PathLike[str]) -> list[str | ShardCheck]:
    """Problems of manifest, tokenizer and file list (lines) and the shards to read; those of the held-out part follow.

    Everything is checked after any problem, unless the manifest is unusable.
    """
    path = os.path.join(folder, MANIFEST)
    try:
        text = Manifest.read(folder)
        m = Manifest.parse(text, path)
    except ValueError as error:
        return [str(error)]
    parts: list[str | ShardCheck] = []
    names = _names(folder, m)
    if text != canonical(json.loads(text)):
        parts.append(f"{path}: is not as it was written: the same fields in other bytes")
    parts += _problems_beside_shards(folder, m)
    listed = {shard.name for shard in m.shards}
    others = sorted(name for name in names if name.endswith(".tar") and name not in listed)
    parts += [f"{os.path.join(folder, name)}: is not in the manifest" for name in others]
    blocks = m.rows_per_shard // m.block_rows  # of each shard but the last
    # without the lists, since a check is sent to a process
    small = m.model_copy(update={"shards": (), "statistics": {}, "options": {}})
    for i, shard in enumerate(m.shards):
        place = os.path.join(folder, shard.name)
        parts.append(ShardCheck(place, shard, i * blocks, small) if shard.name in names else f"{place}: is missing")
    if m.held_out:
        held_out = os.path.join(folder, m.held_out["path"])
        parts += plan(held_out)
        with contextlib.suppress(ValueError):  # missing, as `plan` says
            if hashlib.sha256(Manifest.read(held_out)).hexdigest() != m.held_out["manifest_sha256"]:
                inner = os.path.join(held_out, MANIFEST)
                parts.append(f"{inner}: is not the held-out manifest that {path} names (SHA-256 differs)")
    return parts


def _names(folder: str | os.PathLike[str], m: Manifest) -> set[str]:
    """Names of the files of a folder, or of the objects in it; of a server without lists, of the shards that are there."""
    if storage.is_url(folder):
        url, shards = os.fspath(folder), (shard.name for shard in m.shards)
        with contextlib.suppress(ValueError, storage.AccessDenied):
            if names := {name for name in storage.list_objects(url) if "/" not in name}:
                return names
        return {name for name in shards if storage.exists(storage.join(url, name))}
    return {entry.name for entry in os.scandir(folder) if entry.is_file()}


def _problems_beside_shards(folder: str | os.PathLike[str], m: Manifest) -> list[str]:
    """Problems of the tokenizer and of the sources; those of a store are copied first."""
    problems = []
    with tempfile.TemporaryDirectory() as copies:
        place = Path(folder)
        if storage.is_url(folder):
            place = Path(copies, "data")
            copy_beside_shards(os.fspath(folder), m, place)
        name = storage.join(os.fspath(folder), m.tokenizer["file"])
        tokenizer = place / m.tokenizer["file"]
        if not tokenizer.is_file():
            problems.append(f"{name}: is missing")
        elif not is_tokenizer(tokenizer, m.tokenizer["sha256"]):
            problems.append(f"{name}: is not the tokenizer the manifest names (SHA-256 differs)")
        if m.sources:
            try:
                read_sources(place, m)
            except (ValueError, OSError) as error:
                problems.append(describe(error).replace(str(place), os.fspath(folder)))
    return problems


@dataclass(frozen=True)
class ShardCheck:
    """One shard to be read: its first block's number in the dataset, and the dataset's manifest without its lists."""

    path: str
    shard: Shard
    first_block: int
    manifest: Manifest

    def problems(self) -> list[str]:
        """Problems of the shard, in the order of its bytes; its hash last."""
        try:
            return list(self._read())
        except OSError as error:
            return [f"{self.path}: cannot be read ({error.strerror or error})"]

    def _read(self) -> Iterator[str]:
        m, digest, start = self.manifest, hashlib.sha256(), 0
        full, rest = divmod(self.shard.rows, m.block_rows)
        layout = BlockLayout(m.block_rows, m.seq_len, m.max_sequences, m.dtype)
        span = max(1, SPAN_BYTES // layout.bytes)
        spans = [(layout, first, min(span, full - first)) for first in range(0, full, span)]
        if rest:
            spans.append((BlockLayout(rest, m.seq_len, m.max_sequences, m.dtype), full, 1))
        buffer = memoryview(bytearray(max(size.bytes * blocks for size, _, blocks in spans)))
        with storage.open_object(self.path) if storage.is_url(self.path) else open(self.path, "rb") as file:
            for layout, first, blocks in spans:
                got = file.readinto(buffer[: blocks * layout.bytes])
                digest.update(buffer[:got])
                whole = got // layout.bytes
                yield from self._span(buffer, start, layout, first, whole)
                start += got
                if whole < blocks:
                    yield f"{self.path}: block {first + whole} is cut at byte {start} of {self.shard.bytes}"
                    return
            end_of_archive = file.read(len(TAR_END) + 1)
        digest.update(end_of_archive)
        if end_of_archive != TAR_END:
            yield f"{self.path}: the end of the archive at byte {start} is not as written"
        if digest.hexdigest() != self.shard.sha256:
            yield f"{self.path}: SHA-256 is not the one in the manifest"

    def _span(self, data: memoryview, start: int, layout: BlockLayout, first: int, blocks: int) -> Iterator[str]:
        """Problems of `blocks` whole blocks in `data`, of which the first is block `first` at byte `start` of the shard."""
        if not blocks:
            return
        m = self.manifest
        for block in range(blocks):
            for name, (_, offset, row_bytes) in layout.members.items():
                size = layout.rows * row_bytes
                header = layout.header(name, self.first_block + first + block)
                padding = bytes(-(NPY_HEADER + size) % TAR_UNIT)
                for at, want in ((offset - HEADER, header), (offset + size, padding)):
                    at += block * layout.bytes
                    got = bytes(data[at : at + len(want)])
                    if got != want:
                        byte = start + at + next(i for i in range(len(want)) if got[i] != want[i])
                        yield f"{self.path}: block {first + block}, {name}: header or padding differs at byte {byte}"
        views = layout.views(data, 0, blocks)
        packed = np.empty(blocks * layout.rows, layout.row)
        for name in ("ids", "bounds", "isnext"):
            packed[name].reshape(blocks, layout.rows)[...] = views[name]
        wrong = checksums(packed) != views["crc"].ravel()
        for at in np.flatnonzero(wrong | inconsistent(unpack(packed, m), m.vocab_size)).tolist():
            block, row = divmod(at, layout.rows)
            _, offset, row_bytes = layout.members["ids"]
            byte = start + block * layout.bytes + offset + row * row_bytes
            why = MISMATCH if wrong[at] else CONTRADICTION
            yield f"{self.path}: block {first + block}, row {row} (ids at byte {byte}){why}"
