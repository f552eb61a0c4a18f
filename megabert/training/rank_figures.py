"""Figures of each rank between two log lines, and the ranks that are slower than the others for long.

Every rank of an update takes as long as the slowest one, whose waits the others see as their own. What tells them apart is
the time that a rank computes by itself (`megabert/engine/own_time.py`) and the time that it waits for its data.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from megabert.common.logs import log
from megabert.distributed.process_group import World
from megabert.engine import Engine
from megabert.metrics import peak_memory_gib
from megabert.training.workload import Updates

SLOWER = 1.08  # times the median of the ranks: a rank that is 10% slower is named in spite of noise
UPDATES = 50  # for so many updates


class Straggler(NamedTuple):
    """A rank and its time in times of the median, of which `waits` for data."""

    rank: int
    ratio: float
    waits: float


class Stragglers:
    """Ranks that took `SLOWER` times the median of all ranks over the last `UPDATES` updates."""

    def __init__(self) -> None:
        self._windows: deque[tuple[int, np.ndarray]] = deque()  # updates, seconds [2, ranks]
        self.named: dict[int, Straggler] = {}

    def add(self, updates: int, compute: Sequence[float], wait: Sequence[float]) -> list[Straggler]:
        """The seconds of each rank in so many more updates; the stragglers that were none before."""
        self._windows.append((updates, np.array([compute, wait])))
        while sum(its for its, _ in self._windows) - self._windows[0][0] >= UPDATES:
            self._windows.popleft()
        if sum(its for its, _ in self._windows) < UPDATES:
            return []
        parts = np.sum([seconds for _, seconds in self._windows], axis=0)
        total = parts.sum(axis=0)
        middle = median(total)
        before, self.named = self.named, {}
        for rank in np.flatnonzero(total >= SLOWER * middle).tolist():
            if middle > 0:
                share = parts[1, rank] / total[rank]
                self.named[rank] = Straggler(rank, float(total[rank] / middle), float(share))
        return [found for rank, found in self.named.items() if rank not in before]


class RankFigures:
    """This rank's times since the last log line and its memory, and what comes of those of all ranks."""

    def __init__(self, world: World, engine: Engine) -> None:
        self._world, self._own = world, engine.own_time
        self._waited, self._updates = 0.0, 0
        self.stragglers = Stragglers()

    def take(self, updates: Updates) -> Any:
        """The next update, with the time that the host waits for it."""
        asked = time.perf_counter()
        update = next(updates)
        self._waited += time.perf_counter() - asked
        self._updates += 1
        return update

    @property
    def counts(self) -> list[int]:
        """This rank's part of what `drain` takes summed over the ranks: bytes and nanoseconds."""
        memory = round(peak_memory_gib(self._world.device) * 2**30)
        values = (memory, round(self._own.seconds() * 1e9), round(self._waited * 1e9))
        return [slot for value in values for slot in self._world.slots(value)]

    def drain(self, sums: Sequence[int]) -> dict[str, Any]:
        """`perf/…` values of the updates since the last call, lists by rank; a new straggler is warned of. A collective."""
        size, updates = self._world.size, max(self._updates, 1)
        memory, own, waited = (sums[first : first + size] for first in range(0, 3 * size, size))
        compute, wait = [value / 1e9 for value in own], [value / 1e9 for value in waited]
        found = self.stragglers.add(self._updates, compute, wait) if size > 1 and self._updates else []
        self._own.reset()
        self._waited, self._updates = 0.0, 0
        values: dict[str, Any] = {
            "perf/peak_memory_gib": round(max(memory) / 2**30, 4),
            "perf/rank_compute_seconds": [round(value / updates, 6) for value in compute],
            "perf/rank_data_wait_seconds": [round(value / updates, 6) for value in wait],
        }
        if size > 1:
            total = [c + w for c, w in zip(compute, wait, strict=True)]
            slowest = max(range(size), key=total.__getitem__)
            values["perf/slowest_rank"] = slowest
            values["perf/slowest_rank_ratio"] = round(total[slowest] / max(median(total), 1e-9), 4)
            values["perf/stragglers"] = sorted(self.stragglers.named)
            self._warn(found)
        return values

    def _warn(self, stragglers: Sequence[Straggler]) -> None:
        hosts = self._world.gather(socket.gethostname()) if stragglers else []
        for slow in stragglers if self._world.is_main else ():
            log.warning(
                f"rank {slow.rank} (host {hosts[slow.rank]}) is slow: {slow.ratio:.2f} times the median of the ranks over "
                f"the last {UPDATES} updates, {slow.waits:.0%} of it waiting for data"
            )


def median(values: Iterable[float]) -> float:
    """The lower median: of two ranks the faster one."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
