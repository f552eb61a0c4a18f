"""A training job of real ranks on this machine, started as a launcher would, with its output as it comes."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from megabert.distributed.watchdog import is_alive
from tests.integration.conftest import ROOT, free_port

SMALL = (
    *("model.layers=1", "model.hidden=32", "model.heads=2", "batch.global_size=16", "batch.micro_size=8"),
    *("optimizer.lr=2e-3", "schedule.total_steps=100000", "schedule.warmup_steps=4", "log.interval=1"),
    *("eval.interval=0", "eval.rows=16", "checkpoint.interval=5", "data.workers=1", "peak_tflops=1.0"),
    *("log.tensorboard=false",),
)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAIN = """
import sys
from megabert.distributed.signals import ignore_signals
from megabert.train import main
code = main()
ignore_signals()
sys.exit(code)
"""


def _die_with_the_test() -> None:
    """In the child: a test that is killed leaves no training behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Job:
    """Ranks of `megabert/train.py`; `driver` runs before its `main` in every rank and may wrap functions."""

    def __init__(self, data: Path, run: Path, *extra: object, ranks: int = 2, driver: str = "", head=(), **env: str):
        arguments = ["--config", "tiny", "--data", str(data), "--run", str(run), *SMALL, *map(str, extra)]
        program = ["megabert/train.py", *arguments]
        if driver:
            run.parent.mkdir(parents=True, exist_ok=True)
            script = run.parent / f"driver-{run.name}.py"
            script.write_text(
                "from megabert.distributed.signals import leave_when_signalled\nleave_when_signalled()\n"
                + driver
                + MAIN
            )
            program = [str(script), *arguments]
        base = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | env
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        self.lines: list[str] = []
        self._coming: queue.Queue[str] = queue.Queue()
        self.processes = []
        for rank in range(1 if head else ranks):
            own = {} if head or ranks == 1 else master | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [*map(str, head), *program] if head else [sys.executable, *program]
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=base | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=_die_with_the_test,
            )
            self.processes.append(process)
            threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process) -> None:
        for line in process.stdout:
            self._coming.put(line.rstrip())

    def wait_for(self, text: str, timeout: float = 120) -> str:
        """The first new line that holds `text`."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = self._coming.get(timeout=0.5)
            except queue.Empty:
                if time.monotonic() < deadline and any(p.poll() is None for p in self.processes):
                    continue
                self.kill()
                raise AssertionError(f"no {text!r} in {timeout} s:\n{self.output}") from None
            self.lines.append(line)
            if text in line:
                return line

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].send_signal(number)

    def descendants(self) -> list[int]:
        """Process ids of the ranks and of everything below them."""
        parents: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                except (FileNotFoundError, ProcessLookupError):
                    continue
                parents.setdefault(parent, []).append(int(entry.name))
        found = [process.pid for process in self.processes]
        for pid in found:
            found += parents.get(pid, [])
        return found

    def codes(self, timeout: float = 120) -> list[int]:
        """Exit codes of all ranks. The job is killed, and the test fails, when it takes longer than `timeout` seconds."""
        family = self.descendants()
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
        time.sleep(0.2)  # the last lines
        return [process.returncode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()

    @property
    def output(self) -> str:
        while not self._coming.empty():
            self.lines.append(self._coming.get())
        return "\n".join(self.lines)
