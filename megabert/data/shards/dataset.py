"""Random access to the rows of a dataset: each is compared with its checksum, and checked for consistency, before it is returned."""

from __future__ import annotations

import itertools
import mmap
import os
import stat
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megabert.common.errors import describe, tried_again
from megabert.common.logs import log
from megabert.common.remote import below, is_url, join, parent
from megabert.data.order import RowOrder
from megabert.data.shards import remote_cache
from megabert.data.shards.layout import BlockLayout, checksums
from megabert.data.shards.manifest import Manifest, Shard
from megabert.data.tokenizer import CONFIG

MISMATCH, CONTRADICTION = " does not match its checksum", " holds bounds, labels or ids out of range"
ABSENT = " is not in the file, which is cut or missing"
# shards of a dataset at a URL that are fetched at once
FETCHED_AT_ONCE = 8
# maps kept open at once: each holds a file descriptor
OPEN_SHARDS = 256


class DamagedRow(ValueError):
    """A row whose bytes are not the bytes that were written; the text names shard, block, row and byte offset."""


@dataclass(frozen=True)
class Rows:
    """n rows: ids [n, T] in the storage type, bounds uint16 [n, S, 2], isnext int8 [n, S]."""

    ids: np.ndarray
    bounds: np.ndarray
    isnext: np.ndarray


def size_of(path: Path) -> int | None:
    """Bytes of a regular file; None where there is none. Retried where the file system fails; then raises OSError."""
    try:
        status = tried_again(path.stat)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def order_of(manifests: Sequence[Manifest]) -> RowOrder:
    """Order of the rows of datasets that follow each other."""
    return RowOrder(np.array([shard.rows for m in manifests for shard in m.shards]), manifests[0].block_rows)


def _map(path: Path, size: int) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def unpack(packed: np.ndarray, m: Manifest) -> Rows:
    """Rows of packed ones (structured [n]), each part contiguous."""

    def part(name: str, dtype: str, *shape: int) -> np.ndarray:
        return np.ascontiguousarray(packed[name]).view(dtype).reshape(len(packed), *shape)

    bounds = part("bounds", "u2", m.max_sequences, 2)
    return Rows(part("ids", m.dtype, m.seq_len), bounds, part("isnext", "i1", m.max_sequences))


def inconsistent(rows: Rows, vocab_size: int) -> np.ndarray:
    """bool [n]: rows whose parts contradict each other although their checksum is correct (written wrongly)."""
    n, seq_len = rows.ids.shape
    bad = (rows.bounds[:, :, 0].sum(1, dtype=np.int64) > seq_len) | (rows.bounds[:, :, 1] > rows.bounds[:, :, 0]).any(1)
    if rows.ids.max(initial=0) >= vocab_size:
        bad |= rows.ids.max(1, initial=0) >= vocab_size
    if n and (rows.isnext.min() < -1 or rows.isnext.max() > 1):
        bad |= ((rows.isnext < -1) | (rows.isnext > 1)).any(1)
    return bad


class Dataset:
    """Verified random access to the rows of a dataset folder. Safe to fork and to pickle; maps open on first use.

    Opening checks the manifest and every shard's size: ValueError names the shard that is missing, cut or too long. A
    `tolerant` dataset opens all the same, `problems` names such shards, and `examine` returns which rows are affected. With a
    `manifest` that another process has checked, against the shards too, nothing is read or compared. `folder` may be a URL:
    files then lie in `self.folder`, a cache, and a shard is fetched and checked when rows of it are first read.
    """

    def __init__(
        self, folder: str | os.PathLike[str], tolerant: bool = False, manifest: Manifest | None = None
    ) -> None:
        self.place, self.tolerant = os.fspath(folder), tolerant
        self.problems: list[str] = []
        self.manifest = m = manifest or Manifest.load(folder)
        self.rows = m.rows
        self._remote = is_url(self.place)
        self.folder = remote_cache.folder_of(m.fingerprint) if self._remote else Path(folder)
        for shard in m.shards if manifest is None and not self._remote else ():
            path = self.folder / shard.name
            size = size_of(path)
            if size != shard.bytes:
                state = "is missing" if size is None else f"has {size} bytes, the manifest says {shard.bytes}"
                self.problems.append(f"{path}: {state}; `python -m data_prep verify` shows what is damaged")
        if self.problems and not tolerant:
            raise ValueError(self.problems[0])
        self._order = order_of([m])
        self._full = BlockLayout(m.block_rows, m.seq_len, m.max_sequences, m.dtype)
        self._last = BlockLayout(m.rows % m.block_rows or m.block_rows, m.seq_len, m.max_sequences, m.dtype)
        self._open = OPEN_SHARDS
        # shards at a URL that arrived damaged -> where the damaged file lies
        self._damaged: dict[str, Path] = {}
        # blocks of the last call of `read_ahead`
        self._ahead: set[int] = set()
        # section -> its map (None where the file has nothing of it) and the views over it
        self._maps: OrderedDict[int, tuple[mmap.mmap | None, dict[str, np.ndarray]]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": OrderedDict()}

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer file; that of a dataset at a URL is fetched first."""
        entry = self.manifest.tokenizer
        if not self._remote:
            return self.folder / entry["file"]
        name = entry["file"].removeprefix("../")
        place = self.place if name == entry["file"] else parent(self.place)
        path = self.folder / name
        if entry["kind"] == "wordpiece" and not path.is_file():
            remote_cache.fetch_unsealed(join(place, CONFIG), self.folder / CONFIG)
        remote_cache.fetch(join(place, name), path, entry["sha256"])
        return path

    @property
    def held_out_path(self) -> str | Path | None:
        """Folder or URL of the held-out dataset, None where none was cut."""
        return below(self.place, self.manifest.held_out["path"]) if self.manifest.held_out else None

    def keep_open(self, shards: int) -> None:
        """At most so many shards at once."""
        self._open = shards

    def _file(self, shard: Shard) -> Path:
        """Where a shard lies; that of a dataset at a URL is fetched first. Raises OSError, and ValueError for one that arrives
        damaged, unless the dataset is tolerant: each row has a checksum."""
        path = self.folder / shard.name
        if not self._remote or shard.name in self._damaged:
            return self._damaged.get(shard.name, path)
        url = join(self.place, shard.name)
        try:
            remote_cache.fetch(url, path, shard.sha256, shard.bytes)
        except (FileNotFoundError, ValueError) as error:
            if not self.tolerant:
                raise
            log.warning(f"{describe(error)}; its damaged rows are left out")
            if isinstance(error, ValueError):
                path = path.with_suffix(".damaged")
                remote_cache.fetch_unsealed(url, path)
            self._damaged[shard.name] = path
        return path

    def order(self, seed: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row ids, epochs), both int64 [n], of global positions int64 [n]."""
        return self._order.by_epoch(seed, positions)

    def epoch(self, position: int) -> int:
        """The epoch at a global position."""
        return position // self.rows

    def _views(self, section: int) -> dict[str, np.ndarray]:
        """Views [blocks, R] of each member over one mapped section: the full blocks of a shard, or the short last block.

        Blocks that are not whole in the file, because it is cut or missing, are not in the views. A file that was cut
        since it was mapped is mapped again: a read beyond its end would kill the process (SIGBUS).
        """
        if section in self._maps:
            data, views = self._maps[section]
            if data is None or data.size() >= len(data):
                self._maps.move_to_end(section)
                return views
        shards, tail = self.manifest.shards, section == len(self.manifest.shards)
        shard = shards[-1] if tail else shards[section]
        layout, blocks, start = self._full, shard.rows // self._full.rows, 0
        if tail:
            layout, blocks, start = self._last, 1, blocks * self._full.bytes
        path = self._file(shard)
        size = min(size_of(path) or 0, shard.bytes)
        blocks = min(blocks, max(size - start, 0) // layout.bytes)
        if blocks:
            data = tried_again(lambda: _map(path, size))
            views = layout.views(data, start, blocks)
        else:
            data, views = None, layout.views(bytes(layout.bytes), 0, 0)
        self._maps[section] = data, views
        while len(self._maps) > self._open:
            self._maps.popitem(last=False)
        return views

    def empty(self, n: int) -> Rows:
        """n rows of zeros: they hold no sequence."""
        return unpack(np.zeros(n, self._full.row), self.manifest)

    def read(self, row_ids: np.ndarray) -> Rows:
        """Rows `row_ids` (int64 [n], any order, repeats allowed), each compared with its checksum first.

        DamagedRow names shard, block, row and byte offset of the first row that is not as written.
        """
        rows, damage = self.examine(row_ids)
        for text in damage.values():
            raise DamagedRow(text)
        return rows

    def examine(self, row_ids: np.ndarray) -> tuple[Rows, dict[int, str]]:
        """Rows `row_ids` as of `read`, and what is wrong with each damaged one, by its index in `row_ids`: shard, block, row and
        byte offset. Damaged rows are all zeros."""
        m, wanted = self.manifest, np.ascontiguousarray(row_ids, np.int64)
        n = len(wanted)
        section, block, row = self._places(wanted)
        order = np.argsort(section, kind="stable")
        section, block, row = section[order], block[order], row[order]
        cuts = [0, *(np.flatnonzero(np.diff(section)) + 1).tolist(), n] if n else []
        packed, expected = np.zeros(n, self._full.row), np.zeros(n, np.uint32)
        cut = np.zeros(n, bool)
        for first, last in itertools.pairwise(cuts):
            views = self._views(int(section[first]))
            present = block[first:last] < len(views["crc"])
            cut[first:last] = ~present
            present_rows: Any = slice(first, last) if present.all() else np.flatnonzero(present) + first
            at = (block[present_rows], row[present_rows])
            for name in ("ids", "bounds", "isnext"):
                packed[name][present_rows] = views[name][at]
            expected[present_rows] = views["crc"][at]
        wrong = (checksums(packed) != expected) | cut
        damage = {
            int(order[i]): self._place(int(wanted[order[i]])) + (ABSENT if cut[i] else MISMATCH)
            for i in np.flatnonzero(wrong).tolist()
        }
        packed[wrong] = np.zeros((), packed.dtype)
        if len(cuts) > 2:  # back to the caller's order
            sorted_rows, packed = packed.view(f"V{packed.itemsize}"), np.empty_like(packed)
            packed.view(sorted_rows.dtype)[order] = sorted_rows
        rows = unpack(packed, m)
        if (bad := inconsistent(rows, m.vocab_size)).any():
            for i in np.flatnonzero(bad).tolist():
                damage[i] = self._place(int(wanted[i])) + CONTRADICTION
            for part in (rows.ids, rows.bounds, rows.isnext):
                part[bad] = 0
        return rows, damage

    def read_ahead(self, row_ids: np.ndarray) -> None:
        """Open the shards of rows `row_ids` (int64 [n]) and let the system read the blocks that hold them in the background.
        Raises ValueError and OSError as `examine` does."""
        section, block, _ = self._places(row_ids)
        blocks = self.manifest.rows_per_shard // self._full.rows + 1  # of a section, at most
        wanted = set((section * blocks + block).tolist())
        fresh = np.array(sorted(wanted - self._ahead), np.int64)
        self._ahead = wanted
        sections = fresh // blocks
        if self._remote:  # several at a time
            last = len(self.manifest.shards) - 1
            needed = {min(number, last) for number in np.unique(sections).tolist()}
            with ThreadPoolExecutor(FETCHED_AT_ONCE) as threads:
                list(threads.map(self._file, (self.manifest.shards[i] for i in sorted(needed))))
        for number in sorted(set(sections.tolist())):
            self._advise(number, fresh[sections == number] % blocks)

    def _advise(self, section: int, blocks: np.ndarray) -> None:
        """Let the system read these blocks (int64 [b], sorted) of a section, as far as they are in the file."""
        blocks = blocks[blocks < len(self._views(section)["crc"])]
        data = self._maps[section][0]
        if data is None or not len(blocks):
            return
        tail = section == len(self.manifest.shards)
        start = self.manifest.shards[-1].rows // self._full.rows * self._full.bytes if tail else 0
        size = (self._last if tail else self._full).bytes
        for run in np.split(blocks, np.flatnonzero(np.diff(blocks) > 1) + 1):
            first = start + int(run[0]) * size
            over = first % mmap.PAGESIZE
            data.madvise(mmap.MADV_WILLNEED, first - over, len(run) * size + over)

    def _places(self, row_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Section, block in it and row in that of each row id (int64 [n]). Raises ValueError for one that is out of range."""
        m = self.manifest
        if len(row_ids) and not (row_ids.min() >= 0 and row_ids.max() < self.rows):
            raise ValueError(f"{self.folder}: row ids must lie in 0..{self.rows - 1}")
        # rows of full blocks; the last, short block is a section of its own
        whole = self.rows // m.block_rows * m.block_rows
        full = row_ids < whole
        section = np.where(full, row_ids // m.rows_per_shard, len(m.shards))
        block, row = np.divmod(np.where(full, row_ids % m.rows_per_shard, row_ids - whole), m.block_rows)
        return section, block, row

    def _place(self, row_id: int) -> str:
        shard, local = divmod(row_id, self.manifest.rows_per_shard)
        block, row = divmod(local, self.manifest.block_rows)
        tail = row_id >= self.rows - self.rows % self.manifest.block_rows
        _, offset, row_bytes = (self._last if tail else self._full).members["ids"]
        byte = block * self._full.bytes + offset + row * row_bytes
        path = self.folder / self.manifest.shards[shard].name
        return f"{path}: block {block}, row {row} (ids at byte {byte})"
