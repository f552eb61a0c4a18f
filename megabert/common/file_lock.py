"""Locks of open files (flock), which the system lets go of however a process dies, and which some file systems do not have."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

from megabert.common.logs import log

NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}  # what such file systems say


def lock(descriptor: int, path: Path, otherwise: str, wait: bool = False, shared: bool = False) -> bool:
    """Lock the open file or folder `path` for this process alone, or for it and others that lock it `shared`. False where its
    file system has no locks: a warning says what must not be done then (`otherwise`).

    Raises BlockingIOError where another process has the lock, unless `wait`; OSError where the file system fails.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.warning(f"{path}: this file system has no locks ({error.strerror}); {otherwise}")
        return False
    return True
