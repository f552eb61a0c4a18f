"""The product after GELU, with GELU's gradient at the end of its own backward product (`gelu_product`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megabert.ops.layer import bias_gelu


class BeforeGelu(NamedTuple):
    """What GELU is to be taken of, by the product that reads it: x + bias."""

    x: Tensor  # [..., F]
    bias: Tensor  # [F]


def gelu_linear(before: BeforeGelu, weight: Tensor, backend: str) -> Tensor:
    """gelu(x + bias) W^T. x [..., F], weight [D, F] -> [..., D]; `backend`: of the forward pass's `bias_gelu`."""
    return _GeluLinear.apply(*before, weight, backend)


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, weight: Tensor, backend: str) -> Tensor:
        y = bias_gelu(x, bias, backend)
        ctx.save_for_backward(x, bias, y, weight)
        return F.linear(y, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, y, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        dx, dbias = torch.ops.megabert.gelu_linear_backward(flat, weight, x.flatten(0, -2), bias)
        dweight = flat.t() @ y.flatten(0, -2) if ctx.needs_input_grad[2] else None
        return dx.view_as(x), dbias, dweight, None


@torch.library.custom_op("megabert::gelu_linear_backward", mutates_args=())
def _backward(grad: Tensor, weight: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    from megabert.ops.gelu_product import product_gelu_gradient

    return product_gelu_gradient(grad, weight, x, bias)


@_backward.register_fake
def _(grad: Tensor, weight: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(bias)
