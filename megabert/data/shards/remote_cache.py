"""Cache of datasets that lie at URLs: a file is fetched when it is first read, compared with its SHA-256, and kept.

A dataset's files lie under their own names in a folder that is named after its fingerprint, so that another dataset at the same
URL is never taken for it. One process of a machine fetches a file while the others that need it wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megabert.common import remote
from megabert.common.files import appearing_file, lock, write_whole
from megabert.common.logs import log

# tries of a file that arrives damaged
TRIES = 2


class _Damaged(Exception):
    """The fetched file has another SHA-256, which is the message."""


def folder_of(fingerprint: str) -> Path:
    """Where the files of a dataset are kept."""
    return remote.cache_folder() / "datasets" / fingerprint[:32]


def fetch(url: str, path: Path, sha256: str, size: int | None = None) -> None:
    """Fetch the file at `url` to `path`, unless it is there. Raises OSError, and ValueError where it arrives damaged twice."""
    if _is_there(path, size):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path) as alone:
        if _is_there(path, size):
            return
        if alone:  # temporary files are of processes that were killed
            for left_over in path.parent.glob(f".{path.name}.*.tmp"):
                left_over.unlink()
        for _ in range(TRIES):
            try:
                return _fetch_once(url, path, sha256)
            except _Damaged as found:
                log.warning(f"{url}: its SHA-256 is {found!s:.12}…, in the manifest {sha256[:12]}…")
    raise ValueError(f"{url}: is damaged: it was fetched {TRIES} times and does not match the manifest")


def fetch_unsealed(url: str, path: Path) -> None:
    """Fetch the file at `url` to `path` without a check, if there is one."""
    try:
        data = remote.read_whole(url)
    except (FileNotFoundError, PermissionError):  # S3 forbids a missing name in a bucket that may not be listed
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, data)


def _is_there(path: Path, size: int | None) -> bool:
    return path.is_file() and size in (None, path.stat().st_size)


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Block in which no other process fetches `path`; False where the file system has no locks."""
    name = path.with_name(f".{path.name}.lock")
    with open(name, "w") as file:
        yield lock(file.fileno(), name, "each process fetches for itself", wait=True)


def _fetch_once(url: str, path: Path, sha256: str) -> None:
    """What is at `url` becomes `path`. Raises _Damaged where it is not `sha256`."""
    digest = hashlib.sha256()
    with appearing_file(path) as file:
        for chunk in remote.chunks(url):
            digest.update(chunk)
            file.write(chunk)
        if digest.hexdigest() != sha256:
            raise _Damaged(digest.hexdigest())
