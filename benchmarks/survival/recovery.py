"""Seconds from the kill of a rank to the next update: restarts in place, torchrun's agent, torchft.

Two ranks, as a user starts them, on cores that nothing else uses. In place all ranks start again from copies in memory; torchrun's
agent starts them again from a checkpoint, and the updates after it are repeated; with torchft the other rank continues alone, and its
rows of the updates until the killed rank has returned are those of one rank. Each kill waits until BETWEEN updates were made, time
enough for the imports of the next standby process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import hardware
from benchmarks.survival.in_place import TRAIN, KeptRanks
from benchmarks.survival.life import Case, Failure, children_of, last_step, start_logged, wait_or_fail

RANKS = 2
# updates from a restart to the next kill, at least and at most
BETWEEN = (600, 900)
# updates between the checkpoints that torchrun's restarts load
INTERVAL = 300
# torchft's fastest recovery: a rank is lost after a second without heartbeats (its default: 5), and those with heartbeats go on
LIGHTHOUSE = {"min_replicas": 1, "join_timeout_ms": 1000, "quorum_tick_ms": 50, "heartbeat_timeout_ms": 1000}


class RestartedRanks(KeptRanks):
    """Ranks under torchrun's agent, which ends all of a host when one dies, and starts all again."""

    def _start(self, argv: list[str], hosts: tuple[int, ...]) -> list[Any]:
        options = [f"--nproc-per-node={len(hosts)}", "--max-restarts=1000", "--monitor-interval=0.1"]
        options += ["--master-addr=127.0.0.1", f"--master-port={hardware.free_port()}"]
        return [self._process([sys.executable, "-m", "torch.distributed.run", *options, "--", TRAIN, *argv], {})]

    def kill_rank(self, rank: int) -> None:
        os.kill(children_of(self.processes[0].pid)[rank], signal.SIGKILL)


class SurvivorEnded(Exception):
    """A rank of torchft that was not killed has ended."""


class TorchftRanks:
    """Ranks of torchft, each started again as soon as it is killed."""

    def __init__(self, data: Path, run: Path, updates: int) -> None:
        from torchft.coordination import LighthouseServer

        run.mkdir(parents=True)
        self.run, self.log = run, run.with_name(f"{run.name}.log")
        self._server = LighthouseServer(bind="[::]:0", **LIGHTHOUSE)
        self._options = ["--data", str(data), "--run", str(run), "--steps", str(updates)]
        self._processes = [self._started(rank) for rank in range(RANKS)]

    def _started(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.peers.torchft_loop", "--rank", str(rank), *self._options]
        return start_logged(command, {"TORCHFT_LIGHTHOUSE": self._server.address()}, self.log)

    def recovered(self, chance: random.Random) -> tuple[float, float, int]:
        """Kill a rank and start it again: seconds to the next update and to one of all ranks, and the updates between them.
        Raises SurvivorEnded."""
        self._wait_until(lambda: self.last()[1] == RANKS)
        reach = self.last()[0] + chance.randint(*BETWEEN)
        self._wait_until(lambda: self.last() >= (reach, RANKS))
        killed = chance.randrange(RANKS)
        self._processes[killed].kill()
        self._processes[killed].wait()
        self._processes[killed] = self._started(killed)
        before = self.last()[0]
        first = self._wait_until(lambda: self.last()[0] > before)
        rest = self._wait_until(lambda: self.last()[0] > before + 1 and self.last()[1] == RANKS)
        return first, first + rest, self.last()[0] - before

    def last(self) -> tuple[int, int]:
        """The newest update, and the number of ranks that made it."""
        found = [(0, 0)]
        for file in self.run.glob("rank-*.jsonl"):
            if lines := file.read_text().rpartition("\n")[0].splitlines()[-1:]:
                line = json.loads(lines[0])
                found.append((line["step"], line["ranks"]))
        return max(found)

    def _wait_until(self, condition: Any) -> float:
        """Seconds until then. Raises SurvivorEnded, and Failure, with the end of the log, where that takes too long."""
        started = time.monotonic()
        wait_or_fail(lambda: self._ended() or condition(), "torchft: no update", self.log)
        if self._ended():
            raise SurvivorEnded
        return time.monotonic() - started

    def _ended(self) -> bool:
        return any(process.poll() is not None for process in self._processes)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._server.shutdown()


def recover(data: Path, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Seconds of `kills` recoveries each way. Raises Failure for one of our own ranks."""
    folder.mkdir()
    result = {
        "ranks": RANKS,
        "kills": kills,
        "in_place": restarted(KeptRanks, data, folder / "in-place", kills, seed, 0),
        "torchrun": restarted(RestartedRanks, data, folder / "torchrun", kills, seed, INTERVAL),
    }
    if not importlib.util.find_spec("torchft"):
        return result | {"torchft": "not installed"}
    try:
        return result | {"torchft": replaced(data, folder / "torchft", kills, seed)}
    except Failure as error:  # a peer's, which does not discard our figures
        return result | {"torchft": {"failure": str(error)}}


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
            job.wait_until(lambda starts=starts: count_starts(run) > starts or job.ended(), "no restart")
            job.wait_for_step(before + 1)
            seconds.append(time.monotonic() - started)
    finally:
        job.stop()
    return {"seconds_to_next_update": summary(seconds)}


def count_starts(run: Path) -> int:
    return (run / "starts.jsonl").read_bytes().count(b"\n")


def replaced(data: Path, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """With torchft: seconds from the kill to the next update by any rank and by all ranks, and updates between these.

    A kill can end the surviving rank too (torchft 0.2.0: an assertion in its communication hook), and with it the state of the job:
    such kills are counted, and a new job takes the next ones.
    """
    chance, ended = random.Random(seed), 0
    times: list[tuple[float, float, int]] = []
    while len(times) + ended < kills:
        job = TorchftRanks(data, folder / f"job-{ended}", (kills + 1) * BETWEEN[1] * 1000)
        try:
            while len(times) + ended < kills:
                times.append(job.recovered(chance))
        except SurvivorEnded:
            ended += 1
        finally:
            job.stop()
    result: dict[str, Any] = {"kills_that_ended_both_ranks": ended}
    names = ("seconds_to_next_update", "seconds_to_update_of_all_ranks", "updates_of_one_rank")
    return result | {name: summary(values) for name, values in zip(names, zip(*times, strict=True), strict=False)}


def summary(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    named = {"median": statistics.median(ordered), "p90": ordered[int(0.9 * len(ordered))], "most": ordered[-1]}
    return {name: round(value, 2) for name, value in named.items()}
