"""Two jobs never write one run, on whichever hosts; however the first one ends, the next can start."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from megabert.checkpoint import Checkpoints, run_lock
from megabert.checkpoint.format import SEAL
from megabert.common.errors import FAILED, USER_ERROR, Failed, describe, exit_code
from megabert.config import CheckpointConfig
from megabert.distributed.ranks import RankError, World
from tests.helpers.ranks import CONTEXT, run_ranks
from tests.helpers.simulated_ranks import ALONE
from tests.helpers.waiting import wait_until

LIBC = ctypes.CDLL(None, use_errno=True)
# linux/sched.h, linux/prctl.h
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID, PR_SET_PDEATHSIG = 0x00020000, 0x04000000, 0x20000000, 1
LIMIT = 2.0
OTHER = run_lock.Owner("token", "n2", "elsewhere", 1, "1", "")


def become(host: str) -> None:
    """Continue in a process that has a host name and process ids of its own; "" stays on this host."""
    if host:
        assert LIBC.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID) == 0, os.strerror(ctypes.get_errno())
        socket.sethostname(host)
    if inner := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 0x7F)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if host:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)


def manifest_of(step: int) -> bytes:
    return json.dumps({"state": {"step": step}, "files": {}, SEAL: ""}).encode()


def job(host: str, run: Path, outcome: Path, commits: int) -> None:
    """Takes the run and keeps it, committing a checkpoint of the next step each moment from step `commits` on, if any."""
    become(host)
    os.environ["SLURM_JOB_ID"] = "77"
    run_lock.BEAT, run_lock.LIMIT, run_lock.POLL = 0.2, LIMIT, 0.05
    try:
        run_lock.acquire(run, ALONE)
        if commits:
            run_lock.BEAT = 1000.0  # it is the commit that has to find out
        checkpoints = Checkpoints(run, ALONE, CheckpointConfig(keep=1, asynchronous=False))
        outcome.write_text("taken\n")
        while commits:
            folder = checkpoints.folder / f".saving-{commits:08d}-{host}"
            folder.mkdir(parents=True)
            checkpoints.commit(folder, commits, manifest_of(commits))
            commits += 1
            time.sleep(0.01)
        if host == "leaves":
            run_lock.release()
        time.sleep(60)
    except (ValueError, OSError) as error:
        outcome.write_text(f"{describe(error)}\n")
        os._exit(exit_code(error))


class Job:
    """`job` on a host, which is a set of namespaces of this machine."""

    def __init__(self, host: str, run: Path, commits: int = 0) -> None:
        if host and os.geteuid():
            pytest.skip("only root makes namespaces")
        self._outcome = run.parent / f"{host}-{time.time_ns()}"
        self._process = CONTEXT.Process(target=job, args=(host, run, self._outcome, commits), daemon=True)
        self._process.start()

    def outcome(self) -> str:
        """ "taken", or the error."""
        wait_until(lambda: self._outcome.exists() and self._outcome.read_text().endswith("\n"))
        return self._outcome.read_text().strip()

    def code(self) -> int | None:
        self._process.join(30)
        return self._process.exitcode

    def signal(self, number: int) -> None:
        outer = self._process.pid
        os.kill(int(Path(f"/proc/{outer}/task/{outer}/children").read_text()), number)


def taken(host: str, run: Path, commits: int = 0) -> Job:
    made = Job(host, run, commits)
    assert made.outcome() == "taken"
    return made


def taken_over(run: Path) -> None:
    assert run_lock._create(run / "lock/00000002", OTHER)


def give_up() -> None:
    """Before the lock that another job took ends this process."""
    run_lock._owned.popitem()[1]._ending.set()


def test_a_predecessor_of_the_same_job_is_not_waited_for(tmp_path, monkeypatch):
    """One on a lost host, of which only the ranks of its job know that it has ended."""
    monkeypatch.setattr(run_lock, "LIMIT", 1000.0)
    taken("n1", tmp_path / "run").signal(signal.SIGKILL)
    owner = json.loads((tmp_path / "run/lock/00000001").read_text())["token"]
    token = run_lock.acquire(tmp_path / "run", ALONE, predecessor=owner)
    assert token != owner and os.listdir(tmp_path / "run/lock") == ["00000002"]
    run_lock.release()


def refused(world: World, run: str) -> str:
    run_lock.BEAT, run_lock.LIMIT, run_lock.POLL = 0.2, LIMIT, 0.05
    try:
        run_lock.acquire(run, world)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("host", [pytest.param("", marks=pytest.mark.slow), "n2"])
def test_a_second_job_is_refused_beside_the_first(host, tmp_path):
    run = tmp_path / "run"
    taken("n1", run)
    second = Job(host, run)
    expected = f"{run} is in use by pid 1 on host n1 (job 77); wait for it, stop it, or name another run folder"
    assert second.outcome() == expected and second.code() == USER_ERROR
    if not host:
        assert run_ranks(2, refused, str(run)) == [expected] * 2
    assert os.listdir(run / "lock") == ["00000001"]


def take_folder(world: World, folders: list[str]) -> str:
    """Takes the run folder of this rank, as on a node of its own or in another working directory."""
    run_lock.SHARED = 0.3
    try:
        return run_lock.acquire(folders[world.rank], world)
    except RankError as error:
        assert error.exit_code == USER_ERROR
        return str(error)


def test_ranks_without_a_shared_run_folder_are_refused(tmp_path):
    nodes = [tmp_path / "n0", tmp_path / "n1"]
    for node in nodes:
        (node / "disk").mkdir(parents=True)
    apart = [str(node / "disk/run") for node in nodes]
    host = socket.gethostname()
    refusal = (
        f"rank 1: {apart[1]} on host {host} is not the run folder of rank 0 on host {host}: name a run folder on a"
    )
    assert run_ranks(2, take_folder, apart) == [f"{refusal} file system that all nodes share"] * 2
    nodes[1].joinpath("shared").symlink_to(nodes[0] / "disk")
    first, second = run_ranks(2, take_folder, [apart[0], str(nodes[1] / "shared/run")])
    assert first == second and len(first) == 16


@pytest.mark.parametrize(("one", "other", "least"), [("", "", 0), ("n1", "n2", LIMIT), ("leaves", "n2", 0)])
def test_the_next_job_starts_when_the_first_ended(one, other, least, tmp_path):
    """At once on the same host and after an orderly end, otherwise when the limit has passed."""
    first = taken(one, tmp_path / "run")
    if one != "leaves":
        first.signal(signal.SIGKILL)
        assert first.code() is not None
    started = time.monotonic()
    taken(other, tmp_path / "run")
    assert least * 0.9 < time.monotonic() - started < least + LIMIT
    assert os.listdir(tmp_path / "run/lock") == ["00000002"]


@pytest.mark.parametrize("commits", [0, 10], ids=["renewing", "committing"])
def test_a_suspended_owner_ends_before_it_harms(commits, tmp_path):
    run = tmp_path / "run"
    first = taken("n1", run, commits)
    time.sleep(0.3)
    first.signal(signal.SIGSTOP)
    second = taken("n2", run)
    newer = run / "checkpoints/step-00001000"  # of the second job; the first would remove it as newer than its own
    newer.mkdir(parents=True)
    first.signal(signal.SIGCONT)
    assert first.code() == FAILED
    assert newer.exists() and os.listdir(run / "lock") == ["00000002"]
    second.signal(0)


def test_a_commit_cut_by_the_next_owner_names_it(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run_lock.acquire(run, ALONE)
    checkpoints = Checkpoints(run, ALONE, CheckpointConfig(asynchronous=False))
    saving = checkpoints.folder / ".saving-00000001"
    saving.mkdir(parents=True)

    def taken_over_before(source: Path, target: Path) -> None:
        shutil.rmtree(saving)
        taken_over(run)
        os.replace(source, target)

    monkeypatch.setattr(os, "rename", taken_over_before)
    with pytest.raises(Failed, match="pid 1 on host n2 took the run over"):
        checkpoints.commit(saving, 1, manifest_of(1))
    give_up()


def test_of_several_takers_one_wins(tmp_path):
    run = tmp_path / "run"
    taken("n1", run).signal(signal.SIGKILL)
    takers = [Job(host, run) for host in ("n2", "n3", "", "")]
    outcomes = [taker.outcome() for taker in takers]
    assert outcomes.count("taken") == 1 and sum(" is in use by pid " in text for text in outcomes) == 3, outcomes


def test_an_owner_that_proc_hides_has_not_ended(monkeypatch):
    """Of another user, where /proc is mounted with hidepid=2."""
    owner = run_lock.Owner("token", "n", run_lock.pid_namespace(), 2**22 + 1, "1", "")  # a number above all processes
    assert owner.has_ended
    monkeypatch.setattr(os, "kill", Mock(side_effect=PermissionError))
    assert not owner.has_ended


def test_a_number_long_past_is_not_taken(tmp_path):
    assert [run_lock._create(tmp_path / f"0000000{n}", OTHER) for n in (7, 7, 6)] == [True, False, False]
    assert os.listdir(tmp_path) == ["00000007"]


def test_a_job_killed_while_it_locks_blocks_nobody(tmp_path):
    (tmp_path / "run/lock").mkdir(parents=True)
    (tmp_path / "run/lock/00000001").touch()
    taken("", tmp_path / "run")


def test_a_full_disk_leaves_no_lock_without_an_owner(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OSError, match="No space left") as caught:
        run_lock._create(tmp_path / "00000001", OTHER)
    assert caught.value.filename == str(tmp_path / "00000001")
    assert os.listdir(tmp_path) == []


def test_an_owner_whose_lock_was_removed_ends(tmp_path):
    first = taken("", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/lock")
    taken("", tmp_path / "run")
    assert first.code() == FAILED


def test_a_stale_listing_does_not_keep_a_lock(tmp_path, monkeypatch):
    """As of NFS, whose client lists a file that the next owner on another host removed."""
    run = tmp_path / "run"
    run_lock.acquire(run, ALONE)
    run_lock.check(run)
    taken_over(run)
    monkeypatch.setattr(os, "listdir", lambda folder: ["00000001"])
    with pytest.raises(Failed, match="took the run over"):
        run_lock.check(run)
    give_up()


def test_a_file_system_fault_is_not_a_user_error(tmp_path, monkeypatch):
    fault = OSError(errno.ESTALE, os.strerror(errno.ESTALE), "run/lock")
    monkeypatch.setattr(os, "listdir", Mock(side_effect=fault))
    with pytest.raises(OSError, match="run/lock: Stale file handle") as found:
        run_lock.acquire(tmp_path / "run", ALONE)
    assert exit_code(found.value) == FAILED
