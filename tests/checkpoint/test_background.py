"""Saves in the background: training continues meanwhile, and nothing is visible before it is whole."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from megabert.checkpoint import Checkpoints, load_weights, store
from megabert.distributed.ranks import World
from megabert.distributed.watchdog import entered
from tests.checkpoint.test_faults import names
from tests.checkpoint.test_store import ALONE, FakeEngine, at_moments, settings, state, stored
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks


def test_the_next_save_commits_the_one_in_flight(tmp_path, monkeypatch):
    """Of which it has kept a snapshot; the weights have changed meanwhile."""
    gate, write = threading.Event(), store.write_slices
    monkeypatch.setattr(store, "write_slices", at_moments(lambda *args: gate.wait(30) and write(*args)))
    checkpoints, engine = Checkpoints(tmp_path, ALONE, settings(3, asynchronous=True)), FakeEngine(2)
    assert not checkpoints.pending and checkpoints.finish() is None
    checkpoints.save(engine, state(2, tiny.config()))
    engine.value = 77.0
    assert checkpoints.pending and checkpoints.status == store.WRITING and checkpoints.latest() is None
    gate.set()
    deadline = time.monotonic() + 30
    while checkpoints.status == store.WRITING and time.monotonic() < deadline:
        time.sleep(0.01)
    assert checkpoints.status == store.WRITTEN and checkpoints.latest() is None  # on the disk, and still not to be seen
    checkpoints.save(engine, state(3, tiny.config()))
    assert Checkpoints(tmp_path, ALONE).latest().name == "step-00000002" and stored(tmp_path) == 2
    assert checkpoints.finish() == tmp_path / "checkpoints" / "step-00000003" and stored(tmp_path) == 77
    assert not checkpoints.pending


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
    saved = checkpoints.finish()
    assert saved is not None
    weights = load_weights(saved)[0]
    whole = all(torch.equal(weights[n], w) for n, w in before.items())
    sizes = [(saved / f"weights-{rank:05d}-of-00002.safetensors").stat().st_size for rank in range(2)]
    return [waiting, unseen, saved.name, whole, quiet, max(sizes) < 1.1 * min(sizes)]


@pytest.mark.dist
def test_training_continues_while_a_slow_rank_writes(tmp_path):
    """A save takes no collective, and each rank writes its half."""
    expected = [True, None, "step-00000002", True, True, True]
    assert run_ranks(2, overlapped, str(tmp_path)) == [expected] * 2


def advance(checkpoints: Checkpoints, until: Any) -> None:
    """Updates of a run, each of which advances the save in flight."""
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline
        checkpoints.advance(checkpoints.status)
        time.sleep(0.002)


def test_training_waits_for_no_commit_or_removal(tmp_path, monkeypatch):
    """The commit and the removal of what is too old are held up."""
    gates = {"commit": threading.Event(), "remove": threading.Event()}
    commit, rmtree = Checkpoints.commit, store.shutil.rmtree
    monkeypatch.setattr(Checkpoints, "commit", lambda *args: gates["commit"].wait(30) and commit(*args))
    monkeypatch.setattr(store.shutil, "rmtree", lambda *args, **options: gates["remove"].wait(30) and rmtree(*args))
    checkpoints = Checkpoints(tmp_path, ALONE, settings(1, asynchronous=True))
    for step in (1, 2, 3):
        checkpoints.save(FakeEngine(step), state(step, tiny.config()))
        advance(checkpoints, lambda: checkpoints.status == store.COMMITTING)
        assert [n for n in names(tmp_path) if n == f"step-{step:08d}"] == []
        checkpoints.advance(store.WRITTEN)  # reduced before the commit began
        assert checkpoints.pending
        gates["commit"].set()
        advance(checkpoints, lambda: not checkpoints.pending)
        gates["commit"].clear()
        assert Checkpoints(tmp_path, ALONE).latest() == tmp_path / "checkpoints" / f"step-{step:08d}"
    assert len([name for name in names(tmp_path) if name.startswith(".saving-old-")]) == 2  # no update waited
    gates["remove"].set()
    advance(checkpoints, lambda: names(tmp_path) == ["chain.jsonl", "pointer.json", "step-00000003"])
