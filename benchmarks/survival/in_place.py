"""Ranks that restart in place (`train --in-place`) under kills: every update is compared with those of a run without kills.

A job has four ranks on three nodes, which are network, process and host name spaces of this machine. Kills are of one rank, of
several or all, some of them during the restart after the kill before, and of two nodes, whose ranks and keepers are lost. Until
the first node is lost all figures must be equal bit for bit, and afterwards, on fewer ranks, the rows. Keepers and ranks are
forked by a process that has done their imports, as no standby process is in the product: a thousand kills take minutes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import hardware
from benchmarks.survival.life import (
    MODERN_MUON,
    Case,
    Failure,
    Server,
    children_of,
    failure,
    last_step,
    start_logged,
    wait_or_fail,
)
from benchmarks.survival.network import Network, address

TRAIN = str(hardware.ROOT / "megabert/train.py")
NODES = ("n1", "n2", "n3")
# the node of each rank
PLACES = (0, 0, 1, 2)
# kills of a job, and those of them that are of a node
PER_JOB, LOST_AT = 60, (39, 59)
# the most updates from one restart to the next kill, and updates of a job for each of its kills
BETWEEN, STEPS_A_KILL = 6, 9
# share of the kills that follow the one before within a second
SOON = 0.15
CASES = (
    Case("ZeRO-1", len(PLACES), 0, 25, ("zero.stage=1",)),
    Case("ZeRO-0, fp32", len(PLACES), 0, 25, ("zero.stage=0", "precision=fp32")),
    Case("ZeRO-3", len(PLACES), 0, 25, ("zero.stage=3",)),
    Case(
        "ZeRO-2, LAMB, a loader process", len(PLACES), 0, 25, ("zero.stage=2", "optimizer.name=lamb", "data.workers=1")
    ),
    Case("ZeRO-1, Muon, modern, no checkpoints", len(PLACES), 0, 0, ("zero.stage=1", *MODERN_MUON)),
)
Curve = dict[int, tuple[float, float, str]]


class KeptRanks:
    """The ranks of one start, each the child of its keeper; `hosts`: the host of each."""

    def __init__(self, argv: list[str], run: Path, hosts: tuple[int, ...]) -> None:
        self.run, self.log = run, run.with_name(f"{run.name}.log")
        run.parent.mkdir(parents=True, exist_ok=True)
        self.processes = self._start([*argv, "--run", str(run)], hosts)

    def _start(self, argv: list[str], hosts: tuple[int, ...]) -> list[Any]:
        port, processes = hardware.free_port(), []
        for rank, host in enumerate(hosts):
            env: dict[str, object] = {"RANK": rank, "WORLD_SIZE": len(hosts), "LOCAL_RANK": hosts[:rank].count(host)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "SLURMD_NODENAME": f"n{host}"}
            processes.append(self._process([sys.executable, TRAIN, *argv, "--in-place"], env))
        return processes

    def _process(self, command: list[str], env: dict[str, object]) -> Any:
        return start_logged(command, {name: str(value) for name, value in env.items()}, self.log)

    def wait_for_step(self, step: int) -> None:
        """Raises Failure where the run ends or hangs before that update is logged."""
        self.wait_until(lambda: last_step(self.run) >= step or self.ended(), f"no update {step}")
        if last_step(self.run) < step:
            raise failure(f"ended before step {step}", self.log)

    def wait_until(self, condition: Any, what: str) -> None:
        """Raises Failure, with the end of the log, where that takes too long."""
        try:
            wait_or_fail(condition, what, self.log)
        except Failure:
            self.stop()
            raise

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def kill_rank(self, rank: int) -> None:
        """SIGKILL the child that trains, which is older than the one that waits to follow it."""
        os.kill(children_of(self.processes[rank].pid)[0], signal.SIGKILL)

    def codes(self) -> list[int]:
        """Exit codes of all processes, once they have ended."""
        self.wait_until(self.ended, "hangs")
        return [process.poll() for process in self.processes]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()

    def curve(self) -> Curve:
        """By step: loss, gradient norm, digest of the rows."""
        lines = [line for line in hardware.logged(self.run) if "train/loss" in line]
        return {line["step"]: (line["train/loss"], line["train/grad_norm"], line["data/row_digest"]) for line in lines}


class ForkedKeeper:
    """A keeper on a node, by its process id there; None as the exit code of one that was lost with its node."""

    def __init__(self, node: str, server: Server, pid: int) -> None:
        self.node, self.server, self.pid, self.lost = node, server, pid, False
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and not self.lost:
            self._code = self.server.ask(poll=self.pid)["code"]
        return self._code


class RanksOnNodes(KeptRanks):
    """Ranks on the nodes of a network."""

    def __init__(self, network: Network, case: Case, data: Path, run: Path) -> None:
        self.network = network
        self.servers = {node: Server(network.inside(node)) for node in NODES}
        super().__init__(case.words(data), run, PLACES)

    def _process(self, command: list[str], env: dict[str, object]) -> ForkedKeeper:
        node = NODES[PLACES[int(str(env["RANK"]))]]
        env |= {"MASTER_ADDR": address(NODES[0]), "SLURMD_NODENAME": node, "OMP_NUM_THREADS": 1}
        texts, argv = {name: str(value) for name, value in env.items()}, command[2:]
        pid = self.servers[node].ask(argv=argv, env=texts, log=str(self.log), slow=0.0)["pid"]
        return ForkedKeeper(node, self.servers[node], pid)

    @property
    def living(self) -> list[ForkedKeeper]:
        return [keeper for keeper in self.processes if not keeper.lost]

    def ended(self) -> bool:
        return all(keeper.poll() is not None for keeper in self.living)

    def kill_rank(self, rank: int) -> None:
        """Kill the rank of the living keeper number `rank`, as soon as it has one."""
        keeper = self.living[rank]
        self.wait_until(lambda: keeper.server.ask(kill_rank_of=keeper.pid)["killed"], f"rank {rank} is not started")

    def kill_node(self, node: str) -> None:
        self.network.kill(node)
        for keeper in self.processes:
            keeper.lost |= keeper.node == node

    def stop(self) -> None:
        """End the servers and with them all processes; nodes that were killed start again."""
        for node in {keeper.node for keeper in self.processes if keeper.lost}:
            if self.servers.pop(node, None):
                self.network.boot(node)
        while self.servers:
            self.servers.popitem()[1].close()


def survive_in_place(data: Path, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """At least `kills` kills, in jobs of PER_JOB, each of one of CASES; after Ctrl-C those of the finished jobs. Raises OSError where
    nodes cannot be made, and Failure."""
    victims, results = Counter[str](), []
    folder.mkdir()
    try:
        with Network(folder, NODES) as network:
            for counts, found in finished_jobs(network, data, folder, -(-kills // PER_JOB), random.Random(seed)):
                victims += counts
                results.append(found)
    except KeyboardInterrupt:
        print(f"interrupted after {len(results)} jobs", flush=True)
    return {
        "kills": victims.total(),
        "of": dict(victims),
        "jobs": len(results),
        "updates": sum(result["updates"] for result in results),
        "updates_with_other_rows": sum(result["rows"] for result in results),
        "updates_that_differ_on_four_ranks": sum(result["figures"] for result in results),
        "largest_relative_difference_of_a_loss_on_fewer": max((result["on_fewer"] for result in results), default=0.0),
        "largest_relative_difference_of_a_last_loss": max((result["last"] for result in results), default=0.0),
    }


def finished_jobs(
    network: Network, data: Path, folder: Path, jobs: int, chance: random.Random
) -> Iterator[tuple[Counter[str], dict[str, float]]]:
    """Run the jobs, one case after the other; yields each one's kills and differences."""
    undisturbed: dict[str, Curve] = {}
    for number in range(jobs):
        case = replace(CASES[number % len(CASES)], steps=PER_JOB * STEPS_A_KILL)
        if case.name not in undisturbed:
            undisturbed[case.name] = run_whole(network, case, data, folder / f"whole-{len(undisturbed)}")
        started = time.monotonic()
        counts, found = run_killed(network, case, data, folder / f"run-{number}", chance, undisturbed[case.name])
        print(f"{case.name}: {dict(counts)}, {found}, {time.monotonic() - started:.0f} s", flush=True)
        yield counts, found


def run_whole(network: Network, case: Case, data: Path, run: Path) -> Curve:
    job = RanksOnNodes(network, case, data, run)
    try:
        if any(job.codes()):
            raise failure(f"{case.name}: {job.codes()}", job.log)
        return job.curve()
    finally:
        job.stop()


def run_killed(
    network: Network, case: Case, data: Path, run: Path, chance: random.Random, expected: Curve
) -> tuple[Counter[str], dict[str, float]]:
    """One job under PER_JOB kills: their counts, and what differs from the `expected` curve."""
    job, victims, soon = RanksOnNodes(network, case, data, run), Counter[str](), True
    try:
        for number in range(PER_JOB):
            # never two kills in a row without an update between them: after three the keepers give up
            soon = not soon and chance.random() < SOON
            if soon:
                time.sleep(chance.random())
            else:
                job.wait_for_step(last_step(run) + chance.randrange(1, BETWEEN + 1))
            if number in LOST_AT:
                job.kill_node(chance.choice(sorted({keeper.node for keeper in job.living})))
                victims["a node"] += 1
                continue
            ranks = range(len(job.living))
            chosen = chance.sample(ranks, chance.choice([1, 1, 1, 1, len(ranks), chance.randint(1, len(ranks))]))
            for rank in chosen:
                job.kill_rank(rank)
            kind = "one rank" if len(chosen) == 1 else "all ranks" if len(chosen) == len(ranks) else "several ranks"
            victims[kind + " during a restart" * soon] += 1
        if any(code for code in job.codes() if code is not None):
            raise failure(f"{case.name}: {job.codes()}", job.log)
        return victims, differences(job, expected)
    finally:
        job.stop()


def differences(job: KeptRanks, expected: Curve) -> dict[str, float]:
    """Updates whose rows, and up to the first start on fewer ranks whose figures differ; relative differences of the losses after it."""
    found, starts = job.curve(), map(json.loads, (job.run / "starts.jsonl").read_text().splitlines())
    fewer = min((start["step"] for start in starts if start["ranks"] < len(PLACES)), default=len(expected))
    missing = len(expected.keys() ^ found.keys())
    both = expected.keys() & found.keys()
    relative = {step: abs(found[step][0] / expected[step][0] - 1) for step in both if step > fewer}
    return {
        "updates": len(expected),
        "rows": missing + sum(found[step][2] != expected[step][2] for step in both),
        "figures": missing + sum(found[step] != expected[step] for step in both if step <= fewer),
        "on_fewer": max(relative.values(), default=0.0),
        "last": relative.get(max(expected), 0.0),
    }
