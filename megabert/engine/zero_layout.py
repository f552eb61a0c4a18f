"""Layout of the fp32 master weights under each ZeRO stage.

DeepSpeed's optimizers get flat tensors instead of parameters. A `Master` lists the slice of a parameter for each segment of a
flat tensor. The slices of all ranks cover every parameter exactly once; `find_layout` checks that on every start, because the layout
is private to DeepSpeed and may change with its version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megabert.distributed.ranks import World
from megabert.optim.guarded import FlatSegment, GuardedOptimizer

WEIGHT = "weight"  # kind of state of an element, besides MOMENTS
COUNTERS = ("global_steps", "global_samples")  # of DeepSpeed's engine, besides the number of skipped updates
# The counters of a snapshot before the first update.
START = {"optimizer_steps": 0, "deepspeed": dict.fromkeys((*COUNTERS, "skipped_steps"), 0)}


class Stored(Protocol):
    """A snapshot's tensors, readable as a whole on every rank."""

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """Shapes of all parameters."""

    def gather_all(self, *kinds: str) -> Iterator[tuple[str, str, Tensor]]:
        """(kind, parameter, flat fp32 elements) for every parameter with that kind of state. A collective."""


@dataclass(frozen=True)
class Master:
    """One fp32 tensor that the optimizer updates, and the slices of parameters in it; the rest is padding."""

    tensor: Tensor
    segments: tuple[FlatSegment, ...]


@dataclass(frozen=True)
class ParameterSlice:
    """Elements [offset, offset + length) of a parameter: flat fp32 tensors by kind, its weight or its moments."""

    name: str
    offset: int
    values: dict[str, Tensor]

    @property
    def length(self) -> int:
        return next(iter(self.values.values())).numel()


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of the training state: slices that together with those of the other ranks cover every parameter exactly
    once."""

    shapes: dict[str, tuple[int, ...]]  # shapes of all parameters, the same on every rank
    weights: list[ParameterSlice]  # fp32 masters, as `weight`
    moments: list[ParameterSlice]  # moments of the same slices; [] before the first update
    counters: dict[str, Any]  # JSON, the same on every rank


@dataclass(frozen=True)
class ZeroLayout:
    """This rank's masters. `partitioned` is False when every rank has all parameters (ZeRO stage 0)."""

    shapes: dict[str, torch.Size]  # of all parameters, in the model's order
    masters: tuple[Master, ...]
    partitioned: bool

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def units(self, parts: Mapping[str, Sequence[int]]) -> tuple[dict[Tensor, tuple[FlatSegment, ...]], int]:
        """Each master's segments by units, which have a trust ratio each, and the number of units.

        A unit is a parameter, or one of the `parts` stacked in it, whose rows these are. Units are numbered in the order of the
        parameters.
        """
        rows = [parts.get(name, (1,)) for name in self.names]
        first = [*accumulate(map(len, rows), initial=0)]
        sizes = [self.shapes[name].numel() // sum(of) for name, of in zip(self.names, rows, strict=True)]
        bounds = [[*accumulate((n * size for n in of), initial=0)] for of, size in zip(rows, sizes, strict=True)]
        by_master: dict[Tensor, tuple[FlatSegment, ...]] = {}
        for master in self.masters:
            cut: list[FlatSegment] = []
            for segment in master.segments:
                for number, (begin, end) in enumerate(pairwise(bounds[segment.index])):
                    if (part := segment.within(begin, end)) is not None:
                        cut.append(replace(part, index=first[segment.index] + number))
            by_master[master.tensor] = tuple(cut)
        return by_master, first[-1]

    def slices(self, optimizer: GuardedOptimizer) -> Iterator[ParameterSlice]:
        """Views of this rank's master weights and their moments (none before the first update), parameter by parameter."""
        for master in self.masters:
            flat = {WEIGHT: master.tensor.detach().view(-1), **optimizer.find_moments(master.tensor)}
            for s in master.segments:
                views = {kind: values[s.start : s.end] for kind, values in flat.items()}
                yield ParameterSlice(self.names[s.index], s.offset, views)

    def saved_by(self, rank: int, size: int) -> list[tuple[int, tuple[FlatSegment, ...]]]:
        """(master, its segments) that rank `rank` of `size` saves: all of them if parameters are partitioned, otherwise an equal
        share of the elements."""
        if self.partitioned:
            return [(number, master.segments) for number, master in enumerate(self.masters)]
        total = sum(s.end - s.start for master in self.masters for s in master.segments)
        begin, end = total * rank // size, total * (rank + 1) // size
        shares, position = [], 0
        for number, master in enumerate(self.masters):
            cut = []
            for segment in master.segments:
                length = segment.end - segment.start
                first, last = max(begin - position, 0), min(end - position, length)
                if first < last:
                    start = segment.start + first
                    cut.append(FlatSegment(segment.index, start, start + last - first, segment.offset + first))
                position += length
            shares.append((number, tuple(cut)))
        return shares

    def copies(self, world: World, values: Mapping[int, Mapping[str, Tensor]]) -> list[ParameterSlice]:
        """Copies in host memory of this rank's part of `values`, which has tensors by kind for each master."""
        slices = []
        for number, segments in self.saved_by(world.rank, world.size):
            if not segments or number not in values:
                continue
            first, last = min(s.start for s in segments), max(s.end for s in segments)
            copied = {
                kind: tensor.detach().view(-1)[first:last].to("cpu", copy=True)
                for kind, tensor in values[number].items()
            }
            for s in segments:
                views = {kind: flat[s.start - first : s.end - first] for kind, flat in copied.items()}
                slices.append(ParameterSlice(self.names[s.index], s.offset, views))
        return slices

    def gather(self, world: World) -> dict[str, Tensor]:
        """Complete fp32 weights by name on the CPU of rank 0, an empty dict on other ranks. A collective.

        Bits are summed as integers to keep them exactly: as floats -0.0 + 0 would be 0.0.
        """
        local: dict[str, list[ParameterSlice]] = {}
        for part in self.copies(world, {n: {WEIGHT: master.tensor} for n, master in enumerate(self.masters)}):
            local.setdefault(part.name, []).append(part)
        whole: dict[str, Tensor] = {}
        for name, shape in self.shapes.items():
            buffer = torch.zeros(shape.numel(), dtype=torch.float32, device=world.device)
            for part in local.get(name, ()):
                buffer[part.offset : part.offset + part.length] = part.values[WEIGHT]
            if world.size > 1:
                torch.distributed.reduce(buffer.view(torch.int32), dst=0)
            if world.is_main:
                whole[name] = buffer.cpu().view(shape)
        return whole


def find_layout(optimizer: Any, model: nn.Module, world: World) -> ZeroLayout:
    """The layout of DeepSpeed's optimizer wrapper (0.19), recognised by its attributes.

    Raises RuntimeError if the slices of all ranks do not cover every parameter exactly once.
    """
    named = list(model.named_parameters())
    index_of = {id(parameter): i for i, (_, parameter) in enumerate(named)}
    shapes = {name: torch.Size(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in named}
    partitioned = True
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3: each parameter is split separately
        masters = _stage_3(optimizer, index_of, [*shapes.values()], world)
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):  # stages 1 and 2: a flat group is split
        groups, offsets = optimizer.round_robin_bit16_groups, optimizer.round_robin_bit16_offsets
        parts = zip(optimizer.single_partition_of_fp32_groups, groups, offsets, strict=True)
        masters = [slice_of_group(flat, group, world.rank, index_of, begins) for flat, group, begins in parts]
    elif hasattr(optimizer, "fp32_groups_flat_partition"):  # stage 1 in bf16 with fp32 gradients
        flats = zip(optimizer.fp32_groups_flat_partition, optimizer.bf16_groups, strict=True)
        masters = [slice_of_group(flat, group, world.rank, index_of) for flat, group in flats]
    else:
        partitioned = False
        if hasattr(optimizer, "fp32_groups"):  # stage 0 in 16 bits: one fp32 copy a parameter
            originals, copies = chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups)
        else:  # stage 0 in fp32: the parameters themselves
            originals, copies = (chain(*(group["params"] for group in optimizer.param_groups)) for _ in range(2))
        masters = [
            Master(copy, (FlatSegment(index_of[id(parameter)], 0, copy.numel(), 0),))
            for copy, parameter in zip(copies, originals, strict=True)
        ]
    layout = ZeroLayout(shapes, tuple(masters), partitioned)
    _check_cover(layout, world)
    return layout


def slice_of_group(
    flat: Tensor, group: Sequence[Tensor], rank: int, index_of: Mapping[int, int], offsets: Sequence[int] | None = None
) -> Master:
    """The slices in `flat`, the part of `rank` of a group's parameters, which begin at `offsets` of the whole (None: no gaps)."""
    offsets = offsets or list(accumulate((parameter.numel() for parameter in group[:-1]), initial=0))
    segments, begin, end = [], rank * flat.numel(), (rank + 1) * flat.numel()
    for parameter, offset in zip(group, offsets, strict=True):
        first, last = max(offset, begin), min(offset + parameter.numel(), end)
        if first < last:
            segments.append(FlatSegment(index_of[id(parameter)], first - begin, last - begin, first - offset))
    return Master(flat, tuple(segments))


def _stage_3(optimizer: Any, index_of: dict[int, int], shapes: Sequence[torch.Size], world: World) -> list[Master]:
    masters = []
    for flat, group in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
        segments, position = [], 0
        for parameter in group:
            size, index = parameter.partition_numel(), index_of[id(parameter)]
            offset = world.rank * size
            length = max(0, min(size, shapes[index].numel() - offset))
            if length:
                segments.append(FlatSegment(index, position, position + length, offset))
            position += size
        masters.append(Master(flat, tuple(segments)))
    return masters


def _check_cover(layout: ZeroLayout, world: World) -> None:
    counts = [0] * len(layout.shapes)
    for master in layout.masters:
        for segment in master.segments:
            counts[segment.index] += segment.end - segment.start
    if layout.partitioned:
        counts = world.sum_ints(counts)
    for (name, shape), count in zip(layout.shapes.items(), counts, strict=True):
        if count != shape.numel():
            raise RuntimeError(
                f"DeepSpeed's partitions hold {count} of the {shape.numel()} elements of {name} over {world.size} ranks; "
                "this DeepSpeed version lays parameters out in a way that is not known here"
            )


def check_shapes(weights: Mapping[str, Sequence[int]], shapes: Mapping[str, torch.Size]) -> None:
    """Raises ValueError naming the first parameter that is missing, unknown or of another shape."""
    for name, shape in shapes.items():
        if name not in weights:
            raise ValueError(f"the weights have no {name}; they come from another kind of model")
        saved = tuple(weights[name])
        if saved != tuple(shape):
            raise ValueError(
                f"{name} is {list(saved)} in the weights and {list(shape)} in this model; make the model section of the "
                "config equal to that of the weights (vocab_size, max_positions, hidden, layers)"
            )
    for name in weights:
        if name not in shapes:
            raise ValueError(f"the weights hold {name}, which this model does not have; compare the model section")
