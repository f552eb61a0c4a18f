"""Result of one update, and the tables of losses from which it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megabert.optim.guarded import to_device


class HostCopy:
    """A scalar that is being copied from the device; reading it waits only for the copy, not for later work."""

    def __init__(self, value: Tensor) -> None:
        self._value, self._copied = value, None
        if value.is_cuda:
            self._value = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def __float__(self) -> float:
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._value)


@dataclass(frozen=True)
class UpdateResult:
    """The result of an update, summed over ranks and micro-steps; tensors are fp64 scalars on the device.

    `skipped`: weights and moments are unchanged, on every rank. `vetoed`: skipped at the caller's request; any other skip is a bad
    update. Values are read on demand: `skipped` waits for the end of the update, `float(host_loss)` for its last forward pass.
    """

    loss: Tensor  # weighted sum of the losses
    losses: Tensor  # [k], means over the update's items
    correct: Tensor  # [k], numbers of correct answers
    counts: Tensor  # [k], numbers of items
    grad_norm: Tensor  # fp32, before clipping; inf when skipped
    applied: Tensor  # fp32, 1 or 0
    vetoed: bool
    host_loss: HostCopy  # `loss`, read without waiting for the optimizer
    host_applied: HostCopy

    @property
    def skipped(self) -> bool:
        return not float(self.host_applied)

    @property
    def accuracies(self) -> Tensor:
        return self.correct / self.counts.clamp(min=1)


def doubles(output: Sequence[Tensor]) -> Tensor:
    """The output of a module, k loss sums and k counts of correct answers, as fp64 [2 k]."""
    return torch.stack([value.double() for value in output])


def scaled_loss(losses: Sequence[Tensor], scale: Tensor) -> Tensor:
    """Weighted sum of losses. A non-finite one makes every gradient non-finite, on every rank."""
    loss = (torch.stack(list(losses)) * scale).sum()
    return loss * (1 + (loss.detach() - loss.detach()))  # 1 for a finite loss, NaN otherwise


def loss_table(output: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """fp64 [k, 3]: loss sum, correct answers and items of each term, from a module's output for one batch."""
    values = doubles(output)
    return torch.stack([*values.view(2, -1), to_device(counts, values.device, values.dtype)], 1)
