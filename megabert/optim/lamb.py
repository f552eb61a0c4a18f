"""LAMB with one trust ratio a parameter, whatever flat partitions ZeRO hands it: norms are summed over its slices on all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabert.optim.guarded import FlatSegment, GuardedOptimizer, blocks, to_device

# (index of what has a trust ratio, slice of its weight, slice of its update)
Sliced = tuple[int, Tensor, Tensor]


class Lamb(GuardedOptimizer):
    """LAMB (You et al. 2020) as NVIDIA's BERT recipe runs it.

    Bias correction, decay inside the update, ratio |w| / |u| a parameter (or a part of one), 1 where either norm is 0. As in
    apex's FusedLAMB by default (`use_nvlamb=False`, csrc/multi_tensor_lamb.cu: `if (use_nvlamb || (decay != 0.0))`),
    parameters without weight decay take the plain Adam step.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        # Each unit, a parameter or a part of one, has a trust ratio.
        self._units = sum(len(group["params"]) for group in self.param_groups)
        # Indices of units, copied to the device once.
        self._index_tensors: dict[tuple[int, ...], Tensor] = {}

    def set_units(self, units: int) -> None:
        """Number of what has a trust ratio, where `attach`'s segments cut parameters into parts."""
        self._units = units

    def _update_group(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        """Gradients are consumed: each becomes the update u = m^ / (sqrt(v^) + eps) + decay * w.

        A step that is not taken runs with g = 0, moments multiplied by 1 and an update of 0.
        """
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        device = tensors[0].device
        one = torch.ones((), dtype=torch.float64, device=device)
        taken = 1 - self.found_inf.double()
        skip = taken == 0
        steps = [self.state[t]["step"] for t in tensors]
        torch._foreach_add_(steps, [taken.float()] * len(steps))
        step = steps[0].double()
        divisor = one if self.grad_scale is None else self.grad_scale.double()
        # Share of a gradient in the first moment.
        share = ((1 - beta1) / divisor).float()
        keep1, keep2 = (torch.where(skip, 1.0, beta * one).float() for beta in (beta1, beta2))
        # Correction of the moments for their zero start; inf makes an update of 0.
        correction1 = torch.where(skip, math.inf, 1 - beta1**step).float()
        correction2 = torch.where(skip, 1.0, 1 - beta2**step).float()
        weights = [t.detach().view(-1) for t in tensors]
        updates = [t.grad.contiguous().view(-1) for t in tensors if t.grad is not None]
        first = [self.state[t]["exp_avg"].view(-1) for t in tensors]
        second = [self.state[t]["exp_avg_sq"].view(-1) for t in tensors]
        for w, u, m, v in blocks(weights, updates, first, second):
            torch._foreach_mul_(u, share)  # (1 - beta1) g
            for part in u:
                part.masked_fill_(skip, 0.0)  # NaN is not 0 by any factor
            torch._foreach_mul_(m, keep1)
            torch._foreach_add_(m, u)
            torch._foreach_mul_(v, keep2)
            torch._foreach_addcmul_(v, u, u, value=(1 - beta2) / (1 - beta1) ** 2)
            denominators = torch._foreach_div(v, correction2)
            torch._foreach_sqrt_(denominators)
            torch._foreach_add_(denominators, group["eps"])
            torch._foreach_copy_(u, m)
            torch._foreach_div_(u, correction1)
            torch._foreach_div_(u, denominators)
            if decay:
                torch._foreach_add_(u, w, alpha=decay)
        if not decay:
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
            return
        sliced = [
            (segment.index, w[segment.start : segment.end], u[segment.start : segment.end])
            for number, (tensor, w, u) in enumerate(zip(tensors, weights, updates, strict=True))
            for segment in self._segments.get(tensor, (FlatSegment(number, 0, w.numel(), 0),))
        ]
        rates = (-group["lr"] * taken * self._trust_ratios(sliced, device)).float().unbind()
        for index, weight, update in sliced:
            weight.addcmul_(update, rates[index])

    def _trust_ratios(self, sliced: list[Sliced], device: torch.device) -> Tensor:
        """fp64 [units]: |w| / |u| of every unit, from its slices on all ranks; 1 where either is 0."""
        squares = torch.zeros(2, self._units, dtype=torch.float64, device=device)
        if sliced:
            indices, *both = zip(*sliced, strict=True)
            if indices not in self._index_tensors:
                self._index_tensors[indices] = to_device(indices, device, torch.int64)
            for row, views in zip(squares, both, strict=True):
                norms = torch.stack(torch._foreach_norm(views)).double()
                row.index_add_(0, self._index_tensors[indices], norms.square())
        if self._reduce_on is not None:
            dist.all_reduce(squares)
        weight_norms, update_norms = squares.sqrt()
        valid = (weight_norms > 0) & (update_norms > 0)
        return torch.where(valid, weight_norms / update_norms, 1.0)
