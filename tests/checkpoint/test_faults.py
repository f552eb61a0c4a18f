"""A save that dies, fails or is slow harms nothing: the committed stays, the unfinished is unseen, training goes on."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megabert.checkpoint import Checkpoints, load_weights, store
from megabert.checkpoint import format as checkpoint_format
from megabert.common import errors, files
from megabert.common.errors import Failed
from megabert.distributed.ranks import RankError, World
from megabert.distributed.watchdog import entered
from tests.checkpoint.test_store import FakeEngine, at_moments, names, saved_run, settings, state, steps, stored
from tests.helpers import tiny
from tests.helpers.ranks import CONTEXT, run_ranks
from tests.helpers.simulated_ranks import ALONE
from tests.helpers.waiting import wait_until

CALLS = [
    *((os, name) for name in ("fsync", "rename", "replace", "unlink")),
    *((shutil, "rmtree"), (checkpoint_format, "write_tensors"), (files.Path, "open"), (files.Path, "write_bytes")),
]


def save_and_die(folder: Path, call: int, step: int, asynchronous: bool) -> None:
    """Save `step`, with weights of 20, in this process, which dies by SIGKILL at its call-th file-system call."""
    left = [call]

    def deadly(function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapped

    for module, name in CALLS:
        setattr(module, name, deadly(getattr(module, name)))
    checkpoints = Checkpoints(folder, ALONE, settings(1, asynchronous))
    checkpoints.save(FakeEngine(20), state(step, tiny.config()))  # type: ignore[arg-type]
    checkpoints.finish()


def save_killed_at(folder: Path, call: int, step: int, asynchronous: bool) -> bool:
    """Whether `save_and_die` in a process of its own died; False when it had not so many calls."""
    child = CONTEXT.Process(target=save_and_die, args=(folder, call, step, asynchronous))
    child.start()
    child.join(60)
    return {0: False, -signal.SIGKILL: True}[child.exitcode]


@pytest.mark.parametrize(
    ("step", "asynchronous"), [pytest.param(20, True, marks=pytest.mark.slow), (10, False)], ids=("next", "same")
)
def test_a_kill_during_a_save_leaves_a_whole_checkpoint(step, asynchronous, tmp_path):
    """The only other checkpoint is step 10; saving step 10 again replaces it."""
    kept = []
    for call in range(100):
        run = tmp_path / str(call)
        saved_run(run, (10,), keep=1)
        if not save_killed_at(run, call, step, asynchronous):
            break
        checkpoints = Checkpoints(run, ALONE, settings(1))
        kept.append(stored(run))
        assert checkpoints.latest().name == ("step-00000010" if kept[-1] == 10 else f"step-{step:08d}")
        assert not list((run / "checkpoints").glob(".*"))  # cleaned when the run was opened again
        checkpoints.save(FakeEngine(30), state(30, tiny.config()))
        assert checkpoints.latest().name == "step-00000030"
    assert len(kept) > 15 and set(kept) == {10, 20}


@pytest.mark.parametrize(("full", "asynchronous"), [("weights", False), ("moments", True), ("manifest.json", True)])
def test_a_file_too_large_for_the_disk_fails(full, asynchronous, tmp_path):
    """The kernel refuses to grow the file past a limit (RLIMIT_FSIZE): real errors of real writes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    big, in_manifest = 1 << 20, full == "manifest.json"
    engine, padding = FakeEngine(2, size=8 if in_manifest else big), "x" * (6 * big * in_manifest)
    saved_run(tmp_path, (1,))
    checkpoints = Checkpoints(tmp_path, ALONE, settings(2, asynchronous))
    # weights have 4 MiB, moments twice as many
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * big if full == "weights" else 5 * big, limits[1]))
    try:
        with pytest.raises(Failed, match=r"step 2 could not be written .*File too large.* earlier ones are untouched$"):
            checkpoints.save(engine, state(2, tiny.config(), padding=padding))
            assert checkpoints.in_flight and asynchronous
            checkpoints.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not checkpoints.in_flight and steps(tmp_path) == [1] and stored(tmp_path) == 1
    checkpoints.save(FakeEngine(3), state(3, tiny.config()))
    checkpoints.finish()
    assert stored(tmp_path) == 3


def failing_rank(world: World, folder: str) -> list[str]:
    """Rank 1's disk is full at the second save: every rank learns of it, and another save can follow."""
    found = []
    checkpoints = Checkpoints(folder, world, settings(2, True))
    for step in (1, 2, 3):
        engine = FakeEngine(step)
        whole = engine.snapshot()
        for slices in (whole.weights, whole.moments):
            del slices[1 - world.rank]  # rank 0 has the first half, rank 1 the second
        engine.snapshot = lambda whole=whole: whole
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 1 and step == 2:
                patch.setattr(store, "write_slices", at_moments(full_disk))
            try:
                checkpoints.save(engine, state(step, tiny.config()))
                checkpoints.finish()
            except Failed as error:
                found.append(str(error))
    return [*found, checkpoints.latest().name]


def full_disk(path: Path, slices: Any) -> Any:
    path.write_bytes(b"part of it")
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.dist
def test_a_full_disk_of_one_rank_stops_all(tmp_path):
    for problem, newest in run_ranks(2, failing_rank, str(tmp_path)):
        assert "rank 1" in problem and "No space left" in problem and "earlier ones are untouched" in problem
        assert newest == "step-00000003"
    assert steps(tmp_path) == [1, 3]


def test_a_program_fault_is_raised_as_it_is(tmp_path, monkeypatch):
    checkpoints = saved_run(tmp_path, (1,), asynchronous=True)
    checkpoints.finish()
    monkeypatch.setattr(store, "write_slices", lambda path, slices: [][0])
    checkpoints.save(FakeEngine(2), state(2, tiny.config()))
    with pytest.raises(IndexError):
        checkpoints.finish()
    assert steps(tmp_path) == [1]


READS = [(os, "listdir", ""), (Path, "read_bytes", store.POINTER)]
READS += [(Path, "stat", name) for name in ("manifest.json", "weights-00000-of-00001.safetensors")]


@pytest.mark.parametrize(("module", "function", "name"), READS)
def test_read_errors_are_tried_again(module, function, name, tmp_path, monkeypatch) -> None:
    """What cannot be read is neither missing nor damaged."""
    saved_run(tmp_path)
    real, left = getattr(module, function), [3]

    def failing(path: Any, **options: Any) -> Any:
        if left[0] and (not name or path.name == name):
            left[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))
        return real(path, **options)

    monkeypatch.setattr(errors, "WAITS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(module, function, failing)
    assert Checkpoints(tmp_path, ALONE).latest().name == "step-00000020"
    left[0] = 4
    with pytest.raises((OSError, RankError), match="Input/output error") as raised:
        Checkpoints(tmp_path, ALONE, settings()).latest()
    assert errors.exit_code(raised.value) == errors.FAILED
    assert steps(tmp_path) == [10, 20]  # the newest may be whole, and no older one takes its place


def test_the_next_save_commits_the_one_in_flight(tmp_path, monkeypatch):
    """Of which it has kept a snapshot; the weights have changed meanwhile."""
    gate, write = threading.Event(), store.write_slices
    monkeypatch.setattr(store, "write_slices", at_moments(lambda *args: gate.wait(30) and write(*args)))
    checkpoints, engine = Checkpoints(tmp_path, ALONE, settings(3, asynchronous=True)), FakeEngine(2)
    assert not checkpoints.in_flight
    checkpoints.save(engine, state(2, tiny.config()))
    engine.value = 77.0
    assert checkpoints.in_flight and checkpoints.status == store.WRITING and checkpoints.latest() is None
    gate.set()
    wait_until(lambda: checkpoints.status == store.WRITTEN)
    assert checkpoints.latest() is None  # on the disk, and still not to be seen
    checkpoints.save(engine, state(3, tiny.config()))
    assert Checkpoints(tmp_path, ALONE).latest().name == "step-00000002" and stored(tmp_path) == 2
    checkpoints.finish()
    assert checkpoints.saved_step == 3 and stored(tmp_path) == 77
    assert not checkpoints.in_flight


def overlapped(world: World, folder: str) -> list[Any]:
    """Rank 1 writes slowly: training continues meanwhile, and the save is that of step 2 bit for bit."""
    cfg = tiny.config(zero__stage=1)
    engine = tiny.engine(cfg, world)
    checkpoints = Checkpoints(folder, world, settings(2, asynchronous=True))
    tiny.train(engine, range(2))
    before = engine.consolidated_weights()
    gate, write = threading.Event(), store.write_slices
    if world.rank == 1:
        store.write_slices = at_moments(lambda *args: gate.wait(60) and write(*args))
    before_save = entered()
    checkpoints.save(engine, state(2, cfg))
    quiet = entered() == before_save
    tiny.train(engine, range(2, 5))
    quiet &= entered() != before_save
    waiting, unseen = world.agree_any(checkpoints.status == store.WRITING), checkpoints.latest()
    gate.set()
    checkpoints.finish()
    saved = checkpoints.latest()
    weights = load_weights(saved)[0]
    whole = all(torch.equal(weights[n], w) for n, w in before.items())
    sizes = [(saved / f"weights-{rank:05d}-of-00002.safetensors").stat().st_size for rank in range(2)]
    return [waiting, unseen, saved.name, whole, quiet, max(sizes) < 1.1 * min(sizes)]


@pytest.mark.dist
def test_training_continues_while_a_slow_rank_writes(tmp_path):
    """A save takes no collective, and each rank writes its half."""
    expected = [True, None, "step-00000002", True, True, True]
    assert run_ranks(2, overlapped, str(tmp_path)) == [expected] * 2


def test_training_waits_for_no_commit_or_removal(tmp_path, monkeypatch):
    """The commit and the removal of what is too old are held up."""
    gates = {"commit": threading.Event(), "remove": threading.Event()}
    commit, rmtree = Checkpoints.commit, store.shutil.rmtree
    monkeypatch.setattr(Checkpoints, "commit", lambda *args: gates["commit"].wait(30) and commit(*args))
    monkeypatch.setattr(store.shutil, "rmtree", lambda *args, **options: gates["remove"].wait(30) and rmtree(*args))
    checkpoints = Checkpoints(tmp_path, ALONE, settings(1, asynchronous=True))
    update = lambda: checkpoints.advance(checkpoints.status)  # noqa: E731
    for step in (1, 2, 3):
        checkpoints.save(FakeEngine(step), state(step, tiny.config()))
        wait_until(lambda: update() or checkpoints.status == store.COMMITTING)
        assert f"step-{step:08d}" not in names(tmp_path)
        checkpoints.advance(store.WRITTEN)  # reduced before the commit began
        assert checkpoints.in_flight
        gates["commit"].set()
        wait_until(lambda: update() or not checkpoints.in_flight)
        gates["commit"].clear()
        assert Checkpoints(tmp_path, ALONE).latest() == tmp_path / "checkpoints" / f"step-{step:08d}"
    assert len([name for name in names(tmp_path) if name.startswith(".saving-old-")]) == 2  # no update waited
    gates["remove"].set()
    wait_until(lambda: names(tmp_path) == ["chain.jsonl", "pointer.json", "step-00000003"])
