"""Gradients against finite differences. The operations compute in fp32, so steps are wide and tolerances those of fp32."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megabert import ops
from tests.ops.oracle import needs_library, normal

pytestmark = needs_library
SEED, P = torch.tensor([99]), 0.25
BOUNDS = torch.tensor([[0, 2, 3]]).int(), torch.tensor([[5, 5, 3]]).int()
LABELS = torch.tensor([1, -100, 4])

CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "bias_gelu": (lambda x, b: ops.bias_gelu(x, b, "native"), [normal(3, 5, seed=1), normal(5, seed=2)]),
    "bias_geglu": (lambda x, b: ops.bias_geglu(x, b, "native"), [normal(3, 10, seed=1), normal(10, seed=2)]),
    "rotate": (
        lambda x: ops.rotate(x, 2, ops.rotation(torch.tensor([[0, 3, 1]]), 6), "native"),
        [normal(1, 3, 3 * 2 * 6, seed=1)],
    ),
    "dropout": (lambda x: ops.dropout(x, P, SEED, 2, "native"), [normal(3, 9, seed=1)]),
    "dropout_add_layer_norm": (
        lambda x, b, r, w, s: ops.dropout_add_layer_norm(x, b, r, w, s, P, 1e-5, SEED, 2, "native"),
        [normal(3, 9, seed=1), normal(9, seed=2), normal(3, 9, seed=3), normal(9, seed=4), normal(9, seed=5)],
    ),
    "softmax_mask": (
        lambda x: ops.fused_softmax_mask(x, key_start=BOUNDS[0], key_end=BOUNDS[1], scale=0.7, p=P, seed=SEED),
        [normal(1, 2, 3, 5, seed=1)],
    ),
    "attention": (
        lambda x, b: ops.attend(
            x + b.detach(), 2, [torch.zeros(1, 3).int(), torch.full((1, 3), 3).int()], P, SEED, 1, "native", b
        ),
        [normal(1, 3, 3 * 2 * 4, seed=1), normal(3 * 2 * 4, seed=2)],
    ),
    "mlm_loss": (
        lambda h, w, b: ops.mlm_loss(h, w, b, LABELS, 6, "native", 0.1, 0.01)[0],
        [normal(3, 4, seed=1), normal(8, 4, seed=2), normal(8, seed=3)],
    ),
    "mlm_loss_of_logits": (
        lambda x: ops.mlm_loss_of_logits(x, LABELS, "native", 0.1, 0.01)[0], [normal(3, 6, seed=1)],
    ),
}  # fmt: skip


def test_every_registered_operation_has_a_case() -> None:
    schemas = (Path(__file__).resolve().parents[2] / "csrc" / "registration.cpp").read_text()
    registered = {name for name in re.findall(r'"(\w+)\(', schemas) if not name.endswith("_backward")}
    assert set(CASES) == registered


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_finite_differences(name: str) -> None:
    function, inputs = CASES[name]
    leaves = [t.float().requires_grad_() for t in inputs]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input #")  # that fp32 is less precise than fp64
        assert torch.autograd.gradcheck(function, leaves, eps=1e-2, atol=2e-3, rtol=2e-2)
