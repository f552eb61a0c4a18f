"""Seconds of one update, term by term, from shapes, a device, a fabric and the properties of the software.

A pure model. On one GPU: matrix products at their achieved rate, everything else by its bytes over the memory's bandwidth, a
minimum for each kernel, and the host's launches where they take longer. Between GPUs: the collectives of the ZeRO stage, minus
the part overlapped with the backward pass.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from megabert.common.datasheets import datasheet_tflops
from megabert.config import ModelConfig

if TYPE_CHECKING:
    from megabert.optim.muon import Matrix

GB = 1e9
MICROSECOND = 1e-6

# Gbit/s of network adapters a GPU in NVIDIA's nodes, by their datasheets: DGX-1 4 x 100 for 8 V100, DGX A100
# 8 x 200, DGX H100 and DGX B200 8 x 400; of Ada there is none, 200 assumed
ADAPTERS = {"volta": 50.0, "ampere": 200.0, "ada": 200.0, "hopper": 400.0, "blackwell": 400.0}
# bytes a second and direction of an adapter's slot, PCIe x16 of the GPUs' generation
SLOTS = {"volta": 16 * GB, "ampere": 32 * GB, "ada": 32 * GB, "hopper": 64 * GB, "blackwell": 64 * GB}


@dataclass(frozen=True)
class Device:
    """An accelerator by its datasheet. `link` connects those of a node, at most `domain` of them."""

    generation: str
    peak: float
    # share of the peak that matrix products in whole waves of tiles reach, fitted to MLPerf's published runs by
    # benchmarks/bench_planner.py --fit at revision ec453082; for FP8 runs the remainder after `Constants.fp8`
    achieved: float
    memory: float
    link: float
    # streaming multiprocessors, which share a product's tiles; 0: not modelled
    processors: int
    # power limit, W
    power: float
    # 0: those of a node
    domain: int = 0

    def linked(self, gigabytes: float) -> Device:
        """The device on a host whose links between GPUs have so many GB/s in one direction; 0: those of the table."""
        return replace(self, link=gigabytes * GB) if gigabytes else self


def _device(sold_as: str, generation: str, memory: float, link: float, **figures: Any) -> Device:
    peak = datasheet_tflops(sold_as)
    assert peak is not None, sold_as
    return Device(generation, peak * 1e12, memory=memory * GB, link=link * GB, **figures)


# memory and link GB/s, multiprocessors, W: NVIDIA's datasheets and architecture papers. NVLink metrics are the sum of both
# directions; PCIe 4.0 x16 has 32 GB/s a direction, 5.0 64. V100-SXM3 is that of DGX-2H. GB200: 72 GPUs in one NVLink domain.
DEVICES = {
    "v100": _device("V100", "volta", memory=900, link=150, achieved=0.528, processors=80, power=300),
    "v100-sxm3": _device("V100", "volta", memory=900, link=150, achieved=0.8083, processors=80, power=450),
    "a100": _device("A100", "ampere", memory=2_039, link=300, achieved=0.5338, processors=108, power=400),
    "a100-40": _device("A100", "ampere", memory=1_555, link=300, achieved=0.5603, processors=108, power=400),
    "a100-pcie": _device("A100", "ampere", memory=1_935, link=32, achieved=0.4489, processors=108, power=300),
    "a100-pcie-40": _device("A100", "ampere", memory=1_555, link=32, achieved=0.444, processors=108, power=250),
    "a30": _device("A30", "ampere", memory=933, link=32, achieved=0.4145, processors=56, power=165),
    "a5000": _device("RTX A5000", "ampere", memory=768, link=32, achieved=0.4031, processors=64, power=230),
    "l40s": _device("L40S", "ada", memory=864, link=32, achieved=0.2169, processors=142, power=350),
    "l40": _device("L40", "ada", memory=864, link=32, achieved=0.3069, processors=142, power=300),
    "l4": _device("L4", "ada", memory=300, link=32, achieved=0.1899, processors=58, power=72),
    "h100": _device("H100", "hopper", memory=3_350, link=450, achieved=0.4401, processors=132, power=700),
    "h100-pcie": _device("H100 PCIe", "hopper", memory=2_000, link=64, achieved=0.3051, processors=114, power=350),
    "h200": _device("H200", "hopper", memory=4_800, link=450, achieved=0.4542, processors=132, power=700),
    "b200": _device("B200", "blackwell", memory=8_000, link=900, achieved=0.2845, processors=148, power=1_000),
    "gb200": _device(
        "GB200", "blackwell", memory=8_000, link=900, achieved=0.2388, processors=148, power=1_200, domain=72
    ),
}


@dataclass(frozen=True)
class Constants:
    """Constants for all systems and rows. `network` is fitted like `Device.achieved`, `link` was for the first blind test."""

    # share of the memory bandwidth that streaming kernels reach (assumed)
    memory: float = 0.85
    # share of NVLink or PCIe that collectives reach inside a node
    link: float = 0.6539
    # share of an adapter's slot that collectives between nodes reach, if its line rate is not lower
    network: float = 0.296
    # seconds of a kernel to fill and drain the device (assumed)
    kernel: float = 3 * MICROSECOND
    # share of the backward pass that overlaps gradients, if the software overlaps them (assumed)
    overlap: float = 0.5
    # rate of matrix products in FP8 relative to 16 bits: three products in FP8 save 13-18 of 42-47 ms
    fp8: float = 1.4
    # latency of a collective, and of a hop, by NCCL's tuning model (src/graph/tuning.cc, ring in protocol Simple)
    base_latency: float = 8.4 * MICROSECOND
    # latency of a hop inside a node
    link_latency: float = 3.4 * MICROSECOND
    # latency of a hop between nodes
    network_latency: float = 14 * MICROSECOND


@dataclass(frozen=True)
class Fabric:
    """Accelerators in nodes of `node`, each with `adapters` to the network of `line` bytes a second (0: one node only)."""

    node: int
    adapters: int = 0
    line: float = 0.0

    @classmethod
    def of(cls, node: int, adapters: str) -> Fabric:
        """`8x400` is eight adapters of 400 Gbit/s a node; "" means no network. Raises ValueError for another form."""
        if node < 1:
            raise ValueError(f"--nodes-of {node}: a node has at least 1 GPU")
        if not adapters:
            return cls(node)
        match = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", adapters)
        if not match or not math.prod(map(float, match.groups())):
            raise ValueError(f"--network {adapters}: write ADAPTERSxGBITS a node, e.g. 8x400 for eight of 400 Gbit/s")
        return cls(node, int(match[1]), float(match[2]) * GB / 8)


# ---- collectives


@dataclass(frozen=True)
class Ranks:
    """`size` accelerators, `node` to a node, and the bandwidths and latencies of a collective over them."""

    size: int
    node: int
    # bandwidth of the narrowest link of a ring through all of them
    bandwidth: float
    # seconds of a hop between nodes
    network_latency: float
    constants: Constants

    @property
    def nodes(self) -> int:
        return -(-self.size // self.node)

    @property
    def ring_latency(self) -> float:
        """Seconds of the hops from the first rank to the last."""
        return (self.size - self.nodes) * self.constants.link_latency + (self.nodes - 1) * self.network_latency

    def reduce_scatter(self, size: float, calls: int = 1) -> float:
        """Seconds of a ring reduce-scatter of `size` bytes in `calls` equal parts; also of an all-gather of `size` bytes, and of
        an all-to-all in which each rank sends `size / n` bytes to each other one."""
        if self.size == 1:
            return 0.0
        latency = self.constants.base_latency + self.ring_latency
        return (self.size - 1) / self.size * size / self.bandwidth + calls * latency

    def all_reduce(self, size: float) -> float:
        """Seconds of the faster of ring and tree: equal traffic, 2 (n - 1) hops or twice the depth of the tree."""
        if self.size == 1:
            return 0.0
        depth = (min(self.node, self.size) - 1) * self.constants.link_latency
        depth += math.log2(self.nodes) * self.network_latency
        transfer = 2 * (self.size - 1) / self.size * size / self.bandwidth
        latency = self.constants.base_latency + 2 * min(self.ring_latency, depth)
        return transfer + latency


def groups(device: Device, fabric: Fabric, size: int, constants: Constants) -> tuple[Ranks, Ranks, Ranks]:
    """Three groups: the ranks of one node; one rank of each node, where one such group for each rank of a node shares its network;
    all ranks. Raises ValueError if they need a network that the fabric lacks."""
    linked = size <= max(device.domain, fabric.node)
    if not linked and not fabric.adapters:
        raise ValueError(f"{size} GPUs in nodes of {fabric.node} need a network: give --network, e.g. 8x400")
    link = device.link * constants.link
    network = fabric.adapters * min(fabric.line, SLOTS[device.generation] * constants.network)
    shared, whole = (link if linked else min(link, network / sharing) for sharing in (fabric.node, 1))
    hop = constants.link_latency if linked else constants.network_latency
    ranks = min(size, fabric.node)
    return (
        Ranks(ranks, ranks, link, hop, constants),
        Ranks(-(-size // fabric.node), 1, shared, hop, constants),
        Ranks(size, fabric.node, whole, hop, constants),
    )


# ---- one update

# rows and columns of a tile, which one multiprocessor computes at a time
TILE = 128
# a product's inner dimension is split between multiprocessors down to this
SPLIT_DEPTH = 512
# bytes of a weight in a collective
WEIGHT_BYTES = 2
# parameters of a model up to which stage 3 keeps the gathered weights of the forward pass for the backward pass; DeepSpeed's
# default of stage3_max_reuse_distance
KEPT = 1_000_000_000


@functools.cache
def parameters(model: ModelConfig) -> int:
    from megabert.model import parameter_count  # after the command line is checked, since it imports torch

    return parameter_count(model)


@dataclass(frozen=True)
class MicroBatch:
    """The input of a forward and backward pass of one GPU. Includes padding if the software computes it."""

    # tokens in the linear layers
    tokens: float
    # (query, key) pairs that attention computes in all layers
    pairs: float
    predictions: float
    sequences: float

    def times(self, factor: float) -> MicroBatch:
        return MicroBatch(*(factor * getattr(self, part.name) for part in fields(self)))


@dataclass(frozen=True)
class Software:
    """Properties of a trainer: memory traffic besides matrix products, kernels, and collectives."""

    # bytes a token, layer and hidden unit outside products and attention, forward and backward
    elementwise: float
    # bytes a pair, layer and head, forward and backward; 0: flash attention
    attention: float
    # a layer, forward and backward
    kernels: int
    # seconds of the host a kernel; 0: CUDA graphs
    launch: float = 0.0
    fp8: bool = False
    # bytes a parameter and micro-step to add up gradients
    accumulate: float = 0.0
    # bytes a parameter of norms, clipping and the update itself
    optimizer: float = 42.0
    # Muon's matrices, each orthogonalised by one rank
    orthogonal: tuple[Matrix, ...] = ()
    # DeepSpeed's stage. None is NVIDIA's DistributedFusedLAMB: gradients are reduce-scattered in a node and all-reduced across
    # nodes, each rank of a node updates its share, weights are gathered in the node.
    zero: int | None = None
    # gradients are reduced during the backward pass
    overlap: bool = False
    # bytes of a gradient in a collective
    gradient_bytes: int = 2
    # at stage 1 shares of fewer parameters than this are all-reduced, larger ones reduced to their rank
    least_share: float = math.inf
    # the forward pass is recomputed in the backward pass
    recompute: bool = False
    # seconds an update without overlap
    host: float = 0.0


@dataclass(frozen=True)
class System:
    """Hardware and software of the updates."""

    device: Device
    fabric: Fabric
    software: Software
    constants: Constants = field(default_factory=Constants)

    @property
    def memory(self) -> float:
        """Memory bandwidth of kernels, bytes a second."""
        return self.device.memory * self.constants.memory

    @property
    def rate(self) -> float:
        """FLOP/s of matrix products in 16 bits, in whole waves."""
        return self.device.peak * self.device.achieved


@dataclass(frozen=True)
class GpuShare:
    """One GPU's part of an update: `micro_steps` passes over `batch`, whose rows take the loader `rows_seconds`."""

    batch: MicroBatch
    micro_steps: int = 1
    rows_seconds: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of one update by term; they add up to `seconds`."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    # minimum time of the kernels, and waiting for a slower host
    kernels: float = 0.0
    optimizer: float = 0.0
    # collectives within nodes, without the overlapped part
    inside: float = 0.0
    # the same through the network
    network: float = 0.0
    host: float = 0.0
    # waiting for rows
    data: float = 0.0

    @property
    def seconds(self) -> float:
        return math.fsum(vars(self).values())


def wave_share(m: float, n: float, k: float, processors: int) -> float:
    """Efficiency of a product [m, k] x [k, n] that is computed in whole waves of whole tiles. To fill the last wave the inner dimension
    may be split into parts of at least SPLIT_DEPTH."""
    if not processors:
        return 1.0
    tiles = math.ceil(m / TILE) * math.ceil(n / TILE)
    filled = (
        tiles * parts / (math.ceil(tiles * parts / processors) * processors)
        for parts in range(1, max(1, int(k // SPLIT_DEPTH)) + 1)
    )
    return max(filled) * m * n / (tiles * TILE * TILE)


def products(model: ModelConfig, batch: MicroBatch) -> Iterator[tuple[float, float, float, int]]:
    """(m, n, k, count) of each matrix product of a forward and a backward pass, of 2 m n k operations."""
    d, ffn, tokens = model.hidden, model.ffn, batch.tokens
    linear = [(tokens, model.qkv_columns, d), (tokens, d, d), (tokens, model.ffn_inputs, d), (tokens, d, ffn)]
    heads = [(batch.predictions, model.vocab_size, d)]
    heads += [(batch.predictions, d, d)] if model.transform else []
    heads += [(batch.sequences, d, d)] if model.nsp else []
    for shapes, count in ((linear, model.layers), (heads, 1)):
        for m, n, k in shapes:
            # output, input's gradient, weight's gradient
            if m:
                yield from ((m, n, k, count), (m, k, n, count), (n, k, m, count))


@functools.cache
def wave_operations(model: ModelConfig, batch: MicroBatch, processors: int) -> float:
    """FLOPs of a pass's matrix products, and those lost in incomplete waves."""
    return sum(count * 2 * m * n * k / wave_share(m, n, k, processors) for m, n, k, count in products(model, batch))


def launch_seconds(model: ModelConfig, software: Software) -> float:
    """Seconds of the host to launch the kernels of a forward and a backward pass."""
    return model.layers * software.kernels * software.launch * (4 / 3 if software.recompute else 1)


def pass_seconds(model: ModelConfig, batch: MicroBatch, system: System) -> StepTime:
    """Forward and backward pass of one micro-batch on one GPU, without the update."""
    device, software, constants = system.device, system.software, system.constants
    operations = wave_operations(model, batch, device.processors)
    # in 16 bits, also if the other products are in 8
    scores = 12 * model.hidden * batch.pairs / system.rate
    scores += software.attention * model.heads * batch.pairs / system.memory
    terms = {
        "products": operations / (system.rate * (constants.fp8 if software.fp8 else 1.0)),
        "attention": scores,
        "elementwise": software.elementwise * model.layers * model.hidden * batch.tokens / system.memory,
        "kernels": model.layers * software.kernels * constants.kernel,
    }
    # the forward pass, a third, is recomputed
    if software.recompute:
        terms = {name: 4 / 3 * value for name, value in terms.items()}
    terms["kernels"] += max(0.0, launch_seconds(model, software) - math.fsum(terms.values()))
    return StepTime(**terms)


class Traffic(NamedTuple):
    """Seconds of an update's collectives, inside nodes and through the network, that may overlap with passes, and of the others."""

    during: tuple[float, float]
    after: tuple[float, float]


def traffic(model: ModelConfig, micro_steps: int, size: int, system: System) -> Traffic:
    """Traffic of gradients, and of weights in 16 bits, of `size` GPUs. Raises ValueError as `groups`."""
    software = system.software
    inside, across, whole = groups(system.device, system.fabric, size, system.constants)
    weights = float(WEIGHT_BYTES * parameters(model))
    gradients = float(software.gradient_bytes * parameters(model))
    orthogonal = float(WEIGHT_BYTES * sum(matrix.size for matrix in software.orthogonal))
    if software.zero is None:
        between = across.all_reduce(gradients / inside.size)
        within = inside.reduce_scatter(gradients)
        # nodes that share an NVLink domain need no network
        if size <= system.device.domain:
            within, between = within + between, 0.0
        return Traffic(during=(within, between), after=(inside.reduce_scatter(weights), 0.0))
    if software.zero == 3:
        layer_by_layer = whole.reduce_scatter(gradients, model.layers)
        gathers = 1 if parameters(model) <= KEPT else 2
        layer_by_layer += gathers * whole.reduce_scatter(weights, model.layers)
        during, after = micro_steps * layer_by_layer, 0.0
    elif software.zero == 1 and parameters(model) / size >= software.least_share:
        during, after = whole.reduce_scatter(gradients), whole.reduce_scatter(weights)
    else:
        during = (micro_steps if software.zero == 2 else 1) * whole.all_reduce(gradients)
        after = whole.reduce_scatter(weights) if software.zero else 0.0
    # Muon's directions to their owners and updates back; at stage 0 only updates, to every rank
    if orthogonal:
        after += 2 * whole.reduce_scatter(orthogonal / size) if software.zero else whole.reduce_scatter(orthogonal)
    if size <= max(system.device.domain, system.fabric.node):
        return Traffic((during, 0.0), (after, 0.0))
    return Traffic((0.0, during), (0.0, after))


def step_seconds(model: ModelConfig, share: GpuShare, size: int, system: System) -> StepTime:
    """An update of `size` GPUs, each with a `share`. Raises ValueError as `groups`."""
    software, steps = system.software, share.micro_steps
    one = pass_seconds(model, share.batch, system)
    moved = traffic(model, steps, size, system)
    inside, network = moved.during
    if software.overlap:
        # the other stages reduce only in the last micro-step; stage 3 gathers in the forward pass too
        passes = steps if software.zero in (2, 3) else 1
        part = 1.0 if software.zero == 3 else 2 / 3
        room = system.constants.overlap * part * passes * one.seconds
        inside, network = max(0.0, inside - max(0.0, room - network)), max(0.0, network - room)
    shards = {None: min(size, system.fabric.node), 0: 1}.get(software.zero, size)
    bytes_each = software.accumulate * steps + software.optimizer / shards
    flops = [matrix.flops for matrix in software.orthogonal]
    # Muon's products, of the busiest rank under an ideal assignment
    owned = max(math.fsum(flops) / size, max(flops, default=0.0))
    terms = {name: steps * value for name, value in vars(one).items()} | {
        "optimizer": parameters(model) * bytes_each / system.memory + owned / system.rate,
        "inside": inside + moved.after[0],
        "network": network + moved.after[1],
        "host": software.host,
    }
    waits = max(0.0, share.rows_seconds - math.fsum(terms.values()))
    return StepTime(**terms | {"data": waits})
