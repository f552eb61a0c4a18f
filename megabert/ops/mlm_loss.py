"""The masked-LM loss is a sum over real labels; padded vocabulary entries are never predicted and add nothing."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


def mlm_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocab_size: int, backend: str
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of hidden @ weight^T + bias over the first `vocab_size` entries.

    hidden [N, D], weight [V', D], bias [V'] with V' >= vocab_size, labels int64 [N] (-100: no prediction).
    Returns (loss summed over predictions, fp32 scalar; correct predictions, int64 scalar).
    """
    logits = F.linear(hidden, weight[:vocab_size], bias[:vocab_size]).float()  # (N, V)
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    return loss, (logits.detach().argmax(-1) == labels).sum()
