"""The saves of a run while it trains: one at a time in the background, reported to the time limit and the watchdog."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megabert.checkpoint.store import Checkpoints
from megabert.distributed.signals import Stop
from megabert.distributed.watchdog import Watchdog
from megabert.engine import Engine


class Saves:
    """The saves of one Trainer, reported to `stop` and `watchdog`. All ranks must call the same methods."""

    def __init__(self, checkpoints: Checkpoints, stop: Stop, watchdog: Watchdog) -> None:
        # step of the newest checkpoint; -1 without one
        self.step = -1
        # step and data cursor of the save in flight; None without one
        self.in_flight: tuple[int, int] | None = None
        self._checkpoints, self._stop, self._watchdog = checkpoints, stop, watchdog
        self._started = 0.0

    def start(self, engine: Engine, state: Callable[[], dict[str, Any]]) -> None:
        """Start saving the current state; it is committed at once if saving is not asynchronous."""
        self.finish()
        self._started, saved = time.perf_counter(), state()
        self.in_flight = saved["step"], saved["cursor"]
        self._checkpoints.save(engine, saved)
        self._update()
        self._watchdog.progress()

    def synced(self, status: int) -> None:
        """Advance the save in flight, if any, by the maximum `status` of all ranks."""
        if self._checkpoints.pending:
            self._checkpoints.advance(status)
            self._update()

    def finish(self) -> None:
        """Wait until the save in flight, if any, is committed."""
        if self._checkpoints.pending:
            self._checkpoints.finish()
            self._update()

    def complete(self, engine: Engine, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Save the current state unless its checkpoint exists, and wait until it is committed."""
        self.finish()
        if self.step != step:
            self.start(engine, state)
            self.finish()

    def _update(self) -> None:
        """Record the step and the duration of a save once it is committed."""
        if not self._checkpoints.pending and self.in_flight is not None:
            self.step, self.in_flight = self.in_flight[0], None
            self._stop.saved(time.perf_counter() - self._started)
            self._watchdog.progress()
