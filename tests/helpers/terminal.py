"""A command at a terminal of its own, as a shell starts one: the foreground process group of a pseudo-terminal, with `| reader`."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.survival.life import in_sessions

ROOT = Path(__file__).resolve().parents[2]
# Key that the line discipline turns into SIGINT for the whole foreground group.
CTRL_C = b"\x03"
# The shell: leader of the terminal's session, which starts the job as the foreground group, passes SIGHUP on to it, waits, and writes
# the exit codes to a file. Arguments: the file, where stderr goes ("terminal" or "pipe"), the command, the reader or "".
SHELL = """
import json, os, signal, subprocess, sys
codes, errors, command, reader = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # or setting the foreground group would stop this process
output = subprocess.PIPE if reader else None
job = [subprocess.Popen(command, process_group=0, stdout=output, stderr=output and errors == "pipe" and subprocess.STDOUT or None)]
group = job[0].pid
signal.signal(signal.SIGHUP, lambda *_: os.killpg(group, signal.SIGHUP))
os.tcsetpgrp(0, group)
if reader:
    job.append(subprocess.Popen(reader, process_group=group, stdin=job[0].stdout))
    job[0].stdout.close()
text = json.dumps([process.wait() for process in job])
open(codes + ".new", "w").write(text)
os.rename(codes + ".new", codes)
"""


class Terminal:
    """`program words… [| reader]` at a terminal. `shown` is what the terminal has shown so far."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[object],
        reader: str = "",
        all_output: bool = False,
        program: str = sys.executable,
    ) -> None:
        """`all_output`: `2>&1` before the pipe. The exit codes are written to `folder`."""
        self._codes, self.shown = folder / "codes.json", ""
        command = json.dumps([program, *map(str, words)])
        arguments = [str(self._codes), "pipe" if all_output else "terminal", command, json.dumps(reader.split())]
        self.pid, self._master = pty.fork()
        if not self.pid:
            os.chdir(ROOT)
            os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
            os.environ.pop("PYTHONUNBUFFERED", None)
            os.execv(sys.executable, [sys.executable, "-c", SHELL, *arguments])

    def wait_for(self, text: str, timeout: float = 120) -> None:
        """Read until the terminal has shown `text`."""
        end = time.monotonic() + timeout
        while text not in self.shown:
            assert time.monotonic() < end, f"no {text!r} in {timeout} s:\n{self.shown}"
            self._read(0.1)

    def press(self, key: bytes) -> None:
        os.write(self._master, key)

    def close(self) -> None:
        """Close the terminal, as by its window's button."""
        os.close(self._master)
        self._master = -1

    def codes(self, timeout: float = 120) -> list[int]:
        """Exit codes of the command and of its reader, negative for a signal."""
        end = time.monotonic() + timeout
        try:
            while not self._codes.exists():
                assert time.monotonic() < end, f"still running after {timeout} s:\n{self.shown}"
                self._read(0.1)
        finally:
            self._kill()
        while self._read(5.0):  # until no process has the terminal open
            pass
        codes: list[int] = json.loads(self._codes.read_text())
        return codes

    def _read(self, seconds: float) -> bool:
        """Append to `shown` what comes within some seconds; whether anything did."""
        if self._master < 0:
            time.sleep(seconds)
            return False
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._master, 1 << 16)
        except OSError:  # EIO: every process at the terminal has ended
            data = b""
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)

    def _kill(self) -> None:
        """End what is left of the session, and its shell."""
        for pid in in_sessions({self.pid}):
            if pid != self.pid and not self._codes.exists():
                os.kill(pid, signal.SIGKILL)
        if not self._codes.exists():
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
