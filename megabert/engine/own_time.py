"""Time that this rank computes in its updates, without its waits for other ranks."""

from __future__ import annotations

import time
from typing import Any

import torch


class OwnTime:
    """Seconds between `begin` and `end`, summed: of the device's queue on CUDA, where nothing here waits for it, otherwise
    of the clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._begun: Any = None
        self._queued: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    def begin(self) -> None:
        """From here on this rank computes; nothing changes where it did already."""
        if self._begun is None:
            self._begun = self._mark()

    def end(self) -> None:
        """What comes may wait for other ranks."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        if self._cuda:
            self._queued.append((begun, self._mark()))
        else:
            self._seconds += self._mark() - begun

    def seconds(self) -> float:
        """The sum so far, of what the device has done."""
        while self._queued and self._queued[0][1].query():
            begun, ended = self._queued.pop(0)
            self._seconds += begun.elapsed_time(ended) / 1e3
        return self._seconds

    def reset(self) -> None:
        """From 0 again."""
        self.seconds()
        self._seconds = 0.0

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
