"""Hundreds of ranks, simulated by their files: each writes what it owns, and any other number of ranks resumes from it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megabert.checkpoint import Checkpoints, store
from megabert.checkpoint.manifest import MOMENTS, WEIGHTS, file_name, index_slices, seal
from megabert.common.files import canonical, digest, sealed, write_tensors
from megabert.config import load
from megabert.model import BertForPreTraining
from tests.checkpoint.test_faults import names
from tests.checkpoint.test_store import ALONE, FakeEngine, saved_run, settings, state
from tests.helpers import tiny


def shapes_of_large() -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = BertForPreTraining(load("large_phase1", ["model.vocab_size=30528"]).model)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("stage", (1, 3))
def test_the_manifest_of_512_ranks_is_below_a_megabyte(stage: int) -> None:
    shapes, ranks = shapes_of_large(), 512
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    assert sum(sizes.values()) > 300e6
    held: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks)]
    for group in [list(sizes)] if stage == 1 else [[name] for name in sizes]:  # flat, or each parameter by itself
        slice_size, position = -(-sum(sizes[name] for name in group) // ranks), 0
        for name in group:
            offset = 0
            while offset < sizes[name]:
                rank = (position + offset) // slice_size
                end = min(sizes[name], (rank + 1) * slice_size - position)
                held[rank].append((name, offset, end - offset))
                offset = end
            position += sizes[name]
    assert stage != 3 or sum(map(len, held)) > 100_000
    entry = {"bytes": 10**9, "sha256": "0" * 64}
    files = {
        file_name(group, rank, ranks): entry for group in (WEIGHTS, MOMENTS) for rank in range(ranks) if held[rank]
    }
    layout = {"ranks": ranks, "files": files, "parameters": index_slices(shapes, held), "first_moment_only": []}
    data = seal(layout, state(1, tiny.config()), {"optimizer_steps": 1})
    print(f"stage {stage}: {len(data):,} bytes")
    assert len(data) < 1_000_000


def test_a_seal_is_the_digest_of_the_other_fields() -> None:
    for tree in ({}, {"a": 1}, {"z": [1, {"sha256": "x"}]}, {"a": {"t": 2}, "t": '\n "t": ', "u": [1], "sha256": 3}):
        rest = {name: value for name, value in tree.items() if name != "sha256"}
        assert sealed(tree, "sha256") == canonical(rest | {"sha256": digest(tree, "sha256")})


def test_tensors_are_written_as_the_library_writes_them(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(5.0),
        "ä:1": torch.arange(6).view(2, 3),
        "a": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.zeros(0),
        "scalar": torch.tensor(2.5),
        "bytes": torch.arange(3, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    found = write_tensors(tmp_path / "ours", tensors, {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert found["bytes"] == (tmp_path / "ours").stat().st_size
    assert all(torch.equal(tensors[name], tensor) for name, tensor in load_file(tmp_path / "ours").items())


def test_files_have_the_umask_permissions(tmp_path: Path) -> None:
    mask = 0o027
    before = os.umask(mask)
    try:
        saved_run(tmp_path, (1,))
    finally:
        os.umask(before)
    for path in (tmp_path / "checkpoints").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~mask, path


# -- what a save keeps training from -------------------------------------------------------------------------------------


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, threading.Event]]:
    """Gates at which the commit and the removal of what is too old wait."""
    gates = {"commit": threading.Event(), "remove": threading.Event()}
    commit, rmtree = Checkpoints.commit, store.shutil.rmtree

    def slow_commit(self: Checkpoints, *args: Any) -> None:
        assert gates["commit"].wait(30)
        commit(self, *args)

    def slow_rmtree(path: Path, **options: Any) -> None:
        assert gates["remove"].wait(30)
        rmtree(path, **options)

    monkeypatch.setattr(Checkpoints, "commit", slow_commit)
    monkeypatch.setattr(store.shutil, "rmtree", slow_rmtree)
    yield gates
    for gate in gates.values():
        gate.set()


def advance(checkpoints: Checkpoints, until: Any) -> float:
    """Updates of a run, each of which advances the save in flight; the seconds that this took."""
    deadline, spent = time.monotonic() + 30, 0.0
    while not until():
        assert time.monotonic() < deadline
        status, begun = checkpoints.status, time.perf_counter()
        checkpoints.advance(status)
        spent += time.perf_counter() - begun
        time.sleep(0.002)
    return spent


def test_training_waits_for_no_commit_or_removal(tmp_path: Path, held: dict[str, threading.Event]) -> None:
    checkpoints = Checkpoints(tmp_path, ALONE, settings(1, asynchronous=True))
    for step in (1, 2, 3):
        checkpoints.save(FakeEngine(step), state(step, tiny.config()))  # type: ignore[arg-type]
        advance(checkpoints, lambda: checkpoints.status == store.COMMITTING)
        assert [n for n in names(tmp_path) if n == f"step-{step:08d}"] == []
        checkpoints.advance(store.WRITTEN)  # reduced before the commit began
        assert checkpoints.pending
        held["commit"].set()
        advance(checkpoints, lambda: not checkpoints.pending)
        held["commit"].clear()
        assert Checkpoints(tmp_path, ALONE).latest() == tmp_path / "checkpoints" / f"step-{step:08d}"
    assert len([name for name in names(tmp_path) if name.startswith(".saving-old-")]) == 2  # no update waited
    held["remove"].set()
    deadline = time.monotonic() + 30
    while names(tmp_path) != ["pointer.json", "step-00000003"]:
        assert time.monotonic() < deadline, names(tmp_path)
        time.sleep(0.005)
