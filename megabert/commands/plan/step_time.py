"""Seconds of one update, term by term, from shapes, a device, a fabric and what is known of the software.

A pure model. On one GPU: matrix products at their achieved rate, everything else by its bytes over the memory's
bandwidth, a floor a kernel, and the host's launches where they take longer. Between GPUs: the collectives of the ZeRO
stage, less what the backward pass hides. docs/planner.md has the formulas.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from megabert.commands.plan.collectives import across_nodes, inside_a_node, world
from megabert.commands.plan.devices import Constants, Device, Fabric
from megabert.config import ModelConfig
from megabert.model import parameter_count
from megabert.optim.muon import Matrix

TILE = 128  # rows and columns of the product that one multiprocessor works on at a time
SPLIT_DEPTH = 512  # a product's inner dimension is split between multiprocessors down to this
WEIGHT_BYTES = 2  # of weights and gradients that travel


parameters = functools.cache(parameter_count)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass of one GPU works on. Padding counts where the software computes it."""

    tokens: float  # that pass the linear layers
    pairs: float  # (query, key) pairs that attention computes
    predictions: float
    sequences: float

    def times(self, factor: float) -> MicroBatch:
        return MicroBatch(*(factor * getattr(self, part.name) for part in fields(self)))


@dataclass(frozen=True)
class Software:
    """How a trainer does it: memory traffic beside the matrix products, kernels, and what travels when."""

    elementwise: float  # bytes a token, layer and hidden unit outside products and attention, forward and backward
    attention: float  # bytes a pair, layer and head, forward and backward; 0: flash attention
    kernels: int  # a layer, forward and backward
    launch: float = 0.0  # seconds of the host a kernel; 0: CUDA graphs
    fp8: bool = False
    accumulate: float = 0.0  # bytes a parameter and micro-step to add up gradients
    optimizer: float = 42.0  # bytes a parameter of norms, clipping and the update itself
    orthogonal: tuple[Matrix, ...] = ()  # Muon's, each made orthogonal by one rank
    # DeepSpeed's stage. None is NVIDIA's DistributedFusedLAMB: gradients are reduce-scattered in a node and all-reduced across
    # nodes, each rank of a node updates its share, weights are gathered in the node.
    zero: int | None = None
    overlap: bool = False  # gradients travel during the backward pass
    recompute: bool = False  # the forward pass is done again in the backward pass
    host: float = 0.0  # seconds an update that nothing hides


@dataclass(frozen=True)
class System:
    """What the updates run on and by what."""

    device: Device
    fabric: Fabric
    software: Software
    constants: Constants = field(default_factory=Constants)

    @property
    def memory(self) -> float:
        """Bytes a second that kernels get."""
        return self.device.memory * self.constants.memory

    @property
    def rate(self) -> float:
        """FLOP/s of matrix products in 16 bits, in whole waves."""
        return self.device.peak * self.device.achieved


@dataclass(frozen=True)
class Share:
    """One GPU's part of an update: so many passes over as large a micro-batch. Its rows take the loader `rows_seconds`."""

    batch: MicroBatch
    micro_steps: int = 1
    rows_seconds: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of one update by term; they add up to `seconds`."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    kernels: float = 0.0  # the floor of launching them, and waiting for a host that is slower
    optimizer: float = 0.0
    inside: float = 0.0  # collectives within nodes, what is not hidden of them
    network: float = 0.0  # and through the network
    host: float = 0.0
    data: float = 0.0  # waiting for rows

    @property
    def seconds(self) -> float:
        return math.fsum(vars(self).values())


def wave_share(m: float, n: float, k: float, processors: int) -> float:
    """Share of the multiprocessors' work in a product [m, k] x [k, n] that counts: whole waves of whole tiles.

    The inner dimension may be split into parts of at least SPLIT_DEPTH to fill the last wave.
    """
    if not processors:
        return 1.0
    tiles = math.ceil(m / TILE) * math.ceil(n / TILE)
    filled = (
        tiles * parts / (math.ceil(tiles * parts / processors) * processors)
        for parts in range(1, max(1, int(k // SPLIT_DEPTH)) + 1)
    )
    return max(filled) * m * n / (tiles * TILE * TILE)


def products(model: ModelConfig, batch: MicroBatch) -> Iterator[tuple[float, float, float, int]]:
    """(m, n, k, how often) of each matrix product of a forward and a backward pass; 2 m n k operations every time."""
    d, ffn, tokens = model.hidden, model.ffn, batch.tokens
    linear = [(tokens, 3 * d, d), (tokens, d, d), (tokens, model.ffn_inputs, d), (tokens, d, ffn)]
    heads = [(batch.predictions, model.vocab_size, d), (batch.predictions, d, d)]
    heads += [(batch.sequences, d, d)] if model.nsp else []
    for shapes, count in ((linear, model.layers), (heads, 1)):
        for m, n, k in shapes:
            if m:
                yield from (
                    (m, n, k, count),
                    (m, k, n, count),
                    (n, k, m, count),
                )  # output, input's and weight's gradient


def pass_seconds(model: ModelConfig, batch: MicroBatch, system: System) -> StepTime:
    """Forward and backward of one micro-batch on one GPU, without what belongs to the update."""
    device, software, constants = system.device, system.software, system.constants
    operations = sum(
        count * 2 * m * n * k / wave_share(m, n, k, device.processors) for m, n, k, count in products(model, batch)
    )
    scores = 12 * model.layers * model.hidden * batch.pairs / system.rate  # 16 bits, also where products are in 8
    scores += software.attention * model.layers * model.heads * batch.pairs / system.memory
    kernels = float(model.layers * software.kernels)
    terms = {
        "products": operations / (system.rate * (constants.fp8 if software.fp8 else 1.0)),
        "attention": scores,
        "elementwise": software.elementwise * model.layers * model.hidden * batch.tokens / system.memory,
        "kernels": kernels * constants.kernel,
    }
    if software.recompute:  # the forward pass, a third, is done again
        terms = {name: 4 / 3 * value for name, value in terms.items()}
        kernels *= 4 / 3
    terms["kernels"] += max(0.0, kernels * software.launch - math.fsum(terms.values()))
    return StepTime(**terms)


@dataclass(frozen=True)
class Traffic:
    """Seconds of an update's collectives inside nodes and through the network: what may hide behind passes, and what may not."""

    during: tuple[float, float]
    after: tuple[float, float]


def traffic(model: ModelConfig, micro_steps: int, size: int, system: System) -> Traffic:
    """Gradients and weights of `size` GPUs, in 16 bits.

    DeepSpeed 0.19.8: stages 0 and 1 all-reduce gradients once an update, stage 2 reduce-scatters them in every
    micro-step; 1 and 2 then gather weights, 3 does before each forward and each backward pass, layer by layer
    (Rajbhandari et al. 2020, section 7). Raises ValueError where the GPUs need a network that the fabric has not.
    """
    parts = system.device, system.fabric, size, system.constants
    inside, across, whole = inside_a_node(*parts), across_nodes(*parts), world(*parts)
    weights, stage = float(WEIGHT_BYTES * parameters(model)), system.software.zero
    orthogonal = float(WEIGHT_BYTES * sum(matrix.size for matrix in system.software.orthogonal))
    if stage is None:
        between = across.all_reduce(weights / inside.size)
        within = inside.reduce_scatter(weights)
        if size <= system.device.domain:  # nodes that share an NVLink domain need no network
            within, between = within + between, 0.0
        return Traffic(during=(within, between), after=(inside.all_gather(weights), 0.0))
    if stage == 3:
        layer_by_layer = whole.reduce_scatter(weights, model.layers) + 2 * whole.all_gather(weights, model.layers)
        during, after = micro_steps * layer_by_layer, 0.0
    else:
        during = micro_steps * whole.reduce_scatter(weights) if stage == 2 else whole.all_reduce(weights)
        after = whole.all_gather(weights) if stage else 0.0
    if orthogonal:  # directions to their owners and updates back; at stage 0 updates alone, to every rank
        after += 2 * whole.all_to_all(orthogonal) if stage else whole.all_gather(orthogonal)
    if size <= max(system.device.domain, system.fabric.node):
        return Traffic((during, 0.0), (after, 0.0))
    return Traffic((0.0, during), (0.0, after))


def step_seconds(model: ModelConfig, share: Share, size: int, system: System) -> StepTime:
    """One update of `size` GPUs, of which each does its `share`. Raises ValueError as `traffic` does."""
    software, steps = system.software, share.micro_steps
    one = pass_seconds(model, share.batch, system)
    moved = traffic(model, steps, size, system)
    inside, network = moved.during
    if software.overlap:
        passes = steps if software.zero in (2, 3) else 1  # the others reduce in the last micro-step alone
        part = 1.0 if software.zero == 3 else 2 / 3  # stage 3 gathers in the forward pass too
        room = system.constants.overlap * part * passes * one.seconds
        inside, network = max(0.0, inside - max(0.0, room - network)), max(0.0, network - room)
    shards = {None: min(size, system.fabric.node), 0: 1}.get(software.zero, size)
    bytes_each = software.accumulate * steps + software.optimizer / shards
    flops = [matrix.flops for matrix in software.orthogonal]
    owned = max(math.fsum(flops) / size, max(flops, default=0.0))  # the busiest rank's, at best
    terms = {name: steps * value for name, value in vars(one).items()} | {
        "optimizer": parameters(model) * bytes_each / system.memory + owned / system.rate,
        "inside": inside + moved.after[0],
        "network": network + moved.after[1],
        "host": software.host,
    }
    waits = max(0.0, share.rows_seconds - math.fsum(terms.values()))
    return StepTime(**terms | {"data": waits})
