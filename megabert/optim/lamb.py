"""LAMB and StableAdamW: Adam's update with a factor for each parameter, for any flat partitions of ZeRO. Norms for the factors are
summed over a parameter's slices on all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabert.optim.guarded import MOMENTS, FlatSegment, GuardedOptimizer, sum_squares, to_device

Slices = tuple[tuple[int, ...], list[list[Tensor]]]  # indices of units, and for each flat tensor their slices


class AdamByUnit(GuardedOptimizer):
    """Adam's update with a factor for each unit, a parameter or a part of one."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        # the number of units: more where `attach`'s segments split parameters
        self.units = sum(len(group["params"]) for group in self.param_groups)
        self._index_tensors: dict[tuple[int, ...], Tensor] = {}  # indices of units, copied to the device once

    def _adam(self, group: dict[str, Any], tensors: list[Tensor], targets: list[Tensor], lr: float) -> None:
        """Subtract from flat `targets` lr times Adam's direction m^ / (sqrt(v^) + eps) of `tensors`, by torch's fused kernel: one
        pass over gradients and moments, none if the guard skips the step."""
        steps, (beta1, beta2) = [self.state[t]["step"] for t in tensors], group["betas"]
        gradients = [t.grad.contiguous().view(-1) for t in tensors if t.grad is not None]
        first, second = ([self.state[t][kind].view(-1) for t in tensors] for kind in MOMENTS)
        torch._foreach_add_(steps, [1 - self.found_inf] * len(steps))
        torch._fused_adamw_(
            targets, gradients, first, second, [], steps, lr=lr, beta1=beta1, beta2=beta2, weight_decay=0.0,
            eps=group["eps"], amsgrad=False, maximize=False, grad_scale=self.grad_scale, found_inf=self.found_inf,
        )  # fmt: skip

    def _updates(self, group: dict[str, Any], tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Flat weights and their updates u = m^ / (sqrt(v^) + eps) + decay * w; of a skipped step the caller multiplies u by 0."""
        weights = [t.detach().view(-1) for t in tensors]
        updates = list(torch._foreach_mul(weights, group["weight_decay"]))
        self._adam(group, tensors, updates, -1.0)
        return weights, updates

    def _sliced(self, tensors: list[Tensor], *flat: list[Tensor]) -> Slices:
        """The units that have elements in `tensors`, and their slices of each of `flat`, tensors of the same sizes."""
        segments = [
            (number, segment)
            for number, tensor in enumerate(tensors)
            for segment in self._segments.get(tensor, (FlatSegment(number, 0, tensor.numel(), 0),))
        ]
        slices = [[views[number][segment.start : segment.end] for number, segment in segments] for views in flat]
        return tuple(segment.index for _, segment in segments), slices

    def _sums(self, slices: Slices, device: torch.device) -> Tensor:
        """fp64 [rows, units]: the squares of each unit's elements, summed over its slices on all ranks."""
        indices, rows = slices
        sums = torch.zeros(len(rows), self.units, dtype=torch.float64, device=device)
        if indices:
            if indices not in self._index_tensors:
                self._index_tensors[indices] = to_device(indices, device, torch.int64)
            for row, views in zip(sums, rows, strict=True):
                row.index_add_(0, self._index_tensors[indices], sum_squares(views))
        if self._reduce_on is not None:
            dist.all_reduce(sums)
        return sums

    def _add(self, slices: Slices, rates: Tensor) -> None:
        """Add to each unit's weight its update times its rate. slices: those of weights and updates; rates: fp64 [units]."""
        indices, both = slices
        each = rates.float().unbind()
        for index, weight, update in zip(indices, *both, strict=True):
            weight.addcmul_(update, each[index])


class Lamb(AdamByUnit):
    """LAMB (You et al. 2020) as NVIDIA's BERT recipe runs it.

    Bias correction, decay inside the update, ratio |w| / |u| for each unit, 1 if either norm is 0. As in apex's FusedLAMB by default
    (`use_nvlamb=False`, csrc/multi_tensor_lamb.cu: `if (use_nvlamb || (decay != 0.0))`), parameters without weight decay use the
    plain Adam step.
    """

    def _update_group(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        if not group["weight_decay"]:
            self._adam(group, tensors, [t.detach().view(-1) for t in tensors], group["lr"])
            return
        weights, updates = self._updates(group, tensors)
        slices = self._sliced(tensors, weights, updates)
        weight_norms, update_norms = self._sums(slices, weights[0].device).sqrt()
        valid = (weight_norms > 0) & (update_norms > 0)
        ratios = torch.where(valid, weight_norms / update_norms, 1.0)
        self._add(slices, -group["lr"] * (1 - self.found_inf.double()) * ratios)


class StableAdamW(AdamByUnit):
    """AdamW whose rate is divided by the root mean square of g / sqrt(v^) of a parameter if that is above 1, so that gradients
    much larger than the second moment lead to a smaller step (Wortsman et al. 2023, Stable and low-precision training, section
    3.5; ModernBERT's optimizer)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, lr, betas, eps)
        # sizes of units by the tensors of a group, not by the units in them, of which a rank may have none in several groups: all ranks
        # count the same groups
        self._counted: dict[tuple[int, ...], Tensor] = {}

    def _update_group(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        skip = self.found_inf.double() != 0
        squares = self._surprise(group, tensors)
        weights, updates = self._updates(group, tensors)
        slices = self._sliced(tensors, weights, updates)
        (sums,) = self._sums(self._sliced(tensors, squares), skip.device)
        factors = 1 / (sums / self._sizes(tensors, slices, skip.device)).sqrt().clamp(min=1)
        self._add(slices, torch.where(skip, 0.0, -group["lr"] * factors))

    def _sizes(self, tensors: list[Tensor], slices: Slices, device: torch.device) -> Tensor:
        """fp64 [units]: elements of each unit; 1 for units of other groups. A collective at the first call for `tensors`."""
        (indices, (views, _)), group = slices, tuple(map(id, tensors))
        if group not in self._counted:
            roots = [torch.full((1,), math.sqrt(view.numel()), device=device) for view in views]
            self._counted[group] = self._sums((indices, [roots]), device)[0].round().clamp(min=1)
        return self._counted[group]

    def _surprise(self, group: dict[str, Any], tensors: list[Tensor]) -> list[Tensor]:
        """Flat |g| / max(sqrt(v^), eps) of the next update."""
        beta2 = group["betas"][1]
        gradients = [t.grad.reshape(-1) for t in tensors if t.grad is not None]
        if self.grad_scale is not None:
            gradients = list(torch._foreach_div(gradients, self.grad_scale))
        second = torch._foreach_mul([self.state[t]["exp_avg_sq"].view(-1) for t in tensors], beta2)
        torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta2)
        torch._foreach_div_(second, (1 - beta2 ** (self.state[tensors[0]]["step"].double() + 1)).float())
        torch._foreach_sqrt_(second)
        torch._foreach_clamp_min_(second, group["eps"])
        return list(torch._foreach_div(gradients, second))
