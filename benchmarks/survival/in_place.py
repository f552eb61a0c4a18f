"""Ranks that restart in place (`train --in-place`) under kills, and under torchrun's agent, whose restarts load a checkpoint: seconds
to the next new update, and what differs from a run without kills."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import hardware
from benchmarks.survival.life import LIFE_ENDS_WITHIN, Case, Failure, last_step, wait

TRAIN = str(hardware.ROOT / "megabert/train.py")
# updates from one kill to the next, about: time enough for the imports of the next standby process
BETWEEN = 600
# of 20 kills so many are of all ranks at once
ALL_AT_ONCE = 3


class KeptRanks:
    """The ranks of one start, each the child of its keeper; `hosts`: the host of each."""

    def __init__(self, argv: list[str], run: Path, hosts: tuple[int, ...]) -> None:
        self.run, self.log = run, run.with_name(f"{run.name}.log")
        run.parent.mkdir(parents=True, exist_ok=True)
        self.processes = self._start([*argv, "--run", str(run)], hosts)

    def _start(self, argv: list[str], hosts: tuple[int, ...]) -> list[subprocess.Popen[bytes]]:
        port, started = hardware.free_port(), []
        for rank, host in enumerate(hosts):
            env: dict[str, object] = {"RANK": rank, "WORLD_SIZE": len(hosts), "LOCAL_RANK": hosts[:rank].count(host)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "SLURMD_NODENAME": f"n{host}"}
            started.append(self._process([sys.executable, TRAIN, *argv, "--in-place"], env))
        return started

    def _process(self, command: list[str], env: dict[str, object]) -> subprocess.Popen[bytes]:
        texts = {name: str(value) for name, value in env.items()} | {"OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=os.environ | texts, cwd=hardware.ROOT, stdout=log, stderr=log)

    def wait_for_step(self, step: int) -> None:
        """Raises Failure where the run ends or hangs before that update is logged."""
        try:
            wait(lambda: last_step(self.run) >= step or self.ended(), LIFE_ENDS_WITHIN, "hangs")
        except TimeoutError as error:
            self.stop()
            raise Failure(f"{error}\n{self.log.read_text()[-3000:]}") from None
        if last_step(self.run) < step:
            raise Failure(f"ended before step {step}\n{self.log.read_text()[-3000:]}")

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def kill_rank(self, rank: int) -> None:
        """SIGKILL the child that trains, which is older than the one that waits to follow it."""
        os.kill(children_of(self.processes[rank].pid)[0], signal.SIGKILL)

    def codes(self) -> list[int]:
        """Exit codes of all processes, once they have ended."""
        try:
            return [process.wait(LIFE_ENDS_WITHIN) for process in self.processes]
        finally:
            self.stop()

    def stop(self) -> None:
        for process in self.processes:
            process.kill()

    def curve(self) -> dict[int, tuple[float, float, str]]:
        """By step: loss, gradient norm, digest of the rows."""
        lines = [line for line in hardware.logged(self.run) if "train/loss" in line]
        return {line["step"]: (line["train/loss"], line["train/grad_norm"], line["data/row_digest"]) for line in lines}


class RestartedRanks(KeptRanks):
    """The same ranks under torchrun's agent, which ends all of a host when one dies, and starts all again."""

    def _start(self, argv: list[str], hosts: tuple[int, ...]) -> list[subprocess.Popen[bytes]]:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={len(hosts)}",
            "--max-restarts=1000",
        ]
        command += ["--master-addr=127.0.0.1", f"--master-port={hardware.free_port()}", "--", TRAIN]
        return [self._process([*command, *argv], {})]

    def kill_rank(self, rank: int) -> None:
        os.kill(children_of(self.processes[0].pid)[rank], signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    """Process ids, the oldest process first."""
    command = ["pgrep", "--parent", str(pid)]
    found = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    return sorted(found, key=lambda child: int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[19]))


def survive_in_place(data: Path, folder: Path, kills: int, ranks: int, seed: int) -> dict[str, Any]:
    """`kills` kills in place, and a tenth as many under torchrun with a checkpoint every BETWEEN / 2 updates. Raises Failure."""
    return {
        "in_place": killed(KeptRanks, data, folder / "in-place", kills, ranks, seed, 0),
        "torchrun": killed(RestartedRanks, data, folder / "torchrun", -(-kills // 10), ranks, seed, BETWEEN // 2),
    }


def killed(
    start: Callable[..., KeptRanks], data: Path, folder: Path, kills: int, ranks: int, seed: int, interval: int
) -> dict[str, Any]:
    """`kills` kills of one run, of a rank each or of all; every update is compared with those of a run without kills."""
    case = Case("in place", ranks, (kills + 1) * BETWEEN, interval, ("checkpoint.keep=1",))
    argv = case.argv(data, folder / "run")
    place = argv.index("--run")
    del argv[place : place + 2]
    undisturbed = start(argv, folder / "undisturbed", (0,) * ranks)
    if any(undisturbed.codes()):
        raise Failure(undisturbed.log.read_text()[-3000:])
    job, chance, seconds = start(argv, folder / "run", (0,) * ranks), random.Random(seed), []
    for number in range(kills):
        job.wait_for_step(number * BETWEEN + chance.randrange(1, BETWEEN))
        victims = range(ranks) if chance.randrange(20) < ALL_AT_ONCE else [chance.randrange(ranks)]
        before, started = last_step(job.run), time.monotonic()
        for victim in victims:
            job.kill_rank(victim)
        wait_for_new(job, before)
        seconds.append(time.monotonic() - started)
    codes = job.codes()
    found, expected = job.curve(), undisturbed.curve()
    different = sum(found.get(step) != line for step, line in expected.items()) + len(found.keys() - expected.keys())
    return {
        "ranks": ranks,
        "kills": kills,
        "exit_codes": codes,
        "updates": len(expected),
        "updates_that_differ": different,
        "seconds_to_next_update": {
            "median": round(statistics.median(seconds), 2),
            "p90": round(sorted(seconds)[int(0.9 * len(seconds))], 2),
            "most": round(max(seconds), 2),
        },
    }


def wait_for_new(job: KeptRanks, before: int) -> None:
    """Until an update after `before` is logged by ranks that were started after the kill."""
    starts = job.run / "starts.jsonl"
    count = starts.read_bytes().count(b"\n")
    try:
        wait(lambda: starts.read_bytes().count(b"\n") > count or job.ended(), LIFE_ENDS_WITHIN, "no restart")
    except TimeoutError as error:
        job.stop()
        raise Failure(f"{error}\n{job.log.read_text()[-3000:]}") from None
    job.wait_for_step(before + 1)
