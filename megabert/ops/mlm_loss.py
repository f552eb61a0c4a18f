"""The masked-LM loss is a sum over real labels; padded vocabulary entries are never predicted and add nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megabert.ops.backend import MISSING

IGNORE = -100


def mlm_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocab_size: int, backend: str
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of hidden @ weight^T + bias over the first `vocab_size` entries.

    hidden [N, D], weight [V', D], bias [V'] with V' >= vocab_size, labels int64 [N] (-100: no prediction).
    Returns (loss summed over predictions, fp32 scalar; correct predictions, int64 scalar).
    The native backend computes the gradients together with the loss and never holds all logits at once.
    """
    if backend == "native":
        need_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        return torch.ops.megabert.mlm_loss(hidden, weight, bias, labels, vocab_size, need_grad)[:2]
    logits = F.linear(hidden, weight[:vocab_size], bias[:vocab_size]).float()  # (N, V)
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    return loss, (logits.detach().argmax(-1) == labels).sum()


def _register() -> None:
    @torch.library.register_fake("megabert::mlm_loss")
    def _(hidden, weight, bias, labels, vocab_size, need_grad):
        keep = 1 if need_grad else 0
        scalar = hidden.new_empty((), dtype=torch.float32)
        gradients = [t.new_empty(t.shape[0] * keep, *t.shape[1:]) for t in (hidden, weight, bias)]
        return scalar, hidden.new_empty((), dtype=torch.int64), *gradients

    def setup_context(ctx, inputs, output):
        _loss, correct, *gradients = output
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(correct, *gradients)
        ctx.set_materialize_grads(False)

    def backward(ctx, grad, *_):
        dhidden, dweight, dbias = (t * grad for t in ctx.saved_tensors)  # the scalar stays fp32
        return dhidden, dweight, dbias, None, None, None

    torch.library.register_autograd("megabert::mlm_loss", backward, setup_context=setup_context)


if not MISSING:
    _register()
