"""The element-wise rest of an encoder layer, each in one pass over memory: bias + GELU, bias + dropout + residual + LayerNorm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabert.model.ops.backend import MISSING


def bias_gelu(x: Tensor, bias: Tensor, backend: str) -> Tensor:
    """Exact GELU, y = z * Phi(z) with z = x + bias (Hendrycks & Gimpel 2016). x [..., D], bias [D] -> [..., D]."""
    if backend == "native":
        return torch.ops.megabert.bias_gelu(x, bias)
    return F.gelu(x + bias)


def dropout(x: Tensor, p: float, seed: Tensor, stream: int, backend: str) -> Tensor:
    """Zeroes a share `p` of x [..., D] and scales the rest by 1 / (1 - p); seed and stream as below."""
    if p and backend == "native":
        return torch.ops.megabert.dropout(x, seed, stream, p)
    return F.dropout(x, p, training=p > 0)


def dropout_add_layer_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor,
    p: float, eps: float, seed: Tensor, stream: int, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """z = residual + dropout(x + bias) and LayerNorm(z) * weight + shift; returns (normed, z).

    x, residual [..., D]; bias, weight, shift [D]. seed int64 [1] and stream number the dropout mask of the native
    backend; the torch backend draws from torch's generator.
    """
    if backend == "native":
        op = torch.ops.megabert.dropout_add_layer_norm
        return op(x, bias, residual, weight, shift, seed, stream, p, eps)[:2]
    z = residual + F.dropout(x + bias, p, training=p > 0)
    return F.layer_norm(z, z.shape[-1:], weight, shift, eps), z


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _register() -> None:
    @torch.library.register_fake("megabert::bias_gelu")
    def _(x: Tensor, bias: Tensor) -> Tensor:
        return _like(x)

    @torch.library.register_fake("megabert::bias_gelu_backward")
    def _(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return _like(x), _like(bias)

    def gelu_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def gelu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.megabert.bias_gelu_backward(grad, *ctx.saved_tensors)

    torch.library.register_autograd("megabert::bias_gelu", gelu_backward, setup_context=gelu_context)

    @torch.library.register_fake("megabert::dropout")
    def _(x: Tensor, seed: Tensor, stream: int, p: float) -> Tensor:
        return _like(x)

    def dropout_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _x, seed, *ctx.numbers = inputs
        ctx.save_for_backward(seed)

    def dropout_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return torch.ops.megabert.dropout(grad, *ctx.saved_tensors, *ctx.numbers), None, None, None

    torch.library.register_autograd("megabert::dropout", dropout_backward, setup_context=dropout_context)

    @torch.library.register_fake("megabert::dropout_add_layer_norm")
    def _(
        x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor,
        seed: Tensor, stream: int, p: float, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        statistic = x.new_empty(x.shape[:-1], dtype=torch.float32)
        return _like(x), _like(x), statistic, torch.empty_like(statistic)

    @torch.library.register_fake("megabert::dropout_add_layer_norm_backward")
    def _(
        grad: Tensor, grad_z: Tensor | None, z: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor,
        seed: Tensor, stream: int, p: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        dx = _like(z) if int(p * 65536 + 0.5) else z.new_empty(0)
        return dx, _like(z), _like(weight), _like(weight), _like(weight)

    def norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _x, _bias, _residual, weight, _shift, seed, ctx.stream, ctx.p, _eps = inputs
        _y, z, mean, rstd = output
        ctx.save_for_backward(z, mean, rstd, weight, seed)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)

    def norm_backward(
        ctx: Any, grad: Tensor | None, grad_z: Tensor | None, _mean: None, _rstd: None
    ) -> tuple[Tensor | None, ...]:
        z, mean, rstd, weight, seed = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(z)
        op = torch.ops.megabert.dropout_add_layer_norm_backward
        dx, dresidual, dbias, dweight, dshift = op(
            grad, grad_z, z, mean, rstd, weight, seed, ctx.stream, ctx.p
        )
        if not dx.numel():  # no dropout: the branch and the residual have the same gradient
            dx = dresidual
        return dx, dbias, dresidual, dweight, dshift, None, None, None, None

    torch.library.register_autograd(
        "megabert::dropout_add_layer_norm", norm_backward, setup_context=norm_context
    )


if not MISSING:
    _register()
