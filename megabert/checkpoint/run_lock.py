"""Lock of a run folder: one job at a time writes to it, also if the jobs' nodes share nothing but the file system.

Each file in `run/lock` describes an owner; the one with the greatest number owns the run. A job becomes the owner by exclusively
creating the next number. The owner is rank 0's process, which renews its file every BEAT seconds. A job that finds an
owner waits until the owner has released the lock, its process on the same machine has ended, or its file did not
change for LIMIT seconds. An owner that was only suspended, or disconnected from the file system, then finds a greater
number and exits.

This uses neither flock, which is not visible on other nodes with `localflock` mounts, nor the clocks of different nodes. It needs
close-to-open consistency, as of NFS, Lustre and GPFS: a node sees a file as another node closed it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megabert.common.errors import FAILED, Failed, describe, record_exit_code
from megabert.common.files import add_path_when_full
from megabert.common.logs import log, write_notice
from megabert.common.processes import is_hidden, pid_namespace, read_start_time
from megabert.distributed.ranks import World, on_every_rank, on_main

BEAT = 5.0  # seconds between renewals of the owner's file
LIMIT = 30.0  # seconds without a change of its file after which an owner has ended
RENEWALS = 2  # renewals of the owner's file after which a waiting job gives up
# Seconds after which every node must see the owner's file; NFS may hide a new folder for 30 s from a node that looked before.
SHARED = 40.0
POLL = 0.2  # polling interval of the waiting job, in seconds


@dataclass(frozen=True)
class Owner:
    """Content of an owner's file."""

    token: str
    host: str
    namespace: str  # `pid_namespace` of the process
    pid: int
    started: str  # start time in kernel ticks, since process ids are reused
    job: str  # SLURM_JOB_ID, or ""
    beat: int = 0
    released: bool = False

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host}" + (f" (job {self.job})" if self.job else "")

    @property
    def has_ended(self) -> bool:
        """Whether the owner released the lock, or was a process of this machine that has ended."""
        gone = self.namespace == pid_namespace() and read_start_time(self.pid) != self.started
        return self.released or (gone and not is_hidden(self.pid))


class Ownership:
    """This process's ownership of a run folder, renewed by a thread until `release`."""

    def __init__(self, run_dir: Path, path: Path, owner: Owner) -> None:
        self.run_dir, self.path, self.owner = run_dir, path, owner
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="run lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises Failed if another job owns the run or removed this job's file, OSError if the files cannot be read.

        A client of NFS may list a file for a while after it was removed, so the file is opened.
        """
        newest = _newest(self.path.parent) or self.path.name
        try:
            owner = parse(self.path.with_name(newest).read_bytes())
        except FileNotFoundError:
            owner, newest = None, ""
        if newest != self.path.name or (owner is not None and owner.token != self.owner.token):
            raise Failed(f"{self.run_dir}: {owner or 'another job'} took the run over while this job was suspended")

    def release(self) -> None:
        """Record that the next job need not wait. Raises as `check`."""
        self._ending.set()
        self._thread.join()
        self._write(replace(self.owner, released=True))

    def _renew(self) -> None:
        """Renew the file; exit if another job owns the run. Training continues while the files are unreachable."""
        while not self._ending.wait(BEAT):
            self.owner = replace(self.owner, beat=self.owner.beat + 1)
            try:
                self._write(self.owner)
            except Failed as error:
                write_notice(f"error: {error}; the job ends\n".encode())
                os._exit(record_exit_code(FAILED))
            except OSError as error:
                log.debug(f"{describe(error)}: next renewal in {BEAT:g} s")

    def _write(self, owner: Owner) -> None:
        self.check()
        with open(self.path, "r+b") as file:  # does not create the file
            file.write(serialize(owner))


_owned: dict[str, Ownership] = {}  # run folders that this process owns
_before_release: list[Callable[[], object]] = []  # called by `release`
os.register_at_fork(after_in_child=_owned.clear)  # a forked process does not own them
os.register_at_fork(after_in_child=_before_release.clear)


def acquire(run_dir: str | Path, world: World, predecessor: str = "") -> str:
    """Make this job the only writer of `run_dir` until `release` or the end of rank 0's process; returns the owner's token. A
    collective; idempotent. `predecessor`: token of an owner that the ranks of this job know has ended.

    Raises ValueError on every rank, naming the owner, if another job is running, and Failed if the file system fails. Raises RankError
    if a rank does not see the owner's file: the run folder is not on a file system of all nodes, or the rank's is another one.
    """
    name, token, host = on_main(world, lambda: _take(Path(run_dir), predecessor))
    on_every_rank(world, lambda: _check_visible(Path(run_dir) / "lock" / name, token, host))
    return token


def check(run_dir: str | Path) -> None:
    """Raises Failed if this process took `run_dir` and another job owns it now. Call it before committing or removing a
    checkpoint."""
    if ownership := _owned.get(str(Path(run_dir).resolve())):
        ownership.check()


def call_before_release(action: Callable[[], object]) -> None:
    """Call `action` once, at the start of the next `release`."""
    _before_release.append(action)


def release() -> None:
    """Release the run folders of this process, which must not write to them afterwards."""
    while _before_release:
        _before_release.pop()()
    while _owned:
        try:
            _owned.popitem()[1].release()
        except OSError as error:  # harmless: the next job waits for LIMIT seconds
            log.warning(describe(error))


def _take(run_dir: Path, predecessor: str) -> tuple[str, str, str]:
    """Take the run folder; the name of the owner's file, and the owner's token and host."""
    folder, key, owner = run_dir / "lock", str(run_dir.resolve()), this_process()
    folder.mkdir(parents=True, exist_ok=True)
    while key not in _owned:
        newest = _newest(folder)
        if newest:
            wait_for_end(str(run_dir), "run folder", (folder / newest).read_bytes, LIMIT, POLL, predecessor)
        path = folder / f"{int(newest or 0) + 1:08d}"
        if _create(path, owner):
            _owned[key] = Ownership(run_dir, path, owner)
    owned = _owned[key]
    return owned.path.name, owned.owner.token, owned.owner.host


def _check_visible(path: Path, token: str, host: str) -> None:
    """Raises ValueError unless this rank, too, sees the owner's file at `path` within SHARED seconds."""
    waited = 0.0
    while True:
        with contextlib.suppress(FileNotFoundError):
            owner = parse(path.read_bytes())
            if owner is None or owner.token == token:  # None: it is being renewed
                return
        if waited >= SHARED:
            folder = path.parents[1].absolute()
            raise ValueError(
                f"{folder} on host {socket.gethostname()} is not the run folder of rank 0 on host {host}: name a run folder on a "
                "file system that all nodes share"
            )
        time.sleep(POLL)
        waited += POLL


def wait_for_end(
    place: str, kind: str, read: Callable[[], bytes], limit: float, poll: float, predecessor: str = ""
) -> None:
    """Wait until the owner of `place` (a run folder or a mirror, `kind` in messages) has ended.

    It has ended if its file, which `read` returns, is released, is deleted, or did not change for `limit` seconds. The
    file is read every `poll` seconds. Raises ValueError if the owner renews it.
    """
    last, renewals, unchanged = None, 0, 0.0
    while unchanged < limit:
        try:
            text = read()
        except FileNotFoundError:  # removed by the next owner
            return
        owner = parse(text)
        if owner is not None and (owner.has_ended or owner.token == predecessor):
            return
        name = owner or "another job"
        if last is None:
            log.info(f"{place} is locked by {name}: waiting up to {limit:g} s to see if that still runs")
        elif text != last:
            renewals, unchanged = renewals + 1, 0.0
        if renewals == RENEWALS:
            raise ValueError(f"{place} is in use by {name}; wait for it, stop it, or name another {kind}")
        last = text
        time.sleep(poll)
        unchanged += poll  # no clock: the owner may have been suspended together with this process


def _create(path: Path, owner: Owner) -> bool:
    """Create the file of `owner`, and remove those of earlier owners; whether this job became the owner."""
    try:
        with add_path_when_full(path), open(path, "xb") as file:
            file.write(serialize(owner))
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    except OSError:  # a full disk: a file without an owner would make the next start wait
        path.unlink(missing_ok=True)
        raise
    newest = _newest(path.parent)
    for name in _numbers(path.parent):
        if name < newest:  # also this file, if its number was free because a later owner removed it
            path.with_name(name).unlink(missing_ok=True)
    return newest == path.name


def _numbers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.isdecimal()]


def _newest(folder: Path) -> str:
    """The greatest number; "" if there is none."""
    return max(_numbers(folder), default="")


def this_process() -> Owner:
    """This process as an owner, with a new token."""
    pid = os.getpid()
    return Owner(
        token=secrets.token_hex(8),
        host=socket.gethostname(),
        namespace=pid_namespace(),
        pid=pid,
        started=read_start_time(pid),
        job=os.environ.get("SLURM_JOB_ID", ""),
    )


def parse(text: bytes) -> Owner | None:
    """The owner in a file; None for anything else."""
    try:
        return Owner(**json.loads(text))
    except (ValueError, TypeError):
        return None


def serialize(owner: Owner) -> bytes:
    """Content of an owner's file; of constant size, since it is overwritten in place."""
    return json.dumps(asdict(owner)).ljust(511).encode() + b"\n"
