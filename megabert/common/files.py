"""Atomic files and folders, locks, canonical JSON with a SHA-256 seal, safetensors.

Output is written beside its target, synced to the disk and renamed. This module imports torch only to write tensors.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from megabert.common.errors import FULL_ERRNO
from megabert.common.logs import log

if TYPE_CHECKING:
    from torch import Tensor

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux's renameat2
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}  # errno of file systems without flock
SAFETENSORS_TYPES = {
    "torch.float64": "F64", "torch.int64": "I64", "torch.float32": "F32", "torch.int32": "I32",
    "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.int8": "I8", "torch.uint8": "U8",
}  # fmt: skip
CHUNK = 16 << 20  # bytes hashed and written at a time
SYNCED = 256 << 20  # bytes of a file of tensors after which it is synced, so that its size shows the progress


def cache_folder(name: str) -> Path:
    """The cache folder `name` in $XDG_CACHE_HOME/megabert or ~/.cache/megabert, or in the temporary folder for a user
    without a home."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home.startswith("~"):
        home = os.path.join(tempfile.gettempdir(), f"cache-{os.getuid()}")
        os.makedirs(home, 0o700, exist_ok=True)
        if os.stat(home).st_uid != os.getuid():
            raise ValueError(f"{home}: belongs to another user; set XDG_CACHE_HOME to a folder for copies")
    return Path(home, "megabert", name)


@contextmanager
def atomic_folder(target: str | Path, mark: str, overwrite: bool | None = None) -> Iterator[Path]:
    """An empty folder to write into, renamed to `target` when the block ends without an error.

    Raises ValueError when `target` exists and is not empty, or, with `overwrite`, is not a folder with the file `mark`, which
    the command writes. None: the command has no such option.
    """
    target = Path(target)
    refuse_existing(target, mark, overwrite)
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    replaced = _beside(target, "old")

    def make() -> Path:
        folder = _beside(target, "new")
        folder.mkdir()
        return folder

    temporary, writing = create_locked_folder(make)
    try:
        remove_abandoned(path for path in _hidden(target, "new") if path != temporary)
        yield temporary
        for path in (*sorted(temporary.rglob("*"), reverse=True), temporary):
            sync(path)
        replace_folder(temporary, target, replaced)
        sync(target.parent)
        for path in _hidden(target, "old"):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(writing)
        shutil.rmtree(temporary, ignore_errors=True)


def files_below(folder: Path) -> dict[str, Path]:
    """The files of a folder by their paths relative to it, sorted."""
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


@contextmanager
def add_path_when_full(path: Path) -> Iterator[None]:
    """Context that adds `path` to the OSError of a full disk, which has no file name if raised by `write`."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL_ERRNO:
            error.filename = error.filename or str(path)
        raise


@contextmanager
def atomic_file(path: Path, synced: bool = True) -> Iterator[BinaryIO]:
    """A file to write into, which replaces `path` when the block ends without an error, `synced` to the disk before."""
    temporary = _beside(path, "tmp")
    try:
        # in this order: `close` writes again, and fails again
        with add_path_when_full(path), open(temporary, "wb") as file:
            yield file
            if synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if synced:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def large_atomic_file(path: Path) -> Iterator[BinaryIO]:
    """`atomic_file` for what takes long to write: what killed processes left of it beside `path` is removed."""
    with atomic_file(path) as file:
        lock(file.fileno(), path, "files left there by killed processes are not removed", wait=True)
        remove_abandoned(left for left in _hidden(path, "tmp") if left.name != os.path.basename(file.name))
        yield file


def write_atomically(path: Path, data: bytes) -> None:
    """Write the file `path`, or replace it."""
    with atomic_file(path) as file:
        file.write(data)


def sync(path: Path) -> None:
    """Sync a file's content, or the renames in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, *NO_LOCKS) or not path.is_dir():  # some file systems cannot sync a folder
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _beside(path: Path, kind: str) -> Path:
    """An unused hidden name beside `path`. Random, because process ids repeat between containers."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{kind}")


def _hidden(target: Path, kind: str) -> list[Path]:
    return list(target.parent.glob(f".{glob.escape(target.name)}.*.{kind}"))


def create_locked_folder(make: Callable[[], Path]) -> tuple[Path, int]:
    """Create a folder with `make()` and lock it; returns it and the lock's descriptor. Retries if `remove_abandoned`
    in another process deleted the folder before it was locked."""
    while True:
        folder = make()
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            lock(descriptor, folder, "folders left there by killed processes are not removed", wait=True)
        except OSError:
            os.close(descriptor)
            raise
        if folder.exists():
            return folder, descriptor
        os.close(descriptor)


def remove_abandoned(paths: Iterable[Path]) -> None:
    """Remove folders and files of killed processes: those that are not locked (`create_locked_folder`, `large_atomic_file`)."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except (FileNotFoundError, PermissionError):  # renamed or removed meanwhile, or another user's
            continue
        try:
            if lock(descriptor, path, "remove it by hand if no process writes it"):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        except BlockingIOError:
            log.debug(f"{path} is in use")
        finally:
            os.close(descriptor)


def replace_folder(temporary: Path, target: Path, replaced: Path) -> None:
    """Rename `temporary` to `target`; an existing target is renamed to `replaced`.

    `target` exists at any time if the file system can exchange two names atomically. An error restores the old target.
    """
    if not target.exists():
        os.rename(temporary, target)
        return
    if exchange(temporary, target):
        os.rename(temporary, replaced)
        return
    os.rename(target, replaced)
    try:
        os.rename(temporary, target)
    except OSError:
        os.rename(replaced, target)
        raise


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two files or folders in one step; False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if not renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
        return True
    if (number := ctypes.get_errno()) in (errno.EINVAL, *NO_LOCKS):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def refuse_url(target: str | Path) -> None:
    """Raises ValueError if a folder or file to write is a URL."""
    if re.match(r"[A-Za-z][\w+.-]+:/", os.fspath(target)):  # a path has lost its second slash
        raise ValueError(f"{target}: is a URL; name a place on this machine, and copy it there")


def refuse_existing(target: Path, mark: str, overwrite: bool | None = None) -> None:
    """Raises ValueError if `atomic_folder` would not replace `target`, or if it is a URL. `overwrite` None: the command has no such
    option."""
    refuse_url(target)
    if not os.path.lexists(target):
        return
    if not target.is_dir() or target.is_symlink():
        raise ValueError(f"{target}: exists and is not a folder; name another folder")
    if not any(target.iterdir()):
        return
    if not overwrite:
        replaceable = overwrite is not None and (target / mark).is_file()
        raise ValueError(f"{target}: is not empty; name another folder{', or give --overwrite' * replaceable}")
    if not (target / mark).is_file():
        raise ValueError(f"{target}: has no {mark}, so it is not what --overwrite would replace; name another folder")


def lock(descriptor: int, path: Path, otherwise: str, wait: bool = False, shared: bool = False) -> bool:
    """Lock an open file or folder (flock); the system releases it when the process ends.

    Returns False, after a warning that ends with the advice `otherwise`, if the file system has no locks. Raises
    BlockingIOError if another process holds the lock, unless `wait`, and OSError if the file system fails.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.warning(f"{path}: this file system has no locks ({error.strerror}); {otherwise}")
        return False
    return True


def canonical(value: Any) -> bytes:
    """The canonical JSON text of `value`: sorted keys, an item a line, a line end."""
    return (json.dumps(value, sort_keys=True, indent=1) + "\n").encode()


def compact(value: Any) -> bytes:
    """The canonical JSON text of `value` without blanks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def parse_object(data: bytes, where: str | Path, advice: str = "") -> dict[str, Any]:
    """The JSON object that `data` is. Raises ValueError of the file `where`, with the `advice` at its end, for anything else."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON ({error!s:.100}){advice}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{where}: must hold one JSON object{advice}")
    return tree


def digest(tree: Mapping[str, Any], field: str, text: Any = canonical) -> str:
    """SHA-256 in hex of all fields of `tree` but `field`, as JSON by `text`."""
    return hashlib.sha256(text({name: value for name, value in tree.items() if name != field})).hexdigest()


def sealed(tree: Mapping[str, Any], field: str, text: Any = canonical) -> bytes:
    """The canonical text of `tree` with its digest in `field`."""
    return canonical({**tree, field: digest(tree, field, text)})


def refuse_newer(number: Any, known: int, where: str) -> None:
    """Raises ValueError if the format of the file `where` has a later number than this program reads."""
    if isinstance(number, int) and number > known:
        raise ValueError(
            f"{where}: has format {number} of a later MegaBERT; this version reads up to {known}: update MegaBERT"
        )


def hash_file(path: Path) -> str:
    """SHA-256 in hex of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Write a safetensors file durably, byte for byte as the library does; returns its "bytes" and "sha256".

    The library creates a file that only its owner may read, copies every tensor while holding Python's lock, and would need a
    second reading to hash it. Format: https://huggingface.co/docs/safetensors. Raises OSError naming the file.
    """
    import torch

    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for name in ordered:
        tensor = tensors[name]
        end = position + tensor.numel() * tensor.element_size()
        kind = SAFETENSORS_TYPES[str(tensor.dtype)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    sha256 = hashlib.sha256()
    try:
        with path.open("wb", buffering=1 << 20) as file:
            for part in (len(text).to_bytes(8, "little"), text):
                file.write(part)
                sha256.update(part)
            for name in ordered:
                flat = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
                for first in range(0, len(flat), CHUNK):
                    before = file.tell()
                    file.write(flat[first : first + CHUNK])
                    sha256.update(flat[first : first + CHUNK])
                    if file.tell() // SYNCED > before // SYNCED:
                        file.flush()
                        os.fdatasync(file.fileno())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return {"bytes": 8 + len(text) + position, "sha256": sha256.hexdigest()}
