"""Saves of a run: begun, heard of and committed, with the step of the newest that is whole and the time that one takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megabert.checkpoint import Checkpoints
from megabert.common.errors import Failed
from megabert.distributed.preemption import Stop
from megabert.distributed.watchdog import Watchdog
from megabert.engine import Engine


class Saves:
    """What is saved by one Trainer. All methods are called by all ranks alike; `stop` and `watchdog` hear of each save."""

    def __init__(self, checkpoints: Checkpoints, stop: Stop, watchdog: Watchdog) -> None:
        self.step = -1  # of the newest checkpoint; -1 where there is none
        self._checkpoints, self._stop, self._watchdog = checkpoints, stop, watchdog
        self._since, self._begun = 0.0, -1  # of the newest save that was begun

    def begin(self, engine: Engine, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Begin a checkpoint of this moment; it is committed by `finish`, or at once where saving is not asynchronous."""
        self.finish()
        self._since, self._begun = time.perf_counter(), step
        self._ended(self._checkpoints.save(engine, state()) is not None)
        self._watchdog.progress()

    def hear(self, status: int) -> None:
        """What all ranks reported of the save in flight, if there is one."""
        if self._checkpoints.pending:
            self._ended(self._checkpoints.heard(status) is not None)

    def finish(self) -> None:
        """Commit the checkpoint that is being written, if there is one; waits for it."""
        if self._checkpoints.pending:
            self._ended(self._checkpoints.finish() is not None)

    def complete(self, engine: Engine, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Commit a checkpoint of this moment, at the second try if the first fails. Raises Failed where there is none then,
        whatever `checkpoint.on_error` says: nothing comes after it that could save these updates."""
        self.finish()
        for _ in range(2):
            if self.step != step:
                self.begin(engine, step, state)
                self.finish()
        if self.step != step:
            raise Failed(
                f"{self._checkpoints.folder}: step {step} is where this run ends and it could not be saved, twice; "
                "the same command goes on from the checkpoint before"
            )

    def _ended(self, committed: bool) -> None:
        """Note what came of a save and how long it took, where none is in flight any more."""
        if not self._checkpoints.pending:
            if committed:
                self.step = self._begun
            self._stop.saved(time.perf_counter() - self._since)
            self._watchdog.progress()
