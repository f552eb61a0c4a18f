"""Elastic resume: any number of ranks at any ZeRO stage continues from any other's checkpoint."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megabert.checkpoint import Checkpoints, load_weights
from megabert.checkpoint import format as layout
from megabert.config import CheckpointConfig
from megabert.distributed.ranks import World
from megabert.engine.zero_layout import ParameterSlice
from megabert.optim.muon import find_matrices
from tests.checkpoint.test_store import state
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.simulated_ranks import ALONE, save_as

# the way that a run is moved: ranks, then (ZeRO stage, micro-batch); three updates at each place
LAUNCHES = ((1, [(0, 4)]), (2, [(1, 2), (0, 4)]), (4, [(2, 2)]), (1, [(3, 2), (1, 8)]))
PLACES = sum(len(stays) for _, stays in LAUNCHES)
MANY_AT, MANY = 1, ((64, 1), (48, 3), (64, 2))  # place; simulated ranks and their ZeRO stages
STEPS = 3
KINDS = {name: {"precision": "fp32", "optimizer__name": name} for name in ("adamw", "muon", "lamb")}
KINDS["bf16"] = {"precision": "bf16", "optimizer__name": "adamw"}


def stay(
    world: World, folder: str, kinds: list[str], first_place: int, stays: list[tuple[int, int]]
) -> list[dict[str, Any]]:
    """At each place: load what the place before left, save it again unchanged as step x + 1, train, save."""
    settings, found = CheckpointConfig(keep=99, asynchronous=False), []
    for place, (stage, micro) in enumerate(stays, first_place):
        here: dict[str, Any] = {}
        for kind in kinds:
            cfg = tiny.config(zero__stage=stage, batch__micro_size=micro, **KINDS[kind])
            engine = tiny.engine(cfg, world, seed=7 if place == 0 else 50 + place)
            run, first = Checkpoints(Path(folder) / kind, world, settings), STEPS * place
            if place:
                newest = run.latest()
                if place == MANY_AT:  # 64 ranks resumed from here, then 48 and 64 again, and did not train
                    if world.is_main:
                        for ranks, zero in MANY:
                            newest = save_as(newest, Path(folder) / f"{kind}-{ranks}-{zero}", 10 * first, ranks, zero)
                    newest = Path(world.broadcast(str(newest)))
                before = Checkpoints(newest.parents[1], world)
                assert before.latest() == newest and before.load(engine, newest)["step"] == 10 * first
                run.save(engine, state(10 * first + 1, cfg))
            losses = tiny.train(engine, range(first, first + STEPS))
            run.save(engine, state(10 * (first + STEPS), cfg))
            here[kind] = losses, engine.snapshot().counters
            if place == 0:
                here[f"{kind} straight"] = tiny.train(tiny.engine(cfg, world), range(STEPS * PLACES))
        found.append(here)
    return found


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("kinds", [("adamw", "bf16", "muon"), ("lamb",)])
def test_any_ranks_and_stage_resume_from_any_others(kinds, tmp_path):
    places: list[dict[str, Any]] = []
    for ranks, stays in LAUNCHES:
        places += run_ranks(ranks, stay, str(tmp_path), list(kinds), len(places), stays, timeout=240)[0]
    for kind in kinds:
        straight, losses = places[0][f"{kind} straight"], [loss for place in places for loss in place[kind][0]]
        # 16 bits within their rounding, which other sums of other micro-batches meet differently
        for one, other in zip(losses, straight, strict=True):
            assert one == pytest.approx(other, rel=5e-3 if "16" in kind else 1e-5)
        assert straight[-1][0] < straight[0][0] - 0.1  # it learns, so a seam would show
        check_weights_and_moments(kind, tmp_path / kind)
        for done, found in zip(range(STEPS, STEPS * PLACES + 1, STEPS), places, strict=True):
            theirs = found[kind][1]["deepspeed"]
            assert found[kind][1]["optimizer_steps"] == done == theirs["global_steps"]
            assert theirs["global_samples"] == done * tiny.ROWS and theirs["skipped_steps"] == 0


def check_weights_and_moments(kind: str, run: Path) -> None:
    """What each place loaded and saved again has the bits of the place before."""
    for place in range(1, PLACES):
        before, after = (whole(run, STEPS * place * 10 + more) for more in (0, 1))
        assert before == after, place
    model = tiny.model(tiny.config())
    listed = [name for name, _ in model.named_parameters()]
    single = {listed[index] for index in find_matrices(model)} if kind == "muon" else set()
    expected = {f"{what} {name}" for name in listed for what in ("weight", "exp_avg", "exp_avg_sq")}
    assert set(before) == expected - {f"exp_avg_sq {name}" for name in single}


def whole(run: Path, step: int) -> dict[str, str]:
    """SHA-256 of each parameter's weights and moments, concatenated from the slices of all files."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    weights = load_weights(folder)[0]
    found = {f"weight {name}": tensor.reshape(-1) for name, tensor in weights.items()}
    slices: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for file in folder.glob("moments-*"):
        for key, tensor in load_file(file).items():
            kind, name, offset = key.split(":")
            slices.setdefault(f"{kind} {name}", []).append((int(offset), tensor))
    for name, parts in slices.items():
        found[name] = torch.cat([tensor for _, tensor in sorted(parts, key=lambda part: part[0])])
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in found.items()}


def written(folder: Path, files: list[dict[str, list[tuple[int, int]]]]) -> dict[str, Any]:
    """A folder with weights a [3, 4] and b [5] and their moments, in these (offset, length) slices a rank; its manifest."""
    folder.mkdir()
    entries, shapes = {}, {"a": (3, 4), "b": (5,)}
    held = [[(p, o, n) for p, bounds in of_rank.items() for o, n in bounds] for of_rank in files]
    parameters = layout.index_slices(shapes, held)
    manifest = {"schema": 3, "ranks": len(files), "first_moment_only": [], "parameters": parameters}
    weights = {"weight": lambda x: x * 1.0}
    moments = {"exp_avg": lambda x: x + 0.5, "exp_avg_sq": lambda x: x * 2.0}
    for rank, slices in enumerate(held):
        for group, kinds in ((layout.WEIGHTS, weights), (layout.MOMENTS, moments)):
            name = layout.file_name(group, rank, len(files))
            parts = [
                ParameterSlice(p, o, {k: f(torch.arange(o, o + n)) for k, f in kinds.items()}) for p, o, n in slices
            ]
            entries[name] = layout.write_slices(folder / name, parts)
    layout.check_files(folder, manifest, entries)
    return manifest | {"files": entries}


SPLIT = [{"a": [(0, 5)]}, {"a": [(5, 6), (11, 1)], "b": [(0, 2)]}, {"b": [(2, 3)]}]


@pytest.mark.parametrize("bucket", [1, 12, 17])
def test_parameters_are_joined_from_their_slices(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "BUCKET", bucket)
    manifest = written(tmp_path / "step-1", SPLIT)
    stored = layout.StoredTensors.of_checkpoint(tmp_path / "step-1", manifest, ALONE)
    expected = [
        (kind, name, [factor * i + more for i in range(size)])
        for kind, factor, more in (("weight", 1, 0), ("exp_avg", 1, 0.5), ("exp_avg_sq", 2, 0))
        for name, size in (("a", 12), ("b", 5))
    ]
    found = stored.gather_all("weight", "exp_avg", "exp_avg_sq")
    assert [(kind, name, tensor.tolist()) for kind, name, tensor in found] == expected


def test_slices_that_cover_no_parameter_once_are_refused(tmp_path):
    for number, (files, message) in enumerate((
        ([{"a": [(0, 5)], "b": [(0, 5)]}, {"a": [(6, 6)]}], "slice of a at 6 does not start at 5"),
        ([{"a": [(0, 6)], "b": [(0, 5)]}, {"a": [(5, 7)]}], "slice of a at 5 does not start at 6"),
        ([{"a": [(0, 12)], "b": [(0, 4)]}], "hold 4 of the 5 elements of b"),
        ([{"a": [(0, 12)], "b": [(0, 5)], "c": [(0, 1)]}], "hold 1 of the 0 elements of c"),
    )):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            written(tmp_path / f"step-{number}", files)
