"""Rotary positions: queries and keys are turned by angles that grow with the token's place (Su et al. 2021, "RoFormer")."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

THETA = 10_000.0  # the longest wavelength is 2 pi times this


class Rotation(NamedTuple):
    """Cosines and sines of the angles, [B, T, 1, 1, d / 2] each."""

    cos: Tensor
    sin: Tensor


def rotation(position_ids: Tensor, size: int, dtype: torch.dtype) -> Rotation:
    """position_ids int [B, T] -> the angles of heads of `size` columns, computed in fp32 and rounded to `dtype`."""
    columns = torch.arange(0, size, 2, dtype=torch.float32, device=position_ids.device)
    angles = position_ids[..., None, None, None].float() * THETA ** (-columns / size)
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(qkv: Tensor, heads: int, angles: Rotation) -> Tensor:
    """qkv [B, T, 3D], queries, keys, values head by head -> the same, queries and keys turned.

    Column i of a head is turned with column i + d / 2, as transformers does.
    """
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
    result = qkv.clone(memory_format=torch.contiguous_format)
    old, new = (x.view(*x.shape[:-1], 3, heads, 2, -1)[..., :2, :, :, :] for x in (qkv, result))
    (first, second), (new_first, new_second) = old.unbind(-2), new.unbind(-2)
    new_first.mul_(cos).addcmul_(second, sin, value=-1)
    new_second.mul_(cos).addcmul_(first, sin)
    return result
