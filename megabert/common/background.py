"""Low-priority background thread that stores its exception."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

# Niceness of the threads, so that training has priority.
NICENESS = 10


class BackgroundTask(threading.Thread):
    """A thread that runs a function; `failure` is its exception, once the thread has ended."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        # Not a daemon: the interpreter waits until its file is written.
        super().__init__(name=name)
        self.failure: Exception | None = None
        self._function: Callable[[], None] | None = function
        self.start()

    def run(self) -> None:
        assert self._function is not None
        os.nice(NICENESS)  # on Linux this affects only the thread
        try:
            self._function()
        except Exception as error:
            self.failure = error
        self._function = None  # frees what it holds, e.g. a snapshot in host memory

    @property
    def problem(self) -> str:
        return "" if self.failure is None else str(self.failure) or type(self.failure).__name__

    def status(self, running: int, failed: int, done: int) -> int:
        if self.is_alive():
            return running
        return done if self.failure is None else failed
