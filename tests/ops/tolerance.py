"""The tolerance rule: the error of ours against an exact result is at most a small multiple of plain torch's in the same type."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# a few roundings of each type, for where torch happens to be exact
FLOOR = {torch.float32: 5e-7, torch.bfloat16: 4e-3, torch.float16: 1e-3}

Function = Callable[..., Sequence[Tensor]]


def error(value: Tensor, exact: Tensor) -> float:
    """Largest error, as a share of the largest exact value; NaN where `value` holds one."""
    if not exact.numel():
        return 0.0
    scale = exact.double().abs().max().item() or 1.0
    return (value.double() - exact.double()).abs().max().item() / scale


def run(function: Function, inputs: Sequence[Tensor], dtype: torch.dtype, grads: Sequence[Tensor]) -> list[Tensor]:
    """Outputs and input gradients of `function` with inputs cast to `dtype`."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
    outputs = [o for o in function(*leaves) if o.requires_grad]
    torch.autograd.backward(outputs, [g.to(o.dtype) for g, o in zip(grads, outputs, strict=True)])
    missing = [t for t in leaves if t.grad is None]
    assert not missing
    return [*(o.detach() for o in outputs), *(t.grad for t in leaves if t.grad is not None)]


def verdict(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype, multiple: float
) -> str:
    """What is wrong with `ours` by the rule, `theirs` being plain torch's results in `dtype`; "" where nothing is."""
    for i, (a, b, t) in enumerate(zip(ours, theirs, exact, strict=True)):
        if not torch.isfinite(a).all():
            return f"result {i} is not finite"
        found, plain = error(a, t), error(b, t)
        if not found <= multiple * plain + FLOOR[dtype]:
            return f"result {i}: error {found:.2e}, torch's {plain:.2e}, allowed {multiple} x that + {FLOOR[dtype]:.0e}"
    return ""
