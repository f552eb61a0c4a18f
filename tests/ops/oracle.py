"""The tolerance rule of the operations' tests: our error against fp64 is at most a small multiple of plain torch's in the same
type."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megabert.ops import MISSING

needs_library = pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")
# A few roundings of each type, for where torch happens to be exact.
FLOOR = {torch.float32: 5e-7, torch.bfloat16: 4e-3}
# Where native code runs, and in which types.
ON = pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), ("cpu", torch.bfloat16), *(pytest.param("cuda", t, marks=pytest.mark.gpu) for t in FLOOR)],
    ids=str,
)
Function = Callable[..., Sequence[Tensor]]


def error(value: Tensor, exact: Tensor) -> float:
    """Largest error, as a share of the largest exact value; NaN where `value` holds one."""
    if not exact.numel():
        return 0.0
    scale = exact.double().abs().max().item() or 1.0
    return (value.double() - exact.double()).abs().max().item() / scale


def results(function: Function, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Outputs of `function` and the gradients of all its inputs, on the CPU."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = [o for o in function(*leaves) if o.requires_grad]
    torch.autograd.backward(outputs, [g.to(o) for g, o in zip(grads, outputs, strict=True)])
    found = [*(o.detach() for o in outputs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    assert len(found) == len(outputs) + len(leaves), "an input has no gradient"
    return [t.cpu() for t in found]


def compare(
    ours: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype, multiple: float = 2.0
) -> None:
    """Asserts the rule for each result."""
    for i, (a, b, t) in enumerate(zip(ours, plain, exact, strict=True)):
        assert torch.isfinite(a).all(), f"result {i} is not finite"
        limit = multiple * error(b, t) + FLOOR[dtype]
        assert error(a, t) <= limit, (
            f"result {i}: error {error(a, t):.2e}, torch's {error(b, t):.2e}, allowed {limit:.2e}"
        )


def check(
    native: Function, plain: Function, exact: Function, inputs: Sequence[Tensor], grads: Sequence[Tensor],
    dtype: torch.dtype, multiple: float = 2.0, device: str = "cpu",
) -> None:  # fmt: skip
    """Forward and backward of `native` on `device` and of `plain` torch on the CPU, both in `dtype`, against `exact` in fp64."""
    inputs, grads = [t.to(dtype) for t in inputs], [g.to(dtype) for g in grads]
    truth = results(exact, [t.double() for t in inputs], grads)
    ours = results(native, [t.to(device) for t in inputs], grads)
    compare(ours, results(plain, inputs, grads), truth, dtype, multiple)


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
