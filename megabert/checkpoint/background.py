"""A thread beside the training that writes, and says what came of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

NICENESS = 10  # of threads that write, for training to have the cores first


class Background(threading.Thread):
    """A function at work beside the training; `result` or `failure` is there when the thread has ended."""

    def __init__(self, name: str, function: Callable[[], Any]) -> None:
        # No daemon: the interpreter's end would leave a file half written that could have been whole.
        super().__init__(name=name)
        self.result: Any = None
        self.failure: Exception | None = None
        self._function: Callable[[], Any] | None = function
        self.start()

    def run(self) -> None:
        assert self._function is not None
        os.nice(NICENESS)  # on Linux of this thread alone
        try:
            self.result = self._function()
        except Exception as error:  # raised by `heard`, where all ranks hear of it
            self.failure = error
        self._function = None  # and with it the copies in host memory

    @property
    def problem(self) -> str:
        return "" if self.failure is None else str(self.failure) or type(self.failure).__name__
