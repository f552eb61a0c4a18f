"""Dropout, and bias + dropout + residual + LayerNorm in one pass over memory.

A dropout mask of native backends is a function of a seed tensor and of the operation's number in the model, its `stream`. A seed of
two elements has the seed of an update, and the index of this batch's first row among the update's rows, so that a row's mask does not
depend on ranks and micro-batches. Torch's backends follow this on the CPU (`row_dropout`); on CUDA, and compiled, they draw from
torch's generator, which depends on the rank.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabert.ops.backend import register
from megabert.ops.bias_gelu import or_zeros, plus
from megabert.ops.embedding import adds_in_16_bits


def follows_rows(x: Tensor, seed: Tensor) -> bool:
    """Whether torch's dropout of x [B, ...] is drawn row by row: `seed` has an index and is on the CPU."""
    return seed.numel() == 2 and x.device.type == "cpu" and not torch.compiler.is_compiling()


def row_dropout(x: Tensor, p: float, seed: Tensor, stream: int) -> Tensor:
    """Zero a share `p` of x [B, ...] and scale the rest by 1 / (1 - p), with a torch generator for each row."""
    if not p or not follows_rows(x, seed):
        return F.dropout(x, p, training=p > 0)
    key, first = seed.tolist()
    factor, draw = torch.empty_like(x, memory_format=torch.contiguous_format), torch.Generator()
    for row, part in enumerate(factor, first):
        digest = hashlib.blake2b(f"{key} {stream} {row}".encode(), digest_size=8).digest()
        part.bernoulli_(1 - p, generator=draw.manual_seed(int.from_bytes(digest, "little") >> 1))
    return x * factor.div_(1 - p)


def dropout(x: Tensor, p: float, seed: Tensor, stream: int, backend: str) -> Tensor:
    """Zero a share `p` of x [..., D] and scale the rest by 1 / (1 - p)."""
    if p and backend == "native":
        return torch.ops.megabert.dropout(x, seed, stream, p)
    return row_dropout(x, p, seed, stream)


def norm(x: Tensor, weight: Tensor, shift: Tensor | None, eps: float, rms: bool = False) -> Tensor:
    """LayerNorm, or RMSNorm (Zhang & Sennrich 2019), over the columns of x [..., D]; gradients are added up in fp32."""
    if rms:
        return F.rms_norm(x, weight.shape, weight, eps)
    if adds_in_16_bits(x):
        shift = None if shift is None else shift.float()
        return F.layer_norm(x.float(), weight.shape, weight.float(), shift, eps).to(x.dtype)
    return F.layer_norm(x, weight.shape, weight, shift, eps)


def dropout_add_layer_norm(
    x: Tensor, bias: Tensor | None, residual: Tensor, weight: Tensor, shift: Tensor | None,
    p: float, eps: float, seed: Tensor, stream: int, backend: str, post: bool = False, rms: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """z = residual + dropout(x + bias) and LayerNorm(z) * weight + shift; returns (normed, z), or `post` (normed, normed).

    x, residual [..., D]; bias, weight, shift [D]; seed int64 [1] or [2]. `rms`: RMSNorm, which torch computes under any backend.
    """
    if backend == "native" and not rms:
        bias, shift = or_zeros(bias, x), or_zeros(shift, x)
        if post:
            return _PostNorm.apply(x, bias, residual, weight, shift, seed, stream, p, eps)
        return torch.ops.megabert.dropout_add_layer_norm(x, bias, residual, weight, shift, seed, stream, p, eps)[:2]
    z = residual + dropout(plus(x, bias), p, seed, stream, backend)
    normed = norm(z, weight, shift, eps, rms)
    return normed, normed if post else z


class _PostNorm(torch.autograd.Function):
    """Post-norm with both outputs, so that backward reads two gradients, which autograd would otherwise add in memory first."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor,
        seed: Tensor, stream: int, p: float, eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        op = torch.ops.megabert.dropout_add_layer_norm
        y, z, mean, rstd = op(x, bias, residual, weight, shift, seed, stream, p, eps)
        ctx.save_for_backward(z, mean, rstd, weight, seed)
        ctx.numbers = stream, p
        ctx.set_materialize_grads(False)
        return y, y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, second: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_gradients(grad, second, False, ctx.saved_tensors, *ctx.numbers), None, None, None, None


def _gradients(
    grad: Tensor | None, second: Tensor | None, of_z: bool, saved: tuple[Tensor, ...], stream: int, p: float
) -> tuple[Tensor | None, ...]:
    """Gradients of x, bias, residual, weight and shift."""
    z, mean, rstd, weight, seed = saved
    if grad is None:
        grad, second = (torch.zeros_like(z), second) if of_z or second is None else (second, None)
    op = torch.ops.megabert.dropout_add_layer_norm_backward
    dx, dresidual, dbias, dweight, dshift = op(grad, second, of_z, z, mean, rstd, weight, seed, stream, p)
    # no dropout: the branch and the residual have the same gradient
    return dx if dx.numel() else dresidual, dbias, dresidual, dweight, dshift


def _save_seed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _x, seed, *ctx.numbers = inputs
    ctx.save_for_backward(seed)


def _dropout_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.megabert.dropout(grad, *ctx.saved_tensors, *ctx.numbers), None, None, None


def _shapes(x: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    like, statistic = [x.new_empty(x.shape) for _ in range(2)], x.new_empty(x.shape[:-1], dtype=torch.float32)
    return *like, statistic, torch.empty_like(statistic)


def _backward_shapes(
    grad: Tensor, second: Tensor | None, of_z: bool, z: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor,
    seed: Tensor, stream: int, p: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    dx = z.new_empty(z.shape) if int(p * 65536 + 0.5) else z.new_empty(0)
    return dx, z.new_empty(z.shape), *(weight.new_empty(weight.shape) for _ in range(3))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _x, _bias, _residual, weight, _shift, seed, *ctx.numbers, _eps = inputs
    _y, z, mean, rstd = output
    ctx.save_for_backward(z, mean, rstd, weight, seed)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_z: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    return *_gradients(grad, grad_z, True, ctx.saved_tensors, *ctx.numbers), None, None, None, None


register("dropout", lambda x, *_: x.new_empty(x.shape), _save_seed, _dropout_backward)
register("dropout_add_layer_norm", _shapes, _save, _backward, _backward_shapes)
