"""Dropout of torch's backends on the CPU whose mask follows the row, whichever rank and micro-batch the row is in.

A seed of two elements is one of a whole update, and the place of this batch's first row among the update's rows: the mask
of a row depends on the seed, the operation's number and the row's place alone. Native backends take such seeds everywhere.
Torch's own on CUDA, `compiled` and `apex` do not: they draw from torch's generator, which follows the rank.
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor


def follows_rows(x: Tensor, seed: Tensor) -> bool:
    """Whether dropout of x [B, ...] is drawn row by row: `seed` has a place, and can be read without waiting."""
    return seed.numel() == 2 and x.device.type == "cpu"


def dropout(x: Tensor, p: float, seed: Tensor, stream: int) -> Tensor:
    """Zeroes a share `p` of x [B, ...] and scales the rest by 1 / (1 - p)."""
    if not p or not follows_rows(x, seed):
        return F.dropout(x, p, training=p > 0)
    key, first = seed.tolist()
    factor, draw = torch.empty_like(x, memory_format=torch.contiguous_format), torch.Generator()
    for row, part in enumerate(factor, first):
        digest = hashlib.blake2b(f"{key} {stream} {row}".encode(), digest_size=8).digest()
        part.bernoulli_(1 - p, generator=draw.manual_seed(int.from_bytes(digest, "little") >> 1))
    return x * factor.div_(1 - p)
