"""Commands of `megabert`, each in its own process, forked where everything that they import has been imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.hardware import free_port
from megabert.common.environment import end_with_parent
from tests.helpers.ranks import CONTEXT

ROOT = Path(__file__).resolve().parents[2]


class Forked:
    """`megabert argv…` as a process, with the face of subprocess.Popen; it ends with the tests.

    `output` and `errors` are the files that it appends to. `driver` is a script to run first, which may wrap functions.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], output: Path, errors: Path | None = None, driver: str = ""
    ) -> None:
        given = (list(argv), dict(env), str(output), str(errors or output), driver)
        self._process = CONTEXT.Process(target=_command, args=given)
        self._process.start()
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("megabert", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    argv: Sequence[Any], env: Mapping[str, str], timeout: float, ranks: int = 1
) -> subprocess.CompletedProcess[str]:
    """`megabert argv…` to its end, as subprocess.run with its output captured; the exit code is 0 if every rank's is."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        words = [str(word) for word in argv]
        processes = [Forked(words, {**env, **rank}, output, errors) for rank in environments(ranks)]
        try:
            codes = [process.wait(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        return subprocess.CompletedProcess(list(argv), max(codes, key=abs), output.read_text(), errors.read_text())


def environments(ranks: int) -> list[dict[str, str]]:
    """What a launcher gives each rank of this machine; nothing to one alone."""
    if ranks == 1:
        return [{}]
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    return [master | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _command(argv: list[str], env: dict[str, str], output: str, errors: str, driver: str) -> None:
    end_with_parent()
    for target, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, target)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["megabert", *argv]
    from megabert.__main__ import main
    from megabert.distributed.signals import exit_on_signals

    if driver:
        exit_on_signals()
        exec(compile(Path(driver).read_text(), driver, "exec"), {"__name__": "driver"})
    sys.exit(main(argv))
