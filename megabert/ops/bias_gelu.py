"""Bias + GELU and, for a feed-forward layer with a gate, bias + GELU + gate, each in one pass over memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabert.ops.backend import register


def plus(x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., D] + bias [D], or x without a bias."""
    return x if bias is None else x + bias


def or_zeros(bias: Tensor | None, x: Tensor) -> Tensor:
    """The bias [D] for a native operation on x [..., D]; zeros without one."""
    return x.new_zeros(x.shape[-1]) if bias is None else bias


def bias_gelu(x: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    """Exact GELU, y = z * Phi(z) with z = x + bias (Hendrycks & Gimpel 2016). x [..., D], bias [D] -> [..., D]."""
    if backend == "native":
        return torch.ops.megabert.bias_gelu(x, or_zeros(bias, x))
    return F.gelu(plus(x, bias))


def bias_silu(x: Tensor, bias: Tensor | None) -> Tensor:
    """z * sigmoid(z) with z = x + bias (Hendrycks & Gimpel 2016), which torch computes in any backend. x [..., D], bias [D] ->
    [..., D]."""
    return F.silu(plus(x, bias))


def bias_geglu(x: Tensor, bias: Tensor | None, backend: str, silu: bool = False) -> Tensor:
    """gelu(a) * b of (a, b) = x + bias (Shazeer 2020, "GLU Variants"), with the exact GELU, or silu(a) * b. x [..., 2F],
    bias [2F] -> [..., F]."""
    if backend == "native" and not silu:
        return torch.ops.megabert.bias_geglu(x, or_zeros(bias, x))
    value, gate = plus(x, bias).chunk(2, -1)
    return (F.silu if silu else F.gelu)(value) * gate


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_shapes(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


def _register(op: str, inputs: int) -> None:
    def shapes(x: Tensor, bias: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], x.shape[-1] // inputs)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return getattr(torch.ops.megabert, f"{op}_backward")(grad, *ctx.saved_tensors)

    register(op, shapes, _save, backward, _backward_shapes)


_register("bias_gelu", inputs=1)
_register("bias_geglu", inputs=2)
