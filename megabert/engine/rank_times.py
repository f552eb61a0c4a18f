"""Times and memory of each rank, slow ranks, and cores that other processes share."""

from __future__ import annotations

import resource
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from megabert.common.environment import seconds_short_of_cores
from megabert.common.logs import log
from megabert.distributed.ranks import World

# A rank is a straggler whose time is so many times the median of the ranks (1.08 names one that is 10% slower in spite of
# noise) for so many updates.
STRAGGLER_RATIO, STRAGGLER_UPDATES = 1.08, 50
# Cores are shared when processes wait for one in this share of at least so many seconds.
SHORT_OF_CORES, SHARED_SECONDS = 0.3, 10.0


class OwnTime:
    """Seconds that this rank computes by itself, inside `with` blocks in which it waits for no other rank: of the device's
    queue on CUDA, where nothing here waits for it, otherwise of the clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._queued: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    def __enter__(self) -> None:
        self._start = self._mark()

    def __exit__(self, *error: object) -> None:
        if self._cuda:
            self._queued.append((self._start, self._mark()))
        else:
            self._seconds += self._mark() - self._start

    def seconds(self) -> float:
        """The sum so far, of what the device has done."""
        while self._queued and self._queued[0][1].query():
            start, end = self._queued.pop(0)
            self._seconds += start.elapsed_time(end) / 1e3
        return self._seconds

    def reset(self) -> None:
        """Restart from 0."""
        self.seconds()
        self._seconds = 0.0

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Straggler(NamedTuple):
    """A slow rank: its time in times of the median, and the share of it that was waiting for data."""

    rank: int
    ratio: float
    waits: float


class Stragglers:
    """Ranks that took STRAGGLER_RATIO times the median of all ranks over the last STRAGGLER_UPDATES updates."""

    def __init__(self) -> None:
        # updates, and seconds [2, ranks]
        self._windows: deque[tuple[int, np.ndarray]] = deque()
        self.named: dict[int, Straggler] = {}

    def add(self, updates: int, compute: Sequence[float], wait: Sequence[float]) -> list[Straggler]:
        """The seconds of each rank in so many more updates; the stragglers that were none before."""
        self._windows.append((updates, np.array([compute, wait])))
        while sum(count for count, _ in self._windows) - self._windows[0][0] >= STRAGGLER_UPDATES:
            self._windows.popleft()
        if sum(count for count, _ in self._windows) < STRAGGLER_UPDATES:
            return []
        parts = np.sum([seconds for _, seconds in self._windows], axis=0)
        total = parts.sum(axis=0)
        middle = median(total)
        before, self.named = self.named, {}
        for rank in np.flatnonzero(total >= STRAGGLER_RATIO * middle).tolist() if middle > 0 else ():
            self.named[rank] = Straggler(rank, float(total[rank] / middle), float(parts[1, rank] / total[rank]))
        return [straggler for rank, straggler in self.named.items() if rank not in before]


class SharedCores:
    """Whether other processes compute on the cores of a run on the CPU: a run alone waits for a core 2 to 8% of the time."""

    def __init__(self) -> None:
        self._since, self._short = time.monotonic(), seconds_short_of_cores()

    def look(self) -> None:
        """Warn, once, where processes waited for a core in more than SHORT_OF_CORES of the last SHARED_SECONDS or more."""
        now, short = time.monotonic(), seconds_short_of_cores()
        if short is None or self._short is None or now - self._since < SHARED_SECONDS:
            return
        share = (short - self._short) / (now - self._since)
        self._since, self._short = now, short
        if share > SHORT_OF_CORES:
            self._short = None
            log.warning(
                f"processes waited for a core {share:.0%} of the last {SHARED_SECONDS:.0f} s or more: others compute on this "
                "machine's cores, and the run is slower than it would be alone; `top` shows them"
            )


class RankFigures:
    """This rank's times since the last log line and its memory, and what follows from those of all ranks.

    Every rank of an update takes as long as the slowest one, whose waits the others see as their own. What distinguishes them
    is the time that a rank computes by itself (`OwnTime`) and the time that it waits for its data.
    """

    def __init__(self, world: World, own_time: OwnTime) -> None:
        self._world, self._own = world, own_time
        self._waited, self._updates = 0.0, 0
        self.stragglers = Stragglers()
        self._cores = SharedCores()

    def take(self, updates: Iterator[Any]) -> Any:
        """The next update, with the time that the host waits for it."""
        started = time.perf_counter()
        update = next(updates)
        self._waited += time.perf_counter() - started
        self._updates += 1
        return update

    @property
    def counts(self) -> dict[str, int]:
        """This rank's bytes and nanoseconds."""
        return {
            "memory": peak_memory_bytes(self._world.device),
            "compute": round(self._own.seconds() * 1e9),
            "wait": round(self._waited * 1e9),
        }

    def drain(self, counts: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """`perf/…` values of the updates since the last call, lists by rank, from `counts` of all ranks; a new straggler is
        warned of. A collective."""
        updates = max(self._updates, 1)
        compute, wait = ([nanoseconds / 1e9 for nanoseconds in counts[name]] for name in ("compute", "wait"))
        values: dict[str, Any] = {
            "perf/peak_memory_gib": round(max(counts["memory"]) / 2**30, 4),
            "perf/rank_compute_seconds": [round(value / updates, 6) for value in compute],
            "perf/rank_data_wait_seconds": [round(value / updates, 6) for value in wait],
        }
        if self._world.size > 1:
            if self._updates:
                self._warn(self.stragglers.add(self._updates, compute, wait))
            total = [c + w for c, w in zip(compute, wait, strict=True)]
            slowest = max(range(len(total)), key=total.__getitem__)
            values["perf/slowest_rank"] = slowest
            values["perf/slowest_rank_ratio"] = round(total[slowest] / max(median(total), 1e-9), 4)
            values["perf/stragglers"] = sorted(self.stragglers.named)
        if self._world.is_main and self._world.device.type == "cpu":
            self._cores.look()
        self._own.reset()
        self._waited, self._updates = 0.0, 0
        return values

    def _warn(self, stragglers: Sequence[Straggler]) -> None:
        hosts = self._world.gather(socket.gethostname()) if stragglers else []
        for slow in stragglers if self._world.is_main else ():
            log.warning(
                f"rank {slow.rank} (host {hosts[slow.rank]}) is slow: {slow.ratio:.2f} times the median of the ranks over "
                f"the last {STRAGGLER_UPDATES} updates, {slow.waits:.0%} of it waiting for data"
            )


def median(values: Iterable[float]) -> float:
    """The lower median: of two ranks the faster one."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process has held so far: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
