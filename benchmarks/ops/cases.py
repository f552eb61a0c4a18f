"""What bench_ops times: an operation at one size, as calls that take no argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]


@dataclass
class Case:
    """One operation at one size: what runs, and who is compared with whom."""

    name: str
    size: str
    sides: dict[str, Call]
    comparisons: list[tuple[str, str]]  # (ours, peer)
    bytes: dict[str, int] = field(default_factory=dict)  # that a side has to move, each tensor once
    extra_memory: tuple[str, ...] = ()  # sides whose memory is measured
    what: str = "forward and backward"


class Maker:
    """Random tensors on the device, and forward + backward of a function as one call."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(1)
        self.seed = torch.tensor([1234], device=device)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        value = torch.randn(*shape, generator=self.generator) * scale
        return value.to(self.device, self.dtype)

    def both_ways(self, function: Callable[..., Any], *inputs: Tensor) -> Call:
        """Forward and backward; the gradient of the first output is random, or 1 for a scalar."""
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        with torch.no_grad():
            first = first_of(function(*leaves))
        grad = torch.ones_like(first) if first.dim() == 0 else self.normal(*first.shape).to(first.dtype)

        def call() -> None:
            for leaf in leaves:
                leaf.grad = None
            first_of(function(*leaves)).backward(grad)

        return call


def first_of(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def size_of(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
