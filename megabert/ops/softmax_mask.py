"""Attention probabilities in one pass over the scores: scale, mask, softmax, dropout, without a mask of the scores' size.

A fully masked row is all zeros, with zero gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megabert.ops.backend import register


def fused_softmax_mask(
    scores: Tensor, *, key_start: Tensor | None = None, key_end: Tensor | None = None, mask: Tensor | None = None,
    scale: float = 1.0, p: float = 0.0, seed: Tensor | None = None, stream: int = 0,
) -> Tensor:  # fmt: skip
    """dropout(softmax(scale * scores + mask)) over the keys. scores [B, H, Q, K] -> [B, H, Q, K].

    A query attends to keys [key_start, key_end): int32 [B or 1, Q or 1] each. mask: bool (true: attend) or added to the scores (of
    their dtype), broadcastable to them in any of four dimensions; it has no gradient. With p > 0, `seed` int64 [1] or [2] and
    `stream` determine the dropout mask.

    Raises ValueError for dropout without a seed and for a mask that requires a gradient. Bounds outside [0, K] are a
    RuntimeError on the CPU and make their rows NaN on CUDA.
    """
    if mask is not None and mask.requires_grad:
        raise ValueError("fused_softmax_mask: mask gets no gradient here; detach it, or add it to the scores")
    if seed is None:
        if p:
            raise ValueError(f"fused_softmax_mask: p={p} needs a seed")
        seed = torch.zeros(1, dtype=torch.int64, device=scores.device)
    return torch.ops.megabert.softmax_mask(scores, key_start, key_end, mask, seed, stream, scale, p)[0]


def _shapes(scores: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    drops = int(inputs[-1] * 65536 + 0.5)
    return scores.new_empty(scores.shape), scores.new_empty(scores.shape if drops else 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *_, seed, stream, scale, p = inputs
    out, probs = output
    ctx.numbers = stream, scale, p
    ctx.save_for_backward(probs if probs.numel() else out, seed)  # without dropout they are the same
    ctx.mark_non_differentiable(probs)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _grad_probs: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    dscores = torch.ops.megabert.softmax_mask_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return dscores, *[None] * 7


register("softmax_mask", _shapes, _save, _backward, lambda grad, probs, *_: probs.new_empty(probs.shape))
