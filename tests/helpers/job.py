"""A training job of real ranks on this machine, started as a launcher would, with its output as it comes."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.survival.life import processes
from megabert.common.processes import is_alive
from tests.helpers.forked import ROOT, Forked, environments

SMALL = (
    *("model.layers=1", "model.hidden=32", "model.heads=2", "batch.global_size=16", "batch.micro_size=8"),
    *("optimizer.lr=2e-3", "schedule.total_steps=100000", "schedule.warmup_steps=4", "log.interval=1"),
    *("eval.interval=0", "eval.rows=16", "checkpoint.interval=5", "data.workers=1", "peak_tflops=1.0"),
    *("log.tensorboard=false",),
)


def with_descendants(pids: Iterable[int]) -> list[int]:
    """These processes and everything below them."""
    parents: dict[int, list[int]] = {}
    for pid, fields in processes():
        parents.setdefault(int(fields[1]), []).append(pid)
    found = [*pids]
    for pid in found:
        found += parents.get(pid, [])
    return found


class Job:
    """Ranks of `megabert train`, or of another `command`; `driver` runs before it in every rank and may wrap functions."""

    def __init__(
        self,
        data: Path,
        run: Path,
        *extra: object,
        ranks: int = 2,
        driver: str = "",
        command: tuple[object, ...] = (),
        **env: str,
    ):
        run.parent.mkdir(parents=True, exist_ok=True)
        arguments = ["--config", "tiny", "--data", str(data), "--run", str(run), *SMALL, *map(str, extra)]
        script = run.parent / f"driver-{run.name}.py" if driver else None
        if script:
            script.write_text(driver)
        with tempfile.NamedTemporaryFile(suffix=".log", prefix=f"{run.name}-", dir=run.parent, delete=False) as log:
            self.log = Path(log.name)
        self._read = 0
        base = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | env
        words = list(map(str, command)) or ["train", *arguments]
        self.processes = [
            Forked(words, base | rank, self.log, driver=str(script or "")) for rank in environments(ranks)
        ]

    def wait_for(self, text: str, timeout: float = 120) -> str:
        """The first new line that holds `text`."""
        deadline = time.monotonic() + timeout
        while True:
            ended = all(process.poll() is not None for process in self.processes)
            whole, newline, _ = self.output[self._read :].rpartition("\n")
            for line in whole.splitlines() if newline else ():
                self._read += len(line) + 1
                if text in line:
                    return line
            if ended or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"no {text!r} in {timeout} s:\n{self.output}")
            time.sleep(0.02)

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].send_signal(number)

    def codes(self, timeout: float = 120) -> list[int]:
        """Exit codes of all ranks. The job is killed, and the test fails, when it takes longer than `timeout` seconds."""
        family = with_descendants(process.pid for process in self.processes)
        deadline = time.monotonic() + timeout
        try:
            for process in self.processes:
                process.wait(max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.output}") from None
        finally:
            self.kill()
        gone_by = time.monotonic() + 5
        while orphans := [pid for pid in family if is_alive(pid)]:
            assert time.monotonic() < gone_by, f"orphans {orphans}:\n{self.output}"
            time.sleep(0.05)
        return [process.returncode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")
