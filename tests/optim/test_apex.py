"""AdamW and LAMB by apex's kernels equal ours: called here are stand-ins with the arguments of apex's own sources."""

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megabert import config as configuration
from megabert.engine import Engine
from megabert.optim.apex import obstacle
from megabert.optim.build import build_optimizer
from megabert.optim.guarded import MOMENTS
from tests.helpers import tiny
from tests.helpers.simulated_ranks import ALONE

CUDA = torch.device("cuda")


def adam(
    chunk: int, noop: Tensor, lists: list[list[Tensor]], lr: Tensor, beta1: float, beta2: float, eps: float, step: Tensor,
    mode: int, bias_correction: int, decay: float, inv_scale: Tensor,
) -> None:  # fmt: skip
    """multi_tensor_adam_capturable_cuda of csrc/multi_tensor_adam.cu, in torch; mode 1 is decoupled decay."""
    assert (mode, bias_correction, noop.dtype, step.dtype) == (1, 1, torch.int32, torch.int32)
    if noop.item():
        return
    for g, p, m, v in zip(*lists, strict=True):
        scaled = g * inv_scale
        m.copy_(beta1 * m + (1 - beta1) * scaled)
        v.copy_(beta2 * v + (1 - beta2) * scaled * scaled)
        corrected = m / (1 - beta1**step), v / (1 - beta2**step)
        p.sub_(lr * (corrected[0] / (corrected[1].sqrt() + eps) + decay * p))


def lamb(
    chunk: int, noop: Tensor, lists: list[list[Tensor]], lr: Tensor, beta1: float, beta2: float, eps: float, step: Tensor,
    bias_correction: int, decay: float, grad_averaging: int, mode: int, norm: Tensor, limit: Tensor, nvlamb: bool,
    found_inf: Tensor, inv_scale: Tensor,
) -> None:  # fmt: skip
    """multi_tensor_lamb_mp_cuda of csrc/multi_tensor_lamb_mp.cu, in torch."""
    assert (mode, bias_correction, grad_averaging, nvlamb, step.dtype) == (1, 1, 1, False, torch.int32)
    if noop.item():
        return
    clip = norm / limit if norm > limit else 1.0
    for g, p, m, v in zip(*lists, strict=True):
        scaled = g * inv_scale / clip
        m.copy_(beta1 * m + (1 - beta1) * scaled)
        v.copy_(beta2 * v + (1 - beta2) * scaled * scaled)
        update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps) + decay * p
        ratio = p.norm() / update.norm() if decay and p.norm() and update.norm() else 1.0
        p.sub_(lr * ratio * update)


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The modules that apex's source installs, as far as they are used."""
    package, launcher, kernels = map(types.ModuleType, ("apex", "apex.multi_tensor_apply", "amp_C"))
    kernels.multi_tensor_adam_capturable, kernels.multi_tensor_lamb_mp = adam, lamb
    launcher.multi_tensor_applier = lambda op, noop, lists, *more: op(2048 * 32, noop, lists, *more)
    package.__path__ = []
    for module in (package, launcher, kernels):
        module.__spec__ = ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return kernels


def trained(name: str, apex: bool, scale: float, skipped: int) -> Any:
    """The optimizer and the parameters after 4 updates; gradients are divided by `scale`, one update is skipped."""
    draw = torch.Generator().manual_seed(1)
    holder = nn.ParameterList([nn.Parameter(torch.randn(s, generator=draw)) for s in ((5, 7), (3, 4), (9,))])
    optimizer = build_optimizer(configuration.OptimizerConfig(name=name, lr=0.01, weight_decay=0.1), holder, apex)
    optimizer.attach()
    for step in range(4):
        for parameter in holder:
            parameter.grad = torch.randn(parameter.shape, generator=draw)
            if not apex:  # ours without scale and skip is the oracle
                parameter.grad /= scale or 1.0
        optimizer.found_inf = torch.tensor(float(apex and step == skipped))
        if apex and scale:
            optimizer.grad_scale = torch.tensor(scale)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        if apex or step != skipped:
            optimizer.step()
    return optimizer, list(holder)


@pytest.mark.parametrize("name", ["adamw", "lamb"])
@pytest.mark.parametrize("scale", [0.0, 4.0])
def test_updates_by_apex_equal_ours(apex: Any, name: str, scale: float) -> None:
    skipped = 2 if scale else -1
    ours, theirs = (trained(name, kind, scale, skipped) for kind in (False, True))
    for a, b in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)  # a step moves by 1e-2
        for kind in MOMENTS:
            x, y = (optimizer.find_moments(p)[kind] for optimizer, p in ((ours[0], a), (theirs[0], b)))
            torch.testing.assert_close(y, x, rtol=2e-6, atol=1e-8)
    assert ours[0].count_updates(ours[1]) == theirs[0].count_updates(theirs[1]) == 4 - (skipped >= 0)


def test_what_apex_cannot_do_is_refused_by_name(apex: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = tiny.config(ops__optimizer="apex")
    assert obstacle(cfg, CUDA) == ""
    assert "needs a CUDA device" in obstacle(cfg, torch.device("cpu"))
    lamb = tiny.config(ops__optimizer="apex", optimizer__name="lamb", zero__stage=1)
    assert "at zero.stage=1 apex's LAMB would have one trust ratio" in obstacle(lamb, CUDA)
    assert obstacle(tiny.config(optimizer__name="lamb", zero__stage=0), CUDA) == ""
    with pytest.raises(ValueError, match=r"ops\.optimizer=apex cannot run here: NVIDIA's apex needs a CUDA device"):
        Engine(cfg, tiny.model(cfg), ALONE)
    monkeypatch.delitem(sys.modules, "amp_C")
    assert obstacle(cfg, CUDA) == "NVIDIA's apex does not import (No module named 'amp_C')"
    monkeypatch.delitem(sys.modules, "apex.multi_tensor_apply")
    assert "the package apex installed here is another one; NVIDIA's is at" in obstacle(cfg, CUDA)
