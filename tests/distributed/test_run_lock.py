"""Two jobs never write one run; however the first one dies, the next can start at once."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megabert.common.errors import FAILED, exit_code
from megabert.distributed import run_lock
from megabert.distributed.ranks import World
from tests.helpers.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
ALONE = World(0, 0, 1, torch.device("cpu"), "gloo", "single")
HOLD = """
import os, sys, time, torch
from megabert.distributed import run_lock
from megabert.distributed.ranks import World
run_lock.take(sys.argv[1], World(0, 0, 1, torch.device("cpu"), "gloo", "single"))
if os.fork() == 0:
    time.sleep(60)
    os._exit(0)
print("held", flush=True)
time.sleep(60)
"""


def hold(folder: Path, **env: str) -> subprocess.Popen[str]:
    """A process that holds the lock of `folder`, and has a child of its own that outlives it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_job_is_refused_until_the_first_dies(tmp_path):
    holder = hold(tmp_path, SLURM_JOB_ID="77")
    try:
        with pytest.raises(ValueError) as caught:
            run_lock.take(tmp_path, ALONE, patience=0.3)
        expected = f"{tmp_path} is in use by pid {holder.pid} on host {socket.gethostname()} (job 77)"
        assert expected in str(caught.value)
        for found in run_ranks(2, refused, str(tmp_path)):
            assert expected in found
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        started = time.monotonic()
        run_lock.take(tmp_path, ALONE, patience=0)  # its forked child is still alive
        assert time.monotonic() - started < 1
        os.killpg(holder.pid, 0)  # raises if that were not so
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    run_lock.take(tmp_path, ALONE, patience=0)  # ours already


def refused(world: World, folder: str) -> str:
    try:
        run_lock.take(folder, world, patience=0.3)
    except ValueError as error:
        return str(error)
    return ""


def test_a_dying_holder_is_waited_for(tmp_path):
    holder = hold(tmp_path)
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 -{holder.pid}"])
    run_lock.take(tmp_path, ALONE, patience=20)
    holder.wait()
    killer.wait()


def test_a_lock_without_text_refuses(tmp_path):
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="in use by another process"):
            run_lock.take(tmp_path, ALONE, patience=0)


def failing(number: int) -> Any:
    def fail(path: Any, *flags: Any) -> None:
        raise OSError(number, os.strerror(number), str(path))

    return fail


def test_a_file_system_fault_is_not_a_user_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "open", failing(errno.ESTALE))
    with pytest.raises(OSError, match="lock: Stale file handle") as found:
        run_lock.take(tmp_path / "run", ALONE)
    assert exit_code(found.value) == FAILED


def test_a_file_system_without_locks_warns_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    for _ in range(2):
        run_lock.take(tmp_path, ALONE)
    errors = capsys.readouterr().err
    assert errors.count("warning:") == 1 and "has no locks" in errors and os.strerror(errno.ENOLCK) in errors
