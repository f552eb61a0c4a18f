"""Random access to the rows of a dataset, each verified by its checksum and for consistency before it is returned."""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from megabert.common import storage
from megabert.common.errors import Failed, with_retries
from megabert.data.order import RowOrder
from megabert.data.shards.layout import BlockLayout, checksums
from megabert.data.shards.manifest import Manifest, Shard
from megabert.data.shards.remote import DEFAULT, Cache, RemoteShards, dataset_folder

MISMATCH, CONTRADICTION = " does not match its checksum", " holds bounds, labels or ids out of range"
# maps kept open at once: each holds a file descriptor
OPEN_SHARDS = 256


class DamagedRow(ValueError):
    """A row whose bytes differ from those written; the text names shard, block, row and byte offset."""


@dataclass(frozen=True)
class Rows:
    """n rows: ids [n, T] in the storage type, bounds uint16 [n, S, 2], isnext int8 [n, S]."""

    ids: np.ndarray
    bounds: np.ndarray
    isnext: np.ndarray

    @staticmethod
    def without_sequences(n: int, m: Manifest) -> Rows:
        """n rows of padding alone."""
        shape = (n, m.max_sequences)
        return Rows(np.zeros((n, m.seq_len), m.dtype), np.zeros((*shape, 2), np.uint16), np.full(shape, -1, np.int8))


def unpack(packed: np.ndarray, m: Manifest) -> Rows:
    """Rows of packed ones (structured [n]), each part contiguous."""

    def part(name: str, dtype: str, *shape: int) -> np.ndarray:
        return np.ascontiguousarray(packed[name]).view(dtype).reshape(len(packed), *shape)

    bounds = part("bounds", "u2", m.max_sequences, 2)
    return Rows(part("ids", m.dtype, m.seq_len), bounds, part("isnext", "i1", m.max_sequences))


def inconsistent(rows: Rows, vocab_size: int) -> np.ndarray:
    """bool [n]: rows whose parts contradict each other although the checksum is correct (a mistake of the writer)."""
    n, seq_len = rows.ids.shape
    bad = (rows.bounds[:, :, 0].sum(1, dtype=np.int64) > seq_len) | (rows.bounds[:, :, 1] > rows.bounds[:, :, 0]).any(1)
    if rows.ids.max(initial=0) >= vocab_size:
        bad |= rows.ids.max(1, initial=0) >= vocab_size
    if n and (rows.isnext.min() < -1 or rows.isnext.max() > 1):
        bad |= ((rows.isnext < -1) | (rows.isnext > 1)).any(1)
    return bad


def read_sources(folder: Path, m: Manifest) -> np.ndarray:
    """uint8 [rows, S, 2]: the sources of the A and the B part of each sequence, as indices into the manifest's names.

    Raises ValueError naming the file where it is missing or not as written, OSError where it cannot be read.
    """
    assert m.sources is not None
    path = folder / m.sources["file"]
    try:
        data = with_retries(path.read_bytes)
    except FileNotFoundError:
        raise ValueError(f"{path}: is missing; build the dataset again, or copy it here whole") from None
    if hashlib.sha256(data).hexdigest() != m.sources["sha256"]:
        raise ValueError(
            f"{path}: SHA-256 is not the one in the manifest; build the dataset again, or copy it here whole"
        )
    sources: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
    shape = (m.rows, m.max_sequences, 2)
    if sources.dtype != np.uint8 or sources.shape != shape or sources.max() >= len(m.sources["names"]):
        raise ValueError(f"{path}: holds no uint8 {shape} below {len(m.sources['names'])}; build the dataset again")
    return sources


class Dataset:
    """Verified random access to the rows of a dataset, a folder or a URL. Safe to fork and to pickle; maps open on first use.

    Opening checks the manifest and every shard's size: ValueError names the shard that is missing, cut or too long. With a
    `manifest` that another process has checked against the shards nothing is read or compared. Of a URL `folder` has copies
    (`shards.remote`), in the `cache`.
    """

    def __init__(
        self, folder: str | os.PathLike[str], manifest: Manifest | None = None, cache: Cache = DEFAULT
    ) -> None:
        # as it was named
        self.place = os.fspath(folder)
        remote = storage.is_url(folder)
        self.folder = cache.of(manifest) if remote and manifest else dataset_folder(folder, cache)
        self.manifest = m = manifest or Manifest.load(self.folder)
        self.rows = m.rows
        for shard in () if manifest or remote else m.shards:
            try:
                with_retries(partial(self._check_size, shard))
            except (FileNotFoundError, NotADirectoryError):
                raise ValueError(
                    f"{self.folder / shard.name}: is missing; build the dataset again, or copy it here whole"
                ) from None
        self._order = RowOrder(np.array([shard.rows for shard in m.shards]), m.block_rows)
        self._full = BlockLayout(m.block_rows, m.seq_len, m.max_sequences, m.dtype)
        self._last = BlockLayout(m.rows % m.block_rows or m.block_rows, m.seq_len, m.max_sequences, m.dtype)
        self.most_open = OPEN_SHARDS
        # whether `fetch_ahead` of this process does something, and the seed, epoch and slot of its last call
        self.fetches = True
        self._fetched: tuple[int, ...] = ()
        self._remote: RemoteShards | None = None
        if remote:
            in_use = self._order.shards_in_use
            self._remote = RemoteShards(self.place, m, cache, in_use)
            self.most_open = in_use + 1  # a removed shard takes room as long as it is open
            if manifest is None:
                self._remote.check()
        # rows of its order used by earlier phases of a run; positions count from there
        self.taken = 0
        # blocks of the last call of `read_ahead`
        self._ahead: set[int] = set()
        # section -> its map and the views over it
        self._maps: OrderedDict[int, tuple[mmap.mmap, dict[str, np.ndarray]]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": OrderedDict(), "_fetched": ()}

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        return f"Dataset({storage.public(self.place)!r}: {self.rows:,} rows of {self.manifest.seq_len}, {self.manifest.vocab_size:,} tokens)"

    def __getitem__(self, row_id: int | slice) -> Any:
        """The row, counted from the end if negative, or a list of rows, as of `__getitems__`. Raises TypeError for anything else."""
        if isinstance(row_id, slice):
            return self.__getitems__(range(self.rows)[row_id])
        if not hasattr(row_id, "__index__"):
            raise TypeError(f"{self.folder}: a row is a number or a slice, not {type(row_id).__name__}")
        return self.__getitems__([row_id + self.rows if -self.rows <= row_id < 0 else row_id])[0]

    def __getitems__(self, row_ids: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Rows for torch's DataLoader, as they are stored, unmasked: `ids` int32 [T], `bounds` int32 [S, 2] and `isnext` int8
        [S] of each. Raises IndexError for one that is out of range, and as `read`."""
        wanted = np.array(row_ids, np.int64)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < self.rows:
            raise IndexError(f"{self.folder}: has rows 0 to {self.rows - 1}")
        rows = self.read(wanted)
        parts = zip(rows.ids.astype(np.int32), rows.bounds.astype(np.int32), rows.isnext, strict=True)
        return [{"ids": ids, "bounds": bounds, "isnext": isnext} for ids, bounds, isnext in parts]

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / self.manifest.tokenizer["file"]

    def shard_path(self, shard: Shard) -> Path:
        """The file of a shard; of a URL its copy, which is made first if there is none. Raises as `RemoteShards.path`."""
        return self.folder / shard.name if self._remote is None else self._remote.path(shard)

    @property
    def held_out_path(self) -> Path | None:
        """Folder of the held-out dataset, None where none was cut."""
        return self.folder / self.manifest.held_out["path"] if self.manifest.held_out else None

    @property
    def source_names(self) -> list[str]:
        """Names of the sources of its sequences; empty where it has one or does not record them."""
        return self.manifest.sources["names"] if self.manifest.sources else []

    @cached_property
    def sources(self) -> np.ndarray:
        """As `read_sources`, of a dataset that has them."""
        return read_sources(self.folder, self.manifest)

    @property
    def identity(self) -> dict[str, Any]:
        """Its entries in a checkpoint."""
        return {"dataset": self.manifest.fingerprint}

    def order(self, seed: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row ids, epochs), both int64 [n], of global positions int64 [n]."""
        return self._order.by_epoch(seed, positions + self.taken)

    def epoch(self, position: int) -> int:
        """The epoch at a global position."""
        return (position + self.taken) // self.rows

    def fetch_ahead(self, seed: int, position: int, progress: Callable[[int, int], object] | None = None) -> None:
        """Of a URL: copy the shards that its order uses from a global position on, in the background; with `progress` wait for those
        in use there (`RemoteShards.wait`). Raises as `read`."""
        if self._remote is not None and self.fetches:
            slot = (seed, *self._order.slot(seed, position + self.taken))
            if slot != self._fetched:  # of many updates it is the same
                self._fetched = slot
                self._remote.fetch_ahead(self._order.shards_from(seed, position + self.taken))
            if progress is not None:
                self._remote.wait(progress)

    def stop_fetching(self) -> None:
        """End what `fetch_ahead` began, and close the shards that this process has open."""
        self._fetched = ()
        self._maps.clear()
        if self._remote is not None:
            self._remote.forget()

    def share_cache(self, datasets: int) -> None:
        """As `RemoteShards.share_cache`."""
        if self._remote is not None:
            self._remote.share_cache(datasets)

    def _check_size(self, shard: Shard) -> None:
        """Raises ValueError for a shard of another size than the manifest's, OSError for one that cannot be accessed."""
        path = self.folder / shard.name
        status = path.stat()
        if status.st_size != shard.bytes or not stat.S_ISREG(status.st_mode):
            text = f"{path}: has {status.st_size} bytes, the manifest says {shard.bytes}"
            raise ValueError(f"{text}; `python -m data_prep verify` shows what is damaged")

    def _map(self, shard: Shard) -> mmap.mmap:
        """The mapped file of a shard. It existed when the dataset was opened, so if it is missing its file system is."""
        path = self.shard_path(shard)
        try:
            if self._remote is not None and path.stat().st_size != shard.bytes:
                self._remote.path(shard, suspect=True)
            self._check_size(shard)
            with open(path, "rb") as file:
                return mmap.mmap(file.fileno(), shard.bytes, access=mmap.ACCESS_READ)
        except (FileNotFoundError, NotADirectoryError) as error:
            if self._remote is not None:  # another process needed its room
                return self._map(shard)
            raise Failed(f"{path}: is gone; is its file system still mounted?") from error

    def _is_whole(self, section: int) -> bool:
        """Whether a section is mapped, of a file that was not cut."""
        try:
            return section in self._maps and self._maps[section][0].size() >= len(self._maps[section][0])
        except OSError:  # of NFS, if another node has removed it
            return False

    def _section(self, number: int) -> tuple[Shard, BlockLayout, int, int]:
        """Shard, layout, first byte and number of blocks of a section: a shard's full blocks or the short last one."""
        shards = self.manifest.shards
        shard, tail = shards[min(number, len(shards) - 1)], number == len(shards)
        blocks = shard.rows // self._full.rows
        return (shard, self._last, blocks * self._full.bytes, 1) if tail else (shard, self._full, 0, blocks)

    def _views(self, section: int) -> tuple[mmap.mmap, dict[str, np.ndarray]]:
        """The map of a section, and views [blocks, R] of each member.

        Raises ValueError for a file that was cut or removed: a read beyond its end would kill the process (SIGBUS).
        """
        if self._is_whole(section):
            self._maps.move_to_end(section)
            return self._maps[section]
        shard, layout, start, blocks = self._section(section)
        data = with_retries(partial(self._map, shard))
        views = layout.views(data, start, blocks)
        self._maps[section] = data, views
        while len(self._maps) > self.most_open:
            self._maps.popitem(last=False)
        return data, views

    def read(self, row_ids: np.ndarray) -> Rows:
        """Rows `row_ids` (int64 [n], any order, repeats allowed), each compared with its checksum first.

        A damaged copy of a store's shard is fetched again, once. Raises DamagedRow naming shard, block, row and byte offset of a row
        that is not as written, ValueError or OSError naming a file that is incomplete or unreadable.
        """
        section, block, row = self._places(row_ids)
        packed, wrong = self._copy_rows(section, block, row)
        if self._remote is not None and wrong.any():
            for number in np.unique(section[wrong]).tolist():
                self._remote.path(self._section(number)[0], suspect=True)
                self._maps.pop(number, None)
            packed, wrong = self._copy_rows(section, block, row)
        rows = unpack(packed, self.manifest)
        for bad, text in ((wrong, MISMATCH), (inconsistent(rows, self.manifest.vocab_size), CONTRADICTION)):
            if bad.any():
                raise DamagedRow(self._place(int(row_ids[np.argmax(bad)])) + text)
        return rows

    def _copy_rows(self, section: np.ndarray, block: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Packed rows [n], and bool [n]: those that differ from their checksums."""
        packed, expected = np.zeros(len(row), self._full.row), np.zeros(len(row), np.uint32)
        for number in np.unique(section).tolist():
            chosen = np.flatnonzero(section == number)
            _, views = self._views(number)
            at = (block[chosen], row[chosen])
            for name in ("ids", "bounds", "isnext"):
                packed[name][chosen] = views[name][at]
            expected[chosen] = views["crc"][at]
        return packed, checksums(packed) != expected

    def read_ahead(self, row_ids: np.ndarray) -> None:
        """Open the shards of rows `row_ids` (int64 [n]) and let the system read their blocks in the background.
        Raises ValueError and OSError as `read` does."""
        section, block, _ = self._places(row_ids)
        blocks = self.manifest.rows_per_shard // self._full.rows + 1  # of a section, at most
        wanted = set((section * blocks + block).tolist())
        fresh = np.array(sorted(wanted - self._ahead), np.int64)
        self._ahead = wanted
        sections = fresh // blocks
        for number in np.unique(sections).tolist():
            self._advise(number, fresh[sections == number] % blocks)

    def _advise(self, section: int, blocks: np.ndarray) -> None:
        """Let the system read these blocks (int64 [b], sorted) of a section."""
        data, _ = self._views(section)
        _, layout, start, _ = self._section(section)
        for run in np.split(blocks, np.flatnonzero(np.diff(blocks) > 1) + 1):
            first = start + int(run[0]) * layout.bytes
            over = first % mmap.PAGESIZE
            data.madvise(mmap.MADV_WILLNEED, first - over, len(run) * layout.bytes + over)

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
        section, block, row = (int(part[0]) for part in self._places(np.array([row_id])))
        shard, layout, start, _ = self._section(section)
        _, offset, row_bytes = layout.members["ids"]
        byte = start + block * layout.bytes + offset + row * row_bytes
        block += start // self._full.bytes
        folder = self.folder if self._remote is None else storage.public(self.place)
        return f"{os.path.join(folder, shard.name)}: block {block}, row {row} (ids at byte {byte})"
