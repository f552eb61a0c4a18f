"""Masked-LM loss: a sum over real labels, without padded vocabulary entries."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabert.ops.backend import register

AT_ONCE = 1 << 10  # `mlm_losses`: predictions whose logits are in memory at once


def mlm_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocab_size: int, backend: str
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of hidden @ weight^T + bias over the first `vocab_size` entries.

    hidden [N, D], weight [V', D], bias [V'] with V' >= vocab_size, labels int64 [N] (-100: no prediction).
    Returns (loss summed over predictions, fp32 scalar; correct predictions, int64 scalar).
    The native backend computes gradients together with the loss, without all logits in memory.
    """
    if backend == "native":
        need_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad or bias.requires_grad)
        return torch.ops.megabert.mlm_loss(hidden, weight, bias, labels, vocab_size, need_grad)[:2]
    bias = F.pad(bias[:vocab_size], (0, weight.shape[0] - vocab_size), value=-torch.inf)
    logits = F.linear(hidden, weight, bias).float()  # (N, V'), -inf from V on: no probability, no gradient
    loss = F.cross_entropy(logits, labels, reduction="sum")  # ignores -100
    return loss, (logits.detach().argmax(-1) == labels).sum()


@torch.no_grad()
def mlm_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocab_size: int, groups: Tensor
) -> tuple[Tensor, Tensor]:
    """`mlm_loss` of each of G groups of predictions, given by bool [G, N], without gradients.

    Returns (loss sums, fp64 [G]; correct predictions, int64 [G]).
    """
    loss = torch.zeros(len(groups), dtype=torch.float64, device=hidden.device)
    correct = torch.zeros_like(loss, dtype=torch.int64)
    parts = zip(hidden.split(AT_ONCE), labels.split(AT_ONCE), groups.split(AT_ONCE, 1), strict=True)
    for states, wanted, group in parts:
        logits = mlm_logits(states, weight, bias, vocab_size).float()
        losses = F.cross_entropy(logits, wanted, reduction="none").double()  # ignores -100
        loss += losses.where(group, 0.0).sum(1)
        correct += (group & (logits.argmax(-1) == wanted)).sum(1)
    return loss, correct


def mlm_logits(hidden: Tensor, weight: Tensor, bias: Tensor, vocab_size: int) -> Tensor:
    """hidden [N, D], weight [V', D], bias [V'] -> logits [N, V], the first `vocab_size` columns of a product.

    The whole padded matrix is multiplied, here and above: a slice would be unaligned, which is slow on matrix units, and its
    gradient would be copied into a zeroed matrix.
    """
    return F.linear(hidden, weight, bias)[:, :vocab_size]


def _shapes(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocab_size: int, need_grad: bool
) -> tuple[Tensor, ...]:
    loss, row = (hidden.new_empty(shape, dtype=torch.float32) for shape in ((), hidden.shape[:1]))
    correct, predictions = (hidden.new_empty((), dtype=torch.int64) for _ in range(2))
    gradients = [t.new_empty(t.shape[0] if need_grad else 0, *t.shape[1:]) for t in (hidden, weight, bias)]
    return loss, correct, predictions, row, *gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _loss, *rest = output
    ctx.save_for_backward(*rest[3:])
    ctx.mark_non_differentiable(*rest)
    ctx.set_materialize_grads(False)


def _scaled(t: Tensor, factor: Tensor) -> Tensor:
    """`t` times the fp32 scalar `factor`, which a CUDA product of mixed types would round to the type of `t`."""
    return (t.float() * factor).to(t.dtype) if t.is_cuda else t * factor


def _backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    gradients = [None if grad is None else _scaled(t, grad) for t in ctx.saved_tensors]
    return *gradients, None, None, None


register("mlm_loss", _shapes, _save, _backward)
