"""Exit codes by class of failure, the one line printed for an error, and retries of I/O that may pass.

    0    finished
    2    a mistake in the command, the configuration or the data: a restart would not help
    3    training went wrong: non-finite or spiking repeatedly
    4    I/O failed, or a process, a machine or a peer was lost: a restart may help
    85   stopped with everything saved (`megabert.distributed.signals`)
    130  interrupted at the terminal

An exception that belongs to another class than its type suggests has the attribute `exit_code`.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from megabert.common import logs
from megabert.common.logs import log

T = TypeVar("T")
OK, USER_ERROR, BAD_TRAINING, FAILED, INTERRUPTED = 0, 2, 3, 4, 130
# errno of a path that the user named wrongly; None: a library's own OSError about a file's content
USER_ERRNO = {
    *(None, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS, errno.EINVAL, errno.EXDEV),
}
FULL_ERRNO = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# seconds before each retry
WAITS = (0.1, 1.0, 5.0)


class BadTraining(RuntimeError):
    """Training cannot continue usefully; the same on every rank."""

    exit_code = BAD_TRAINING


class Failed(OSError):
    """I/O failed, or a process was lost, in words of our own."""

    exit_code = FAILED


def exit_code(error: Exception) -> int:
    """The exit code of a command that ends with `error`: a ValueError, an OSError or an exception with the attribute."""
    code: int | None = getattr(error, "exit_code", None)
    if code is not None:
        return code
    if isinstance(error, ConnectionError | TimeoutError):
        return FAILED
    return FAILED if isinstance(error, OSError) and error.errno not in USER_ERRNO else USER_ERROR


def describe(error: Exception) -> str:
    """The error in a user's words: an OSError as path and reason."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    reason = error.strerror
    if error.errno in FULL_ERRNO:
        reason = "the disk is full (or a quota or file size limit is reached); with more room the same command resumes"
    return f"{os.fsdecode(error.filename)}: {reason}" if isinstance(error.filename, str | bytes) else reason


def tried_again(action: Callable[[], T]) -> T:
    """The result of `action`, retried after growing waits while it raises an OSError that may pass (EIO, ESTALE, a time-out).

    Raises the last try's error, and at once one that the user must fix (no such file, no permission).
    """
    for wait in WAITS:
        try:
            return action()
        except OSError as error:
            if exit_code(error) != FAILED:
                raise
            log.warning(f"{describe(error)}: retrying in {wait:g} s")
            time.sleep(wait)
    return action()


def command(main: Callable[[Any], int]) -> Callable[..., int]:
    """Decorator of a command's `main(argv)`, or of what it does with its arguments: sets up messages; an error becomes one line on stderr and its exit code."""

    @functools.wraps(main)
    def wrapped(argv: Any = None) -> int:
        try:
            logs.setup()
            return main(argv)
        except (ValueError, OSError) as error:
            log.error(describe(error))
            return exit_code(error)
        except KeyboardInterrupt:
            log.error("interrupted: nothing was written")
            return INTERRUPTED

    return wrapped


def leave_exit_code(code: int, failed_hosts: Iterable[str] = ()) -> int:
    """`code`, also written to $MEGABERT_EXIT_DIR where a launch script set it, with the hosts whose ranks failed: launchers
    change or lose the ranks' codes."""
    if folder := os.environ.get("MEGABERT_EXIT_DIR"):
        try:
            Path(folder, f"{socket.gethostname()}-{os.getpid()}").write_text(
                "\n".join([str(code), *(f"failed={host}" for host in failed_hosts)]) + "\n"
            )
        except OSError as error:
            log.warning(f"MEGABERT_EXIT_DIR: {describe(error)}")
    return code


def code_of(main: Callable[[], int]) -> int:
    """What a command's `main` returns, or exits with because its arguments are wrong; left for a launch script too."""
    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else OK if end.code is None else 1
    except KeyboardInterrupt:
        # in the imports of a command
        print("error: interrupted", file=sys.stderr)
        code = INTERRUPTED
    return leave_exit_code(code)
