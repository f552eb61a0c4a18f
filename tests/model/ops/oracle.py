"""The tolerance rule: the error of ours against an fp64 oracle is at most a small multiple of torch's in the same precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megabert.model.ops import MISSING

needs_library = pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")
DTYPES = [torch.float32, torch.bfloat16]
FLOOR = {torch.float32: 5e-7, torch.bfloat16: 4e-3}  # a few roundings; where torch happens to be exact

Function = Callable[..., Sequence[Tensor]]


def error(value: Tensor, exact: Tensor) -> float:
    """Largest error, as a share of the largest exact value."""
    if not exact.numel():
        return 0.0
    scale = exact.double().abs().max().item() or 1.0
    return (value.double() - exact.double()).abs().max().item() / scale


def run(
    function: Function, inputs: Sequence[Tensor], dtype: torch.dtype, grads: Sequence[Tensor]
) -> list[Tensor]:
    """Outputs and input gradients of `function` with inputs cast to `dtype`."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
    outputs = [o for o in function(*leaves) if o.requires_grad]
    torch.autograd.backward(outputs, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)])
    missing = [t for t in leaves if t.grad is None]
    assert not missing
    return [*(o.detach() for o in outputs), *(t.grad for t in leaves if t.grad is not None)]


def check(
    native: Function, plain: Function, exact: Function, inputs: Sequence[Tensor], grads: Sequence[Tensor],
    dtype: torch.dtype, multiple: float = 2.0,
) -> None:  # fmt: skip
    """Forward and backward of `native` and of `plain` torch in `dtype`, against `exact` in fp64 on the same inputs."""
    inputs, grads = [t.to(dtype) for t in inputs], [g.to(dtype) for g in grads]
    truth = run(exact, inputs, torch.float64, grads)
    ours, theirs = run(native, inputs, dtype, grads), run(plain, inputs, dtype, grads)
    for i, (a, b, t) in enumerate(zip(ours, theirs, truth, strict=True)):
        assert torch.isfinite(a).all(), f"result {i} is not finite"
        limit = multiple * error(b, t) + FLOOR[dtype]
        assert error(a, t) <= limit, (
            f"result {i}: error {error(a, t):.2e}, torch's {error(b, t):.2e}, allowed {multiple} x that + {FLOOR[dtype]:.0e}"
        )


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
