"""Datasets of a store by their URL: copies of their files on a node's disk, which all its processes share.

A dataset's folder there has its fingerprint as name, so that a changed dataset gets another one. All but the shards is copied when it
is opened, and again where a copy is damaged. A shard is copied when it is needed, or ahead, once a node; it is compared with its SHA-256
and appears when it is complete. One whose rows fail their checksums later is copied again. Beyond a limit the oldest shards are removed,
where a shard is the newer the sooner the order uses it again; a process that has one mapped may still read it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import math
import os
import posixpath
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue

from megabert.common import storage
from megabert.common.errors import Failed
from megabert.common.files import NO_LOCKS, add_path_when_full, cache_folder, hash_file, write_atomically
from megabert.common.logs import log
from megabert.data.shards.manifest import MANIFEST, Manifest, Shard
from megabert.data.tokenizer import CONFIG as TOKENIZER_CONFIG
from megabert.data.tokenizer import Tokenizer

# shards that a process copies at the same time, and most of them before they are needed (as an epoch's beginning needs)
CONNECTIONS, AHEAD = 4, 64
# seconds after which a file that a process was copying is that of a killed one
STALE = 3600.0
# the shards of all datasets below the folder of copies, and those that are being copied, of which the room is taken at once
SHARDS, PARTS, TEMPORARY = "*/data/shard-*.tar", "*/data/.shard-*.tar.part", "*/data/.*.tmp"


@dataclass(frozen=True)
class Cache:
    """Where copies of remote datasets are: a folder ("": megabert/datasets in $XDG_CACHE_HOME or ~/.cache), and the most GiB of
    shards there."""

    folder: str = ""
    gib: float = 100.0

    @property
    def path(self) -> Path:
        return Path(self.folder) if self.folder else cache_folder("datasets")

    def of(self, manifest: Manifest) -> Path:
        """The folder of a dataset's copies. A tokenizer in the parent of a dataset's folder is in that of this one."""
        return self.path / manifest.fingerprint[:32] / "data"


DEFAULT = Cache()


def dataset_folder(folder: str | os.PathLike[str], cache: Cache = DEFAULT) -> Path:
    """A dataset's folder; of a URL the copies of its files but the shards, and of its whole held-out split. Raises ValueError if there
    is no dataset at the URL, Failed if the store cannot be reached."""
    if not storage.is_url(folder):
        return Path(folder)
    url = os.fspath(folder)
    text = Manifest.read(url)
    manifest = Manifest.parse(text, storage.join(url, MANIFEST))
    copies = cache.of(manifest)
    with _alone(copies):
        whole = (copies / MANIFEST).is_file()
        if whole and (damaged := next(_damaged(copies, text, manifest), None)):
            log.warning(f"{damaged}: the copy is damaged; it is fetched again from {storage.public(url)}")
            whole = False
        if not whole:
            copy_beside_shards(url, manifest, copies)
            if manifest.held_out:
                name = manifest.held_out["path"]
                _copy_held_out(storage.join(url, name), manifest.held_out["manifest_sha256"], copies / name)
            for file in (manifest.tokenizer["file"], *([manifest.sources["file"]] if manifest.sources else [])):
                if not (copies / file).is_file():  # not uploaded yet, perhaps
                    raise _missing(storage.join(url, file))
            write_atomically(copies / MANIFEST, text)  # last, as a sign that the others are there
    return copies


def _damaged(folder: Path, text: bytes, manifest: Manifest, shards: Sequence[Shard] = ()) -> Iterator[Path]:
    """The copies beside shards, of these `shards` and of the held-out split that are gone or not as they were written. `text`: the
    manifest's."""
    if (folder / MANIFEST).read_bytes() != text:
        yield folder / MANIFEST
    tokenizer = folder / manifest.tokenizer["file"]
    if not tokenizer.is_file() or not is_tokenizer(tokenizer, manifest.tokenizer["sha256"]):
        yield tokenizer
    sources = [(manifest.sources["file"], manifest.sources["sha256"])] if manifest.sources else []
    for name, sha256 in (*sources, *((shard.name, shard.sha256) for shard in shards)):
        if _is_damaged(folder / name, sha256):
            yield folder / name
    if manifest.held_out:
        part = folder / manifest.held_out["path"]
        if _is_damaged(part / MANIFEST, manifest.held_out["manifest_sha256"]):
            yield part / MANIFEST
        split = Manifest.load(part)
        yield from _damaged(part, Manifest.read(part), split, split.shards)


def _is_damaged(path: Path, sha256: str) -> bool:
    return not path.is_file() or hash_file(path) != sha256


def is_tokenizer(path: Path, sha256: str) -> bool:
    """Whether a file is the tokenizer with this SHA-256, which is that of its bytes and, of a WordPiece vocabulary, of its casing."""
    if not path.with_name(TOKENIZER_CONFIG).is_file():
        return hash_file(path) == sha256
    try:
        return Tokenizer.load(path).sha256 == sha256
    except ValueError:
        return False


def copy_beside_shards(url: str, manifest: Manifest, folder: Path) -> None:
    """Copy the files that a manifest names beside shards, as far as they exist."""
    tokenizer = manifest.tokenizer["file"]
    folder.mkdir(parents=True, exist_ok=True)
    for name in (tokenizer, *([manifest.sources["file"]] if manifest.sources else [])):
        with suppress(FileNotFoundError):
            storage.fetch(storage.join(url, name), folder / name)
    optional = posixpath.join(posixpath.dirname(tokenizer), TOKENIZER_CONFIG)
    with suppress(FileNotFoundError, storage.AccessDenied):  # S3's answer for a missing object to who may not list
        storage.fetch(storage.join(url, optional), folder / optional)


def _copy_held_out(url: str, sha256: str, folder: Path) -> None:
    """Copy the held-out split with this SHA-256 of its manifest. Raises ValueError naming a file that is not as it was written."""
    text = Manifest.read(url)
    if hashlib.sha256(text).hexdigest() != sha256:
        raise ValueError(f"{storage.join(url, MANIFEST)}: not the split that the dataset names; copy it there whole")
    part = Manifest.parse(text, storage.join(url, MANIFEST))
    copy_beside_shards(url, part, folder)
    for shard in part.shards:
        if storage.fetch(storage.join(url, shard.name), folder / shard.name) != shard.sha256:
            raise _changed(storage.join(url, shard.name))
    write_atomically(folder / MANIFEST, text)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Only one thread of one process on this node is in the context of a file or folder. Raises ValueError without locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / f".{path.name}.lock", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno in NO_LOCKS - {errno.ENOLCK}:  # which may be a server's fault
                raise ValueError(
                    f"{path.parent}: this file system has no locks; set data.cache_dir to one that has"
                ) from None
            raise
        try:
            yield
        finally:
            # `close` is not enough: a loader process that was forked meanwhile has the open file, and so the lock, too
            fcntl.flock(file, fcntl.LOCK_UN)


def unique(numbers: Iterable[int]) -> Iterator[int]:
    """Each number once, at its first place."""
    seen: set[int] = set()
    for number in numbers:
        if number not in seen:
            seen.add(number)
            yield number


def _missing(url: str) -> ValueError:
    return ValueError(f"{storage.public(url)}: is missing; build the dataset again, or copy it there whole")


def _changed(url: str) -> ValueError:
    return ValueError(
        f"{storage.public(url)}: SHA-256 is not the one in the manifest; the shard was changed or is damaged"
    )


class RemoteShards:
    """The shards of the dataset at `url`, of which `in_use` are read from at a time. Safe to fork and to pickle."""

    def __init__(self, url: str, manifest: Manifest, cache: Cache, in_use: int) -> None:
        """Raises ValueError if the cache's limit is below the shards in use."""
        self.url, self.manifest, self.cache, self.in_use = url, manifest, cache, in_use
        self.limit = int(cache.gib * (1 << 30))
        self.share_cache(1)
        # shards in the order of their use, those in use and those ahead
        self._wanted: list[int] = []
        self._waiting: SimpleQueue[tuple[Future[Path], Shard]] | None = None
        self._copying: dict[int, Future[Path]] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_waiting": None, "_copying": {}, "_wanted": []}

    def share_cache(self, datasets: int) -> None:
        """Use an equal share of the cache, beside other datasets of the run. Raises ValueError if the shards in use need more."""
        sizes, share = [shard.bytes for shard in self.manifest.shards], self.limit // datasets
        needed = min(sum(sizes), (self.in_use + CONNECTIONS) * max(sizes))
        if needed > share:
            raise ValueError(
                f"data.cache_gib={self.cache.gib:g}: of {self.url} {self.in_use} shards of {max(sizes) / 2**20:.0f} MiB are in use at a "
                f"time; give at least {math.ceil(datasets * needed / 2**30 * 100) / 100:g}"
            )
        # shards that are copied before they are needed, beside those that are being copied
        self.ahead = min(AHEAD, min(len(sizes), share // max(sizes) - CONNECTIONS) - self.in_use)

    def check(self) -> None:
        """Raises ValueError naming a shard that is not in the store with its size. Some stores have no lists, or refuse them, and a list
        may be older than the shards."""
        try:
            listed = {found.url: found.size for found in storage.find(storage.join(self.url, ""))}
        except (ValueError, storage.AccessDenied):  # shards are compared when they are copied
            listed = {}
        for shard in self.manifest.shards if listed else ():
            url = storage.join(self.url, shard.name)
            if listed.get(url) == shard.bytes:
                continue
            try:
                size = storage.stat(url).size
            except FileNotFoundError:
                raise _missing(url) from None
            if size != shard.bytes:
                raise ValueError(f"{url}: has {size} bytes, the manifest says {shard.bytes}")

    def path(self, shard: Shard, suspect: bool = False) -> Path:
        """The shard's copy, made first if there is none. A `suspect` one is compared, and made again if it is damaged and no other process
        has replaced it. Raises ValueError for a shard that is not as the manifest says, Failed if the store fails, OSError if the disk
        does."""
        path = self.cache.of(self.manifest) / shard.name
        with suppress(FileNotFoundError):
            os.utime(path)
            if not suspect:
                return path
        with _alone(path):
            damaged = suspect and path.is_file() and _is_damaged(path, shard.sha256)
            if path.is_file() and not damaged:
                return path
            url, part = storage.join(self.url, shard.name), path.with_name(f".{path.name}.part")
            if damaged:
                log.warning(f"{path}: the copy is damaged; it is fetched again from {storage.public(url)}")
                path.unlink()
            try:
                self._make_room(part, shard.bytes)
                if storage.fetch(url, part) != shard.sha256:
                    raise _changed(url)
                os.replace(part, path)
            except FileNotFoundError as error:
                if error.filename != storage.public(url):
                    raise Failed(f"{error.filename}: was removed while it was written") from error
                raise _missing(url) from None
            finally:
                part.unlink(missing_ok=True)
        return path

    def _make_room(self, part: Path, size: int) -> None:
        """Make the empty file `part` of `size` bytes, and remove the oldest shards until the limit holds. The parts of a killed process
        go so too, but after STALE: one that is being copied would appear again."""
        with _alone(self.cache.path / "shards"):
            with add_path_when_full(part), open(part, "wb") as file:
                file.truncate(size)
            os.utime(part, (time.time(), time.time() + STALE))
            copies = []
            # parts become shards: the list of these is made when parts have been counted
            for path in chain.from_iterable(map(self.cache.path.glob, (PARTS, SHARDS))):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    copies.append((status.st_mtime_ns, status.st_size, path))
            for path in self.cache.path.glob(TEMPORARY):
                with suppress(FileNotFoundError):
                    if path.stat().st_mtime < time.time() - STALE:
                        path.unlink()
            total = sum(bytes_ for _, bytes_, _ in copies)
            for _, bytes_, path in sorted(copies):
                if total <= self.limit:
                    break
                path.unlink(missing_ok=True)
                total -= bytes_

    def fetch_ahead(self, numbers: Iterable[int]) -> None:
        """Copy shards in the background: those of `numbers`, in the order of their use, as many as the limit allows. An error is
        raised where the shard is needed."""
        if self._waiting is None:
            self._waiting = SimpleQueue()
            for _ in range(CONNECTIONS):  # daemons: the end of a process does not wait for shards that nothing reads
                threading.Thread(target=self._copy, args=(self._waiting,), name="shards", daemon=True).start()
        wanted = list(islice(unique(numbers), max(0, self.in_use + self.ahead)))
        self._wanted, before = wanted, self._copying
        for number in before.keys() - wanted:
            before[number].cancel()
        missing = self._order_by_use(wanted)
        going_on = {number: copy for number, copy in before.items() if not copy.done()}
        self._copying = {number: going_on.get(number) or self._start_copy(number) for number in missing}

    def forget(self) -> None:
        """Copy nothing ahead any more, until the next call of `fetch_ahead`."""
        for copy in self._copying.values():
            copy.cancel()
        self._copying, self._wanted = {}, []

    def _start_copy(self, number: int) -> Future[Path]:
        assert self._waiting is not None
        copy: Future[Path] = Future()
        self._waiting.put((copy, self.manifest.shards[number]))
        return copy

    def _order_by_use(self, wanted: list[int]) -> list[int]:
        """Give the copies of shards times in the order of their use, so that `_make_room` removes the one that is used last; returns the
        shards without a copy."""
        folder, now, missing = self.cache.of(self.manifest), time.time_ns(), []
        for place, number in enumerate(wanted):
            try:
                os.utime(folder / self.manifest.shards[number].name, ns=(now, now - place * 1000))
            except FileNotFoundError:
                missing.append(number)
        return missing

    def _copy(self, waiting: SimpleQueue[tuple[Future[Path], Shard]]) -> None:
        while True:
            copy, shard = waiting.get()
            if copy.set_running_or_notify_cancel():
                try:
                    copy.set_result(self.path(shard))
                except Exception as error:
                    copy.set_exception(error)

    def wait(self, progress: Callable[[int, int], object]) -> None:
        """Wait until the shards in use are there; `progress(done, all of them)` after each. Raises as `path`."""
        first = self._wanted[: self.in_use]
        for done, number in enumerate(first, 1):
            if number in self._copying:
                self._copying[number].result()
            progress(done, len(first))
