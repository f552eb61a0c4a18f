"""Gradients of stage 1 in bf16: accumulated in place in fp32, and summed over the ranks during the backward pass.

DeepSpeed 0.19's wrapper of that stage converts all gradients after each backward pass, averages them after the last one in bf16,
and gives every rank all of them. Here a gradient is added to its group's flat fp32 tensor as soon as autograd has it (the first
one of an update is copied, so that nothing has to be zeroed), and a bucket of the tensor is summed in fp32 on the rank that needs
it as soon as the last micro-step has filled it. This sends as many bytes as an all-reduce in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabert.distributed.ranks import wait_for_ranks

# Most elements summed at once: 100 MB, a millisecond of NVLink.
BUCKET = 25_000_000
# Smallest part of a rank in elements; below it latency costs more than bandwidth, so gradients are all-reduced.
LEAST = 1_000_000


@dataclass
class GradientBucket:
    """A slice of a flat gradient, the rank that needs its sum (-1: every one), and the parameters in it."""

    flat: Tensor
    owner: int
    # Indices of parameters in the order of the model.
    members: frozenset[int]
    # Number of these whose gradient the last micro-step has not computed yet.
    waiting: int = 0


class FlatGradients:
    """The flat fp32 gradients of groups of parameters, filled by hooks on the parameters."""

    def __init__(
        self, groups: Sequence[tuple[Tensor, Sequence[nn.Parameter]]], order: Sequence[nn.Parameter], world: int
    ) -> None:
        """`groups`: a flat tensor, whose `world` equal parts belong to the ranks, and the parameters concatenated in it. `order`: all
        parameters in the order of the forward pass."""
        number = {id(parameter): n for n, parameter in enumerate(order)}
        self._views: dict[int, Tensor] = {}
        self._buckets: list[GradientBucket] = []
        self._in: dict[int, list[GradientBucket]] = {}
        for flat, parameters in groups:
            ends, position = [], 0
            for parameter in parameters:
                begin, position = position, position + parameter.numel()
                n = number[id(parameter)]
                self._views[n] = flat[begin:position].view(parameter.shape)
                ends.append((n, begin, position))
                parameter.register_post_accumulate_grad_hook(lambda p, n=n: self._arrived(n, p))
            for begin, end, owner in bucket_bounds(flat.numel(), world) if world > 1 else ():
                members = frozenset(n for n, first, last in ends if first < end and begin < last)
                self._buckets.append(GradientBucket(flat[begin:end], owner, members))
        # The backward pass reaches the last layer first. All ranks sum in this order, even if a bucket is ready earlier.
        self._buckets.sort(key=lambda bucket: -min(bucket.members, default=-1))
        for n in self._views:
            self._in[n] = [bucket for bucket in self._buckets if n in bucket.members]
        self._reset()

    def _reset(self) -> None:
        self._filled: set[int] = set()
        self._last, self._launched = False, 0
        self._works: list[Any] = []
        for bucket in self._buckets:
            bucket.waiting = len(bucket.members)

    def last(self) -> None:
        """Announce the last backward pass of the update. A collective, with `finish`."""
        self._last = True

    def finish(self) -> None:
        """Complete the sums, for work queued on the device after this call; the next update overwrites them. Parameters without a
        gradient have 0."""
        for n, view in self._views.items():
            if n not in self._filled:
                view.zero_()
        self._launch(len(self._buckets))
        for work in self._works:
            wait_for_ranks(work)
        self._reset()

    @torch.no_grad()
    def _arrived(self, n: int, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if n in self._filled:
            self._views[n].add_(parameter.grad)
        else:
            self._views[n].copy_(parameter.grad)
            self._filled.add(n)
        parameter.grad = None
        if self._last:
            for bucket in self._in[n]:
                bucket.waiting -= 1
                assert bucket.waiting >= 0, "a parameter had two gradients in one backward pass"
            ready = self._launched
            while ready < len(self._buckets) and not self._buckets[ready].waiting:
                ready += 1
            self._launch(ready)

    def _launch(self, until: int) -> None:
        for bucket in self._buckets[self._launched : until]:
            if bucket.owner < 0:
                self._works.append(dist.all_reduce(bucket.flat, async_op=True))
            else:
                self._works.append(dist.reduce(bucket.flat, dst=bucket.owner, async_op=True))
        self._launched = until


def bucket_bounds(size: int, world: int) -> list[tuple[int, int, int]]:
    """(begin, end, owner) of the buckets of a flat tensor whose `world` equal parts belong to the ranks."""
    part = size // world
    if part < LEAST:
        return [(begin, min(begin + BUCKET, size), -1) for begin in range(0, size, BUCKET)]
    return [
        (begin, min(begin + BUCKET, (rank + 1) * part), rank)
        for rank in range(world)
        for begin in range(rank * part, (rank + 1) * part, BUCKET)
    ]
