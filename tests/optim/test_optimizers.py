"""Optimizers against update rules written out plainly here, on whole parameters and on ZeRO's flat partitions."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megabert.checkpoint import Checkpoints, start_engine
from megabert.config import CheckpointConfig
from megabert.optim.adamw import AdamW
from megabert.optim.guarded import FlatSegment, parameter_groups
from megabert.optim.lamb import Lamb
from megabert.optim.muon import Muon
from tests.checkpoint.test_store import state
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from tests.optim.test_muon import BETAS, DECAY, EPS, LR, PlainMuon, check, clip, plain_run, train


class PlainLamb:
    """LAMB a parameter at a time, as NVIDIA's recipe has it; norms in fp64.

    `split`: queries, keys and values are parameters of their own, as they are in that recipe's model.
    """

    def __init__(self, model: nn.Module, split: bool = False) -> None:
        named = list(model.named_parameters())
        self.parameters = [p for _, p in named]
        self.parts = [3 if split and ".qkv." in name else 1 for name, _ in named]
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]
        self.t = 0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self.t += 1
        for p, m, v, parts in zip(self.parameters, self.m, self.v, self.parts, strict=True):
            assert p.grad is not None
            for one in zip(*(t.chunk(parts) for t in (p, p.grad, m, v)), strict=True):
                self.step_one(lr, *one)
            p.grad = None

    def step_one(self, lr: float, p: Tensor, gradient: Tensor, m: Tensor, v: Tensor) -> None:
        m.copy_(BETAS[0] * m + (1 - BETAS[0]) * gradient)
        v.copy_(BETAS[1] * v + (1 - BETAS[1]) * gradient**2)
        u = (m / (1 - BETAS[0] ** self.t)) / ((v / (1 - BETAS[1] ** self.t)).sqrt() + EPS)
        ratio = 1.0
        if p.ndim >= 2:
            u = u + DECAY * p
            w_norm, u_norm = float(p.double().norm()), float(u.double().norm())
            if w_norm > 0 and u_norm > 0:
                ratio = w_norm / u_norm
        p.sub_(lr * ratio * u)


# (ZeRO stage, offload) of two ranks by optimizer; the others are slow
USUAL = {"lamb": [(2, "none")], "muon": [(1, "none"), (3, "none")]}
SETUPS = [(stage, "none") for stage in range(4)] + [(2, "cpu")]
OTHERS = {name: [setup for setup in SETUPS if setup not in usual] for name, usual in USUAL.items()}
KINDS: dict[str, Any] = {"lamb": PlainLamb, "muon": PlainMuon}
SPLIT: dict[str, Any] = {"name": "lamb", "steps": 6, "optimizer__split_qkv": True}


def under_zero(world: Any, setups: dict[str, list[Any]], split: tuple[int, ...] = ()) -> dict[Any, Any]:
    found: dict[Any, Any] = {stage: train(world, zero__stage=stage, **SPLIT) for stage in split}
    for name in setups:
        for stage, offload in setups[name]:
            found[name, stage, offload] = train(world, name, zero__stage=stage, zero__offload=offload)
    return found


@pytest.fixture(scope="module")
def two_ranks() -> dict[Any, Any]:
    return run_ranks(2, under_zero, USUAL, (1, 3), timeout=240)[0]


@pytest.mark.dist
@pytest.mark.parametrize("name", USUAL)
def test_optimizers_under_zero_equal_unsharded_ones(name, two_ranks):
    reference = plain_run(KINDS[name])
    for stage, offload in USUAL[name]:
        check(two_ranks[name, stage, offload], reference)


@pytest.mark.dist
@pytest.mark.slow
def test_optimizers_are_equal_at_every_stage():
    found = run_ranks(2, under_zero, OTHERS, timeout=480)[0]
    references = {name: plain_run(kind) for name, kind in KINDS.items()}
    for key in found:
        check(found[key], references[key[0]])


@pytest.mark.dist
def test_queries_keys_and_values_have_own_trust_ratios(two_ranks):
    recipe, merged = (plain_run(partial(PlainLamb, split=split), 6) for split in (True, False))
    for stage in (1, 3):
        check(two_ranks[stage], recipe)
        assert tiny.distance(two_ranks[stage]["weights"], merged["weights"]) > 1e-3


def test_phase_2_takes_over_the_moments(world, tmp_path):
    """From the run of phase 1, and again after a restart before its first update."""
    settings = {"optimizer__name": "lamb", "optimizer__split_qkv": True, "zero__stage": 2}
    cfg, keep = tiny.config(**settings), CheckpointConfig(asynchronous=False)
    first = tiny.engine(cfg, world)
    tiny.train(first, range(5), LR)
    Checkpoints(tmp_path / "phase1", world, keep).save(first, state(5, cfg))
    second = tiny.engine(cfg, world, seed=3)
    assert start_engine(second, tmp_path / "phase1", world)["step"] == 5
    run = Checkpoints(tmp_path / "phase2", world, keep)
    run.save(second, state(0, cfg))
    third = tiny.engine(cfg, world, seed=4)
    run.load(third, run.latest())
    found = []
    for engine in (second, third):
        losses = [loss for loss, _ in tiny.train(engine, range(5, 10), LR)]
        found.append((losses, engine.consolidated_weights()))
    assert start_engine(third, tmp_path / "phase1/checkpoints/step-00000005", world)["step"] == 5
    with pytest.raises(ValueError, match=r"of optimizer.name=lamb and this run's is muon; set init_moments"):
        start_engine(tiny.engine(tiny.config(optimizer__name="muon"), world), tmp_path / "phase1", world)
    with pytest.raises(ValueError, match="holds no moments; set init_moments=false"):
        fresh = Checkpoints(tmp_path / "fresh", world, keep)
        fresh.save(tiny.engine(cfg, world), state(0, cfg))
        start_engine(third, tmp_path / "fresh", world)
    recipe = partial(PlainLamb, split=True)
    expected, unaware = plain_run(recipe, 10, phase_2=5), plain_run(recipe, 10)
    for losses, weights in found:
        assert losses == pytest.approx(expected["losses"][5:], rel=1e-5)
        assert tiny.distance(weights, expected["weights"]) < 1e-5
        assert tiny.distance(weights, unaware["weights"]) > 1e-3


def test_every_parameter_is_in_one_group():
    model = tiny.model(tiny.config())
    groups = parameter_groups(model, DECAY)
    listed = [id(p) for group in groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters()) and len(set(listed)) == len(listed)
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    names = {n: decays[id(p)] for n, p in model.named_parameters()}
    assert {n for n, d in names.items() if d == 0} == {n for n in names if n.endswith("bias") or "norm" in n}
    assert set(names.values()) == {0.0, DECAY}


def test_lamb_on_a_flat_tensor_with_padding_equals_lamb_on_parameters():
    """Three matrices laid out in one flat tensor with gaps, garbage in the gaps: same weights, to 1e-6."""
    torch.manual_seed(1)
    shapes, starts, size = [(5, 3), (1, 1), (4, 6)], [2, 17, 20], 49
    tensors = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    flat = torch.full((size,), 1e6)
    segments = []
    for i, (tensor, start) in enumerate(zip(tensors, starts, strict=True)):
        flat[start : start + tensor.numel()] = tensor.detach().view(-1)
        segments.append(FlatSegment(i, start, start + tensor.numel(), 0))
    flat = flat.requires_grad_()
    whole = Lamb([{"params": tensors, "weight_decay": DECAY}], lr=LR, betas=BETAS, eps=EPS)
    whole.attach()
    parts = Lamb([{"params": [*tensors], "weight_decay": DECAY}], lr=LR, betas=BETAS, eps=EPS)
    parts.param_groups[0]["params"] = [flat]
    parts.attach({flat: tuple(segments)})
    for _ in range(4):
        flat.grad = torch.zeros(size)
        for tensor, start in zip(tensors, starts, strict=True):
            tensor.grad = torch.randn_like(tensor)
            flat.grad[start : start + tensor.numel()] = tensor.grad.view(-1)
        whole.step()
        parts.step()
    for tensor, start in zip(tensors, starts, strict=True):
        torch.testing.assert_close(
            flat.detach()[start : start + tensor.numel()].view(tensor.shape), tensor.detach(), rtol=1e-6, atol=1e-7
        )


def test_lamb_ratio_is_one_for_a_zero_weight():
    zero, still = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = Lamb([{"params": [zero, still], "weight_decay": DECAY}], lr=0.5, betas=BETAS, eps=EPS)
    optimizer.attach()
    zero.grad, still.grad = torch.ones(3, 2), torch.zeros(2, 2)
    optimizer.step()
    # first step: m^ / sqrt(v^) = 1 for a gradient of 1, so u = 1 / (1 + eps), and the ratio is 1 as |w| = 0
    torch.testing.assert_close(zero.detach(), torch.full((3, 2), -0.5 / (1 + EPS)))
    # u = decay * w points along w: ratio 1/decay, so the step is lr * w
    torch.testing.assert_close(still.detach(), torch.full((2, 2), 0.5))


def built(kind: type, layer: Any) -> Any:
    """An attached optimizer of a linear layer; its weight is one matrix."""
    layer.matrices = 1
    if kind is Muon:
        optimizer: Any = Muon(layer, LR, BETAS, EPS, DECAY, torch.float32)
    else:
        optimizer = kind(parameter_groups(layer, DECAY), lr=LR, betas=BETAS, eps=EPS)
    optimizer.attach()
    return optimizer


@pytest.mark.parametrize("kind", (AdamW, Lamb, Muon))
def test_a_guarded_step_clips_and_skips(kind):
    """Against the same optimizer on gradients clipped here, over steps with bad gradients between, also before the first."""
    torch.manual_seed(2)
    layer, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(layer.state_dict())
    guarded, usual = built(kind, layer), built(kind, plain)
    for bad in (math.nan, None, math.inf, -math.inf, None, None):
        before = [p.detach().clone() for p in layer.parameters()]
        moments = [t.clone() for p in layer.parameters() for t in guarded.moments_of(p).values()]
        for p in layer.parameters():
            p.grad = torch.randn_like(p)
        if bad is None:
            for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
                q.grad = p.grad.clone()
            expected = clip(plain, 0.5)
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
            after = [t for p in layer.parameters() for t in guarded.moments_of(p).values()]
            for old, new in zip([*before, *moments], [*layer.parameters(), *after], strict=True):
                assert torch.equal(old, new)
        assert guarded.updates_of(layer.parameters()) == usual.updates_of(plain.parameters())


@pytest.mark.parametrize("kind", (AdamW, Lamb, Muon))
def test_a_resumed_optimizer_continues_bit_for_bit(kind):
    """Moments copied through `resume` and `moments_of`: the same bits after, and state of the same types and places."""
    torch.manual_seed(3)
    layers = [nn.Linear(5, 3, bias=False) for _ in range(2)]
    weights = [layer.weight for layer in layers]
    straight, second = (built(kind, layer) for layer in layers)
    assert second.moments_of(weights[1]) == {} and second.updates_of(weights[1:]) == 0
    for step in range(5):
        if step == 3:
            second.resume([weights[1]], straight.updates_of([weights[0]]))
            weights[1].data.copy_(weights[0])
            for name, flat in second.moments_of(weights[1]).items():
                assert flat.shape == (15,) and not flat.any()
                flat.copy_(straight.moments_of(weights[0])[name])
            states = [{k: (v.dtype, v.device, v.shape) for k, v in o.state[w].items()}
                      for o, w in ((straight, weights[0]), (second, weights[1]))]  # fmt: skip
            assert states[0] == states[1] and second.updates_of([weights[1]]) == 3
        gradient = torch.randn(3, 5)
        for optimizer, weight in ((straight, weights[0]), (second, weights[1])):
            if optimizer is straight or step >= 3:
                weight.grad = gradient.clone()
                optimizer.step()
    assert torch.equal(weights[0], weights[1])
    second.resume([weights[1]], 0)
    assert second.updates_of([weights[1]]) == 0 and second.moments_of(weights[1]) == {}
