"""Ranks of a training run from outside: started, watched, killed, waited for."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import hardware
from megabert.common.processes import read_status

SURVIVORS_END_WITHIN = 20.0  # seconds after one rank was killed
ENDED_BY_LAUNCHER = "in the start, before the ranks met; the others were ended as a launcher does"
LIFE_ENDS_WITHIN = 240.0  # time limit of a life in seconds
POLL = 0.001
TINY = (
    *("model.layers=1", "model.hidden=32", "model.heads=2", "batch.global_size=8", "batch.micro_size=8"),
    *("optimizer.lr=2e-3", "schedule.warmup_steps=10", "log.interval=1", "log.tensorboard=false"),
    *("eval.interval=0", "eval.rows=16", "peak_tflops=1.0", "data.workers=0", "checkpoint.keep=2"),
)
# settings of ModernBERT's architecture and Muon, besides the ZeRO stage
MODERN_MUON = ("optimizer.name=muon", "model.kind=modern", "model.norm=pre", "model.nsp=false")


class Server:
    """A running `server.py`, asked through its pipes."""

    def __init__(self) -> None:
        command = [sys.executable, str(hardware.ROOT / "benchmarks/survival/server.py")]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=hardware.ROOT, **pipes)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server has ended; its error is on stderr"
        return json.loads(answer)

    def start(self, argv: list[str], place: Mapping[str, str], log: Path, slow: float = 0.0) -> Forked:
        """A rank or keeper of this environment; `slow`: seconds of delay of its first write of a checkpoint."""
        env = {**place, "OMP_NUM_THREADS": "1"}
        pid = self.ask(argv=argv, env=env, log=str(log), slow=slow)["pid"]
        return Forked(pid, lambda pid: self.ask(poll=pid)["code"])

    def close(self) -> None:
        self._process.communicate()  # the end of its input ends it with all remaining ranks


class Forked:
    """A rank or keeper that the server forked, or a rank that its keeper forked; methods as in subprocess."""

    def __init__(self, pid: int, reap: Callable[[int], int | None]) -> None:
        self.pid, self._reap = pid, reap
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code; for one thread."""
        if self._code is None:
            self._code = self._reap(self.pid)
        return self._code

    def wait(self) -> int | None:
        while self.poll() is None:
            time.sleep(POLL)
        return self._code

    def send_signal(self, number: int) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):  # reaped meanwhile
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class Case:
    """A command: `world` ranks train `steps` updates with a checkpoint every `interval`."""

    name: str
    world: int
    steps: int
    interval: int
    overrides: tuple[str, ...] = ()

    def words(self, data: Path) -> list[str]:
        """The arguments without the run folder."""
        steps = (f"schedule.total_steps={self.steps}", f"checkpoint.interval={self.interval}")
        return ["--config", "tiny", "--data", str(data), *TINY, *steps, *self.overrides]


class Failure(AssertionError):
    """A run failed; the text says how, with the end of its log."""


class Ranks:
    """Processes of a run, and its state observed from outside."""

    def __init__(self, run: Path) -> None:
        self.run, self.log = run, run.with_name(f"{run.name}.log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.touch()
        self._begin = self.log.stat().st_size
        self.processes: list[Any] = []

    def printed(self) -> bytes:
        return self.log.read_bytes()[self._begin :]

    def output(self) -> str:
        return self.printed().decode(errors="replace")

    def failure(self, reason: object) -> Failure:
        """The reason, with the end of the output."""
        return Failure(f"{reason}\n{self.output()[-3000:]}")

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        """Ends the processes and raises Failure where that takes too long."""
        try:
            wait(condition, LIFE_ENDS_WITHIN, what)
        except TimeoutError as error:
            self.stop()
            raise self.failure(error) from None

    def codes(self) -> list[int]:
        """Exit codes of all processes, once they have ended."""
        self.wait_until(self.ended, "hangs")
        return [process.poll() for process in self.processes]

    def stop(self) -> None:
        """End the remaining processes."""
        for process in self.processes:
            process.kill()


class Life(Ranks):
    """The ranks of one start of a case's command."""

    def __init__(self, case: Case, data: Path, run: Path, server: Server, slow: tuple[int, float] = (0, 0.0)) -> None:
        """`slow`: rank and seconds of delay of its first write."""
        super().__init__(run)
        self.case, self.slow = case, slow
        self._stale = set(saves_of(run))
        argv = [*case.words(data), "--run", str(run)]
        self.processes = [
            server.start(argv, place, self.log, slow[1] if rank == slow[0] else 0.0)
            for rank, place in enumerate(hardware.rank_places(case.world))
        ]

    def running(self) -> bool:
        return all(rank.poll() is None for rank in self.processes)

    def saving(self) -> list[tuple[str, int]]:
        """(name, inode) of the folder into which this life writes a checkpoint now, if any."""
        return [entry for entry in saves_of(self.run) if entry not in self._stale]

    def kill(self, victims: Sequence[int]) -> str:
        """SIGKILL these ranks, then wait for the others; returns the state at the kill."""
        before = self.saving()
        trained = "step" in self.output() and last_step(self.run)
        for victim in victims:
            os.kill(self.processes[victim].pid, signal.SIGKILL)
        wait(lambda: all(self.processes[v].poll() is not None for v in victims), 10, "a killed rank stays")
        committed = saved_steps(self.run)
        try:
            wait(self.ended, SURVIVORS_END_WITHIN, "")
        except TimeoutError:
            self.stop()
            wait(self.ended, 10, "a killed rank stays")
            if "parameters," in self.output():  # printed after the rendezvous of all ranks
                raise self.failure(f"{self.case.name}: ranks outlive a killed one") from None
            return ENDED_BY_LAUNCHER
        if before:
            written = all(int(name.split("-")[1]) in committed for name, _ in before)
            return "while a checkpoint is committed" if written else "inside a checkpoint write"
        return "in training" if trained else "in the start"

    def end(self) -> None:
        """Wait for every rank to end with 0."""
        if any(codes := self.codes()):
            raise self.failure(f"{self.case.name}: exit codes {codes}")


def processes() -> Iterator[tuple[int, list[str]]]:
    """Process ids, each with the fields of its `stat` from the state on (proc(5)), without those that have ended."""
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        if (fields := read_status(pid))[0] not in "ZX":
            yield pid, fields


def in_sessions(sessions: set[int]) -> list[int]:
    """Processes of these sessions: each rank leads one, with the workers of its loader in it."""
    return [pid for pid, fields in processes() if int(fields[3]) in sessions]


def await_end(sessions: set[int], what: str) -> None:
    """Wait for the ends of their processes. Raises TimeoutError."""
    wait(lambda: not in_sessions(sessions), 15.0, f"{what}processes are left behind")


def children_of(parent: int) -> list[int]:
    """Child processes, the oldest first."""
    return [pid for _, pid in sorted((int(fields[19]), pid) for pid, fields in processes() if int(fields[1]) == parent)]


def wait(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} for {seconds} s")
        time.sleep(POLL)


def last_step(run: Path) -> int:
    """The step of the last complete line of metrics.jsonl; 0 without one."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            steps = re.findall(rb'"step": (\d+)[^\n]*\n', file.read())
    except FileNotFoundError:
        return 0
    return int(steps[-1]) if steps else 0


def saves_of(run: Path) -> list[tuple[str, int]]:
    """(name, inode) of each folder of a save that is not committed."""
    try:
        with os.scandir(run / "checkpoints") as entries:
            return [(e.name, e.inode()) for e in entries if re.fullmatch(r"\.saving-\d+-\w+", e.name)]
    except FileNotFoundError:
        return []


def saved_steps(run: Path) -> list[int]:
    """Committed checkpoints, oldest first."""
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
