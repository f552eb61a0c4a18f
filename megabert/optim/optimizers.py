"""Optimizers: AdamW, and LAMB with one trust ratio a parameter whatever flat partitions ZeRO hands it. Muon is in muon.py.

Every parameter is in exactly one group; LayerNorm weights and biases (fewer than two dimensions) do not decay. LAMB
has one trust ratio a parameter at every ZeRO stage: norms are sums over the parameter's pieces on all ranks. What the
gradients' norm decides (by what they are divided, whether the step is taken at all) stays on the device and is applied
inside the update rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabert.config import OptimizerConfig
from megabert.distributed.process_group import World

# What update rules keep of an element, in fp32; of Muon's matrices the first alone.
MOMENTS = ("exp_avg", "exp_avg_sq")
CACHED = 1 << 17  # elements of a piece on the CPU: five fp32 arrays of it fit a core's cache


def to_device(values: Sequence[float], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of host numbers on `device`. On CUDA from pinned memory: a copy from any other waits for the device."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


@dataclass(frozen=True)
class Segment:
    """Elements [start, end) of a flat tensor are elements [offset, offset + end - start) of parameter `index`."""

    index: int
    start: int
    end: int
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.end - self.start


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices with `weight_decay`, vectors and scalars without. Shared parameters count once."""
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    plain = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build(config: OptimizerConfig, model: nn.Module, apex: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """The configured optimizer over `model`'s parameters, by our and torch's kernels or by apex's; it does nothing until
    `attach` is called. `dtype`: of Muon's matrix products."""
    betas = (config.beta1, config.beta2)
    if config.name == "muon":
        from megabert.optim.muon import Muon

        return Muon(model, config.lr, betas, config.eps, config.weight_decay, dtype)
    kind: Any = Lamb if config.name == "lamb" else AdamW
    if apex:
        from megabert.optim.apex_kernels import ApexAdamW, ApexLamb

        kind = ApexLamb if config.name == "lamb" else ApexAdamW
    groups = parameter_groups(model, config.weight_decay)
    return kind(groups, lr=config.lr, betas=betas, eps=config.eps)


class _Guarded(torch.optim.Optimizer):
    """What both update rules share: idle until attached, and a guard that never waits for the device.

    `guard` leaves two numbers on the device that the update rules read as they go: `grad_scale`, by which gradients are
    divided, and `found_inf`, 1 where the step changes nothing. Names and meaning are torch's (`torch.amp.GradScaler`), whose
    fused AdamW knows them. Both are None where DeepSpeed computes the norm, clips and skips.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    primed = False  # it began with moments of another run

    def attach(
        self,
        segments: Mapping[Tensor, tuple[Segment, ...]] | None = None,
        reduce_on: torch.device | None = None,
        world: World | None = None,
    ) -> None:
        """Start work.

        `segments` describes each tensor this optimizer will see (None: tensors are whole parameters); their indices are of
        what has a trust ratio of its own. `reduce_on` is the device of the collectives when parameters are spread over the
        ranks of `world` (None: they are not).
        """
        self._segments = dict(segments or {})
        self._reduce_on, self._attached = reduce_on, True

    @torch.no_grad()
    def guard(self, gradients: list[Tensor], limit: float, skip: bool = False) -> Tensor:
        """Decides from `gradients` what the next steps do: clip to the norm `limit` (0: never), or nothing where it is not
        finite or `skip` says so. Their global norm, fp32 on the device; inf where nothing is done.

        `gradients` are all that this rank holds; where parameters are spread over ranks, each element is on one rank,
        and the call is a collective.
        """
        home = gradients[0].device if gradients else self._reduce_on
        squares = torch.zeros((), dtype=torch.float64, device=home)
        if gradients:  # a rank can be left without any by a model of fewer elements than ranks
            squares += torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        if self._reduce_on is not None:
            dist.all_reduce(squares)
        norm = squares.sqrt().float()
        finite = torch.zeros_like(norm, dtype=torch.bool) if skip else torch.isfinite(norm)
        self.found_inf = (~finite).float()
        divisor = torch.clamp((norm + 1e-6) / limit, min=1.0) if limit > 0 else None
        self.grad_scale = None if divisor is None else divisor.where(finite, 1.0)
        return norm.where(finite, math.inf)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every tensor that has a gradient; none changes where the guard found one not finite."""
        assert closure is None
        if not getattr(self, "_attached", False):
            return  # DeepSpeed's wrappers take a trial step with zero gradients, which would count and decay
        self._update()

    def _update(self) -> None:
        raise NotImplementedError

    def updates_of(self, tensors: Iterable[Tensor]) -> int:
        """Updates that `tensors` have taken, skipped ones not counted; all of them have taken as many."""
        counts = {int(self.state[t]["step"]) if self.state.get(t) else 0 for t in tensors}
        assert len(counts) <= 1, counts
        return counts.pop() if counts else 0

    def moments_of(self, tensor: Tensor) -> dict[str, Tensor]:
        """Flat views of a tensor's moments; {} before its first update, unless it began with moments."""
        state = self.state.get(tensor)
        if not state or not (self.primed or int(state["step"])):
            return {}
        return {kind: state[kind].view(-1) for kind in self.kinds(tensor)}

    def kinds(self, tensor: Tensor) -> tuple[str, ...]:
        """Names of the moments that this rule keeps of a tensor."""
        return MOMENTS

    def resume(self, tensors: Iterable[Tensor], updates: int, primed: bool = False) -> None:
        """Make `tensors` such as have taken `updates` updates; moments that did not exist are zero and wait to be filled.
        `primed`: there are moments before the first update too."""
        self.primed = primed
        for tensor in tensors:
            if not updates and not primed:
                self.state.pop(tensor, None)
                continue
            if not self.state.get(tensor):
                self._begin(tensor)
            self.state[tensor]["step"].fill_(updates)

    def _begin(self, tensor: Tensor) -> None:
        state = self.state[tensor]
        state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        for kind in self.kinds(tensor):
            state[kind] = torch.zeros_like(tensor, memory_format=torch.contiguous_format)


class AdamW(_Guarded, torch.optim.AdamW):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019): torch's fused kernel, CPU and CUDA.

    Element-wise, so flat partitions need no care.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        torch.optim.AdamW.__init__(self, params, lr=lr, betas=betas, eps=eps, fused=True)

    def _update(self) -> None:
        torch.optim.AdamW.step(self)


class Lamb(_Guarded):
    """LAMB (You et al. 2020) as NVIDIA's BERT recipe runs it.

    Bias correction, decay inside the update, ratio |w| / |u| a parameter (or a part of one), 1 where either norm is 0. As in apex's
    FusedLAMB by default (`use_nvlamb=False`, csrc/multi_tensor_lamb.cu: `if (use_nvlamb || (decay != 0.0))`),
    parameters without weight decay take the plain Adam step.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._units = sum(len(group["params"]) for group in self.param_groups)  # each with a trust ratio
        self._owners: dict[tuple[int, ...], Tensor] = {}  # parameters' indices, copied to the device once

    def number_units(self, units: int) -> None:
        """So many have a trust ratio: parameters, and parts of those that the layout cut."""
        self._units = units

    def _update(self) -> None:
        for group in self.param_groups:
            # Every rank takes part in a group's norms, also one whose partition holds none of its elements.
            tensors = [p for p in group["params"] if p.grad is not None]
            if tensors:
                self._update_group(group, tensors)

    def _update_group(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        """Gradients are consumed: each becomes the update u = m^ / (sqrt(v^) + eps) + decay * w.

        A step that is not taken runs with g = 0, moments multiplied by 1 and an update of 0.
        """
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        for tensor in tensors:
            if not self.state.get(tensor):
                self._begin(tensor)
        home = tensors[0].device
        one = torch.ones((), dtype=torch.float64, device=home)
        taken = one if self.found_inf is None else 1 - self.found_inf.to(home).double()
        skip = taken == 0
        steps = [self.state[t]["step"] for t in tensors]
        torch._foreach_add_(steps, [taken.float()] * len(steps))
        step = steps[0].double()
        divisor = one if self.grad_scale is None else self.grad_scale.to(home).double()
        share = ((1 - beta1) / divisor).float()  # of a gradient in the first moment
        keep1, keep2 = (torch.where(skip, 1.0, beta * one).float() for beta in (beta1, beta2))
        # What corrects the moments for their zero start; inf makes an update of 0.
        correction1 = torch.where(skip, math.inf, 1 - beta1**step).float()
        correction2 = torch.where(skip, 1.0, 1 - beta2**step).float()
        weights = [t.detach().view(-1) for t in tensors]
        updates = [t.grad.contiguous().view(-1) for t in tensors if t.grad is not None]
        first = [self.state[t]["exp_avg"].view(-1) for t in tensors]
        second = [self.state[t]["exp_avg_sq"].view(-1) for t in tensors]
        for block in blocks(weights, updates, first, second):
            w, u, m, v = block
            torch._foreach_mul_(u, share)  # (1 - beta1) g
            if self.found_inf is not None:
                for piece in u:
                    piece.masked_fill_(skip, 0.0)  # NaN is not 0 by any factor
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
        pieces = [
            (segment.index, w[segment.start : segment.end], u[segment.start : segment.end])
            for number, (tensor, w, u) in enumerate(zip(tensors, weights, updates, strict=True))
            for segment in self._segments.get(tensor, (Segment(number, 0, w.numel(), 0),))
        ]
        rates = (-group["lr"] * taken * self._trust_ratios(pieces, home)).float().unbind()
        for owner, weight, update in pieces:
            weight.addcmul_(update, rates[owner])

    def _trust_ratios(self, pieces: list[tuple[int, Tensor, Tensor]], home: torch.device) -> Tensor:
        """|w| / |u| of every unit, from its (index, weight, update) pieces on all ranks; 1 where either is 0. fp64."""
        squares = torch.zeros(2, self._units, dtype=torch.float64, device=home)
        if pieces:
            owners, *both = zip(*pieces, strict=True)
            if owners not in self._owners:
                self._owners[owners] = to_device(owners, home, torch.int64)
            for row, views in zip(squares, both, strict=True):
                norms = torch.stack(torch._foreach_norm(views)).double()
                row.index_add_(0, self._owners[owners], norms.square())
        if self._reduce_on is not None:
            squares = squares.to(self._reduce_on)
            dist.all_reduce(squares)
        weight_norms, update_norms = squares.sqrt().to(home)
        valid = (weight_norms > 0) & (update_norms > 0)
        return torch.where(valid, weight_norms / update_norms, 1.0)


def blocks(*lists: list[Tensor]) -> Iterator[list[list[Tensor]]]:
    """The flat tensors of parallel lists, piece by piece: on the CPU pieces that stay in its cache while a dozen
    operations pass over them, on CUDA everything at once."""
    if lists[0][0].device.type != "cpu":
        yield [list(tensors) for tensors in lists]
        return
    for parallel in zip(*lists, strict=True):
        for pieces in zip(*(tensor.split(CACHED) for tensor in parallel), strict=True):
            yield [[piece] for piece in pieces]
