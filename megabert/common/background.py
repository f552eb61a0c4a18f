"""Low-priority background thread that stores its exception."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

NICENESS = 10  # niceness of the threads, so that training has priority


class BackgroundTask(threading.Thread):
    """A thread that runs a function; `failure` is its exception, once the thread has ended."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        super().__init__(name=name, target=function)  # no daemon: the interpreter waits until its file is written
        self.failure: Exception | None = None
        self.start()

    def run(self) -> None:
        os.nice(NICENESS)  # on Linux this affects only the thread
        try:
            super().run()  # then frees what the function holds, e.g. a snapshot in host memory
        except Exception as error:
            self.failure = error

    @property
    def problem(self) -> str:
        return "" if self.failure is None else str(self.failure) or type(self.failure).__name__

    def status(self, running: int, failed: int, done: int) -> int:
        if self.is_alive():
            return running
        return done if self.failure is None else failed
