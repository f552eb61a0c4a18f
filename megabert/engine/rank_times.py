"""Times and memory of each rank, slow ranks, and cores shared with other processes. A median of two ranks is the faster one."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np
import torch

from megabert.common.environment import cpu_pressure_seconds, host_name
from megabert.common.files import canonical, write_atomically
from megabert.common.logs import log
from megabert.config import WatchdogConfig
from megabert.distributed.ranks import World
from megabert.distributed.watchdog import Watchdog

SLOW_UPDATES = 50  # least updates by which a rank is judged, since a single one may be slow by chance
# A link is slow if messages take this many times the median of the ranks, and this many seconds more: a heartbeat waits up to 5 ms
# for Python's lock, and a round trip within a cluster takes less than 1 ms.
MESSAGE_RATIO, MESSAGE_SECONDS = 10.0, 0.02
# Times of each rank: computing, the part of it caused by the host, waiting for rows, and the round trip of a message to rank 0.
TIMES = ("compute", "host", "data_wait", "message")
CAUSES = {
    "data": "it waits for rows",
    "host": "its process waits for a core, or launches its work late",
    "device": "its device computes more slowly",
    "network": "the round trip of its messages to rank 0",
}
# Cores are shared if processes wait for one in this share of at least this many seconds.
SHORT_OF_CORES, SHARED_SECONDS = 0.3, 10.0


class ComputeTime:
    """Computing seconds of this rank, inside `with` blocks without waits for other ranks: on CUDA those of the device's queue,
    measured without waiting for it, otherwise those of the clock.

    `host_seconds` are the part caused by the host: on the CPU the time in which this thread did not run, on CUDA the time of updates
    before which the device's queue was empty (also if the host had just read a result).
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._queued: list[tuple[torch.cuda.Event, torch.cuda.Event, bool]] = []  # and whether the host is late
        self._late = False
        self._seconds = self.host_seconds = 0.0

    def begin_update(self) -> None:
        """Call at the beginning of an update on the host."""
        self._late = self._cuda and torch.cuda.current_stream().query()

    def __enter__(self) -> None:
        self._start, self._ran = self._mark(), time.thread_time()

    def __exit__(self, *error: object) -> None:
        if self._cuda:
            self._queued.append((self._start, self._mark(), self._late))
        else:
            seconds = self._mark() - self._start
            self._seconds += seconds
            self.host_seconds += max(seconds - (time.thread_time() - self._ran), 0.0)

    def seconds(self) -> float:
        """The sum so far, of finished work of the device."""
        while self._queued and self._queued[0][1].query():
            start, end, late = self._queued.pop(0)
            seconds = start.elapsed_time(end) / 1e3
            self._seconds += seconds
            self.host_seconds += seconds * late
        return self._seconds

    def reset(self) -> None:
        self.seconds()
        self._seconds = self.host_seconds = 0.0

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class SlowRank(NamedTuple):
    """A slow rank, the ratio of its time to the ranks' median (for network: of its messages), and one of CAUSES."""

    rank: int
    host: str
    ratio: float
    cause: str


class SlowRanks:
    """Ranks that took `ratio` times the median of all ranks over at least SLOW_UPDATES updates and `seconds` of training."""

    def __init__(self, hosts: Sequence[str], ratio: float, seconds: float) -> None:
        """`hosts` of the ranks."""
        self._hosts, self._ratio, self._least = hosts, ratio, (SLOW_UPDATES, seconds)
        # updates, seconds, and TIMES of each rank, by log line and summed
        self._lines: deque[np.ndarray] = deque()
        self._sum = np.zeros(2 + len(TIMES) * len(hosts))
        self.named: list[SlowRank] = []

    @property
    def minutes(self) -> float:
        """Minutes of training by which the ranks are judged."""
        return float(self._sum[1]) / 60

    def add(self, updates: int, seconds: float, times: Mapping[str, Sequence[float]]) -> list[SlowRank]:
        """Add updates with their seconds and each rank's sums of TIMES; returns ranks that are newly slow, or for another cause."""
        line = np.concatenate([[updates, seconds], *(times[name] for name in TIMES)])
        self._lines.append(line)
        self._sum += line
        while all((left := self._sum - self._lines[0])[:2] >= self._least):
            self._sum = left
            self._lines.popleft()
        before, self.named = self.named, self._find() if all(self._sum[:2] >= self._least) else []
        known = {(slow.rank, slow.cause) for slow in before}
        return [slow for slow in self.named if (slow.rank, slow.cause) not in known]

    def _find(self) -> list[SlowRank]:
        updates, seconds = self._sum[:2]
        compute, host, wait, message = self._sum[2:].reshape(len(TIMES), -1)
        total = compute + wait
        # without the host's part
        device = np.maximum(compute - host, compute / 1e3)
        by_rank: dict[int, tuple[float, str]] = {}
        for rank in np.flatnonzero(total >= self._ratio * max(median_low(total), 1e-9)).tolist():
            computing, waiting = compute[rank] - median_low(compute), wait[rank] - median_low(wait)
            cause = "data"
            if computing > waiting:
                # the larger part of its longer computing time
                slower = device[rank] / median_low(device)
                cause = "device" if slower >= compute[rank] / median_low(compute) / slower else "host"
            by_rank[rank] = float(total[rank] / max(median_low(total), 1e-9)), cause
        # While ranks neither compute nor wait for rows, they exchange gradients. Messages within rank 0's host use no link, and
        # with a single other host it is unknown which end of the link is slow.
        far = [rank for rank, name in enumerate(self._hosts) if name != self._hosts[0]]
        if len({self._hosts[rank] for rank in far}) > 1 and seconds >= self._ratio * max(total):
            usual = median_low(message[far])
            for rank in far:
                slow = message[rank] - usual >= MESSAGE_SECONDS * updates and message[rank] >= MESSAGE_RATIO * usual
                if slow and rank not in by_rank:
                    by_rank[rank] = float(message[rank] / max(usual, 1e-9)), "network"
        found = sorted(by_rank.items())
        return [SlowRank(rank, self._hosts[rank], round(ratio, 2), cause) for rank, (ratio, cause) in found]


class SharedCores:
    """Detects other processes on the cores of a run on the CPU: a run alone waits for a core 2 to 8% of the time."""

    def __init__(self) -> None:
        self._since, self._short = time.monotonic(), cpu_pressure_seconds()

    def look(self) -> None:
        """Warn once if processes waited for a core in more than SHORT_OF_CORES of the last SHARED_SECONDS or more."""
        now, short = time.monotonic(), cpu_pressure_seconds()
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


class RankMetrics:
    """Times of this rank since the last log line, its memory, and metrics from those of all ranks.

    Every rank takes as long as the slowest for an update. They differ in computing time (`ComputeTime`), waiting time for data, and the
    time of heartbeats.
    """

    def __init__(
        self, world: World, compute_time: ComputeTime, watchdog: Watchdog, config: WatchdogConfig, record: Path
    ) -> None:
        """`record`: the file that names the current slow ranks, by which launch/job.sh may exclude their nodes. A collective."""
        self._hosts = world.gather(host_name())
        self._world, self._own, self._watchdog, self._config = world, compute_time, watchdog, config
        self._record, self._recorded = record, list[tuple[int, str]]()
        if world.is_main:
            record.unlink(missing_ok=True)
        self._waited, self._updates = 0.0, 0
        # None until the first log line, since its updates load libraries and fill caches
        self._slow: SlowRanks | None = None
        self._cores = SharedCores()

    def take(self, updates: Iterator[Any]) -> Any:
        """Take the next update, and measure the wait for it."""
        self._own.begin_update()
        started = time.perf_counter()
        update = next(updates)
        self._waited += time.perf_counter() - started
        self._updates += 1
        return update

    @property
    def counts(self) -> dict[str, int]:
        """This rank's bytes, and its nanoseconds of TIMES."""
        # seconds() also updates host_seconds
        compute, host = self._own.seconds(), self._own.host_seconds
        seconds = (compute, host, self._waited, self._updates * self._watchdog.round_trip)
        nanoseconds = {name: round(value * 1e9) for name, value in zip(TIMES, seconds, strict=True)}
        return {"memory": peak_memory_bytes(self._world.device)} | nanoseconds

    def drain(self, counts: Mapping[str, Sequence[int]], seconds: float, step: int) -> dict[str, Any]:
        """`perf/…` values, lists by rank, of the updates since the last call up to `step`, from `counts` of all ranks; warns of
        new slow ranks and records them."""
        updates = max(self._updates, 1)
        times = {name: [nanoseconds / 1e9 for nanoseconds in counts[name]] for name in TIMES}
        values: dict[str, Any] = {"perf/peak_memory_gib": round(max(counts["memory"]) / 2**30, 4)}
        for name in TIMES:
            values[f"perf/rank_{name}_seconds"] = [round(value / updates, 6) for value in times[name]]
        if self._world.size > 1:
            if self._slow is None:
                self._slow = SlowRanks(self._hosts, self._config.slow_ratio, 60 * self._config.slow_minutes)
            elif self._updates:
                self._warn(self._slow.add(self._updates, seconds, times), self._slow.minutes)
            total = [c + w for c, w in zip(times["compute"], times["data_wait"], strict=True)]
            slowest = max(range(len(total)), key=total.__getitem__)
            values["perf/slowest_rank"] = slowest
            values["perf/slowest_rank_ratio"] = round(total[slowest] / max(median_low(total), 1e-9), 4)
            values["perf/slow_ranks"] = [slow._asdict() for slow in self._slow.named]
            self._keep_record(values["perf/slow_ranks"], step)
        if self._world.is_main and self._world.device.type == "cpu":
            self._cores.look()
        self._own.reset()
        self._waited, self._updates = 0.0, 0
        return values

    def _keep_record(self, named: Sequence[Mapping[str, Any]], step: int) -> None:
        now = [(slow["rank"], slow["cause"]) for slow in named]
        if self._world.is_main and now != self._recorded:
            self._record.unlink(missing_ok=True)
            if named:
                write_atomically(self._record, canonical({"step": step, "slow_ranks": named}))
        self._recorded = now

    def _warn(self, slow_ranks: Sequence[SlowRank], minutes: float) -> None:
        for slow in slow_ranks if self._world.is_main else ():
            log.warning(
                f"rank {slow.rank} (host {slow.host}) is slow: {slow.ratio:.2f} times the median of the ranks over the last "
                f"{minutes:.1f} minutes; cause: {slow.cause} ({CAUSES[slow.cause]})"
            )


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far: of tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
