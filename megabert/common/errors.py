"""Exit codes by class of failure, and the one line that is said about an error.

    0    finished
    2    a mistake in the command, the configuration or the data: starting it again would not help
    3    training went wrong: non-finite or spiking again and again
    4    I/O failed, or a process, a machine or a peer was lost: starting it again may help
    85   stopped with everything saved (`megabert.distributed.preemption`)
    130  interrupted at the terminal

An exception that belongs to another class than its type says has the attribute `exit_code`.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
from collections.abc import Callable
from pathlib import Path

from megabert.common import logs
from megabert.common.logs import log

OK, USER_ERROR, BAD_TRAINING, FAILED, INTERRUPTED = 0, 2, 3, 4, 130
# what the operating system says of a path that the user named wrongly; None: a library's own OSError about a file's content
OF_THE_USER = {
    *(None, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS, errno.EINVAL, errno.EXDEV),
}  # fmt: skip
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class BadTraining(RuntimeError):
    """Going on would waste the machine; the same on every rank."""

    exit_code = BAD_TRAINING


class Failed(OSError):
    """I/O failed, or a process was lost, in words of our own."""

    exit_code = FAILED


def exit_code(error: Exception) -> int:
    """The exit code of a command that ends with `error`, one of ValueError, OSError or an exception that says it itself."""
    code: int | None = getattr(error, "exit_code", None)
    if code is not None:
        return code
    if isinstance(error, ConnectionError | TimeoutError):
        return FAILED
    return FAILED if isinstance(error, OSError) and error.errno not in OF_THE_USER else USER_ERROR


def describe(error: Exception) -> str:
    """The error in a user's words: an OSError as path and reason."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    reason = error.strerror
    if error.errno in FULL:
        reason = "the disk is full (or a quota or file size limit is reached); with more room the same command goes on"
    return f"{os.fsdecode(error.filename)}: {reason}" if isinstance(error.filename, str | bytes) else reason


def command(main: Callable[[list[str] | None], int]) -> Callable[..., int]:
    """Decorator of a command's `main(argv)`: messages are set up; what ends it is one line on stderr and its exit code."""

    @functools.wraps(main)
    def ended(argv: list[str] | None = None) -> int:
        try:
            logs.setup()
            return main(argv)
        except (ValueError, OSError) as error:
            log.error(describe(error))
            return exit_code(error)
        except KeyboardInterrupt:
            log.error("interrupted")
            return INTERRUPTED

    return ended


def leave_exit_code(code: int) -> int:
    """`code`, left in $MEGABERT_EXIT_DIR as well where a launching script set it: launchers change or lose the ranks' codes."""
    if folder := os.environ.get("MEGABERT_EXIT_DIR"):
        try:
            Path(folder, f"{socket.gethostname()}-{os.getpid()}").write_text(f"{code}\n")
        except OSError as error:
            log.warning(f"MEGABERT_EXIT_DIR: {describe(error)}")
    return code


def code_of(main: Callable[[], int]) -> int:
    """What a command's `main` returns, or exits with because its arguments are wrong, left for a launching script too."""
    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else OK if end.code is None else 1
    return leave_exit_code(code)
