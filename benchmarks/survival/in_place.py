"""Ranks that restart in place (`train --in-place`) under kills: seconds to the next update, and what differs from a run without kills."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import hardware
from benchmarks.survival.life import LIFE_ENDS_WITHIN, Case, Failure, last_step, wait

# updates from one kill to the next, about
BETWEEN = 60
# of 20 kills so many are of all ranks at once
ALL_AT_ONCE = 3


class KeptRanks:
    """The ranks of one start, each the child of its keeper; `hosts`: the host of each."""

    def __init__(self, argv: list[str], run: Path, hosts: tuple[int, ...]) -> None:
        self.run, self.log, self.keepers = run, run.with_name(f"{run.name}.log"), []
        run.parent.mkdir(parents=True, exist_ok=True)
        port = hardware.free_port()
        with self.log.open("wb") as log:
            for rank, host in enumerate(hosts):
                env: dict[str, object] = {
                    "RANK": rank,
                    "WORLD_SIZE": len(hosts),
                    "LOCAL_RANK": hosts[:rank].count(host),
                }
                env |= {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "OMP_NUM_THREADS": 1,
                    "SLURMD_NODENAME": f"n{host}",
                }
                command = [sys.executable, "megabert/train.py", *argv, "--run", str(run), "--in-place"]
                texts = {name: str(value) for name, value in env.items()}
                pipes: dict[str, Any] = {"stdout": log, "stderr": log}
                self.keepers.append(subprocess.Popen(command, env=os.environ | texts, cwd=hardware.ROOT, **pipes))

    def step(self) -> int:
        """The last update that was logged."""
        return last_step(self.run)

    def wait_for_step(self, step: int) -> None:
        """Raises Failure where the run ends or hangs before it."""
        try:
            wait(lambda: self.step() >= step or self.ended(), LIFE_ENDS_WITHIN, "hangs")
        except TimeoutError as error:
            self.stop()
            raise Failure(f"{error}\n{self.log.read_text()[-3000:]}") from None
        if self.step() < step:
            raise Failure(f"ended before step {step}\n{self.log.read_text()[-3000:]}")

    def ended(self) -> bool:
        return all(keeper.poll() is not None for keeper in self.keepers)

    def kill_rank(self, rank: int) -> None:
        """SIGKILL the child that trains, which is older than the one that waits to follow it."""
        command = ["pgrep", "--parent", str(self.keepers[rank].pid)]
        children = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        os.kill(min(map(int, children)), signal.SIGKILL)

    def codes(self) -> list[int]:
        """Exit codes of all keepers, once they have ended."""
        try:
            return [keeper.wait(LIFE_ENDS_WITHIN) for keeper in self.keepers]
        finally:
            self.stop()

    def stop(self) -> None:
        for keeper in self.keepers:
            keeper.kill()

    def curve(self) -> dict[int, tuple[float, float, str]]:
        """By step: loss, gradient norm, digest of the rows."""
        lines = [line for line in hardware.logged(self.run) if "train/loss" in line]
        return {line["step"]: (line["train/loss"], line["train/grad_norm"], line["data/row_digest"]) for line in lines}


def survive_in_place(data: Path, folder: Path, kills: int, ranks: int, seed: int) -> dict[str, Any]:
    """`kills` kills of one run, of a rank each or of all; every update is compared with those of a run without kills."""
    case = Case("in place", ranks, (kills + 1) * BETWEEN, 0, ("checkpoint.keep=1",))
    argv = case.argv(data, folder / "run")
    argv = argv[: argv.index("--run")] + argv[argv.index("--run") + 2 :]
    undisturbed = KeptRanks(argv, folder / "undisturbed", (0,) * ranks)
    if any(undisturbed.codes()):
        raise Failure(undisturbed.log.read_text()[-3000:])
    job, chance, seconds = KeptRanks(argv, folder / "run", (0,) * ranks), random.Random(seed), []
    for number in range(kills):
        job.wait_for_step(number * BETWEEN + chance.randrange(1, BETWEEN))
        victims = range(ranks) if chance.randrange(20) < ALL_AT_ONCE else [chance.randrange(ranks)]
        before, started = job.step(), time.monotonic()
        for victim in victims:
            job.kill_rank(victim)
        job.wait_for_step(before + 1)
        seconds.append(time.monotonic() - started)
    codes = job.codes()
    found, expected = job.curve(), undisturbed.curve()
    return {
        "ranks": ranks,
        "kills": kills,
        "exit_codes": codes,
        "updates": len(expected),
        "updates_that_differ": sum(found.get(step) != line for step, line in expected.items())
        + len(found.keys() - expected),
        "seconds_to_next_update": {
            "median": round(statistics.median(seconds), 2),
            "p90": round(sorted(seconds)[int(0.9 * len(seconds))], 2),
            "most": round(max(seconds), 2),
        },
    }
