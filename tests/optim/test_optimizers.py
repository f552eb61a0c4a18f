"""Optimizers against update rules written out plainly here, on whole parameters and on ZeRO's flat partitions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from megabert.checkpoint import Checkpoints, start_engine
from megabert.config import CheckpointConfig, OptimizerConfig
from megabert.optim.adamw import AdamW
from megabert.optim.build import build_optimizer
from megabert.optim.guarded import parameter_groups
from megabert.optim.lamb import Lamb, StableAdamW
from megabert.optim.muon import Muon
from tests.checkpoint.test_store import state
from tests.helpers import once, tiny
from tests.helpers.ranks import run_ranks
from tests.optim.test_muon import BETAS, DECAY, EPS, LR, RATES, check, clip, plain_run, train

# ZeRO stages of two ranks by optimizer; the others are slow
USUAL = {"lamb": [2], "muon": [1, 3], "stable_adamw": [2]}
OTHERS = {"lamb": [0, 1, 3], "muon": [0, 2], "stable_adamw": [0, 1, 3]}
# with rates by group
RATED = {"lamb": [2], "muon": [3], "stable_adamw": [1]}
OTHERS_RATED = {"lamb": [0, 1, 3], "muon": [0, 1, 2], "stable_adamw": [0, 2, 3]}
SPLIT: dict[str, Any] = {"name": "lamb", "steps": 6, "optimizer__split_qkv": True}


def under_zero(
    world: Any, setups: dict[str, list[int]], split: tuple[int, ...] = (), rated: dict[str, list[int]] | None = None
) -> dict[Any, Any]:
    found: dict[Any, Any] = {stage: train(world, zero__stage=stage, **SPLIT) for stage in split}
    for name, stages in (rated or {}).items():
        found |= {(name, stage, "rated"): train(world, name, 6, zero__stage=stage, **RATES) for stage in stages}
    for name in setups:
        for stage in setups[name]:
            found[name, stage] = train(world, name, zero__stage=stage)
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> dict[Any, Any]:
    run = lambda: run_ranks(2, under_zero, USUAL, (1, 3), RATED, timeout=240)[0]  # noqa: E731
    return once.value(tmp_path_factory, "optimizers", run)


@pytest.mark.dist
@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_optimizers_under_zero_equal_unsharded_ones(others, request):
    found = run_ranks(2, under_zero, OTHERS, timeout=480)[0] if others else request.getfixturevalue("two_ranks")
    for name, stages in (OTHERS if others else USUAL).items():
        reference = plain_run(name)
        for stage in stages:
            check(found[name, stage], reference)


@pytest.mark.dist
def test_queries_keys_and_values_have_own_trust_ratios(two_ranks):
    recipe, merged = (plain_run(name, 6) for name in ("split lamb", "lamb"))
    for stage in (1, 3):
        check(two_ranks[stage], recipe)
        assert tiny.distance(two_ranks[stage]["weights"], merged["weights"]) > 1e-3


@pytest.mark.dist
@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rates_by_group_under_zero_equal_unsharded_ones(others, request):
    setups = OTHERS_RATED if others else RATED
    found = run_ranks(2, under_zero, {}, (), setups, timeout=480)[0] if others else request.getfixturevalue("two_ranks")
    for name, stages in setups.items():
        reference, level = plain_run(name, 6, **RATES), plain_run(name, 6)
        for stage in stages:
            check(found[name, stage, "rated"], reference)
        assert tiny.distance(reference["weights"], level["weights"]) > 1e-3


def test_rates_fall_from_layer_to_layer():
    model = tiny.model(tiny.config(model__layers=3))
    settings = OptimizerConfig(embedding_lr=0.5, layer_decay=0.9)
    groups = build_optimizer(settings, model).param_groups
    found = {id(p): (group["rate"], group["weight_decay"]) for group in groups for p in group["params"]}
    rates = {name: found[id(p)][0] for name, p in model.named_parameters()}
    assert rates["embeddings.word.weight"] == rates["embeddings.norm_bias"] == pytest.approx(0.5 * 0.9**3)
    layers = [rates[f"layers.{i}.qkv.weight"] for i in range(3)]
    assert layers == pytest.approx([0.81, 0.9, 1.0]) and rates["mlm.weight"] == rates["pooler.bias"] == 1.0
    assert len(found) == sum(len(group["params"]) for group in groups) == len(rates)
    assert all((found[id(p)][1] > 0) == (p.ndim >= 2) for p in model.parameters())
    plain = build_optimizer(OptimizerConfig(), model).param_groups
    assert [(group["rate"], group["weight_decay"]) for group in plain] == [(1.0, 0.01), (1.0, 0.0)]


@pytest.mark.parametrize("tied", [True, False])
def test_decoder_has_the_rate_of_the_head(tied):
    """Only the weight of a tied decoder is an embedding."""
    model = tiny.model(tiny.config(model__tied=tied))
    optimizer = build_optimizer(OptimizerConfig(embedding_lr=0, layer_decay=0.5), model)
    rates = {id(p): group["rate"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: rates[id(p)] for name, p in model.named_parameters() if name.startswith(("embeddings.", "mlm."))}
    head = {"embeddings.word.bias", *(() if tied else ("embeddings.word.decoder",))}
    assert {name for name, rate in found.items() if rate == 1.0} == head | {n for n in found if n.startswith("mlm.")}
    assert {rate for name, rate in found.items() if name.startswith("embeddings.") and name not in head} == {0.0}


def test_phase_2_takes_over_the_moments(world, tmp_path):
    """From the run of phase 1, and again after a restart before its first update."""
    settings = {"optimizer__name": "lamb", "optimizer__split_qkv": True, "zero__stage": 2}
    cfg, keep = tiny.config(**settings), CheckpointConfig(asynchronous=False)
    first = tiny.engine(cfg, world)
    tiny.train(first, range(5), LR)
    Checkpoints(tmp_path / "phase1", world, keep).save(first, state(5, cfg))
    second = tiny.engine(cfg, world, seed=3)
    assert start_engine(second, tmp_path / "phase1", world, moments=True)["step"] == 5
    run = Checkpoints(tmp_path / "phase2", world, keep)
    run.save(second, state(0, cfg))
    third = tiny.engine(cfg, world, seed=4)
    run.load(third, run.latest())
    runs = [([loss for loss, _ in tiny.train(engine, range(5, 10), LR)], engine.consolidated_weights())
            for engine in (second, third)]  # fmt: skip
    assert start_engine(third, tmp_path / "phase1/checkpoints/step-00000005", world, moments=True)["step"] == 5
    with pytest.raises(ValueError, match=r"of optimizer.name=lamb and this run's is muon; set init_moments"):
        start_engine(tiny.engine(tiny.config(optimizer__name="muon"), world), tmp_path / "phase1", world, moments=True)
    with pytest.raises(ValueError, match="holds no moments; set init_moments=false"):
        fresh = Checkpoints(tmp_path / "fresh", world, keep)
        fresh.save(tiny.engine(cfg, world), state(0, cfg))
        start_engine(third, tmp_path / "fresh", world, moments=True)
    expected, unaware = plain_run("split lamb", 10, phase_2=5), plain_run("split lamb", 10)
    for losses, weights in runs:
        assert losses == pytest.approx(expected["losses"][5:], rel=1e-5)
        assert tiny.distance(weights, expected["weights"]) < 1e-5
        assert tiny.distance(weights, unaware["weights"]) > 1e-3


def test_lamb_ratio_is_one_for_a_zero_weight():
    zero, still = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = Lamb([{"params": [zero, still], "weight_decay": DECAY}], lr=0.5, betas=BETAS, eps=EPS)
    optimizer.attach()
    zero.grad, still.grad = torch.ones(3, 2), torch.zeros(2, 2)
    optimizer.guard([zero.grad, still.grad], 0.0)
    optimizer.step()
    # first step: m^ / sqrt(v^) = 1 for a gradient of 1, so u = 1 / (1 + eps), and the ratio is 1 as |w| = 0
    torch.testing.assert_close(zero.detach(), torch.full((3, 2), -0.5 / (1 + EPS)))
    # u = decay * w points along w: ratio 1/decay, so the step is lr * w
    torch.testing.assert_close(still.detach(), torch.full((2, 2), 0.5))


def test_an_unforeseen_gradient_takes_a_smaller_step():
    """Of a first gradient 1 and a second 100, whose root mean square over sqrt(v^) is sqrt(2) at most: here 100 / sqrt(v^)."""
    steady, jumps = (nn.Parameter(torch.zeros(4, 4)) for _ in range(2))
    optimizer = StableAdamW([{"params": [steady, jumps], "weight_decay": 0.0}], lr=0.1, betas=BETAS, eps=EPS)
    optimizer.attach()
    for size in (1.0, 100.0):
        before = jumps.detach().clone()
        steady.grad, jumps.grad = torch.ones(4, 4), torch.full((4, 4), size)
        optimizer.guard([steady.grad, jumps.grad], 0.0)
        optimizer.step()
    m = (BETAS[0] * (1 - BETAS[0]) + (1 - BETAS[0]) * 100) / (1 - BETAS[0] ** 2)
    v = (BETAS[1] * (1 - BETAS[1]) + (1 - BETAS[1]) * 100**2) / (1 - BETAS[1] ** 2)
    rate = 0.1 / (100 / math.sqrt(v))
    torch.testing.assert_close(before - jumps, torch.full((4, 4), rate * m / (math.sqrt(v) + EPS)))
    torch.testing.assert_close(steady.detach(), torch.full((4, 4), -0.2 / (1 + EPS)))


def built(kind: type, layer: Any) -> Any:
    """An attached optimizer of a linear layer; its weight is one matrix."""
    layer.matrices = 1
    if kind is Muon:
        optimizer: Any = Muon(layer, parameter_groups(layer, DECAY), LR, BETAS, EPS, torch.float32)
    else:
        optimizer = kind(parameter_groups(layer, DECAY), lr=LR, betas=BETAS, eps=EPS)
    optimizer.attach()
    return optimizer


@pytest.mark.parametrize("kind", (AdamW, Lamb, Muon, StableAdamW))
def test_a_guarded_step_clips_and_skips(kind):
    """Against the same optimizer on gradients clipped here, over steps with bad gradients between, also before the first."""
    torch.manual_seed(2)
    layer, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(layer.state_dict())
    guarded, usual = built(kind, layer), built(kind, plain)
    for bad in (math.nan, None, math.inf, -math.inf, None, None):
        before = [p.detach().clone() for p in layer.parameters()]
        moments = [t.clone() for p in layer.parameters() for t in guarded.find_moments(p).values()]
        for p in layer.parameters():
            p.grad = torch.randn_like(p)
        if bad is None:
            for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
                q.grad = p.grad.clone()
            expected = clip(plain, 0.5)
            usual.guard([q.grad for q in plain.parameters()], 0.0)
            usual.step()
        else:
            layer.bias.grad[2] = layer.weight.grad[1, 3] = bad
        norm = guarded.guard([p.grad for p in layer.parameters()], 0.5)
        guarded.step()
        assert float(guarded.found_inf) == (bad is not None)
        if bad is None:
            assert float(norm) == pytest.approx(expected, rel=1e-6)
            for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-6 if kind is not Muon else 1e-4, atol=1e-7)
        else:
            assert norm == math.inf
            after = [t for p in layer.parameters() for t in guarded.find_moments(p).values()]
            for old, new in zip([*before, *moments], [*layer.parameters(), *after], strict=True):
                assert torch.equal(old, new)
        assert guarded.count_updates(layer.parameters()) == usual.count_updates(plain.parameters())
