"""Lock of a run folder: one job at a time writes it, also where jobs run on nodes that share nothing but its files.

Each file of `run/lock` is an owner; the one with the greatest number owns the run. A job becomes owner by creating the next
number exclusively. The owner is rank 0's process, which renews its file every BEAT seconds. A job that finds an owner waits for
its end: `release` records it, a process of the same machine is looked up, and any other has ended once its file stays the same
for LIMIT seconds. An owner that was only suspended, or cut off from its files, then finds a greater number and ends.

Neither flock, which `localflock` mounts do not carry to other nodes, nor times of several clocks are used. A file must be seen as
it was when another node closed it, as on NFS, Lustre and GPFS.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megabert.common.errors import FAILED, Failed, describe, leave_exit_code
from megabert.common.logs import log
from megabert.distributed.ranks import World, on_main
from megabert.distributed.watchdog import is_alive, pid_namespace

# Seconds between two renewals of the owner's file.
BEAT = 5.0
# An owner whose file stays the same for so many seconds has ended.
LIMIT = 30.0
# An owner that renews its file so often while another job waits lives, and is not about to end.
RENEWALS = 2
# Seconds between two looks at it.
POLL = 0.2


@dataclass(frozen=True)
class Owner:
    """What an owner's file says."""

    token: str
    host: str
    # Of process ids.
    namespace: str
    pid: int
    # When the process started, in its kernel's ticks: process ids are used again.
    started: str
    # SLURM's number of the job; "" elsewhere.
    job: str
    beat: int = 0
    released: bool = False

    def __str__(self) -> str:
        return f"pid {self.pid} on host {self.host}" + (f" (job {self.job})" if self.job else "")

    @property
    def has_ended(self) -> bool:
        """Whether this is known at once."""
        return self.released or (self.namespace == pid_namespace() and start_of(self.pid) != self.started)


class Ownership:
    """This process's ownership of a run folder, renewed by a thread until `release`."""

    def __init__(self, run_dir: Path, path: Path, owner: Owner) -> None:
        self.run_dir, self.path, self.owner = run_dir, path, owner
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="run lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises Failed where another job owns the run, OSError where its files cannot be read."""
        newest = _newest(self.path.parent)
        owner = _read(self.path.with_name(newest)) if newest else None
        if newest != self.path.name or (owner is not None and owner.token != self.owner.token):
            raise Failed(f"{self.run_dir}: {owner or 'another job'} took the run over while this job was suspended")

    def release(self) -> None:
        """The next job need not wait. Raises as `check`."""
        self._ending.set()
        self._thread.join()
        self._write(replace(self.owner, released=True))

    def _renew(self) -> None:
        """End this process where another job owns the run. While the files cannot be reached training may continue."""
        while not self._ending.wait(BEAT):
            self.owner = replace(self.owner, beat=self.owner.beat + 1)
            try:
                self._write(self.owner)
            except Failed as error:
                print(f"error: {error}; the job ends", file=sys.stderr, flush=True)
                os._exit(leave_exit_code(FAILED))
            except OSError as error:
                log.debug(f"{describe(error)}: renewed in {BEAT:g} s")

    def _write(self, owner: Owner) -> None:
        self.check()
        with open(self.path, "r+b") as file:  # creates no file
            file.write(_text(owner))


# This process's, by run folder.
_owned: dict[str, Ownership] = {}
# A fork's end is not the owner's.
os.register_at_fork(after_in_child=_owned.clear)


def take(run_dir: str | Path, world: World, predecessor: str = "") -> str:
    """Make this job the only writer of `run_dir` until `release` or the end of rank 0's process; the owner's token. A collective;
    twice is once. `predecessor`: the token of an owner that has ended, as the ranks of the same job know.

    Raises ValueError on every rank, naming the owner, where another job lives, and Failed where the file system fails.
    """
    on_main(world, lambda: _take(Path(run_dir), predecessor))
    return world.broadcast(_owned[str(Path(run_dir).resolve())].owner.token if world.is_main else None)


def check(run_dir: str | Path) -> None:
    """Raises Failed where this process took `run_dir` and another job owns it now; to be called before a checkpoint is
    committed or removed."""
    if ownership := _owned.get(str(Path(run_dir).resolve())):
        ownership.check()


@contextmanager
def naming_next_owner(run_dir: str | Path) -> Iterator[None]:
    """`check` where an OSError ends the body: a later owner removes what this job was saving."""
    try:
        yield
    except OSError:
        check(run_dir)
        raise


def release() -> None:
    """Give up what this process took; nothing may be written to it afterwards."""
    while _owned:
        try:
            _owned.popitem()[1].release()
        except OSError as error:  # everything is saved; the next job waits for LIMIT seconds
            log.warning(describe(error))


def _take(run_dir: Path, predecessor: str) -> None:
    folder, key, pid = run_dir / "lock", str(run_dir.resolve()), os.getpid()
    folder.mkdir(parents=True, exist_ok=True)
    owner = Owner(
        token=secrets.token_hex(8),
        host=socket.gethostname(),
        namespace=pid_namespace(),
        pid=pid,
        started=start_of(pid),
        job=os.environ.get("SLURM_JOB_ID", ""),
    )
    while key not in _owned:
        newest = _newest(folder)
        if newest:
            _wait_for_end(run_dir, folder / newest, predecessor)
        path = folder / f"{int(newest or 0) + 1:08d}"
        if _create(path, owner):
            _owned[key] = Ownership(run_dir, path, owner)


def _wait_for_end(run_dir: Path, path: Path, predecessor: str) -> None:
    """Return once the owner of `path` has ended. Raises ValueError where it lives."""
    last, renewals, same = None, 0, 0.0
    while same < LIMIT:
        try:
            text = path.read_bytes()
        except FileNotFoundError:  # removed by the next owner
            return
        owner = _parse(text)
        if owner is not None and (owner.has_ended or owner.token == predecessor):
            return
        if last is None:
            log.info(
                f"{run_dir} belongs to {owner or 'another job'}: waiting up to {LIMIT:g} s to see whether that lives"
            )
        elif text != last:
            renewals, same = renewals + 1, 0.0
        if renewals == RENEWALS:
            raise ValueError(
                f"{run_dir} is in use by {owner or 'another job'}; wait for it, stop it, or name another run folder"
            )
        last = text
        time.sleep(POLL)
        same += POLL  # by no clock: the owner may have been suspended together with this process


def _create(path: Path, owner: Owner) -> bool:
    """Whether this job became the owner of that number; the files of those before are removed."""
    try:
        with open(path, "xb") as file:
            file.write(_text(owner))
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    newest = _newest(path.parent)
    for name in _numbers(path.parent):
        if name < newest:  # this one too, where the number was free because a later owner removed it
            path.with_name(name).unlink(missing_ok=True)
    return newest == path.name


def _numbers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.isdecimal()]


def _newest(folder: Path) -> str:
    """The greatest number; "" where there is none."""
    return max(_numbers(folder), default="")


def _read(path: Path) -> Owner | None:
    """None where it is being written or removed."""
    try:
        return _parse(path.read_bytes())
    except FileNotFoundError:
        return None


def _parse(text: bytes) -> Owner | None:
    try:
        return Owner(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _text(owner: Owner) -> bytes:
    """A line that is as long for each beat: it replaces the one before."""
    return json.dumps(asdict(owner)).ljust(511).encode() + b"\n"


def start_of(pid: int) -> str:
    """When a process of this namespace started, in the kernel's ticks (proc(5), field 22); "" where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19] if is_alive(pid) else ""
    except (FileNotFoundError, ProcessLookupError):
        return ""
