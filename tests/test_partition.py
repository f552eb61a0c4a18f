"""A checkpoint does not know how many ranks wrote it: any world size and ZeRO stage goes on from any other."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megabert.checkpoint import Checkpoints, load_weights
from megabert.config import CheckpointConfig
from megabert.distributed import World
from tests import tiny
from tests.ranks import run_ranks
from tests.test_checkpoint import state
from tests.test_engine import allow_fp16

pytestmark = pytest.mark.dist

# the way that a run is moved: ranks, then (ZeRO stage, offload, micro-batch); three updates at each place
LAUNCHES = (
    (1, [(0, "none", 4)]),
    (2, [(1, "none", 2), (0, "none", 4)]),
    (4, [(2, "none", 2)]),
    (1, [(3, "cpu", 2), (1, "none", 8)]),
)
PLACES = sum(len(stays) for _, stays in LAUNCHES)
STEPS = 3
KINDS = {
    "adamw": {"precision": "fp32", "optimizer__name": "adamw"},
    "lamb": {"precision": "fp32", "optimizer__name": "lamb"},
    "bf16": {"precision": "bf16", "optimizer__name": "adamw"},
    "fp16": {"precision": "fp16", "optimizer__name": "lamb"},
}


def stay(
    world: World, folder: str, first_place: int, stays: list[tuple[int, str, int]]
) -> list[dict[str, Any]]:
    """At each place: load what the place before left, save it again unchanged as step x + 1, train, save."""
    allow_fp16()
    settings, found = CheckpointConfig(keep=99, asynchronous=False), []
    for place, (stage, offload, micro) in enumerate(stays, first_place):
        here: dict[str, Any] = {}
        for kind, extra in KINDS.items():
            cfg = tiny.config(zero__stage=stage, zero__offload=offload, batch__micro_size=micro, **extra)
            engine = tiny.engine(cfg, world, seed=7 if place == 0 else 50 + place)
            run = Checkpoints(Path(folder) / kind, world, settings)
            first = STEPS * place
            if place:
                newest = run.latest()
                assert newest is not None and run.load(engine, newest)["step"] == 10 * first
                run.save(engine, state(10 * first + 1, cfg))
            losses = tiny.train(engine, range(first, first + STEPS))
            run.save(engine, state(10 * (first + STEPS), cfg))
            here[kind] = losses, engine.snapshot().counters
            if place == 0:
                straight = tiny.engine(cfg, world)
                here[f"{kind} straight"] = tiny.train(straight, range(STEPS * PLACES))
        found.append(here)
    return found


@pytest.fixture(scope="module")
def moved(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder, found = tmp_path_factory.mktemp("moved"), []
    for ranks, stays in LAUNCHES:
        found += run_ranks(ranks, stay, str(folder), len(found), stays, timeout=240)[0]
    return folder, found


@pytest.mark.parametrize("kind", KINDS)
def test_losses_do_not_see_the_moves(kind, moved):
    """fp32 within 1e-5; 16 bits within their rounding, which other sums of other micro-batches meet differently."""
    losses = [loss for place in moved[1] for loss in place[kind][0]]
    straight = moved[1][0][f"{kind} straight"]
    assert len(losses) == len(straight) == STEPS * PLACES
    worst = max(
        abs(a - b) / b
        for ours, theirs in zip(losses, straight, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    assert worst < (5e-3 if "16" in kind else 1e-5), worst
    assert straight[-1][0] < straight[0][0] - 0.1  # it learns, so a seam would show


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_of_weights_and_moments_survives_a_move(kind, moved):
    names = set()
    for place in range(1, PLACES):
        first = STEPS * place * 10
        before, after = whole(moved[0] / kind, first), whole(moved[0] / kind, first + 1)
        assert before == after, place
        names = set(before)
    parameters = dict(tiny.model(tiny.config()).named_parameters())
    assert names == {f"{what} {name}" for name in parameters for what in ("weight", "exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("kind", KINDS)
def test_counters_go_along(kind, moved):
    for place, found in enumerate(moved[1], 1):
        counters = found[kind][1]
        skipped = counters["deepspeed"]["skipped_steps"]
        assert counters["optimizer_steps"] + skipped == STEPS * place
        assert counters["deepspeed"]["global_steps"] == STEPS * place
        assert counters["deepspeed"]["global_samples"] == STEPS * place * tiny.ROWS
        if kind == "fp16":
            assert counters["loss_scale"]["cur_iter"] == STEPS * place
            assert counters["loss_scale"]["cur_scale"] >= 1
        else:
            assert skipped == 0 and counters["loss_scale"] == {}


def whole(run: Path, step: int) -> dict[str, str]:
    """SHA-256 of each parameter's weights and moments, put together from the pieces of all files."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    weights = load_weights(folder)[0]
    found = {f"weight {name}": tensor.reshape(-1) for name, tensor in weights.items()}
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for file in folder.glob("moments-*"):
        for key, tensor in load_file(file).items():
            kind, name, offset = key.split(":")
            pieces.setdefault(f"{kind} {name}", []).append((int(offset), tensor))
    for name, parts in pieces.items():
        found[name] = torch.cat([tensor for _, tensor in sorted(parts, key=lambda part: part[0])])
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in found.items()}
