"""Base of the optimizers: groups of parameters, slices of ZeRO's flat tensors, and a guard that does not wait for the device.

Every parameter is in exactly one group; LayerNorm weights and biases (fewer than two dimensions) do not decay. The
decisions by the gradients' norm (their divisor, whether the step is taken) stay on the device and are applied inside the
update rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabert.distributed.ranks import World

# State of an element besides its weight, in fp32; Muon's matrices have only the first.
MOMENTS = ("exp_avg", "exp_avg_sq")
RATE = "rate"  # key of a group of parameters: the factor of its learning rate
BLOCK = 1 << 17  # elements of a block on the CPU: five fp32 arrays of this size fit a core's cache


@dataclass(frozen=True)
class FlatSegment:
    """Elements [start, end) of a flat tensor are elements [offset, offset + end - start) of parameter `index`."""

    index: int
    start: int
    end: int
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.end - self.start

    def within(self, begin: int, end: int) -> FlatSegment | None:
        """Its part in elements [begin, end) of the parameter, with an offset from `begin`; None if there is none."""
        first, last = max(self.offset, begin), min(self.stop, end)
        start = self.start + first - self.offset
        return FlatSegment(self.index, start, start + last - first, first - begin) if first < last else None


Segments = Mapping[Tensor, tuple[FlatSegment, ...]]  # of the tensors of an optimizer


def parameter_groups(
    model: nn.Module, weight_decay: float, rate: Callable[[str], float] = lambda name: 1.0
) -> list[dict[str, Any]]:
    """Groups of matrices with `weight_decay` and of vectors and scalars without, one for each factor of the learning rate by
    `rate` of the name. Shared parameters count once."""
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    named = [(p.ndim < 2, rate(name), p) for name, p in model.named_parameters() if p.requires_grad]
    for vector, factor, p in sorted(named, key=lambda item: item[0]):
        groups.setdefault((vector, factor), []).append(p)
    return [
        {"params": members, "weight_decay": 0.0 if vector else weight_decay, RATE: factor}
        for (vector, factor), members in groups.items()
    ]


class GuardedOptimizer(torch.optim.Optimizer):
    """Base of the update rules: idle until attached, then steps by the decisions of `guard` on the device.

    `guard` sets two numbers on the device that the update rules read: `grad_scale`, by which gradients are divided, and
    `found_inf`, 1 for a step that changes nothing. Names and meaning are those of `torch.amp.GradScaler`, which torch's fused
    AdamW reads.
    """

    grad_scale: Tensor | None = None  # None is 1
    found_inf: Tensor
    primed = False  # the run started with moments of another run

    def attach(
        self, segments: Segments | None = None, reduce_on: torch.device | None = None, world: World | None = None
    ) -> None:
        """Enable steps.

        `segments` describes each tensor of this optimizer (None: tensors are whole parameters); their indices are those of units
        with a separate trust ratio. `reduce_on` is the device of the collectives when parameters are partitioned over the ranks of
        `world` (None: they are not).
        """
        self._segments = dict(segments or {})
        self._reduce_on, self._attached = reduce_on, True

    @torch.no_grad()
    def guard(self, gradients: list[Tensor], limit: float, skip: bool = False) -> Tensor:
        """Decide from `gradients` whether the next steps clip to the norm `limit` (0: never), or change nothing because the norm
        is not finite or `skip` is set. Returns the global norm, fp32 on the device; inf if nothing is changed.

        `gradients` are all those of this rank. Where parameters are partitioned over ranks each element is on one rank, and the call
        is a collective.
        """
        device = gradients[0].device if gradients else self._reduce_on
        squares = torch.zeros((), dtype=torch.float64, device=device)
        if gradients:  # empty on a rank if a model has fewer elements than there are ranks
            squares += sum_squares(gradients).sum()
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
        """Update every tensor that has a gradient; nothing changes if the guard found a non-finite gradient."""
        assert closure is None
        if not getattr(self, "_attached", False):
            return  # DeepSpeed's wrappers run a trial step with zero gradients, which would count and apply weight decay
        self._update()

    def _update(self) -> None:
        for group in self.param_groups:
            # Every rank takes part in a group's collectives, even without elements of it.
            tensors = [p for p in group["params"] if p.grad is not None]
            if tensors:
                for tensor in tensors:
                    self._create_state(tensor)
                self._update_group(group, tensors)

    def _update_group(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        raise NotImplementedError

    def kinds(self, tensor: Tensor) -> tuple[str, ...]:
        """Names of the moments that this rule keeps for a tensor."""
        return MOMENTS

    def count_updates(self, tensors: Iterable[Tensor]) -> int:
        """Number of applied updates of `tensors`, the same for all of them."""
        counts = {int(self.state[t]["step"]) if self.state.get(t) else 0 for t in tensors}
        assert len(counts) <= 1, counts
        return counts.pop() if counts else 0

    def find_moments(self, tensor: Tensor) -> dict[str, Tensor]:
        """Flat views of a tensor's moments; {} before its first update, unless the run started with moments."""
        state = self.state.get(tensor)
        if not state or not (self.primed or int(state["step"])):
            return {}
        return {kind: state[kind].view(-1) for kind in self.kinds(tensor)}

    def resume(self, tensors: Iterable[Tensor], updates: int, primed: bool = False) -> None:
        """Set the number of updates of `tensors`; missing moments are created as zeros for the caller to fill. `primed`: there are
        moments before the first update too."""
        self.primed = primed
        for tensor in tensors:
            if updates or primed:
                self._create_state(tensor)
                self.state[tensor]["step"].fill_(updates)
            else:
                self.state.pop(tensor, None)

    def _create_state(self, tensor: Tensor) -> None:
        """Create zero moments and step count for a tensor without them."""
        state = self.state[tensor]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
            for kind in self.kinds(tensor):
                state[kind] = torch.zeros_like(tensor, memory_format=torch.contiguous_format)


def blocks(*lists: list[Tensor]) -> Iterator[list[list[Tensor]]]:
    """The flat tensors of parallel lists: on the CPU in blocks that stay in the cache for a dozen operations, on CUDA all at once."""
    if lists[0][0].device.type != "cpu":
        yield [list(tensors) for tensors in lists]
        return
    for parallel in zip(*lists, strict=True):
        for block in zip(*(tensor.split(BLOCK) for tensor in parallel), strict=True):
            yield [[part] for part in block]


def sum_squares(tensors: Sequence[Tensor]) -> Tensor:
    """fp64 [n]: the sum of the squares of each tensor's elements. On the CPU block by block, since torch adds them up in fp32: its norm
    of 110 M normal numbers in one tensor is 1.2% too low."""
    parts = [t.reshape(-1).split(BLOCK) if t.device.type == "cpu" else (t,) for t in tensors]
    squares = torch.stack(torch._foreach_norm(list(chain.from_iterable(parts)))).double().square()
    if len(squares) == len(parts):
        return squares
    return torch.stack([part.sum() for part in squares.split([*map(len, parts)])])


def to_device(values: Sequence[float], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of host numbers on `device`. On CUDA from pinned memory, since other copies wait for the device."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
