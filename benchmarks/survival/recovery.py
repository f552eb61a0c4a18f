"""Seconds from the kill of a rank to the next update: restarts in place, and by torchrun's agent.

Two ranks, as a user starts them, on cores that nothing else uses. In place all ranks start again from copies in memory; torchrun's
agent starts them again from a checkpoint, and the updates after it are repeated. Each kill waits until BETWEEN updates were made, time
enough for the imports of the next standby process.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import hardware
from benchmarks.survival.in_place import TRAIN, KeptRanks
from benchmarks.survival.life import Case, children_of, last_step

RANKS = 2
# updates from a restart to the next kill, at least and at most
BETWEEN = (600, 900)
# updates between the checkpoints that torchrun's restarts load
INTERVAL = 300


class RestartedRanks(KeptRanks):
    """Ranks under torchrun's agent, which ends all of a host when one dies, and starts all again."""

    def _start(self, argv: list[str], hosts: tuple[int, ...]) -> list[Any]:
        options = [f"--nproc-per-node={len(hosts)}", "--max-restarts=1000", "--monitor-interval=0.1"]
        options += ["--master-addr=127.0.0.1", f"--master-port={hardware.free_port()}"]
        return [self._process([sys.executable, "-m", "torch.distributed.run", *options, "--", TRAIN, *argv], {})]

    def kill_rank(self, rank: int) -> None:
        os.kill(children_of(self.processes[0].pid)[rank], signal.SIGKILL)


def recover(data: Path, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Seconds of `kills` recoveries each way. Raises Failure."""
    in_place = restarted(KeptRanks, data, folder / "in-place", kills, seed, 0)
    torchrun = restarted(RestartedRanks, data, folder / "torchrun", kills, seed, INTERVAL)
    return {"ranks": RANKS, "kills": kills, "in_place": in_place, "torchrun": torchrun}


def restarted(kind: type[KeptRanks], data: Path, run: Path, kills: int, seed: int, interval: int) -> dict[str, Any]:
    """Restarts of all ranks: seconds from the kill to an update that was not made before it."""
    case = Case(run.name, RANKS, (kills + 1) * BETWEEN[1], interval, ("checkpoint.keep=1",))
    words = [word for word in case.words(data) if not word.startswith("peak_tflops=")]  # by the defaults
    job, chance, seconds = kind(words, run, (0,) * RANKS), random.Random(seed), []
    try:
        for _ in range(kills):
            job.wait_for_step(last_step(run) + chance.randint(*BETWEEN))
            started, starts = time.monotonic(), count_starts(run)
            job.kill_rank(chance.randrange(RANKS))
            before = last_step(run)
            job.wait_until(partial(lambda before: count_starts(run) > before or job.ended(), starts), "no restart")
            # the old ranks may have logged one more meanwhile
            job.wait_for_step(max(before, last_step(run)) + 1)
            seconds.append(time.monotonic() - started)
    finally:
        job.stop()
    ordered = sorted(seconds)
    named = {"median": statistics.median(ordered), "p90": ordered[int(0.9 * len(ordered))], "most": ordered[-1]}
    return {"seconds_to_next_update": {name: round(value, 2) for name, value in named.items()}}


def count_starts(run: Path) -> int:
    return (run / "starts.jsonl").read_bytes().count(b"\n")
