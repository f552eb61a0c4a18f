"""A clock for code that times others: a busy machine cannot turn its verdict."""

from __future__ import annotations


class Clock:
    """Stands for the module `time`: time passes when somebody sleeps, and 0.1 ms with each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-4
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
