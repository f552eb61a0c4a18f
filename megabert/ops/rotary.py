"""Rotary positions: queries and keys are rotated by angles proportional to the position (Su et al. 2021, "RoFormer")."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabert.ops.backend import register


class Rotation(NamedTuple):
    """Cosines and sines of the angles, fp32 [B, T, d / 2] each."""

    cos: Tensor
    sin: Tensor


def rotation(position_ids: Tensor, size: int, theta: float = 10_000.0) -> Rotation:
    """position_ids int [B, T] -> the angles for heads of `size` columns; the longest wavelength is 2 pi `theta`."""
    columns = torch.arange(0, size, 2, dtype=torch.float32, device=position_ids.device)
    angles = position_ids[..., None].float() * theta ** (-columns / size)
    return Rotation(angles.cos(), angles.sin())


def rotate(qkv: Tensor, heads: int, angles: Rotation, backend: str) -> Tensor:
    """qkv [B, T, 3D], queries, keys, values head by head -> the same with rotated queries and keys; `backend`: the layer's.

    Column i of a head is rotated with column i + d / 2, as in transformers. The native backend computes in fp32, others use torch's
    operations in the type of `qkv`.
    """
    if backend == "native":
        return torch.ops.megabert.rotate(qkv, *angles, heads, False)
    return _Rotate.apply(qkv, heads, *angles)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return _turned(qkv, heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, ctx.heads, cos, -sin), None, None, None


def _turned(qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = (x[..., None, None, :].to(qkv.dtype) for x in (cos, sin))
    result = qkv.clone(memory_format=torch.contiguous_format)
    old, new = (x.view(*x.shape[:-1], 3, heads, 2, -1)[..., :2, :, :, :] for x in (qkv, result))
    (first, second), (new_first, new_second) = old.unbind(-2), new.unbind(-2)
    new_first.mul_(cos).addcmul_(second, sin, value=-1)
    new_second.mul_(cos).addcmul_(first, sin)
    return result


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _qkv, cos, sin, *ctx.options = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    heads, back = ctx.options
    return torch.ops.megabert.rotate(grad, *ctx.saved_tensors, heads, not back), None, None, None, None


register("rotate", lambda qkv, *_: qkv.new_empty(qkv.shape), _save, _backward)
