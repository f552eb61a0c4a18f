"""Seconds of collectives by ring and tree, with latency and bandwidth, inside a node and between nodes.

A ring moves (n - 1) / n of the buffer over each link for a reduce-scatter or an all-gather and twice that for an
all-reduce, which is the least possible (Patarasuk & Yuan 2009); a double binary tree moves as much in a logarithm of
the hops (Sanders et al. 2009). Hops are counted as NCCL's own tuning model does (src/graph/tuning.cc).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megabert.commands.plan.devices import Constants, Device, Fabric


@dataclass(frozen=True)
class Ranks:
    """`size` accelerators, `node` to a node, and what a collective over them gets of links and network."""

    size: int
    node: int
    bandwidth: float  # of the narrowest place that a ring through all of them passes
    link_latency: float
    network_latency: float
    base_latency: float

    @property
    def nodes(self) -> int:
        return -(-self.size // self.node)

    def reduce_scatter(self, size: float, calls: int = 1) -> float:
        """Seconds to reduce `size` bytes held by each rank to a share a rank, in `calls` equal parts, by ring."""
        if self.size == 1:
            return 0.0
        hops = (self.size - self.nodes) * self.link_latency + (self.nodes - 1) * self.network_latency
        return (self.size - 1) / self.size * size / self.bandwidth + calls * (self.base_latency + hops)

    def all_gather(self, size: float, calls: int = 1) -> float:
        """Seconds until each rank has `size` bytes of which each had a share: a reduce-scatter backwards."""
        return self.reduce_scatter(size, calls)

    def all_reduce(self, size: float, calls: int = 1) -> float:
        """Seconds of the faster of ring and tree: equal traffic, 2 (n - 1) hops against the tree's depth twice."""
        if self.size == 1:
            return 0.0
        ring = (self.size - self.nodes) * self.link_latency + (self.nodes - 1) * self.network_latency
        depth = (min(self.node, self.size) - 1) * self.link_latency
        depth += math.log2(self.nodes) * self.network_latency
        traffic = 2 * (self.size - 1) / self.size * size / self.bandwidth
        return traffic + calls * (self.base_latency + 2 * min(ring, depth))

    def all_to_all(self, size: float) -> float:
        """Seconds until each rank has sent every other an equal part of its share of `size` bytes."""
        return self.reduce_scatter(size / self.size)


def _hop(device: Device, fabric: Fabric, size: int, sharing: int, constants: Constants) -> tuple[float, float]:
    """Bytes a second that a ring gets from node to node while `sharing` of them use a node's network, and a hop's seconds."""
    link = device.link * constants.link
    if size <= max(device.domain, fabric.node):
        return link, constants.link_latency
    if not fabric.network:
        raise ValueError(f"{size} GPUs in nodes of {fabric.node} need a network: give --network, e.g. 8x400")
    return min(link, fabric.network * constants.network / sharing), constants.network_latency


def world(device: Device, fabric: Fabric, size: int, constants: Constants) -> Ranks:
    """All ranks in one ring or tree. Raises ValueError where they need a network that the fabric has not."""
    bandwidth, hop = _hop(device, fabric, size, sharing=1, constants=constants)
    return Ranks(size, fabric.node, bandwidth, constants.link_latency, hop, constants.base_latency)


def inside_a_node(device: Device, fabric: Fabric, size: int, constants: Constants) -> Ranks:
    """The ranks of one node."""
    ranks, hop = min(size, fabric.node), constants.link_latency
    return Ranks(ranks, ranks, device.link * constants.link, hop, hop, constants.base_latency)


def across_nodes(device: Device, fabric: Fabric, size: int, constants: Constants) -> Ranks:
    """One rank of each node, while as many such groups as a node has ranks share its network.

    Raises ValueError where there is no network.
    """
    bandwidth, hop = _hop(device, fabric, size, sharing=fabric.node, constants=constants)
    return Ranks(-(-size // fabric.node), 1, bandwidth, hop, hop, constants.base_latency)
