"""Exit codes by class of failure, the line printed for an error, and retries after transient I/O errors.

    0    finished
    2    a mistake in the command, the configuration or the data: a restart would not help
    3    training went wrong: non-finite or spiking repeatedly
    4    I/O failed, or a process, a machine or a peer was lost: a restart may help
    85   stopped with everything saved (`megabert.distributed.signals`)
    130  interrupted at the terminal

The attribute `exit_code` of an exception overrides the class of its type.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megabert.common import logs
from megabert.common.logs import log

T = TypeVar("T")
OK, USER_ERROR, BAD_TRAINING, FAILED, INTERRUPTED = 0, 2, 3, 4, 130
# errno values that mean a user mistake, such as a wrong path. None: raised by a library about a file's content
USER_ERRNO = {
    *(None, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS, errno.EINVAL, errno.EXDEV),
}
FULL_ERRNO = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
WAITS = (0.1, 1.0, 5.0)  # seconds before each retry


class BadTraining(RuntimeError):
    """Training cannot continue usefully; the same on every rank."""

    exit_code = BAD_TRAINING


class Failed(OSError):
    """I/O failed, or a process was lost; the message is shown as it is."""

    exit_code = FAILED
    retried = True  # by `with_retries`


def exit_code(error: Exception) -> int:
    """The exit code of a command that ends with `error`: a ValueError, an OSError or an exception with the attribute."""
    code: int | None = getattr(error, "exit_code", None)
    if code is not None:
        return code
    if isinstance(error, ConnectionError | TimeoutError):
        return FAILED
    return FAILED if isinstance(error, OSError) and error.errno not in USER_ERRNO else USER_ERROR


def describe(error: Exception) -> str:
    """The message of an error, never empty; of an OSError path and reason."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    reason = error.strerror
    if error.errno in FULL_ERRNO:
        reason = "the disk is full (or a quota or file size limit is reached); with more room the same command resumes"
    return f"{os.fsdecode(error.filename)}: {reason}" if isinstance(error.filename, str | bytes) else reason


def with_retries(action: Callable[[], T], waits: Sequence[float] = ()) -> T:
    """Run `action`, retrying a transient OSError (EIO, ESTALE, a timeout) after each of `waits` seconds (default:
    WAITS).

    Raises the last error. An error that the user has to fix (no such file, no permission) is raised at once, as is a
    Failed that is not `retried`.
    """
    for wait in waits or WAITS:
        try:
            return action()
        except OSError as error:
            if exit_code(error) != FAILED or not getattr(error, "retried", True):
                raise
            log.warning(f"{describe(error)}: retrying in {wait:g} s")
            time.sleep(wait)
    return action()


def command(main: Callable[[Any], int | None]) -> Callable[..., int]:
    """Decorator for a command's `main(argv)`, or a function of its arguments: sets up logging, prints a ValueError, an
    OSError, BadTraining or Ctrl-C in one line on stderr, and returns its exit code; a result of None becomes OK."""

    @functools.wraps(main)
    def wrapped(argv: Any = None) -> int:
        try:
            logs.setup()
            return main(argv) or OK
        except (ValueError, OSError, BadTraining) as error:
            log.error(describe(error))
            return exit_code(error)
        except KeyboardInterrupt:
            return interrupted("nothing was written")

    return wrapped


def interrupted(consequence: str = "") -> int:
    """Report Ctrl-C on a line of its own, since it may come before a progress bar was cleared; returns the exit code."""
    logs.write("\n", sys.stderr)
    log.error(f"interrupted: {consequence}" if consequence else "interrupted")
    return INTERRUPTED


@contextlib.contextmanager
def exit_on_ctrl_c() -> Iterator[None]:
    """Ctrl-C in the block ends the process with one line. For imports, whose compiled code prints a KeyboardInterrupt with a
    traceback and continues."""

    def leave(number: int, frame: Any) -> None:
        logs.write_notice(b"error: interrupted\n")
        os._exit(record_exit_code(INTERRUPTED))

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def record_exit_code(code: int, failed_hosts: Iterable[str] = ()) -> int:
    """Return `code`, and write it with the hosts of failed ranks to $MEGABERT_EXIT_DIR where a launch script set it: launchers
    change or lose the ranks' codes."""
    if folder := os.environ.get("MEGABERT_EXIT_DIR"):
        try:
            Path(folder, f"{socket.gethostname()}-{os.getpid()}").write_text(
                "\n".join([str(code), *(f"failed={host}" for host in failed_hosts)]) + "\n"
            )
        except OSError as error:
            log.warning(f"MEGABERT_EXIT_DIR: {describe(error)}")
    return code


def run_main(main: Callable[[], int]) -> int:
    """Run a command's `main`; returns its exit code, also after SystemExit, Ctrl-C or output that could not be written.

    Records the code for a launch script (`record_exit_code`). Characters that stdout cannot encode are printed as
    escapes.
    """
    logs.open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr
    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else OK if end.code is None else 1
    except KeyboardInterrupt:
        logs.write("error: interrupted\n", sys.stderr)  # during a command's imports
        code = INTERRUPTED
    logs.flush()
    if code == OK and logs.write_error is not None:
        logs.write(f"error: {describe(logs.write_error)}: output is lost\n", sys.stderr)
        code = FAILED
    return record_exit_code(code)
