"""Optimizers: AdamW, and LAMB with one trust ratio a parameter whatever flat partitions ZeRO hands it.

Every parameter is in exactly one group; LayerNorm weights and biases (fewer than two dimensions) do not decay. LAMB
has one trust ratio a parameter at every ZeRO stage: norms are sums over the parameter's pieces on all ranks. A step
whose gradients are not finite changes nothing and is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabert.config import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")  # what both update rules keep of every element, in fp32
CACHED = 1 << 17  # elements of a piece on the CPU: five fp32 arrays of it fit a core's cache


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


def build(config: OptimizerConfig, model: nn.Module) -> AdamW | Lamb:
    """The configured optimizer over `model`'s parameters; it does nothing until `attach` is called."""
    kind = Lamb if config.name == "lamb" else AdamW
    groups = parameter_groups(model, config.weight_decay)
    return kind(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)


class _Guarded(torch.optim.Optimizer):
    """What both update rules share: idle until attached, and the guard of whole-parameter training.

    With partitions DeepSpeed computes the norm, clips, and skips the step on every rank when it is not finite. At stage
    0 in fp32 it hands NaN to the optimizer and loses the norm, so there `attach(clip=...)` turns our guard on.
    """

    overflow = False  # DeepSpeed reads this after each step, and the norm below
    _global_grad_norm: Tensor | float = 0.0
    skipped = 0
    counts_on_device = True  # where the update rule keeps a tensor's step counter

    def attach(
        self,
        segments: Mapping[Tensor, tuple[Segment, ...]] | None = None,
        reduce_on: torch.device | None = None,
        clip: float | None = None,
    ) -> None:
        """Start work.

        `segments` describes each tensor this optimizer will see (None: tensors are whole parameters). `reduce_on` is
        the device of the norms' all-reduce when parameters are spread over ranks (None: they are not). `clip` turns
        on the guard of stage 0 with that gradient-norm limit (0: no limit).
        """
        self._segments = dict(segments or {})
        self._reduce_on, self._clip, self._attached = reduce_on, clip, True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every tensor that has a gradient; none at all when the guard finds one not finite."""
        assert closure is None
        if not getattr(self, "_attached", False):
            return  # DeepSpeed's wrappers take a trial step with zero gradients, which would count and decay
        if self._clip is not None and not self._guard(self._clip):
            return
        self._update()

    def _update(self) -> None:
        raise NotImplementedError

    def updates_of(self, tensors: Iterable[Tensor]) -> int:
        """Updates that `tensors` have taken, skipped ones not counted; all of them have taken as many."""
        counts = {int(self.state[t]["step"]) if self.state.get(t) else 0 for t in tensors}
        assert len(counts) <= 1, counts
        return counts.pop() if counts else 0

    def moments_of(self, tensor: Tensor) -> dict[str, Tensor]:
        """Flat views of a tensor's moments; {} before its first update."""
        state = self.state.get(tensor)
        return {kind: state[kind].view(-1) for kind in MOMENTS} if state else {}

    def resume(self, tensors: Iterable[Tensor], updates: int) -> None:
        """Make `tensors` such as have taken `updates` updates; moments that did not exist are zero and wait to be filled."""
        for tensor in tensors:
            if not updates:
                self.state.pop(tensor, None)
                continue
            if not self.state.get(tensor):
                self._begin(tensor)
            self.state[tensor]["step"].fill_(updates)

    def _begin(self, tensor: Tensor) -> None:
        home = tensor.device if self.counts_on_device else None
        state = self.state[tensor]
        state["step"] = torch.zeros((), dtype=torch.float32, device=home)
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(tensor, memory_format=torch.contiguous_format)

    def _guard(self, limit: float) -> bool:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        finite = torch.isfinite(norm).to(torch.int32)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        self._global_grad_norm, self.overflow = norm, not bool(finite)
        if self.overflow:
            self.skipped += 1
            return False
        if limit > 0:
            torch._foreach_div_(gradients, torch.clamp((norm + 1e-6) / limit, min=1.0))
        return True


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

    Bias correction, decay inside the update, ratio |w| / |u| a parameter, 1 where either norm is 0. As in apex's
    FusedLAMB by default (`use_nvlamb=False`, csrc/multi_tensor_lamb.cu: `if (use_nvlamb || (decay != 0.0))`),
    parameters without weight decay take the plain Adam step.
    """

    counts_on_device = False

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._parameters = sum(len(group["params"]) for group in self.param_groups)

    def _update(self) -> None:
        for group in self.param_groups:
            # Every rank takes part in a group's norms, also one whose partition holds none of its elements.
            tensors = [p for p in group["params"] if p.grad is not None]
            if tensors:
                self._update_group(group, tensors)

    def _update_group(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        """Gradients are consumed: each becomes the update u = m^ / (sqrt(v^) + eps) + decay * w."""
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        for tensor in tensors:
            if not self.state.get(tensor):
                self._begin(tensor)
            self.state[tensor]["step"] += 1
        step = float(self.state[tensors[0]]["step"])
        weights = [t.detach().view(-1) for t in tensors]
        updates = [t.grad.contiguous().view(-1) for t in tensors if t.grad is not None]
        first = [self.state[t]["exp_avg"].view(-1) for t in tensors]
        second = [self.state[t]["exp_avg_sq"].view(-1) for t in tensors]
        for block in _blocks(weights, updates, first, second):
            w, u, m, v = block
            torch._foreach_lerp_(m, u, 1 - beta1)
            torch._foreach_mul_(v, beta2)
            torch._foreach_addcmul_(v, u, u, 1 - beta2)
            denominators = torch._foreach_div(v, 1 - beta2**step)  # m^, v^: corrected for their zero start
            torch._foreach_sqrt_(denominators)
            torch._foreach_add_(denominators, group["eps"])
            torch._foreach_copy_(u, m)
            torch._foreach_div_(u, 1 - beta1**step)
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
        ratios = self._trust_ratios(pieces, tensors[0].device)
        for owner, weight, update in pieces:
            weight.add_(update, alpha=-group["lr"] * ratios[owner])

    def _trust_ratios(self, pieces: list[tuple[int, Tensor, Tensor]], home: torch.device) -> list[float]:
        """|w| / |u| of every parameter, from its (index, weight, update) pieces on all ranks; 1 where either is 0."""
        squares = torch.zeros(2, self._parameters, dtype=torch.float64, device=home)
        if pieces:
            owners, *both = zip(*pieces, strict=True)
            index = torch.tensor(owners, device=home)
            for row, views in zip(squares, both, strict=True):
                row.index_add_(0, index, torch.stack(torch._foreach_norm(views)).double().square())
        if self._reduce_on is not None:
            squares = squares.to(self._reduce_on)
            dist.all_reduce(squares)
        weight_norms, update_norms = squares.sqrt()
        valid = (weight_norms > 0) & (update_norms > 0)
        return torch.where(valid, weight_norms / update_norms, 1.0).tolist()


def _blocks(*lists: list[Tensor]) -> Iterator[list[list[Tensor]]]:
    """The flat tensors of parallel lists, piece by piece: on the CPU pieces that stay in its cache while a dozen
    operations pass over them, on CUDA everything at once."""
    if lists[0][0].device.type != "cpu":
        yield [list(tensors) for tensors in lists]
        return
    for parallel in zip(*lists, strict=True):
        for pieces in zip(*(tensor.split(CACHED) for tensor in parallel), strict=True):
            yield [[piece] for piece in pieces]
