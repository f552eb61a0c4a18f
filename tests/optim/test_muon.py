"""Muon against an update rule written out plainly here, on whole parameters and under ZeRO (two ranks: test_optimizers.py)."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megabert.engine.zero_layout import slice_of_group
from megabert.optim.muon import Matrix, assign_owners, orthogonalize, plan_exchange
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks

BETAS, EPS, DECAY, LR = (0.9, 0.999), 1e-6, 0.01, 0.003
STEPS = 20
LAYERS_MATRICES = ("qkv.weight", "attention_output.weight", "feed_forward.weight", "feed_forward_output.weight")
# factors of the rate in a model of two layers
RATES = {"optimizer__embedding_lr": 0.25, "optimizer__layer_decay": 0.5}
FACTORS = {"embeddings.word.bias": 1.0, "embeddings.": 0.25 * 0.5**2, "layers.0.": 0.5}


def newton_schulz(g: Tensor) -> Tensor:
    """Five steps of X <- a X + b (X X^T) X + c (X X^T)^2 X, from X = G / |G|, in the type of `g`."""
    tall = g.shape[0] > g.shape[1]
    x = g.T if tall else g
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * (gram @ x) + 2.0315 * (gram @ (gram @ x))
    return x.T if tall else x


class PlainOptimizer:
    """Muon, or LAMB as NVIDIA's recipe has it, a parameter at a time, with norms in fp64. In "split lamb" queries, keys and
    values are parameters of their own, as they are in that recipe's model."""

    def __init__(self, model: nn.Module, name: str, rated: bool = False) -> None:
        self.rated, self.cfg, self.name, self.t = rated, model.cfg, name, 0
        self.named = dict(model.named_parameters())
        self.m, self.v = ({n: torch.zeros_like(p) for n, p in self.named.items()} for _ in range(2))

    @torch.no_grad()
    def step(self, peak: float) -> None:
        self.t += 1
        for name, p in self.named.items():
            lr = peak * next((factor for part, factor in FACTORS.items() if self.rated and name.startswith(part)), 1.0)
            if self.name == "muon":
                self.muon(lr, name, p)
            else:
                parts = self.qkv() if self.name == "split lamb" and ".qkv." in name else len(p)
                rule = self.stable_adamw if self.name == "stable_adamw" else self.lamb
                for one in zip(*(t.split(parts) for t in (p, p.grad, self.m[name], self.v[name])), strict=True):
                    rule(lr, *one)
            p.grad = None

    def qkv(self) -> list[int]:
        """Rows of queries, keys and values."""
        width = self.cfg.hidden // self.cfg.heads
        return [self.cfg.hidden, *[width * (self.cfg.kv_heads or self.cfg.heads)] * 2]

    def adam(self, g: Tensor, m: Tensor, v: Tensor) -> Tensor:
        m.copy_(BETAS[0] * m + (1 - BETAS[0]) * g)
        v.copy_(BETAS[1] * v + (1 - BETAS[1]) * g**2)
        return (m / (1 - BETAS[0] ** self.t)) / ((v / (1 - BETAS[1] ** self.t)).sqrt() + EPS)

    def lamb(self, lr: float, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        u, ratio = self.adam(g, m, v), 1.0
        if p.ndim >= 2:
            u = u + DECAY * p
            w_norm, u_norm = float(p.double().norm()), float(u.double().norm())
            if w_norm > 0 and u_norm > 0:
                ratio = w_norm / u_norm
        p.sub_(lr * ratio * u)

    def stable_adamw(self, lr: float, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        """Wortsman et al. 2023, algorithm 2, with the bias corrections of Adam."""
        u = self.adam(g, m, v) + (DECAY * p if p.ndim >= 2 else 0)
        second = (v / (1 - BETAS[1] ** self.t)).clamp(min=EPS**2)
        p.sub_(lr / max(1.0, float((g.double() ** 2 / second).mean().sqrt())) * u)

    def muon(self, lr: float, name: str, p: Tensor) -> None:
        """Which are matrices of the layers is read from their names. Of one: momentum, Nesterov's direction, orthogonal, as
        large as AdamW's."""
        if p.ndim >= 2:
            p.mul_(1 - lr * DECAY)
        if not (name.startswith("layers.") and name.endswith(LAYERS_MATRICES)):
            p.sub_(lr * self.adam(p.grad, self.m[name], self.v[name]))
            return
        self.m[name].copy_(0.95 * self.m[name] + p.grad)
        # queries, keys and values; what a gate multiplies, and the gate
        gated = self.cfg.modern and name.endswith("feed_forward.weight")
        parts = self.qkv() if "qkv" in name else len(p) // 2 if gated else len(p)
        directions = (p.grad + 0.95 * self.m[name]).split(parts)
        p.sub_(lr * torch.cat([0.2 * math.sqrt(max(part.shape)) * newton_schulz(part) for part in directions]))


def clip(model: nn.Module, limit: float) -> float:
    norm = float(torch.cat([p.grad.double().view(-1) for p in model.parameters()]).norm())
    for p in model.parameters():
        p.grad.div_(max(1.0, norm / limit))
    return norm


def plain_run(name: str, steps: int = STEPS, phase_2: int = -1, **changes: Any) -> dict[str, Any]:
    """Updates of whole batches in fp32, without DeepSpeed; from step `phase_2` on as in the second phase of NVIDIA's recipe,
    which loads the first one's optimizer with the step of every parameter set to 0 (run_pretraining.py,
    prepare_model_and_optimizer)."""
    model = tiny.model(tiny.config(**changes))
    optimizer = PlainOptimizer(model, name, rated=RATES.items() <= changes.items())
    losses, norms = [], []
    for step in range(steps):
        if step == phase_2:
            optimizer.t = 0
        losses.append(tiny.backward(model, step)[0])
        norms.append(clip(model, 1.0))
        optimizer.step(LR)
    return {"losses": losses, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def train(world: Any, name: str = "muon", steps: int = STEPS, **changes: Any) -> dict[str, Any]:
    cfg = tiny.config(optimizer__name=name, **changes)
    engine = tiny.engine(cfg, world)
    results = [engine.train_update(tiny.update(s, cfg, world), LR) for s in range(steps)]
    return {
        "losses": [float(r.losses[0]) for r in results],
        "norms": [float(r.grad_norm) for r in results],
        "weights": engine.consolidated_weights(),
    }


def check(found: dict[str, Any], reference: dict[str, Any], case: Any = "") -> None:
    assert found["losses"] == pytest.approx(reference["losses"], rel=1e-5), case
    assert found["norms"] == pytest.approx(reference["norms"], rel=1e-4), case
    assert max(reference["norms"]) > 1.2  # clipping had something to do
    assert set(found["weights"]) == set(reference["weights"])
    assert tiny.distance(found["weights"], reference["weights"]) < 1e-5, case


MODERN: dict[str, Any] = {"model__kind": "modern", "model__norm": "pre", "model__nsp": False, "model__kv_heads": 1}


def one_rank(world: Any) -> dict[str, Any]:
    """Four micro-steps an update of a gated model; and what a run in bf16 did and kept, with a vetoed update."""
    cfg = tiny.config(optimizer__name="muon", batch__micro_size=4, precision="bf16", zero__stage=1)
    engine = tiny.engine(cfg, world)
    losses = tiny.train(engine, range(3))
    vetoed = engine.train_update(tiny.update(3, cfg, world), LR, lambda loss: True).skipped
    after = engine.snapshot()
    return {
        "modern": train(world, zero__stage=1, **MODERN),
        "losses": losses + tiny.train(engine, range(4, 6)),
        "skipped": (vetoed, after.counters["optimizer_steps"]),
        "moments": {part.name: list(part.values) for part in after.moments},
        "products": engine.optimizer._dtype,
    }


@pytest.mark.dist
def test_muon_of_gates_and_in_bf16():
    found = run_ranks(1, one_rank)[0]
    check(found["modern"], plain_run("muon", **MODERN))
    assert found["skipped"] == (True, 3) and found["products"] == torch.bfloat16
    for parameter, kinds in found["moments"].items():
        single = parameter.startswith("layers.") and parameter.endswith(LAYERS_MATRICES)
        assert kinds == (["exp_avg"] if single else ["exp_avg", "exp_avg_sq"]), parameter
    assert found["losses"][-1][0] < found["losses"][0][0] - 0.2


def test_singular_values_become_one_for_any_gradient_size():
    draw = torch.Generator().manual_seed(0)
    stack = torch.randn(3, 48, 80, generator=draw)
    for dtype, far in ((torch.float32, 0.35), (torch.bfloat16, 0.40)):
        done = orthogonalize(stack.to(dtype)).float()
        values = torch.linalg.svdvals(done)
        assert float((values - 1).abs().max()) < far, dtype
        u, _, v = torch.linalg.svd(stack, full_matrices=False)
        assert float(((u.mT @ done @ v.mT).diagonal(dim1=-2, dim2=-1) > 0.6).float().mean()) == 1
        torch.testing.assert_close(orthogonalize(stack.mT.to(dtype)).float(), done.mT, rtol=0, atol=2e-2)
    exact = torch.stack([newton_schulz(matrix) for matrix in stack.double()])
    assert float((orthogonalize(stack) - exact).abs().max()) < 1e-5
    for size in (1e-15, 1e12):
        torch.testing.assert_close(orthogonalize(size * stack), orthogonalize(stack), rtol=1e-3, atol=1e-5)
    assert not orthogonalize(torch.zeros(2, 8, 4)).any()
    assert float(orthogonalize(1e-30 * stack).abs().max()) < 1e-6  # nothing is left of its squares


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_every_element_reaches_one_owner_and_returns(ranks):
    """Each sends the parts that the other expects, and the owner receives whole matrices."""
    matrices = {0: tuple(Matrix(0, n * 12, 3, 4) for n in range(3)), 1: (Matrix(1, 0, 5, 2),), 2: (Matrix(2, 0, 6, 7),)}
    tensors = [torch.empty(size) for size in (36, 10, 42)]
    share = -(-128 // ranks)  # the last of 7 ranks holds padding alone
    numbers = {id(tensor): index for index, tensor in enumerate(tensors)}
    segments = [[slice_of_group(torch.empty(share), tensors, rank, numbers).segments] for rank in range(ranks)]
    plans = [plan_exchange(matrices, segments, rank) for rank in range(ranks)]
    covered: list[int] = []
    for rank, plan in enumerate(plans):
        assert plan.matrices == plans[0].matrices and len(plan.matrices) == 5
        whole: dict[int, list[tuple[int, int]]] = {}
        for other in range(ranks):
            assert plan.owned[other] == plans[other].held[rank]
            for part in plan.held[other]:  # where it says, counted over all ranks' tensors
                matrix = plan.matrices[part.matrix]
                there = (0, 36, 46)[matrix.index] + matrix.begin + part.offset
                assert rank * share + part.start == there
            for part in plan.owned[other]:
                whole.setdefault(part.matrix, []).append((part.offset, part.offset + part.size))
        for number, bounds in whole.items():
            bounds.sort()
            assert bounds[0][0] == 0 and bounds[-1][1] == plan.matrices[number].size
            assert all(a[1] == b[0] for a, b in pairwise(bounds))
        covered += whole
    assert sorted(covered) == list(range(5))


def test_owners_have_equal_work():
    costs = [Matrix(0, 0, *shape).flops for shape in [(1024, 1024)] * 96 + [(4096, 1024)] * 48]
    assert costs[0] == 5 * 6 * 1024**3 and costs[-1] == 5 * (4 * 4 + 2) * 1024**3
    for ranks in (1, 3, 8, 64):
        owners = assign_owners(costs, ranks)
        load = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == r) for r in range(ranks)]
        assert max(load) <= max(1.1 * sum(costs) / ranks, max(costs)), load
    assert sorted(assign_owners(costs, 512)) == list(range(144))
