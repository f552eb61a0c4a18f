"""A run that is killed at random instants and started again unaided must end as the run that never was.

Each case is trained once without a fault, then in lives: each life is started by the same command, goes on by itself
from what it finds, and is killed (SIGKILL, one rank or all) at an instant drawn at random: in its start, between updates,
inside a checkpoint write, or while one rank's write takes seconds longer. The last life ends by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[1]
SURVIVORS_END_WITHIN = 20.0  # seconds after one rank was killed
LIFE_ENDS_WITHIN = 240.0  # seconds: a life that takes longer hangs
POLL = 0.001
TINY = (
    *("model.layers=1", "model.hidden=32", "model.heads=2", "batch.global_size=8", "batch.micro_size=8"),
    *("optimizer.lr=2e-3", "schedule.warmup_steps=10", "log.interval=1", "log.tensorboard=false"),
    *("eval.interval=0", "eval.rows=16", "peak_tflops=1.0", "data.workers=0", "checkpoint.keep=2"),
)


class Process(Protocol):
    pid: int

    def poll(self) -> int | None: ...


class Server:
    """The client of `survival_server.py`."""

    def __init__(self) -> None:
        command = [sys.executable, str(ROOT / "benchmarks/survival_server.py")]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server has ended; its error is on stderr"
        return json.loads(answer)

    def start(self, argv: Sequence[str], env: dict[str, str], log: Path, slow: float) -> Forked:
        return Forked(self, self.ask(argv=list(argv), env=env, log=str(log), slow=slow)["pid"])

    def close(self) -> None:
        self._process.communicate()  # the end of its input ends it, and every rank that is left with it


class Forked:
    """A rank that the server forked; `poll` as in subprocess."""

    def __init__(self, server: Server, pid: int) -> None:
        self._server, self.pid, self._code = server, pid, None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._server.ask(poll=self.pid)["code"]
        return self._code


@dataclass(frozen=True)
class Case:
    """One command: `world` ranks train `steps` updates with a checkpoint every `interval`."""

    name: str
    world: int
    steps: int
    interval: int
    overrides: tuple[str, ...] = ()

    def argv(self, data: Path, run: Path) -> list[str]:
        steps = (f"schedule.total_steps={self.steps}", f"checkpoint.interval={self.interval}")
        return [
            *("--config", "tiny", "--data", str(data), "--run", str(run), *TINY, *steps),
            *self.overrides,
        ]


class Failure(AssertionError):
    """A run did not survive; the text says how, with the end of its log."""


class Life:
    """The ranks of one start of a case's command, and what can be seen of them from outside."""

    def __init__(
        self,
        case: Case,
        data: Path,
        run: Path,
        server: Server | None,
        slow: tuple[int, float] = (0, 0.0),
    ) -> None:
        """`server` None: by the real command. `slow`: this rank's first write takes so many seconds longer."""
        self.run, self.case = run, case
        self.log = run.with_name(f"{run.name}.log")
        self._begin = self.log.stat().st_size if self.log.exists() else 0
        self._stale = set(self._saving())
        self.started = time.monotonic()
        argv, port = case.argv(data, run), free_port()
        self.ranks: list[Process] = []
        for rank in range(case.world):
            env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.world}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            texts = {name: str(value) for name, value in env.items()}
            if server:
                self.ranks.append(server.start(argv, texts, self.log, slow[1] if rank == slow[0] else 0.0))
                continue
            with self.log.open("a") as log:
                self.ranks.append(
                    subprocess.Popen(
                        [sys.executable, "megabert/train.py", *argv],
                        cwd=ROOT,
                        env=os.environ | texts | {"PYTHONPATH": str(ROOT)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    def running(self) -> bool:
        return all(rank.poll() is None for rank in self.ranks)

    def output(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")

    def step(self) -> int:
        """The last update that was logged, by this life or one before."""
        return last_step(self.run)

    def saving(self) -> list[tuple[str, int]]:
        """(name, inode) of the folders that this life writes a checkpoint into now: one, or none."""
        return [entry for entry in self._saving() if entry not in self._stale]

    def _saving(self) -> list[tuple[str, int]]:
        try:
            with os.scandir(self.run / "checkpoints") as entries:
                return [(e.name, e.inode()) for e in entries if re.fullmatch(r"\.saving-\d+", e.name)]
        except FileNotFoundError:
            return []

    def kill(self, victims: Sequence[int]) -> tuple[str, float]:
        """SIGKILL these ranks, then wait for the others; gives where it fell and how long the others took to end."""
        before = self.saving()
        logged = self.step()
        for victim in victims:
            os.kill(self.ranks[victim].pid, signal.SIGKILL)
        killed = time.monotonic()
        wait(lambda: all(self.ranks[v].poll() is not None for v in victims), 10, "a killed rank stays")
        committed = steps_of(self.run)
        left = [rank for rank in self.ranks if rank.poll() is None]
        try:
            wait(lambda: all(rank.poll() is not None for rank in left), SURVIVORS_END_WITHIN, "")
        except TimeoutError:
            for rank in left:
                if rank.poll() is None:
                    os.kill(rank.pid, signal.SIGKILL)
            raise Failure(f"{self.case.name}: ranks outlive a killed one\n{self.output()[-3000:]}") from None
        took = time.monotonic() - killed if left else 0.0
        if any(int(name.removeprefix(".saving-")) not in committed for name, _ in before):
            return "inside a checkpoint write", took
        if before:
            return "while a checkpoint is committed", took
        return ("in training" if "step" in self.output() and logged else "in the start"), took

    def end(self) -> None:
        """Wait for every rank to end by itself with 0."""
        try:
            wait(lambda: all(rank.poll() is not None for rank in self.ranks), LIFE_ENDS_WITHIN, "hangs")
        except TimeoutError as error:
            for rank in self.ranks:
                if rank.poll() is None:
                    os.kill(rank.pid, signal.SIGKILL)
            raise Failure(f"{self.case.name}: {error}\n{self.output()[-3000:]}") from None
        codes = [rank.poll() for rank in self.ranks]
        if any(codes):
            raise Failure(f"{self.case.name}: exit codes {codes}\n{self.output()[-3000:]}")


def wait(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} for {seconds} s")
        time.sleep(POLL)


def free_port() -> int:
    """A free port below those that the system gives to outgoing connections, which could take it first."""
    while True:
        port = random.SystemRandom().randrange(12_000, 30_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def last_step(run: Path) -> int:
    """The last whole line of metrics.jsonl's step; 0 without one."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            found = re.findall(rb'"step": (\d+)[^\n]*\n', file.read())
    except FileNotFoundError:
        return 0
    return int(found[-1]) if found else 0


def steps_of(run: Path) -> list[int]:
    """Committed checkpoints, oldest first."""
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))


@dataclass
class Outcome:
    """What a case came to: counts of kills by kind and place, and what they cost."""

    kills: int = 0
    planned: Counter[str] = field(default_factory=Counter)
    fell: Counter[str] = field(default_factory=Counter)
    victims: Counter[str] = field(default_factory=Counter)
    resumed_at: list[int] = field(default_factory=list)
    survivors_seconds: float = 0.0  # the longest that ranks took to end after another was killed
    real_commands: int = 0


def uninterrupted(case: Case, data: Path, run: Path, server: Server) -> float:
    """Train the case without a fault; gives the median seconds of its checkpoint writes."""
    life, seen, durations = Life(case, data, run, server), 0.0, []
    while life.running():
        saving = bool(life.saving())
        if saving and not seen:
            seen = time.monotonic()
        elif seen and not saving:
            durations.append(time.monotonic() - seen)
            seen = 0.0
        time.sleep(POLL)
    life.end()
    return sorted(durations)[len(durations) // 2] if durations else 0.01


PLAN = ("any", "save", "any", "slow", "save", "any", "save", "any")  # what is aimed at, in turn


def killed(
    case: Case,
    data: Path,
    run: Path,
    server: Server,
    kills: int,
    rng: random.Random,
    save_seconds: float,
    real: Sequence[int] = (),
) -> Outcome:
    """Kill the case's run `kills` times, start it again each time, then let it end. `real`: lives started by the command."""
    outcome = Outcome()
    for number in range(kills):
        aim = PLAN[(number + len(case.name)) % len(PLAN)] if number not in real else "any"
        slow = (rng.randrange(case.world), rng.uniform(0.5, 6.0)) if aim == "slow" else (0, 0.0)
        done = steps_of(run)
        newest = done[-1] if done else 0
        life = Life(case, data, run, None if number in real else server, slow)
        in_start = aim == "any" and rng.random() < 0.15
        instant = rng.uniform(0.0, 1.0)
        reach = min(newest + rng.randrange(2, 2 + 2 * case.steps // (kills + 1)), case.steps - 1)
        pause = rng.uniform(0.0, 0.02)
        if aim == "save":
            pause = rng.uniform(0.0, save_seconds)
        elif aim == "slow":
            pause = rng.uniform(0.0, 1.3 * slow[1])
        if not in_start:

            def due(life: Life = life, aim: str = aim, reach: int = reach) -> bool:
                if not life.running():
                    return True
                return bool(life.saving()) if aim in ("save", "slow") else life.step() >= reach

            wait(due, LIFE_ENDS_WITHIN, f"{case.name}: no instant to kill at")
            instant = pause
        time.sleep(instant)
        if not life.running():
            if all(rank.poll() == 0 for rank in life.ranks):
                break  # it reached its end first: fewer kills are counted
            raise Failure(f"{case.name}: it ended before the kill\n{life.output()[-3000:]}")
        victims = list(range(case.world))
        rng.shuffle(victims)
        if case.world > 1 and rng.random() < 0.6:
            victims = victims[:1]
        place, took = life.kill(victims)
        outcome.kills += 1
        outcome.planned[aim] += 1
        outcome.fell[place] += 1
        outcome.victims["all ranks" if len(victims) == case.world else "one rank"] += 1
        outcome.survivors_seconds = max(outcome.survivors_seconds, took)
        outcome.real_commands += number in real
        check_resume(life, newest, outcome)
    newest = (steps_of(run) or [0])[-1]
    life = Life(case, data, run, server)
    life.end()
    check_resume(life, newest, outcome)
    return outcome


def check_resume(life: Life, newest: int, outcome: Outcome) -> None:
    """A life goes on from the newest checkpoint that was committed before it, and finds none damaged."""
    said = life.output()
    resumed = re.search(r"resuming from \S+ at step (\d+)", said)
    if resumed:
        outcome.resumed_at.append(int(resumed[1]))
        if int(resumed[1]) != newest:
            raise Failure(
                f"{life.case.name}: resumed at {resumed[1]}, {newest} was committed\n{said[-3000:]}"
            )
    elif newest and re.search(r"^step ", said, re.M):
        raise Failure(f"{life.case.name}: started over although {newest} was committed\n{said[-3000:]}")
    if "going back" in said or "is whole" in said:
        raise Failure(f"{life.case.name}: a kill damaged a committed checkpoint\n{said[-3000:]}")


def differences(straight: Path, broken: Path, steps: int) -> list[str]:
    """How two finished runs differ, one line each: losses, rows, learning rate, weights, moments. Times may differ."""
    found = []
    one, two = (logged(run) for run in (straight, broken))
    for name, lines in (("uninterrupted", one), ("killed", two)):
        updates = [line["step"] for line in lines if "train/loss" in line]
        if updates != list(range(1, steps + 1)):
            found.append(f"the {name} run's updates are not 1..{steps} once each: {updates}")
    for a, b in zip(one, two, strict=False):
        keys = [key for key in a.keys() | b.keys() if not key.startswith(("perf/", "time/"))]
        found += [
            f"step {a['step']}: {key} is {a.get(key)!r} and {b.get(key)!r}"
            for key in sorted(keys)
            if a.get(key) != b.get(key)
        ]
    hashes = [files_of(run, steps) for run in (straight, broken)]
    for name in sorted(hashes[0].keys() | hashes[1].keys()):
        if hashes[0].get(name) != hashes[1].get(name):
            found.append(f"the final checkpoint's {name} differs")
    left = [path.name for path in (broken / "checkpoints").glob(".*")]
    if left:
        found.append(f"left in the killed run's folder: {left}")
    return found


def logged(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def files_of(run: Path, step: int) -> dict[str, str]:
    """SHA-256 of each file of a checkpoint, as its manifest has them; the files are read again to be sure."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    for name, entry in files.items():
        found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert found == entry["sha256"], f"{folder / name} is damaged"
    return {name: entry["sha256"] for name, entry in files.items()}


def survive(
    case: Case, data: Path, folder: Path, server: Server, kills: int, seed: int, real: Sequence[int] = ()
) -> dict[str, Any]:
    """Both runs of a case and their comparison; gives what happened. Raises Failure where anything differs."""
    folder.mkdir(parents=True)
    straight, broken = folder / "uninterrupted", folder / "killed"
    started = time.monotonic()
    save_seconds = uninterrupted(case, data, straight, server)
    middle = time.monotonic()
    outcome = killed(case, data, broken, server, kills, random.Random(seed), save_seconds, real)
    if found := differences(straight, broken, case.steps):
        raise Failure(f"{case.name}: {len(found)} differences: " + "; ".join(found[:5]))
    return {
        "world": case.world,
        "updates": case.steps,
        "checkpoint_interval": case.interval,
        "overrides": list(case.overrides),
        "kills": outcome.kills,
        "aimed_at": dict(outcome.planned),
        "fell": dict(outcome.fell),
        "killed": dict(outcome.victims),
        "started_by_the_real_command": outcome.real_commands,
        "resumed_at": outcome.resumed_at,
        "checkpoint_write_seconds": round(save_seconds, 4),
        "others_ended_within_seconds": round(outcome.survivors_seconds, 2),
        "uninterrupted_seconds": round(middle - started, 1),
        "killed_seconds": round(time.monotonic() - middle, 1),
        "rows_lost_or_repeated": 0,
        "differences": 0,
    }
