"""The tolerance rule (tests.ops.tolerance.py) against an fp64 oracle, and the inputs of its tests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megabert.ops import MISSING
from tests.ops.tolerance import FLOOR, Function, error, run, verdict

needs_library = pytest.mark.skipif(bool(MISSING), reason=MISSING or "-")
DTYPES = [torch.float32, torch.bfloat16]
__all__ = ["DTYPES", "FLOOR", "check", "error", "needs_library", "normal"]


def check(
    native: Function, plain: Function, exact: Function, inputs: Sequence[Tensor], grads: Sequence[Tensor],
    dtype: torch.dtype, multiple: float = 2.0,
) -> None:  # fmt: skip
    """Forward and backward of `native` and of `plain` torch in `dtype`, against `exact` in fp64 on the same inputs."""
    inputs, grads = [t.to(dtype) for t in inputs], [g.to(dtype) for g in grads]
    truth = run(exact, inputs, torch.float64, grads)
    ours, theirs = run(native, inputs, dtype, grads), run(plain, inputs, dtype, grads)
    wrong = verdict(ours, theirs, truth, dtype, multiple)
    assert not wrong, wrong


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
