"""Costs of ring and tree against cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megabert.commands.plan.collectives import Ranks, across_nodes, inside_a_node, world
from megabert.commands.plan.devices import DEVICES, Constants, Fabric

GB, US = 1e9, 1e-6
BARE = Constants(link=1.0, network=1.0, base_latency=0.0, link_latency=0.0, network_latency=0.0)
H100, FABRIC = DEVICES["h100"], Fabric(8, 400 * GB)


def ranks(size: int, node: int) -> Ranks:
    """100 GB/s, 10 us a collective, 2 us a hop inside a node and 20 us between nodes."""
    return Ranks(size, node, 100 * GB, 2 * US, 20 * US, 10 * US)


def test_a_ring_in_one_node() -> None:
    four = ranks(4, 4)  # 3 steps of 1 GB each at 100 GB/s, 3 hops
    assert four.reduce_scatter(4 * GB) == pytest.approx(0.03 + 10 * US + 3 * 2 * US, rel=1e-12)
    assert four.all_gather(4 * GB) == four.reduce_scatter(4 * GB)
    assert four.all_reduce(4 * GB) == pytest.approx(0.06 + 10 * US + 6 * 2 * US, rel=1e-12)
    # each holds 1 GB and sends a quarter of it to each of three
    assert four.all_to_all(4 * GB) == pytest.approx(0.0075 + 10 * US + 3 * 2 * US, rel=1e-12)
    assert four.reduce_scatter(4 * GB, calls=5) == pytest.approx(0.03 + 5 * 16 * US, rel=1e-12)


def test_a_ring_through_nodes_has_a_slow_hop_a_node() -> None:
    # 16 ranks in 4 nodes: 15 hops, of which 3 leave a node and 12 do not
    assert ranks(16, 4).reduce_scatter(0.0) == pytest.approx(10 * US + 12 * 2 * US + 3 * 20 * US)


def test_the_tree_takes_over_where_there_are_many_nodes() -> None:
    # 64 nodes of one: a ring has 2 x 63 hops, a tree of depth 6 has 2 x 6
    assert ranks(64, 1).all_reduce(64 * GB) == pytest.approx(2 * 63 / 64 * 0.64 + 10 * US + 12 * 20 * US)
    # two nodes of one: both have one hop each way
    assert ranks(2, 1).all_reduce(0.0) == pytest.approx(10 * US + 2 * 20 * US)


def test_one_rank_sends_nothing() -> None:
    assert ranks(1, 8).all_reduce(GB) == ranks(1, 8).reduce_scatter(GB) == ranks(1, 8).all_gather(GB) == 0.0


def test_who_shares_what() -> None:
    # 8 adapters of 50 GB/s: a ring through all ranks has all of them, one group of eight has an eighth
    assert world(H100, FABRIC, 64, BARE).bandwidth == 400 * GB
    assert across_nodes(H100, FABRIC, 64, BARE).bandwidth == 50 * GB
    assert across_nodes(H100, FABRIC, 64, BARE).size == 8
    assert inside_a_node(H100, FABRIC, 64, BARE).bandwidth == 450 * GB
    assert world(H100, FABRIC, 8, BARE).bandwidth == 450 * GB, "one node has no use for a network"
    wide = Fabric(8, 10_000 * GB)
    assert world(H100, wide, 64, BARE).bandwidth == 450 * GB, "then NVLink is narrower"
    assert world(H100, FABRIC, 64, replace(BARE, network=0.5)).bandwidth == 200 * GB


def test_an_nvlink_domain_larger_than_a_node_needs_no_network() -> None:
    gb200 = DEVICES["gb200"]
    assert across_nodes(gb200, Fabric(4), 64, BARE).bandwidth == 900 * GB
    with pytest.raises(ValueError, match="128 GPUs in nodes of 4 need a network"):
        across_nodes(gb200, Fabric(4), 128, BARE)


@pytest.mark.parametrize("text", ["400", "8x", "x400", "0x400", "8x0", "8 x 400", "-8x400"])
def test_a_network_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"--network .*write ADAPTERSxGBITS"):
        Fabric.of(8, text)


def test_a_network_in_gigabits() -> None:
    assert Fabric.of(8, "8x400") == FABRIC
    assert Fabric.of(4, "2x12.5").network == pytest.approx(3.125 * GB)
    with pytest.raises(ValueError, match="--nodes-of 0"):
        Fabric.of(0, "8x400")
