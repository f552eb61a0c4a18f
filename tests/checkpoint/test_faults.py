"""A save that dies, fails or is slow harms nothing: what was committed stays, and nothing unfinished is ever seen."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from megabert.checkpoint import Checkpoints, store
from megabert.checkpoint import format as checkpoint_format
from megabert.common import errors, files
from megabert.common.errors import Failed
from megabert.distributed.ranks import RankRefused, World
from tests.checkpoint.test_store import ALONE, WEIGHTS_FILE, FakeEngine, at_moments, saved_run, settings, state, stored
from tests.helpers import tiny
from tests.helpers.ranks import CONTEXT, run_ranks

CALLS = [
    *((os, name) for name in ("fsync", "rename", "replace", "unlink")),
    (shutil, "rmtree"),
    (checkpoint_format, "write_tensors"),
    (files.Path, "open"),
    (files.Path, "write_bytes"),
]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


# -- kills -------------------------------------------------------------------------------------------------------


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
    """Whether `save_and_die` in a process of its own died; False when it had no so many calls."""
    child = CONTEXT.Process(target=save_and_die, args=(folder, call, step, asynchronous))
    child.start()
    child.join(60)
    assert child.exitcode in (0, -signal.SIGKILL), child.exitcode
    return child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("step", "asynchronous"), [pytest.param(20, True, marks=pytest.mark.slow), (10, False)], ids=("next", "same")
)
def test_a_kill_during_a_save_leaves_a_whole_checkpoint(step, asynchronous, tmp_path):
    """The only other checkpoint is step 10; saving step 10 again replaces it."""
    kept, killed = set(), 0
    for call in range(100):
        run = tmp_path / str(call)
        saved_run(run, (10,), keep=1)
        if not save_killed_at(run, call, step, asynchronous):
            break
        killed += 1
        checkpoints = Checkpoints(run, ALONE, settings(1))
        latest = checkpoints.latest()
        assert latest is not None
        value = stored(run)
        assert latest.name == ("step-00000010" if value == 10 else f"step-{step:08d}")
        kept.add(int(value))
        assert not list((run / "checkpoints").glob(".*"))  # cleaned when the run was opened again
        checkpoints.save(FakeEngine(30), state(30, tiny.config()))
        assert checkpoints.latest().name == "step-00000030"
    assert killed > 15 and kept == {10, 20}


# -- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("full", "asynchronous"), [("weights", False), ("moments", True), ("manifest.json", True)])
def test_a_file_too_large_for_the_disk_fails(full, asynchronous, tmp_path):
    """The kernel refuses to grow the file past a limit (RLIMIT_FSIZE): real errors of real writes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = 1 << 20
    engine = FakeEngine(2, size=big if full != "manifest.json" else 8)
    long = {"padding": "x" * (6 * big)} if full == "manifest.json" else {}
    saved_run(tmp_path, (1,))
    checkpoints = Checkpoints(tmp_path, ALONE, settings(2, asynchronous))
    # weights have 4 MiB, moments twice as many
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * big if full != "weights" else 2 * big, limits[1]))
    try:
        with pytest.raises(Failed, match=r"step 2 could not be written .*File too large.* earlier ones are untouched$"):
            checkpoints.save(engine, state(2, tiny.config(), **long))
            assert checkpoints.pending and asynchronous
            checkpoints.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (
        not checkpoints.pending
        and names(tmp_path) == ["chain.jsonl", "pointer.json", "step-00000001"]
        and stored(tmp_path) == 1
    )
    checkpoints.save(FakeEngine(3), state(3, tiny.config()))
    checkpoints.finish()
    assert stored(tmp_path) == 3


def failing_rank(world: World, folder: str) -> list[str]:
    """Rank 1's disk is full at the second save: every rank learns of it, and another save can follow."""
    found = []
    checkpoints = Checkpoints(folder, world, settings(2, True))
    for step in (1, 2, 3):
        if world.rank == 1 and step == 2:
            store.write_slices, kept = at_moments(full_disk), store.write_slices
        engine = FakeEngine(step)
        whole = engine.snapshot()
        for slices in (whole.weights, whole.moments):
            del slices[1 - world.rank]  # rank 0 has the first half, rank 1 the second
        engine.snapshot = lambda whole=whole: whole
        try:
            checkpoints.save(engine, state(step, tiny.config()))
            checkpoints.finish()
        except Failed as error:
            found.append(str(error))
        if world.rank == 1 and step == 2:
            store.write_slices = kept
    return [*found, checkpoints.latest().name]


def full_disk(path: Path, slices: Any) -> Any:
    path.write_bytes(b"part of it")
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.dist
def test_a_full_disk_of_one_rank_stops_all(tmp_path):
    for problem, newest in run_ranks(2, failing_rank, str(tmp_path)):
        assert "rank 1" in problem and "No space left" in problem and "earlier ones are untouched" in problem
        assert newest == "step-00000003"
    assert names(tmp_path) == ["chain.jsonl", "pointer.json", "step-00000001", "step-00000003"]


def test_a_program_fault_is_raised_as_it_is(tmp_path, monkeypatch):
    checkpoints = saved_run(tmp_path, (1,), asynchronous=True)
    checkpoints.finish()
    monkeypatch.setattr(store, "write_slices", lambda path, slices: [][0])
    checkpoints.save(FakeEngine(2), state(2, tiny.config()))
    with pytest.raises(IndexError):
        checkpoints.finish()
    assert names(tmp_path) == ["chain.jsonl", "pointer.json", "step-00000001"]


# -- reading that fails --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "function", "name"),
    [
        (os, "listdir", ""),
        (Path, "read_bytes", store.POINTER),
        (Path, "stat", "manifest.json"),
        (Path, "stat", WEIGHTS_FILE),
    ],
)
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
    with pytest.raises((OSError, RankRefused), match="Input/output error") as raised:
        Checkpoints(tmp_path, ALONE, settings()).latest()
    assert errors.exit_code(raised.value) == errors.FAILED
    assert "step-00000020" in names(tmp_path)  # it may be whole, and no older one takes its place
