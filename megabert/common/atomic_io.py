"""Atomic writing of files and folders: written beside their place, synced to the disk, renamed into it; whole or not there."""

from __future__ import annotations

import glob
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megabert.common.file_lock import lock
from megabert.common.logs import log


@contextmanager
def appearing(target: str | Path, mark: str, overwrite: bool = False) -> Iterator[Path]:
    """An empty folder to write into, which becomes `target` when the block ends without an error.

    Raises ValueError when `target` exists and holds anything, or, with `overwrite`, anything but a folder that has the
    file `mark`: what this command wrote before.
    """
    target = Path(target)
    _refuse(target, mark, overwrite)
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary, replaced = _beside(target, "new"), _beside(target, "old")
    temporary.mkdir()
    writing = os.open(temporary, os.O_RDONLY)
    try:
        lock(writing, temporary, "what a kill leaves there is not removed")
        _remove_left_over(target, temporary)
        yield temporary
        for path in sorted(temporary.rglob("*"), reverse=True):
            sync(path)
        sync(temporary)
        _put(temporary, target, replaced)
        sync(target.parent)
        for path in _hidden(target, "old"):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(writing)
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def appearing_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write into, which becomes `path`, in place of one that was there, when the block ends without an error."""
    temporary = _beside(path, "tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """The file `path` with `data` in it, in place of one that was there."""
    with appearing_file(path) as file:
        file.write(data)


def _beside(path: Path, kind: str) -> Path:
    """A name beside `path` that nobody has: process numbers repeat, in containers all the time."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{kind}")


def _hidden(target: Path, kind: str) -> list[Path]:
    return list(target.parent.glob(f".{glob.escape(target.name)}.*.{kind}"))


def _remove_left_over(target: Path, own: Path) -> None:
    """Remove the folders of processes that were killed while they wrote `target`: those that nobody holds a lock of."""
    for path in _hidden(target, "new"):
        if path == own:
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another process has just made it its target
        try:
            if lock(descriptor, path, "remove it by hand if nobody writes it"):
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            log.debug(f"{path}: another process is writing it")
        finally:
            os.close(descriptor)


def _put(temporary: Path, target: Path, replaced: Path) -> None:
    """Rename `temporary` to `target`; what was there is `replaced` afterwards, or still there after an error."""
    if not target.exists():
        os.rename(temporary, target)
        return
    os.rename(target, replaced)
    try:
        os.rename(temporary, target)
    except OSError:
        os.rename(replaced, target)
        raise


def _refuse(target: Path, mark: str, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if not target.is_dir() or target.is_symlink():
        raise ValueError(f"{target}: is no folder; name another place")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"{target}: is not empty; name another folder")
    if not (target / mark).is_file():
        raise ValueError(f"{target}: has no {mark}, so it is not what --overwrite would replace; name another folder")


def sync(path: Path) -> None:
    """What was written to a file, or the renames in a folder, are on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """In hex, of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
