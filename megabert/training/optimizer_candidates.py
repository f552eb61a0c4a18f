"""Candidates of the optimizer's step: torch's and our kernels against NVIDIA apex's, at the sizes that one rank updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megabert.config import Config
from megabert.distributed.process_group import World
from megabert.model import outline
from megabert.ops.candidates import Measured, attempt, compare
from megabert.ops.problems import SEED
from megabert.ops.tolerance import verdict
from megabert.optim import apex_kernels, optimizers

STEPS = 3  # of a check: the zero start of the moments, then what they have become
CHECKED = ((130, 70), (9, 1024), (257,), (1,))  # parameters of a check, with and without decay, sizes even and odd


def obstacles(config: Config, device: torch.device) -> dict[str, str]:
    """Why an implementation cannot run, by name; "" where it can."""
    return {"torch": "", "apex": apex_kernels.obstacle(config, device)}


def sizes(config: Config, world_size: int) -> list[tuple[int, ...]]:
    """What one rank's optimizer updates: at stage 0 the parameters, above it a flat share of each group."""
    groups = optimizers.parameter_groups(outline(config.model), config.optimizer.weight_decay)
    if config.zero.stage == 0:
        return [tuple(p.shape) for group in groups for p in group["params"]]
    totals = [sum(p.numel() for p in group["params"]) for group in groups]
    # two dimensions: of the group that decays
    return [(-(-total // world_size),) + (1,) * (index == 0) for index, total in enumerate(totals)]


def measure(config: Config, world: World, reasons: Mapping[str, str], seconds: float) -> Measured:
    """Checks and times the candidates that have no reason against them; the fastest right one, and the table.

    Torch's generators are left as they were. Raises NoneRight, a ValueError with every reason, and DeviceLost."""
    shapes, device = sizes(config, world.size), world.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(SEED)
        exact = _stepped(config, "torch", torch.device("cpu"), torch.float64)
        plain = _stepped(config, "torch", torch.device("cpu"), torch.float32)

        def judge(name: str) -> str:
            return verdict(_stepped(config, name, device, torch.float32), plain, exact, torch.float32, 2.0)

        checked = {
            name: why or attempt("optimizer", name, device, partial(judge, name)) for name, why in reasons.items()
        }
        return compare("optimizer", checked, lambda name: _step(config, name, shapes, device), device, seconds)


def _built(config: Config, name: str, tensors: list[Tensor]) -> Any:
    holder = nn.ParameterList([nn.Parameter(t) for t in tensors])
    optimizer = optimizers.build(config.optimizer, holder, name == "apex")
    for group in optimizer.param_groups:
        if "capturable" in group:  # torch refuses to be captured otherwise; what runs is the same kernel
            group["capturable"] = True
    optimizer.attach()
    return optimizer


def _stepped(config: Config, name: str, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Weights and moments after STEPS updates of small parameters, on the CPU."""
    draw = torch.Generator().manual_seed(SEED)
    weights = [torch.randn(shape, generator=draw).to(device, dtype) for shape in CHECKED]
    optimizer = _built(config, name, weights)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=draw).to(device, dtype)
        optimizer.step()
    found = [[p.detach(), *optimizer.moments_of(p).values()] for p in parameters]
    return [t.cpu() for tensors in found for t in tensors]


def _step(config: Config, name: str, shapes: list[tuple[int, ...]], device: torch.device) -> Callable[[], object]:
    """One update of a rank's own sizes."""
    optimizer = _built(config, name, [torch.randn(shape, device=device) for shape in shapes])
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    return lambda: optimizer.step()
