"""Requests to stop: signals and time limits set a flag, and the training loop then saves and ends on all ranks.

INT (Ctrl-C), TERM, HUP (a closed terminal), USR1 and USR2 request a stop, and so does an approaching limit
(`--max-time`, the end of the SLURM job). The loop checks the flag after every update; a collective in a signal handler
would hang. A second signal ends the process at once, unless it arrives within ECHO_SECONDS: a launcher and the batch
system may both forward the same request. Threads wait for signals, since a main thread that is blocked in a rendezvous or a
collective runs no Python signal handlers.

This module must not import torch: signals are caught before the slow imports.
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

from megabert.common import logs
from megabert.common.errors import FAILED, record_exit_code

REQUEUE = 85  # exit code: everything is saved, run the same command again
SIGNALS: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
    SIGNALS = (*SIGNALS, signal.SIGHUP)
# Printed if there is nothing to save yet.
NOTHING = b"stopped: nothing was trained yet; the same command starts again\n"
# Environment variable: file descriptor of the pipe from which a rank started by a keeper reads its real environment.
ENVIRONMENT_FD = "MEGABERT_KEEPER_PLACE"
# Environment variable of a rank that restarts in place: it must save the state in memory before it ends.
RESTARTED = "MEGABERT_KEEPER_RESTARTED"
# Environment variable with the time at which the job started, if ranks restart within it, in seconds since the epoch.
STARTED = "MEGABERT_JOB_STARTED"
# Printed after Ctrl-C, and where nothing is saved.
NOTICE = b"\nstopping: the run is saved after this update; Ctrl-C again ends it at once\n"
UNSAVED = b"\nstopping after this step; Ctrl-C again ends it at once\n"
ECHO_SECONDS = 1.0  # a process may receive one request twice: through its process group and from its launcher
RECENT = 100  # number of updates, and of saves, whose maximum estimates the time of the next one
LATE = 2  # updates between a request and the stop: reports of an update are gathered during the next one
CLOCK_ERROR = 1.0  # seconds in which the clock and the monotonic one may differ
MARGIN_SECONDS = 5.0  # seconds reserved for everything else, such as the exit
UNKNOWN_SAVE = (0.1, 60.0)  # estimate of the first save: fraction of the allowed time, and its maximum in seconds
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

_taken_over = threading.Event()
_early: threading.Thread | None = None
# When a signal was received before a `Stop` existed, in seconds of the monotonic clock.
_early_request: float | None = None
# Handlers before `install_handlers`, and wakeup descriptors before each `Stop`, in a process that a command was called in.
_before: dict[signal.Signals, Any] = {}
_wakeups: list[int] = []
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a forked process' signals are its own


def exit_on_signals() -> None:
    """Exit with REQUEUE on a signal until a `Stop` exists; before that there is nothing to save. A rank that restarts
    in place records the request instead, for its `Stop` to honour.
    """
    global _early
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _early = threading.Thread(target=_leave, args=[RESTARTED in os.environ], name="leave", daemon=True)
    _early.start()


def _leave(restarted: bool) -> None:
    global _early_request
    last = False
    while not last:
        last = _taken_over.is_set()  # pending signals are handled once more
        if (received := signal.sigtimedwait(SIGNALS, 0.1)) is None:
            continue
        if not restarted:
            if os.environ.get("LOCAL_RANK", "0") == "0" and ENVIRONMENT_FD not in os.environ:
                logs.write_notice(b"\n" * (received.si_signo == signal.SIGINT) + NOTHING)
            os._exit(record_exit_code(REQUEUE))
        if _early_request is None:
            _early_request = time.monotonic()
        elif time.monotonic() - _early_request > ECHO_SECONDS:
            os._exit(128 + received.si_signo)


def ignore_signals() -> None:
    """Ignore signals while the interpreter exits, so that they do not change the exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def install_handlers(request: Callable[[int, Any], None]) -> None:
    """Handle signals by calling `request` on the main thread."""
    for number in SIGNALS:
        _before.setdefault(number, signal.signal(number, request))
    if _early is not None:
        _before.clear()  # the process ends with the command
        _wakeups.clear()
        _taken_over.set()
        _early.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def restore_handlers() -> None:
    """Restore the signal handlers of the program that called the command."""
    while _before:
        number, handler = _before.popitem()
        signal.signal(number, handler or signal.SIG_DFL)
    while _wakeups:  # which ends the thread that reads it
        os.close(signal.set_wakeup_fd(_wakeups.pop()))


def interrupt(number: int, frame: Any) -> None:
    """Signal handler of commands that have nothing to save: raises KeyboardInterrupt, at which unfinished files are removed."""
    raise KeyboardInterrupt


class Stop:
    """`requested` becomes true at a signal, or when the remaining time is needed for saving."""

    def __init__(self, deadline: float | None = None, notice: bytes = NOTICE) -> None:
        """`deadline`: time by which this process must have exited, in seconds since the epoch; None for no limit. `notice`: printed
        after Ctrl-C."""
        self._deadline, self._notice = deadline, notice
        self._clock = time.time() - time.monotonic()
        self._updates, self._saves, self._uploads = (deque[float](maxlen=RECENT) for _ in range(3))
        share, most = UNKNOWN_SAVE
        self._first_save = 0.0 if deadline is None else min(share * max(deadline - time.time(), 0.0), most)
        self._signalled: float | None = None
        received, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        _wakeups.append(signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False))
        threading.Thread(target=self._watch, args=[received], name="second signal", daemon=True).start()
        install_handlers(self._request)
        self._signalled = self._signalled or _early_request

    def _request(self, number: int, frame: Any) -> None:
        self._signalled = self._signalled or time.monotonic()

    def _watch(self, received: int) -> None:
        """End the process at a second signal, also while the main thread is blocked."""
        first = None
        while number := int.from_bytes(os.read(received, 1)):
            if number not in SIGNALS:  # of a loader process that ended
                continue
            if (first := first or _early_request) is None:  # `_leave` may have noted one since this thread started
                first = time.monotonic()
                if number == signal.SIGINT and os.environ.get("LOCAL_RANK", "0") == "0":
                    logs.write_notice(self._notice)  # not logged: the main thread may hold the logger's lock
            elif time.monotonic() - first > ECHO_SECONDS:
                record_exit_code(FAILED)  # for a launch script: nothing was saved
                os._exit(128 + number)
        os.close(received)

    @property
    def requested(self) -> bool:
        return self._signalled is not None or self.seconds_left <= 0

    @property
    def seconds_left(self) -> float:
        """Seconds left for starting an update: those to the deadline, minus LATE updates, a save with its upload, and
        MARGIN_SECONDS; infinite without a deadline."""
        if self._deadline is None:
            return float("inf")
        save = max(self._saves, default=self._first_save)
        save += max(self._uploads, default=0.0)
        # a clock that was set back does not move the deadline
        now = max(time.time(), self._clock + time.monotonic() - CLOCK_ERROR)
        return self._deadline - now - LATE * max(self._updates, default=0.0) - save - MARGIN_SECONDS

    def record_update(self, seconds: float) -> None:
        """Record the duration of an update, including its data but not an evaluation."""
        self._updates.append(seconds)

    def record_save(self, seconds: float) -> None:
        """Record the duration of a save until it was committed."""
        self._saves.append(seconds)

    def record_upload(self, seconds: float) -> None:
        """Record the duration of a checkpoint's upload, for which the end of the job waits."""
        self._uploads.append(seconds)


def find_deadline(max_time: str, environment: Mapping[str, str], started: float) -> float | None:
    """The job's deadline in seconds since the epoch, or None: the earlier of `started` + `--max-time` ("" for none)
    and the end of the SLURM job. Under --in-place the time counts from the job's start, not the rank's.

    Raises ValueError naming the value that cannot be parsed.
    """
    deadlines = [float(environment.get(STARTED, started)) + parse_duration(max_time)] if max_time else []
    slurm = environment.get("SLURM_JOB_END_TIME", "")
    if slurm:
        if not slurm.isdecimal():
            raise ValueError(f"environment variable SLURM_JOB_END_TIME={slurm!r} is not a number of seconds")
        deadlines.append(float(slurm))
    return min(deadlines, default=None)


def parse_duration(text: str) -> float:
    """Seconds of `90` or `90m` (minutes), `45s`, `2h`, `1d`, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM`, `D-HH:MM:SS`.

    Values without a unit are those of `sbatch --time` (man sbatch). Raises ValueError for other texts and for 0.
    """
    seconds = 0.0
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        seconds = float(match[1]) * UNITS[match[2]]
    elif match := re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text):
        clock = [int(part) for part in match[2].split(":")]
        if not match[1] and len(clock) < 3:  # the first number is minutes
            clock.insert(0, 0)
        hours, minutes, rest = (*clock, 0, 0)[:3]
        seconds = ((int(match[1] or 0) * 24 + hours) * 60 + minutes) * 60 + rest
    if not seconds:
        raise ValueError(f"--max-time {text}: write 90 (minutes), 45s, 2h, 1:30:00 or 1-12:00:00")
    return seconds
