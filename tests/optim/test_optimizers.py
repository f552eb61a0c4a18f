"""Optimizers against update rules written out plainly here, on whole parameters and on ZeRO's flat partitions."""

import math
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from megabert.checkpoint import Checkpoints, start_engine
from megabert.config import CheckpointConfig, OptimizerConfig
from megabert.optim.build import build_optimizer
from megabert.optim.guarded import FlatSegment
from megabert.optim.lamb import Lamb, StableAdamW
from tests.checkpoint.test_store import state
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from tests.optim.test_muon import BETAS, DECAY, EPS, LR, RATES, STEPS, check, clip, plain_run, train

# (optimizer, ZeRO stage of two ranks, kind); the others are slow
SHARED = {"model__kv_heads": 1}
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "rated": RATES, "split": {"optimizer__split_qkv": True} | SHARED}
USUAL = [
    *(("lamb", 2, "plain"), ("muon", 1, "plain"), ("muon", 3, "plain"), ("stable_adamw", 2, "plain")),
    *(("lamb", 2, "rated"), ("muon", 3, "rated"), ("stable_adamw", 1, "rated")),
    *(("lamb", 1, "split"), ("lamb", 3, "split")),
]
ALL = product(("lamb", "muon", "stable_adamw"), range(4), ("plain", "rated"))
OTHERS = [case for case in ALL if case not in USUAL]


def steps_of(kind: str) -> int:
    return STEPS // 2 if kind == "plain" else 6


def under_zero(world: Any, cases: list[tuple[str, int, str]]) -> list[dict[str, Any]]:
    return [train(world, name, steps_of(kind), zero__stage=stage, **KINDS[kind]) for name, stage, kind in cases]


@pytest.mark.dist
@pytest.mark.parametrize("cases", [USUAL, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=("usual", "others"))
def test_optimizers_under_zero_equal_unsharded_ones(cases):
    """Also with rates by group, and with trust ratios of queries, keys and values of their own: other weights than without."""
    reference = cache(plain_run)
    for case, found in zip(cases, run_ranks(2, under_zero, cases, timeout=800)[0], strict=True):
        name, _, kind = case
        rates, shape = RATES if kind == "rated" else {}, SHARED if kind == "split" else {}
        check(found, reference("split lamb" if kind == "split" else name, steps_of(kind), **rates, **shape), case)
        if kind != "plain":
            assert tiny.distance(found["weights"], reference(name, 6, **shape)["weights"]) > 1e-3, case


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
    cfg = tiny.config(optimizer__name="lamb", zero__stage=2, **KINDS["split"])
    keep = CheckpointConfig(asynchronous=False)
    first = tiny.engine(cfg, world)
    tiny.train(first, range(5), LR)
    Checkpoints(tmp_path / "phase1", world, keep).save(first, state(5, cfg))
    second = tiny.engine(cfg, world, seed=3)
    assert start_engine(second, tmp_path / "phase1", moments=True)["step"] == 5
    run = Checkpoints(tmp_path / "phase2", world, keep)
    run.save(second, state(0, cfg))
    third = tiny.engine(cfg, world, seed=4)
    run.load(third, run.latest())
    runs = [([loss for loss, _ in tiny.train(engine, range(5, 10), LR)], engine.consolidated_weights())
            for engine in (second, third)]  # fmt: skip
    assert start_engine(third, tmp_path / "phase1/checkpoints/step-00000005", moments=True)["step"] == 5
    with pytest.raises(ValueError, match=r"of optimizer.name=lamb and this run's is muon; set init_moments"):
        start_engine(tiny.engine(tiny.config(optimizer__name="muon"), world), tmp_path / "phase1", moments=True)
    with pytest.raises(ValueError, match="holds no moments; set init_moments=false"):
        fresh = Checkpoints(tmp_path / "fresh", world, keep)
        fresh.save(tiny.engine(cfg, world), state(0, cfg))
        start_engine(third, tmp_path / "fresh", moments=True)
    expected, unaware = (plain_run("split lamb", 10, phase_2=step, **SHARED) for step in (5, -1))
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


def two_groups(world: Any) -> list[list[float]]:
    """Updates of two groups of which the first rank has all elements, as of few elements on many ranks."""
    tensors = [nn.Parameter(torch.full((4,), float(number))) for number in (2, 3)]
    optimizer = StableAdamW([{"params": [t], "weight_decay": 0.1} for t in tensors], lr=0.1, betas=BETAS, eps=EPS)
    segments = {t: () if world.rank else (FlatSegment(number, 0, 4, 0),) for number, t in enumerate(tensors)}
    optimizer.attach(segments, world.device if world.size > 1 else None, world)
    for step in range(3):
        for number, tensor in enumerate(tensors):
            tensor.grad = torch.full((4,), 0.0 if world.rank else 10.0 ** (step * number))
        optimizer.guard([t.grad for t in tensors if t.grad is not None], 0.0)
        optimizer.step()
    return [t.tolist() for t in tensors]


@pytest.mark.dist
def test_a_rank_may_have_no_element_of_several_groups(world):
    assert run_ranks(2, two_groups, timeout=60)[0] == two_groups(world)


def built(name: str, layer: Any) -> Any:
    """An attached optimizer of a linear layer; its weight is one matrix."""
    layer.matrices = (layer.out_features,)
    optimizer = build_optimizer(OptimizerConfig(name=name, lr=LR), layer)
    optimizer.attach()
    return optimizer


def test_norms_of_large_tensors_are_exact():
    """The sum of 8 M squares in fp32 is 0.06% too low: that of all gradients in one tensor, as of ZeRO's partitions, and LAMB's."""
    values = 1e-4 * torch.randn(1 << 23, generator=torch.Generator().manual_seed(1))
    exact = float(values.double().square().sum())
    optimizer = built("lamb", nn.Linear(2, 2))
    assert float(optimizer.guard([values, values[:0]], 0.0)) == pytest.approx(exact**0.5, rel=1e-5)
    sums = optimizer._sums(((1, 0), [[values, values[:0]]]), values.device)
    assert sums.tolist() == [[0.0, pytest.approx(exact, rel=1e-5)]]


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon", "stable_adamw"])
def test_a_guarded_step_clips_and_skips(name):
    """Against the same optimizer on gradients clipped here, over steps with bad gradients between, also before the first."""
    torch.manual_seed(2)
    layer, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(layer.state_dict())
    guarded, usual = built(name, layer), built(name, plain)
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
                torch.testing.assert_close(p, q, rtol=1e-4 if name == "muon" else 1e-6, atol=1e-7)
        else:
            assert norm == math.inf
            after = [t for p in layer.parameters() for t in guarded.find_moments(p).values()]
            for old, new in zip([*before, *moments], [*layer.parameters(), *after], strict=True):
                assert torch.equal(old, new)
        assert guarded.count_updates(layer.parameters()) == usual.count_updates(plain.parameters())
