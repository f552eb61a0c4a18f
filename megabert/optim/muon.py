"""Muon: momentum orthogonalised matrix by matrix, for any partitions of ZeRO; AdamW for all other parameters.

Each rank averages the gradients of its partition into its momentum. Once an update the directions of every matrix are sent to the
rank that owns it, which orthogonalises them by a Newton-Schulz iteration and returns the parts to the ranks. Matrices are assigned to
ranks by the cost of their iteration; the exchange is in the type of the iteration, 2 bytes an element each way in 16 bits. Nothing is
read back from the device.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; scale and decoupled decay of Liu et al. 2025,
"Muon is Scalable for LLM Training", section 2.2, so that AdamW's learning rates fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabert.distributed.ranks import World
from megabert.optim.adamw import AdamW
from megabert.optim.guarded import MOMENTS, FlatSegment, GuardedOptimizer, Segments, blocks

MOMENTUM = 0.95  # momentum, with Nesterov's look-ahead
STEPS = 5  # iterations of Newton-Schulz
# Coefficients steep at 0, so that 5 steps bring every singular value to 0.7-1.2.
QUINTIC = (3.4445, -4.7750, 2.0315)
SCALE = 0.2  # root mean square of the elements of AdamW's updates
# Smallest norm: the size of the update does not depend on that of the gradients until their squares are 0 in fp32.
TINY = 1e-20
ORTHOGONAL = "orthogonal"  # key of a group of parameters: whether it holds matrices


@dataclass(frozen=True)
class Matrix:
    """Elements [begin, stop) of parameter `index` are a matrix, row by row."""

    index: int
    begin: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns

    @property
    def stop(self) -> int:
        return self.begin + self.size

    @property
    def flops(self) -> float:
        """FLOPs of its orthogonalisation."""
        short, long = sorted((self.rows, self.columns))
        return STEPS * (4.0 * short * short * long + 2.0 * short**3)

    @property
    def scale(self) -> float:
        """Factor of an orthogonal matrix for an update as large as AdamW's."""
        return SCALE * math.sqrt(max(self.rows, self.columns))


@dataclass(frozen=True)
class MatrixPart:
    """Elements [start, end) of a rank's flat tensor `tensor`, which are elements from `offset` on of matrix `matrix`."""

    tensor: int
    start: int
    end: int
    matrix: int
    offset: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class MatrixExchange:
    """Parts that a rank sends to the owners of matrices and receives as an owner; updates are exchanged in reverse."""

    matrices: tuple[Matrix, ...]
    held: tuple[tuple[MatrixPart, ...], ...]  # by owner: parts in this rank's partition
    owned: tuple[tuple[MatrixPart, ...], ...]  # by rank: its parts of the matrices that this rank owns


def find_matrices(model: nn.Module) -> dict[int, tuple[Matrix, ...]]:
    """Matrices by number of the parameter, for parameters of `model` that have some: a module's `matrices` are the rows of those stacked
    in its `weight`."""
    number = {id(parameter): n for n, parameter in enumerate(model.parameters())}
    matrices = {}
    for module in model.modules():
        stacked, weight = getattr(module, "matrices", ()), getattr(module, "weight", None)
        if stacked and isinstance(weight, nn.Parameter) and weight.requires_grad:
            index, columns = number[id(weight)], weight.shape[1]
            begins = [columns * row for row in accumulate(stacked, initial=0)]
            parts = zip(begins, stacked, strict=False)
            matrices[index] = tuple(Matrix(index, begin, rows, columns) for begin, rows in parts)
    return matrices


def assign_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank that owns each matrix: matrices by falling cost, each assigned to the rank with the lowest total."""
    owners, load = [0] * len(costs), [0.0] * ranks
    for n in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        owners[n] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owners[n]] += costs[n]
    return owners


def plan_exchange(
    matrices: Mapping[int, tuple[Matrix, ...]], segments: Sequence[Sequence[Sequence[FlatSegment]]], rank: int
) -> MatrixExchange:
    """Parts that `rank` sends and receives, where `segments` are those of every rank's flat tensors."""
    present = {segment.index for segment in chain.from_iterable(chain.from_iterable(segments))}
    listed = tuple(matrix for index in sorted(present) for matrix in matrices[index])
    number = {matrix: n for n, matrix in enumerate(listed)}
    owners = assign_owners([matrix.flops for matrix in listed], len(segments))

    def parts(holder: int, owner: int) -> tuple[MatrixPart, ...]:
        held_parts = []
        for tensor, held in enumerate(segments[holder]):
            for segment in held:
                for matrix in matrices[segment.index]:
                    part = segment.within(matrix.begin, matrix.stop)
                    if part is not None and owners[number[matrix]] == owner:
                        held_parts.append(MatrixPart(tensor, part.start, part.end, number[matrix], part.offset))
        return tuple(held_parts)

    everyone = range(len(segments))
    held = tuple(parts(rank, owner) for owner in everyone)
    return MatrixExchange(listed, held, tuple(parts(holder, rank) for holder in everyone))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Matrices [k, n, m] with all singular values near 1, by products in their type."""
    a, b, c = QUINTIC
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = (wide / norm.clamp(min=TINY)).to(matrices.dtype)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrices else x.mT


class Muon(AdamW):
    """Muon for the groups whose `orthogonal` is true, AdamW for the others, with the same learning rate.

    Matrices keep one moment, AdamW's parameters two.
    """

    def __init__(
        self, model: nn.Module, groups: Sequence[Mapping[str, Any]], lr: float, betas: tuple[float, float], eps: float,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """`groups`: all parameters of the model; `dtype`: type of the Newton-Schulz products and of the exchange between ranks."""
        self._matrices, self._dtype = find_matrices(model), dtype
        self._whole: dict[Tensor, tuple[FlatSegment, ...]] = {}
        self._whole |= {p: (FlatSegment(n, 0, p.numel(), 0),) for n, p in enumerate(model.parameters())}
        orthogonal = {id(p) for n, p in enumerate(model.parameters()) if n in self._matrices}
        split = [
            {**group, "params": members, ORTHOGONAL: flag}
            for group in groups
            for flag in (True, False)
            if (members := [p for p in group["params"] if (id(p) in orthogonal) == flag])
        ]
        super().__init__(split, lr, betas, eps)

    def attach(
        self, segments: Segments | None = None, reduce_on: torch.device | None = None, world: World | None = None
    ) -> None:
        """As `GuardedOptimizer.attach`; a collective."""
        super().attach(segments or self._whole, reduce_on, world)
        self._ranks, self._rank = (world.size, world.rank) if world else (1, 0)
        self._device = next(iter(self._segments)).device
        self._place = {tensor: n for n, tensor in enumerate(self._segments)}
        local = [self._segments[tensor] for tensor in self._place]
        self._segments_by_rank = [local] * self._ranks
        if world and reduce_on is not None:
            numbers = [[[s.index, s.start, s.end, s.offset] for s in held] for held in local]
            self._segments_by_rank = [
                [tuple(FlatSegment(*segment) for segment in held) for held in of_rank]
                for of_rank in world.gather(numbers)
            ]
        self._exchanges: dict[tuple[int, ...], MatrixExchange] = {}

    def kinds(self, tensor: Tensor) -> tuple[str, ...]:
        held = self._segments[tensor]
        return MOMENTS[:1] if held and held[0].index in self._matrices else MOMENTS

    def _update(self) -> None:
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not group[ORTHOGONAL]]
            super()._update()
            self.param_groups = [group for group in groups if group[ORTHOGONAL]]
            GuardedOptimizer._update(self)
        finally:
            self.param_groups = groups

    def _update_group(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        """Overwrites gradients. A skipped step runs with g = 0, momentum times 1 and a rate of 0."""
        taken = 1 - self.found_inf
        torch._foreach_add_([self.state[t]["step"] for t in tensors], [taken] * len(tensors))
        weights = [t.detach().view(-1) for t in tensors]
        directions = [t.grad.contiguous().view(-1) for t in tensors if t.grad is not None]
        momenta = [self.state[t]["exp_avg"].view(-1) for t in tensors]
        self._look_ahead(directions, momenta, taken)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"] * taken)
        places = tuple(self._place[tensor] for tensor in tensors)
        if places not in self._exchanges:
            segments = [[of_rank[place] for place in places] for of_rank in self._segments_by_rank]
            self._exchanges[places] = plan_exchange(self._matrices, segments, self._rank)
        exchange = self._exchanges[places]
        by_scale: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        owned = self._orthogonalize(exchange, self._collect(exchange, directions))
        for part, update in self._return_updates(exchange, owned):
            slices, updates = by_scale.setdefault(exchange.matrices[part.matrix].scale, ([], []))
            slices.append(weights[part.tensor][part.start : part.end])
            updates.append(update)
        for scale, (slices, updates) in by_scale.items():
            torch._foreach_mul_(updates, -group["lr"] * scale * taken)
            torch._foreach_add_(slices, updates)

    def _look_ahead(self, gradients: list[Tensor], momenta: list[Tensor], taken: Tensor) -> None:
        """m <- 0.95 m + 0.05 g; `gradients` become 0.95 m + 0.05 g with this m (Nesterov)."""
        skip, share = taken == 0, (1 - MOMENTUM) * taken
        keep = torch.where(skip, 1.0, torch.full_like(taken, MOMENTUM))
        if self.grad_scale is not None:
            share = share / self.grad_scale
        for g, m in blocks(gradients, momenta):
            for part in g:
                part.masked_fill_(skip, 0.0)  # a factor of 0 would keep NaN
            torch._foreach_mul_(g, share)
            torch._foreach_mul_(m, keep)
            torch._foreach_add_(m, g)
            torch._foreach_add_(g, m, alpha=MOMENTUM)

    def _collect(self, exchange: MatrixExchange, directions: list[Tensor]) -> dict[int, Tensor]:
        """Complete directions of this rank's matrices, by number."""
        # If every rank holds everything it needs no parts of others.
        partitioned = self._reduce_on is not None
        parts = tuple(chain.from_iterable(exchange.held)) if partitioned else exchange.owned[self._rank]
        packed = self._pack([directions[p.tensor][p.start : p.end] for p in parts])
        if partitioned:
            parts = tuple(chain.from_iterable(exchange.owned))
            packed = self._all_to_all(packed, exchange.held, exchange.owned)
        by_matrix: dict[int, list[tuple[int, Tensor]]] = {}
        for part, values in zip(parts, packed.split([p.size for p in parts]), strict=True):
            by_matrix.setdefault(part.matrix, []).append((part.offset, values))
        return {n: torch.cat([values for _, values in sorted(of, key=lambda p: p[0])]) for n, of in by_matrix.items()}

    def _orthogonalize(self, exchange: MatrixExchange, owned: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """This rank's orthogonalised matrices, flat; computed in a batch for each shape."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for n in owned:
            matrix = exchange.matrices[n]
            by_shape.setdefault((matrix.rows, matrix.columns), []).append(n)
        orthogonal: dict[int, Tensor] = {}
        for shape, numbers in by_shape.items():
            stacked = orthogonalize(torch.stack([owned[n].view(shape) for n in numbers]))
            orthogonal |= {n: matrix.reshape(-1) for n, matrix in zip(numbers, stacked.unbind(), strict=True)}
        return orthogonal

    def _return_updates(
        self, exchange: MatrixExchange, owned: Mapping[int, Tensor]
    ) -> Iterable[tuple[MatrixPart, Tensor]]:
        """Every part in this rank's partition with its update, fp32."""
        sent = chain.from_iterable(exchange.owned)
        packed = self._pack([owned[p.matrix][p.offset : p.offset + p.size] for p in sent])
        parts = tuple(chain.from_iterable(exchange.held))
        received = self._all_to_all(packed, exchange.owned, exchange.held).float()
        return zip(parts, received.split([p.size for p in parts]), strict=True)

    def _pack(self, slices: list[Tensor]) -> Tensor:
        """Slices as one flat tensor in the type of the iteration."""
        sizes = [part.numel() for part in slices]
        packed = torch.empty(sum(sizes), dtype=self._dtype, device=self._device)
        if slices:
            torch._foreach_copy_(list(packed.split(sizes)), slices)
        return packed

    def _all_to_all(
        self, sent: Tensor, to: Sequence[Sequence[MatrixPart]], back: Sequence[Sequence[MatrixPart]]
    ) -> Tensor:
        """The parts `back` received from each rank, in order; `sent` has the parts `to` each rank. A collective."""
        if self._ranks == 1:
            return sent
        width = sent.element_size()
        received_bytes, sent_bytes = ([width * sum(p.size for p in parts) for parts in ranks] for ranks in (back, to))
        received = torch.empty(sum(received_bytes), dtype=torch.uint8, device=sent.device)
        dist.all_to_all_single(
            received, sent.view(torch.uint8), output_split_sizes=received_bytes, input_split_sizes=sent_bytes
        )
        return received.view(self._dtype)
