"""Requests to stop: signals and time limits only set a flag; the loop asks for it, saves and ends on all ranks together.

INT (Ctrl-C), TERM, USR1 and USR2 ask to stop; so does a limit (`--max-time`, the end of SLURM's job) that comes close. Nothing
is done inside a signal handler, where a collective would hang: the loop asks once an update. A second signal ends the process
at once; one that follows within a second is the same request, forwarded by a launcher and the batch system both.
No torch here: signals are caught before the slow imports.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from megabert.common.errors import leave_exit_code

# Exit code: everything is saved, start the same command again.
REQUEUE = 85
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
# Before there is anything to save.
NOTHING = b"stopped: nothing was trained yet; the same command starts again\n"
# The descriptor at which a process that waits to become a rank (`train --in-place`) gets its place: its end is no news.
PLACE = "MEGABERT_KEEPER_PLACE"
# To who pressed Ctrl-C.
NOTICE = b"\nstopping: the run is saved after this update; Ctrl-C again ends it at once\n"
# One request may reach a process twice: with its group and through its launcher.
ECHO_SECONDS = 1.0
# Updates, and saves, whose longest is taken for the time of the next one.
RECENT = 100
# Updates until all ranks know of a request: the ranks' record of an update is read after the next one.
LATE = 2
# For what is neither an update nor a save: an evaluation's end, leaving.
MARGIN_SECONDS = 5.0
# Before the first save: its share of the time allowed, and the most seconds.
UNKNOWN_SAVE = (0.1, 60.0)
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

_taken_over = threading.Event()
_early: threading.Thread | None = None


def leave_when_signalled() -> None:
    """Until a `Stop` takes over, when there is nothing to save, a signal ends the process, to be started again.

    A thread waits for it, because the main thread may sit in a rendezvous, where no handler of Python's would run.
    """
    global _early
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _early = threading.Thread(target=_leave, name="leave", daemon=True)
    _early.start()


def _leave() -> None:
    last = False
    while not last:
        last = _taken_over.is_set()  # then signals that are pending already are handled once more
        if (received := signal.sigtimedwait(SIGNALS, 0.1)) is not None:
            if os.environ.get("LOCAL_RANK", "0") == "0" and PLACE not in os.environ:
                os.write(2, b"\n" * (received.si_signo == signal.SIGINT) + NOTHING)
            os._exit(leave_exit_code(REQUEUE))


def ignore_signals() -> None:
    """The exit code is decided: while the interpreter ends, a signal would take its default action."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def take_over(request: Callable[[int, Any], None]) -> None:
    """From here on a signal calls `request`, on the main thread."""
    for number in SIGNALS:
        signal.signal(number, request)
    if _early is not None:
        _taken_over.set()
        _early.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def interrupt(number: int, frame: Any) -> None:
    """Ends a command that has nothing to save: what it was writing is removed."""
    raise KeyboardInterrupt


class Stop:
    """`requested` turns true with a signal, or when the time that is left until `ends` is needed for saving."""

    def __init__(self, ends: float | None = None) -> None:
        """`ends`: the moment (seconds of the epoch) at which this process must be gone; None for never."""
        self._signalled: float | None = None
        self._ends = ends
        self._updates: deque[float] = deque(maxlen=RECENT)
        self._saves: deque[float] = deque(maxlen=RECENT)
        share, most = UNKNOWN_SAVE
        self._first_save = 0.0 if ends is None else min(share * max(ends - time.time(), 0.0), most)
        take_over(self._request)

    def _request(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self._signalled is not None and now - self._signalled > ECHO_SECONDS:
            os._exit(128 + number)
        if self._signalled is None:
            self._signalled = now
            if number == signal.SIGINT and os.environ.get("LOCAL_RANK", "0") == "0":
                os.write(2, NOTICE)  # the log's lock may be held here

    @property
    def requested(self) -> bool:
        return self._signalled is not None or self.seconds_left <= 0

    @property
    def seconds_left(self) -> float:
        """Seconds until the last update that can still be followed by a save has to begin; infinite without a limit."""
        if self._ends is None:
            return float("inf")
        save = max(self._saves, default=self._first_save)
        return self._ends - time.time() - LATE * max(self._updates, default=0.0) - save - MARGIN_SECONDS

    def updated(self, seconds: float) -> None:
        """Note the time of one more update, with its data and evaluation."""
        self._updates.append(seconds)

    def saved(self, seconds: float) -> None:
        """Note the time of one more save until it was committed."""
        self._saves.append(seconds)


def end_of_time(max_time: str, environment: Mapping[str, str], started: float) -> float | None:
    """The moment (seconds of the epoch) at which the job must be gone: of `--max-time` ("" for none) from `started` on,
    and SLURM's own end of the job, the earlier one. Raises ValueError naming what cannot be read."""
    ends = [started + parse_duration(max_time)] if max_time else []
    slurm = environment.get("SLURM_JOB_END_TIME", "")
    if slurm:
        if not slurm.isdecimal():
            raise ValueError(f"environment variable SLURM_JOB_END_TIME={slurm!r} is not a number of seconds")
        ends.append(float(slurm))
    return min(ends, default=None)


def parse_duration(text: str) -> float:
    """Seconds of `90` or `90m` (minutes), `45s`, `2h`, `1d`, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM`, `D-HH:MM:SS`.

    Without a unit as `sbatch --time` takes it (man sbatch). Raises ValueError for anything else, and for 0.
    """
    seconds = 0.0
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        seconds = float(match[1]) * UNITS[match[2]]
    elif match := re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text):
        clock = [int(part) for part in match[2].split(":")]
        if not match[1] and len(clock) < 3:  # it begins with the minutes
            clock.insert(0, 0)
        hours, minutes, rest = (*clock, 0, 0)[:3]
        seconds = ((int(match[1] or 0) * 24 + hours) * 60 + minutes) * 60 + rest
    if not seconds:
        raise ValueError(f"--max-time {text}: write 90 (minutes), 45s, 2h, 1:30:00 or 1-12:00:00")
    return seconds
