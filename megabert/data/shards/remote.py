"""Datasets of a store by their URL: copies of their files on a node's disk, which all its processes share.

A dataset's folder there has its fingerprint as name, so that a changed dataset gets another one. All but the shards is copied when it
is opened. A shard is copied when it is needed, or ahead, once a node; it is compared with its SHA-256 and appears when it is complete.
Beyond a limit the shards that were opened first are removed; a process that has one mapped may still read it.
"""

from __future__ import annotations

import fcntl
import os
import posixpath
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from megabert.common import storage
from megabert.common.files import cache_folder, write_whole
from megabert.data.shards.manifest import MANIFEST, Manifest, Shard

# copied too where it exists, beside the tokenizer
TOKENIZER_CONFIG = "tokenizer_config.json"
# shards that a process copies at the same time, and most of them before they are needed (as an epoch's beginning needs)
CONNECTIONS, AHEAD = 4, 64
# seconds after which the file that a killed process was copying is removed
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


def located(folder: str | os.PathLike[str], cache: Cache = DEFAULT) -> Path:
    """A dataset's folder; of a URL the copies of its files but the shards, and of its whole held-out split. Raises ValueError if there
    is no dataset at the URL, Failed if the store cannot be reached."""
    if not storage.is_url(folder):
        return Path(folder)
    url = os.fspath(folder)
    text = Manifest.read(url)
    manifest = Manifest.parse_text(text, storage.join(url, MANIFEST))
    copies = cache.of(manifest)
    with _alone(copies):
        if not (copies / MANIFEST).is_file():
            copy_beside_shards(url, manifest, copies)
            if manifest.held_out:
                name = manifest.held_out["path"]
                part = Manifest.load(storage.join(url, name))
                copy_beside_shards(storage.join(url, name), part, copies / name)
                for file in (*(shard.name for shard in part.shards), MANIFEST):
                    storage.fetch(storage.join(url, name, file), copies / name / file)
            write_whole(copies / MANIFEST, text)  # last, as a sign that the others are there
    return copies


def copy_beside_shards(url: str, manifest: Manifest, folder: Path) -> None:
    """Copy the files that a manifest names beside shards, as far as they exist."""
    tokenizer = manifest.tokenizer["file"]
    names = [tokenizer, posixpath.join(posixpath.dirname(tokenizer), TOKENIZER_CONFIG)]
    folder.mkdir(parents=True, exist_ok=True)
    for name in names + ([manifest.sources["file"]] if manifest.sources else []):
        with suppress(FileNotFoundError):
            storage.fetch(storage.join(url, name), folder / name)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Only one thread of one process on this node is in the context of a file or folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / f".{path.name}.lock", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class RemoteShards:
    """The shards of the dataset at `url`, of which `in_use` are read from at a time. Safe to fork and to pickle."""

    def __init__(self, url: str, manifest: Manifest, cache: Cache, in_use: int) -> None:
        """Raises ValueError if the cache's limit is below the shards in use."""
        self.url, self.manifest, self.cache, self.in_use = url, manifest, cache, in_use
        self.limit = int(cache.gib * (1 << 30))
        sizes = [shard.bytes for shard in manifest.shards]
        needed = min(sum(sizes), (in_use + CONNECTIONS) * max(sizes))
        if needed > self.limit:
            raise ValueError(
                f"data.cache_gib={cache.gib:g}: of {url} {in_use} shards of {max(sizes) / 2**20:.0f} MiB are in use at a time; give at "
                f"least {needed / 2**30:.2g}"
            )
        # shards that are copied before they are needed
        self.ahead = min(AHEAD, min(len(sizes), self.limit // max(sizes)) - in_use)
        self._waiting: SimpleQueue[tuple[Future[Path], Shard]] | None = None
        self._copying: dict[int, Future[Path]] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_waiting": None, "_copying": {}}

    def check(self) -> None:
        """Raises ValueError naming a shard that the store does not list with its size. Some stores have no lists."""
        listed = {found.url: found.size for found in storage.find(self.url)}
        for shard in self.manifest.shards if listed else ():
            url = storage.join(self.url, shard.name)
            if url not in listed:
                raise ValueError(f"{url}: is missing; build the dataset again, or copy it there whole")
            if listed[url] != shard.bytes:
                raise ValueError(f"{url}: has {listed[url]} bytes, the manifest says {shard.bytes}")

    def path(self, shard: Shard) -> Path:
        """The shard's copy, made first if there is none. Raises ValueError for a shard that is not as the manifest says, Failed if the
        store fails, OSError if the disk does."""
        path = self.cache.of(self.manifest) / shard.name
        with suppress(FileNotFoundError):
            os.utime(path)
            return path
        with _alone(path):
            if path.is_file():
                return path
            url, part = storage.join(self.url, shard.name), path.with_name(f".{path.name}.part")
            self._make_room(part, shard.bytes)
            try:
                found = storage.fetch(url, part)
                if found != shard.sha256:
                    raise ValueError(
                        f"{url}: SHA-256 is not the one in the manifest; the shard was changed or is damaged"
                    )
                os.replace(part, path)
            except FileNotFoundError:
                raise ValueError(f"{url}: is missing; build the dataset again, or copy it there whole") from None
            finally:
                part.unlink(missing_ok=True)
        return path

    def _make_room(self, part: Path, size: int) -> None:
        """Make the empty file `part` of `size` bytes, and remove the shards that were opened first until the limit holds. Of a killed
        process the parts go so too; one that is being copied would appear again."""
        with _alone(self.cache.path / "shards"):
            with open(part, "wb") as file:
                file.truncate(size)
            copies = []
            for path in (*self.cache.path.glob(SHARDS), *self.cache.path.glob(PARTS)):
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
        wanted: dict[int, None] = {}
        for number in numbers:
            wanted[number] = None
            if len(wanted) == self.in_use + self.ahead:
                break
        self._copying = {n: copy for n, copy in self._copying.items() if n in wanted or not copy.cancel()}
        for number in wanted:
            if number not in self._copying:
                self._copying[number] = Future()
                self._waiting.put((self._copying[number], self.manifest.shards[number]))

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
        first = list(self._copying.values())[: self.in_use]
        for done, copy in enumerate(first, 1):
            copy.result()
            progress(done, len(first))
