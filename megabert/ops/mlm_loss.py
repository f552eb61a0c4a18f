"""Masked-LM loss: a sum over real labels; padded vocabulary entries are never predicted and add nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megabert.ops.backend import MISSING


def mlm_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocab_size: int, backend: str,
    label_smoothing: float = 0.0, z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Cross-entropy of hidden @ weight^T + bias over the first `vocab_size` entries.

    hidden [N, D], weight [V', D], bias [V'] with V' >= vocab_size, labels int64 [N] (-100: no prediction).
    label_smoothing (Szegedy et al. 2016) as in torch's cross_entropy; z_loss adds z_loss * log-sum-exp^2 to each
    prediction's loss (Chowdhery et al. 2022).
    Returns (loss summed over predictions, fp32 scalar; correct predictions, int64 scalar).
    The native backend computes the gradients together with the loss and never holds all logits at once.
    """
    if backend == "native":
        need_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        op = torch.ops.megabert.mlm_loss
        return op(hidden, weight, bias, labels, vocab_size, label_smoothing, z_loss, need_grad)[:2]
    padding = weight.shape[0] - vocab_size
    bias = F.pad(bias[:vocab_size], (0, padding), value=-torch.inf)
    logits = F.linear(hidden, weight, bias)  # (N, V'), -inf from V on: no probability, no gradient
    if label_smoothing:
        logits = logits[:, :vocab_size]  # its mean over the vocabulary takes no -inf
    return mlm_loss_of_logits(logits, labels, backend, label_smoothing, z_loss)


def mlm_logits(hidden: Tensor, weight: Tensor, bias: Tensor, vocab_size: int) -> Tensor:
    """hidden [N, D], weight [V', D], bias [V'] -> logits [N, V], the first `vocab_size` columns of a product.

    The whole padded matrix is multiplied, here and above: a slice of it would be aligned to nothing, which matrix units
    pay for, and its gradient would be copied into a zeroed whole.
    """
    return F.linear(hidden, weight, bias)[:, :vocab_size]


def mlm_loss_of_logits(
    logits: Tensor, labels: Tensor, backend: str, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The same from logits [N, V] that exist already."""
    if backend == "native":
        need_grad = torch.is_grad_enabled() and logits.requires_grad
        op = torch.ops.megabert.mlm_loss_of_logits
        return op(logits, labels, label_smoothing, z_loss, need_grad)[:2]
    logits = logits.float()
    loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)  # ignores -100
    if z_loss:
        loss = loss + z_loss * (logits.logsumexp(-1).square() * (labels >= 0)).sum()
    return loss, (logits.detach().argmax(-1) == labels).sum()


def _register() -> None:
    def results(like: Tensor, rows: int) -> tuple[Tensor, ...]:
        scalar, row = like.new_empty((), dtype=torch.float32), like.new_empty(rows, dtype=torch.float32)
        return scalar, like.new_empty((), dtype=torch.int64), like.new_empty((), dtype=torch.int64), row

    @torch.library.register_fake("megabert::mlm_loss")
    def _(
        hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocab_size: int,
        label_smoothing: float, z_loss: float, need_grad: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        gradients = [t.new_empty(t.shape[0] * need_grad, *t.shape[1:]) for t in (hidden, weight, bias)]
        return *results(hidden, hidden.shape[0]), *gradients

    @torch.library.register_fake("megabert::mlm_loss_of_logits")
    def _(logits: Tensor, labels: Tensor, label_smoothing: float, z_loss: float, need_grad: bool) -> tuple[Tensor, ...]:
        rows, entries = logits.shape
        return *results(logits, rows), logits.new_empty(rows * need_grad, entries)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _loss, *rest = output
        ctx.others = len(inputs) - len(rest[3:])
        ctx.save_for_backward(*rest[3:])
        ctx.mark_non_differentiable(*rest)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        gradients = [None if grad is None else t * grad for t in ctx.saved_tensors]  # the scalar stays fp32
        return *gradients, *[None] * ctx.others

    for op in ("mlm_loss", "mlm_loss_of_logits"):
        torch.library.register_autograd(f"megabert::{op}", backward, setup_context=setup_context)


if not MISSING:
    _register()
