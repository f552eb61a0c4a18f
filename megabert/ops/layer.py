"""The element-wise rest of an encoder layer: bias + GELU and bias + dropout + residual + LayerNorm, each in one pass over
memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabert.ops import row_dropout
from megabert.ops.backend import MISSING

GRAPHS = 64  # of one compiled function at most


def bias_gelu(x: Tensor, bias: Tensor, backend: str) -> Tensor:
    """Exact GELU, y = z * Phi(z) with z = x + bias (Hendrycks & Gimpel 2016). x [..., D], bias [D] -> [..., D]."""
    if backend == "native":
        return torch.ops.megabert.bias_gelu(x, bias)
    return (_compiled(_bias_gelu) if backend == "compiled" else _bias_gelu)(x, bias)


def bias_geglu(x: Tensor, bias: Tensor, backend: str) -> Tensor:
    """gelu(a) * b of (a, b) = x + bias (Shazeer 2020, "GLU Variants"), with the exact GELU. x [..., 2F], bias [2F] -> [..., F]."""
    if backend == "native":
        return torch.ops.megabert.bias_geglu(x, bias)
    return (_compiled(_bias_geglu) if backend == "compiled" else _bias_geglu)(x, bias)


def dropout(x: Tensor, p: float, seed: Tensor, stream: int, backend: str) -> Tensor:
    """Zeroes a share `p` of x [..., D] and scales the rest by 1 / (1 - p); seed and stream as below."""
    if p and backend == "native":
        return torch.ops.megabert.dropout(x, seed, stream, p)
    return row_dropout.dropout(x, p, seed, stream)


def dropout_add_layer_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor,
    p: float, eps: float, seed: Tensor, stream: int, backend: str, post: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """z = residual + dropout(x + bias) and LayerNorm(z) * weight + shift; returns (normed, z), or `post` (normed, normed).

    x, residual [..., D]; bias, weight, shift [D]. seed int64 [1] and stream number the dropout mask of the native
    backend; the others draw from torch's generator. A seed of two elements says too which row of a larger batch x[0] is
    (`row_dropout`).
    """
    if backend == "native":
        if post:
            return _Norm.apply(x, bias, residual, weight, shift, seed, stream, p, eps, post)
        op = torch.ops.megabert.dropout_add_layer_norm
        return op(x, bias, residual, weight, shift, seed, stream, p, eps)[:2]
    if backend == "apex":
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine

        z = residual + F.dropout(x + bias, p, training=p > 0)
        normed = fused_layer_norm_affine(z, weight, shift, z.shape[-1:], eps)
    elif backend == "compiled":
        normed, z = _compiled(_dropout_add_layer_norm)(x, bias, residual, weight, shift, p, eps)
    else:
        z = residual + row_dropout.dropout(x + bias, p, seed, stream)
        normed = F.layer_norm(z, z.shape[-1:], weight, shift, eps)
    return normed, normed if post else z


class _Norm(torch.autograd.Function):
    """The norm and the next residual: `post` the norm for both of its uses, so that backward reads two gradients and autograd
    need not add them in memory first."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor,
        seed: Tensor, stream: int, p: float, eps: float, post: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        op = torch.ops.megabert.dropout_add_layer_norm
        y, z, mean, rstd = op(x, bias, residual, weight, shift, seed, stream, p, eps)
        ctx.save_for_backward(z, mean, rstd, weight, seed)
        ctx.numbers, ctx.of_z = (stream, p), not post
        ctx.set_materialize_grads(False)
        return y, y.view_as(y) if post else z

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, second: Tensor | None) -> tuple[Tensor | None, ...]:
        found = _norm_gradients(grad, second, ctx.of_z, ctx.saved_tensors, *ctx.numbers)
        return *found, None, None, None, None, None


def _norm_gradients(
    grad: Tensor | None, second: Tensor | None, of_z: bool, saved: tuple[Tensor, ...], stream: int, p: float
) -> tuple[Tensor | None, ...]:
    """Gradients of x, bias, residual, weight and shift."""
    z, mean, rstd, weight, seed = saved
    if grad is None and not of_z:
        grad, second = second, None
    if grad is None:
        grad = torch.zeros_like(z)
    op = torch.ops.megabert.dropout_add_layer_norm_backward
    dx, dresidual, dbias, dweight, dshift = op(grad, second, of_z, z, mean, rstd, weight, seed, stream, p)
    # no dropout: the branch and the residual have the same gradient
    return dx if dx.numel() else dresidual, dbias, dresidual, dweight, dshift


def _bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def _bias_geglu(x: Tensor, bias: Tensor) -> Tensor:
    value, gate = (x + bias).chunk(2, -1)
    return F.gelu(value) * gate


def _dropout_add_layer_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, p: float, eps: float
) -> tuple[Tensor, Tensor]:
    z = residual + F.dropout(x + bias, p, training=p > 0)
    return F.layer_norm(z, z.shape[-1:], weight, shift, eps), z


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One graph, so that what torch cannot compile is an error and no slower way taken unsaid.

    Training, evaluation and a teacher have shapes and gradients of their own, each with its graph: more than torch's 8.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    return torch.compile(function, fullgraph=True)


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

    @torch.library.register_fake("megabert::bias_geglu")
    def _(x: Tensor, bias: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)

    @torch.library.register_fake("megabert::bias_geglu_backward")
    def _(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return _like(x), _like(bias)

    def geglu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.megabert.bias_geglu_backward(grad, *ctx.saved_tensors)

    torch.library.register_autograd("megabert::bias_geglu", geglu_backward, setup_context=gelu_context)

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
        grad: Tensor, second: Tensor | None, of_z: bool, z: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor,
        seed: Tensor, stream: int, p: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        dx = _like(z) if int(p * 65536 + 0.5) else z.new_empty(0)
        return dx, _like(z), _like(weight), _like(weight), _like(weight)

    def norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _x, _bias, _residual, weight, _shift, seed, stream, p, _eps = inputs
        ctx.numbers = stream, p
        _y, z, mean, rstd = output
        ctx.save_for_backward(z, mean, rstd, weight, seed)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)

    def norm_backward(
        ctx: Any, grad: Tensor | None, grad_z: Tensor | None, _mean: None, _rstd: None
    ) -> tuple[Tensor | None, ...]:
        return *_norm_gradients(grad, grad_z, True, ctx.saved_tensors, *ctx.numbers), None, None, None, None

    torch.library.register_autograd("megabert::dropout_add_layer_norm", norm_backward, setup_context=norm_context)


if not MISSING:
    _register()
