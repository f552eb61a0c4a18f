"""Lock of a run folder: one job at a time writes it.

`run/lock` is locked by rank 0's process for as long as it lives; the kernel releases it however the process dies. The
file's text names the holder and means nothing without the lock. Children that are forked, such as loader workers, do
not keep it: they may outlive the process for seconds.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from megabert.common.files import lock
from megabert.distributed.ranks import World, on_main

PATIENCE = 5.0  # seconds that a process which was just killed may need to be gone

_held: dict[str, int] = {}  # run folder -> descriptor of its lock, open until this process ends


def take(run_dir: str | Path, world: World, patience: float = PATIENCE) -> None:
    """Make this job the only writer of `run_dir` until rank 0's process ends. A collective; twice is once.

    Raises ValueError on every rank, naming the holder, when another process holds it for `patience` seconds, and Failed
    where the file system fails. Where it has no locks one warning is printed and the run continues without.
    """
    on_main(world, lambda: _take(Path(run_dir), patience))


def _take(run_dir: Path, patience: float) -> None:
    """Raises ValueError where another process keeps it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    key = str(run_dir.resolve())
    if key in _held:
        return
    path = run_dir / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + patience
    while True:
        try:
            lock(descriptor, path, "start no second job on this run folder")
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                text = f"{run_dir} is in use by {_holder(path)}; wait for it, stop it, or name another run folder"
                os.close(descriptor)
                raise ValueError(text) from None
            time.sleep(0.1)
    job = os.environ.get("SLURM_JOB_ID", "")
    text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "job": job}) + "\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    _held[key] = descriptor


def _holder(path: Path) -> str:
    try:
        found = json.loads(path.read_text())
        job = f" (job {found['job']})" if found["job"] else ""
        return f"pid {found['pid']} on host {found['host']}{job}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # which has the lock and has not yet written who it is


def _forget() -> None:
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
