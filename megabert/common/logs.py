"""Messages of commands and runs: one logger, plain lines on stdout from rank 0, warnings and errors on stderr with their rank.

`log.info` is printed by rank 0 only, `log.warning` and `log.error` by every rank. MEGABERT_LOG is the lowest level that is shown:
debug, info (default), warning or error.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

log = logging.getLogger("megabert")
LEVELS = ("debug", "info", "warning", "error")
# parts of addresses in a text that may be secrets: user and password, and a query, up to the punctuation of the text
PASSWORD = re.compile(r"(?<=://)[^\s/?#'\"]*@")
QUERY = re.compile(r"(https?://[^\s?'\"]*)\?[^\s'\"]*?(?=[:;,.)\]]*(?:[\s'\"]|$))")


class _LineHandler(logging.Handler):
    """Handler that writes to the current sys.stdout and sys.stderr, also if they were replaced after `setup`."""

    prefix, is_main = "", True

    def emit(self, record: logging.LogRecord) -> None:
        text = hide_secrets(record.getMessage())
        if record.levelno >= logging.WARNING:
            write(f"{self.prefix}{record.levelname.lower()}: {text}\n", sys.stderr)
        elif self.is_main or record.levelno < logging.INFO:
            write(f"{self.prefix}{text}\n", sys.stdout)


def hide_secrets(text: str) -> str:
    """A text without the passwords and queries of the web addresses in it."""
    return QUERY.sub(r"\1", PASSWORD.sub("", text))


def open_closed_streams() -> None:
    """Open those of stdin, stdout and stderr that are closed (`2>&-`): the next file would get the number, and what a library prints."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def write(text: str, stream: TextIO | None) -> None:
    """Write to stdout or stderr and flush. If that fails, because the terminal is closed, or the reader of a pipe has ended (`| tee`,
    at Ctrl-C), this and later output of the process to the stream is lost, and the error is in `write_error`."""
    global write_error
    if stream is None:  # was closed at the start; `print` would take stdout
        return
    try:
        print(text, end="", file=stream, flush=True)
    except BlockingIOError:  # full, and another process has made it non-blocking
        with contextlib.suppress(OSError, ValueError):
            os.set_blocking(stream.fileno(), True)
            stream.flush()
    except OSError as error:
        write_error = write_error or error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with contextlib.suppress(OSError):  # a stream without a descriptor
            os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def flush() -> None:
    """Flush stdout and stderr here, since the interpreter's flush at exit prints a traceback if a stream is closed."""
    write("", sys.stdout)
    write("", sys.stderr)


def write_notice(text: bytes) -> None:
    """Write to stderr from a signal handler, or past a lock that another thread may hold, if its reader has not ended."""
    with contextlib.suppress(OSError):
        os.write(2, text)


_lines = _LineHandler()
write_error: OSError | None = None  # the first error of writing to stdout or stderr


def setup(rank: int = 0) -> None:
    """Send the project's messages to this process' streams as rank `rank`. Called by commands, again once the
    rank is known. Raises ValueError for a level that does not exist."""
    if _lines not in log.handlers:  # before the check below, whose error it prints
        log.addHandler(_lines)
    log.propagate = False
    _lines.prefix, _lines.is_main = f"rank {rank}: " if rank else "", rank == 0
    name = (os.environ.get("MEGABERT_LOG") or "info").lower()
    if name not in LEVELS:
        raise ValueError(f"MEGABERT_LOG={name}: choose {', '.join(LEVELS)}")
    log.setLevel(name.upper())


@contextlib.contextmanager
def warn_while_waiting(text: str, seconds: float) -> Iterator[None]:
    """Log a warning if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, log.warning, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning on rank 0, the first time that this text is given."""
    if _lines.is_main:
        log.warning(text)


def duration(seconds: float) -> str:
    """`93784` → `1d02h03m`."""
    minutes, sec = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h{minutes:02d}m"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{sec:02d}s"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """A table of cells as text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def log_progress_every(seconds: float, what: str) -> Callable[[int, int], None]:
    """A function (done, total) that logs "DONE of TOTAL" and `what`, at most once per `seconds`, the first time after
    `seconds`."""
    last = time.monotonic()

    def show(done: int, of: int) -> None:
        nonlocal last
        if time.monotonic() - last > seconds:
            last = time.monotonic()
            log.info(f"{done} of {of} {what}")

    return show
