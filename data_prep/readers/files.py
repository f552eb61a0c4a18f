"""Files that inputs name, on this machine or at a URL: what they are, when they changed, and their bytes."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import BinaryIO

from data_prep.common.errors import BadInput
from megabert.common import remote
from megabert.common.remote import is_url


@dataclass(frozen=True)
class Status:
    """Whether a path is a regular file, its bytes, and a number that changes with its content: a time in ns, or of an ETag."""

    regular: bool
    size: int
    stamp: int


def status(path: str) -> Status:
    """Raises OSError, for a URL as `megabert.common.remote` does."""
    if is_url(path):
        found = remote.status(path)
        return Status(not found.folder, found.size, found.stamp)
    local = os.stat(path)
    return Status(stat.S_ISREG(local.st_mode), local.st_size, local.st_mtime_ns)


def open_regular(path: str) -> BinaryIO:
    """The file, open for reading. Raises BadInput for a pipe, device or socket, without waiting on it."""
    if is_url(path):
        return remote.opened(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise BadInput(f"{path}: not a regular file")
    return file


def name(path: str) -> str:
    """A path as its suffix is told by: of a URL without its query."""
    return path.partition("?")[0] if is_url(path) else path
