"""Times of collectives and of one update, by hand and by limits."""

import math
from dataclasses import replace

import pytest

from megabert.commands.plan import forecast as planner
from megabert.commands.plan import step_time as times
from megabert.commands.plan.step_time import DEVICES, Constants, Fabric, GpuShare, MicroBatch, Ranks, Software, System
from megabert.config import ModelConfig
from megabert.engine.deepspeed_step import LEAST
from megabert.metrics import training_flops
from megabert.optim.muon import Matrix
from tests.commands.plan.cases import FABRIC, FREE, H100, PLAIN, base

GB, US = 1e9, 1e-6
MODEL = ModelConfig(layers=24, hidden=1024, heads=16, vocab_size=30_528)
BATCH = MicroBatch(tokens=16_384, pairs=24 * 32 * 512**2, predictions=2_464, sequences=32)


def ranks_of(size: int, node: int) -> Ranks:
    """100 GB/s, 10 us a collective, 2 us a hop inside a node and 20 us between nodes."""
    return Ranks(size, node, 100 * GB, 20 * US, Constants(base_latency=10 * US, link_latency=2 * US))


def test_ring_and_tree_by_hand() -> None:
    # 3 steps of 1 GB each at 100 GB/s, 3 hops
    four = ranks_of(4, 4)
    assert four.reduce_scatter(4 * GB) == pytest.approx(0.03 + 10 * US + 3 * 2 * US, rel=1e-12)
    assert four.all_reduce(4 * GB) == pytest.approx(0.06 + 10 * US + 6 * 2 * US, rel=1e-12)
    assert four.reduce_scatter(4 * GB, calls=5) == pytest.approx(0.03 + 5 * 16 * US, rel=1e-12)
    # 16 ranks in 4 nodes: 15 hops, of which 3 leave a node and 12 do not
    assert ranks_of(16, 4).reduce_scatter(0.0) == pytest.approx(10 * US + 12 * 2 * US + 3 * 20 * US)
    # 64 nodes of one: a ring has 2 x 63 hops, a tree of depth 6 has 2 x 6; of two nodes both have one hop each way
    assert ranks_of(64, 1).all_reduce(64 * GB) == pytest.approx(2 * 63 / 64 * 0.64 + 10 * US + 12 * 20 * US)
    assert ranks_of(2, 1).all_reduce(0.0) == pytest.approx(10 * US + 2 * 20 * US)
    one = ranks_of(1, 8)
    assert one.all_reduce(GB) == one.reduce_scatter(GB) == 0.0


def test_ranks_share_links_and_adapters() -> None:
    # 8 adapters of 50 GB/s: a ring through all ranks has all of them, one group of eight has an eighth
    inside, across, whole = times.groups(H100, FABRIC, 64, FREE)
    assert (inside.bandwidth, across.bandwidth, whole.bandwidth) == (450 * GB, 50 * GB, 400 * GB)
    assert (inside.size, across.size, whole.size) == (8, 8, 64)
    # one node has no use for a network, and with a wide one NVLink is narrower
    assert times.groups(H100, FABRIC, 8, FREE)[2].bandwidth == 450 * GB
    assert times.groups(H100, Fabric(8, 8, 10_000 * GB), 64, FREE)[2].bandwidth == 450 * GB
    # half of a slot of 64 GB/s is less than an adapter's 50, but more than 25
    assert times.groups(H100, FABRIC, 64, replace(FREE, network=0.5))[2].bandwidth == 8 * 32 * GB
    assert times.groups(H100, Fabric.of(8, "8x200"), 64, replace(FREE, network=0.5))[2].bandwidth == 8 * 25 * GB
    # an NVLink domain larger than a node
    assert times.groups(DEVICES["gb200"], Fabric(4), 64, FREE)[1].bandwidth == 900 * GB
    with pytest.raises(ValueError, match="128 GPUs in nodes of 4 need a network"):
        times.groups(DEVICES["gb200"], Fabric(4), 128, FREE)
    assert Fabric.of(4, "2x12.5") == Fabric(4, 2, 1.5625 * GB)
    # PCIe 3.0 instead of 5.0
    assert times.groups(DEVICES["h100-pcie"].linked(16), FABRIC, 8, FREE)[0].bandwidth == 16 * GB
    assert DEVICES["h100-pcie"].linked(0) == DEVICES["h100-pcie"]


def system(software: Software = PLAIN, constants: Constants | None = None) -> System:
    return System(H100, FABRIC, software, constants or Constants())


def step(size: int, software: Software = PLAIN, steps: int = 1, constants: Constants | None = None) -> times.StepTime:
    return times.step_seconds(MODEL, GpuShare(BATCH, steps), size, system(software, constants))


def test_the_products_are_the_models_operations() -> None:
    for model in (MODEL, ModelConfig(layers=3, hidden=64, heads=4, vocab_size=1_000, nsp=False)):
        counted = sum(2 * m * n * k * count for m, n, k, count in times.products(model, BATCH))
        counted += 12 * model.hidden * BATCH.pairs
        assert counted == training_flops(model, 16_384, 24 * 32 * 512**2, 2_464, 32)


def test_waves_of_tiles() -> None:
    # whole; a tile left for a second wave; split in five, three waves; half of a tile missing; not modelled
    full, left, split, half, unknown = (128 * 108, 108), (128 * 109, 108), (1_024, 108), (64, 1), (64, 0)
    for (m, processors), (n, k), want in (
        (full, (128, 512), 1), (left, (128, 512), 109 / 216), (split, (1_024, 4_096), 320 / 324),
        (half, (128, 512), 0.5), (unknown, (128, 512), 1),
    ):  # fmt: skip
        assert times.wave_share(m, n, k, processors) == pytest.approx(want)


def test_a_pass_by_hand() -> None:
    """A device of 1 TFLOP/s and 1 TB/s in a model of one layer whose every product is one whole wave."""
    model = ModelConfig(layers=1, hidden=128, heads=2, vocab_size=128, nsp=False)
    one = replace(H100, peak=1e12, achieved=1.0, memory=1e12, processors=1)
    batch = MicroBatch(tokens=128, pairs=128**2, predictions=128, sequences=1)
    software = Software(elementwise=100, attention=10, kernels=20)
    constants = replace(FREE, kernel=1e-6)
    found = times.pass_seconds(model, batch, System(one, FABRIC, software, constants))
    # per token 6 x (12 d^2) in the layer and 6 x 2 d^2 in the heads; 12 d a pair
    assert found.products == pytest.approx(128 * 6 * 14 * 128**2 / 1e12)
    assert found.attention == pytest.approx((12 * 128 + 10 * 2) * 128**2 / 1e12)
    assert found.elementwise == pytest.approx(100 * 128 * 128 / 1e12)
    assert found.kernels == pytest.approx(20e-6)
    eight = times.pass_seconds(model, batch, System(one, FABRIC, replace(software, fp8=True), constants))
    assert eight.products == pytest.approx(found.products / 1.4) and eight.attention == found.attention
    recomputed = times.pass_seconds(model, batch, System(one, FABRIC, replace(software, recompute=True), constants))
    assert recomputed.seconds == pytest.approx(4 / 3 * found.seconds)
    # where the host is slower than the device, its launches are the time
    slow = times.pass_seconds(model, batch, System(one, FABRIC, replace(software, launch=1e-3), constants))
    assert slow.seconds == pytest.approx(20e-3)


def test_traffic_of_the_zero_stages() -> None:
    """In units of a reduce-scatter: 511/512 of the bytes through the narrowest place of a node."""
    unit = times.parameters(MODEL) * 511 / 512 / 400e9
    # stage, each share to its rank, traffic of gradients and weights: all-reduced once an update, in every one of four
    # micro-steps at stage 2, layer by layer at stage 3
    cases = ((0, False, 2, 0), (1, False, 2, 1), (1, True, 1, 1), (2, False, 8, 1), (3, False, 4, 4))
    for stage, own, gradients, weights in cases:
        for gradient_bytes in (2, 4):
            least = times.parameters(MODEL) // 512 if own else math.inf
            software = replace(PLAIN, zero=stage, gradient_bytes=gradient_bytes, least_share=least)
            found = times.traffic(MODEL, 4, 512, system(software, FREE))
            expected = (gradients * gradient_bytes + weights * 2) * unit
            assert found.during[1] + found.after[1] == pytest.approx(expected, rel=1e-9), stage
            assert found.during[0] == found.after[0] == 0.0


def test_traffic_is_that_of_the_engine() -> None:
    """Gradients in fp32; at stage 1 each share to its rank during the backward pass, until the shares are smaller than the
    engine reduces so."""
    for stage in range(4):
        software = planner.describe_software(base("precision=bf16", f"zero.stage={stage}"))
        found = software.gradient_bytes, software.overlap, software.least_share
        assert found == (4, stage in (1, 3), LEAST if stage == 1 else math.inf)
    size, moved = times.parameters(MODEL), system(planner.describe_software(base("precision=bf16")), FREE)
    assert size / 512 < LEAST < size / 256
    for ranks, copies in ((256, 1), (512, 2)):
        found = times.traffic(MODEL, 1, ranks, moved).during[1]
        assert found == pytest.approx(copies * 4 * size * (ranks - 1) / ranks / 400e9)


def test_overlap_hides_at_most_half_the_backward_pass() -> None:
    software = replace(PLAIN, overlap=True)
    bare, found = step(512), step(512, software)
    one = times.pass_seconds(MODEL, BATCH, system())
    assert 0 < bare.seconds - found.seconds <= 0.5 * 2 / 3 * one.seconds
    assert found.network == 0 and found.inside >= times.traffic(MODEL, 1, 512, system()).after[0]
    assert step(512, software, constants=Constants(overlap=0.0)) == bare


def test_optimizer_shares_and_muons_traffic() -> None:
    matrices = tuple(Matrix(n, 0, 1_024, 4_096) for n in range(48))
    muon = replace(PLAIN, orthogonal=matrices, zero=1)
    flops = 48 * 5 * (4 * 1_024**2 * 4_096 + 2 * 1_024**3)
    # bytes a parameter: accumulated in each of three micro-steps, updated in shares
    whole = times.parameters(MODEL) / (H100.memory * 0.85)
    for stage, shards in ((0, 1), (1, 16), (None, 8)):
        found = step(16, replace(PLAIN, zero=stage), steps=3).optimizer
        assert found == pytest.approx((3 * 27 + 67 / shards) * whole)
    # on 64 no rank has less than a matrix
    for size, ranks in ((1, 1), (8, 8), (64, 48)):
        more = step(size, muon).optimizer - step(size, replace(PLAIN, zero=1)).optimizer
        assert more == pytest.approx(flops / ranks / system().rate)
    # bytes of the matrices in 16 bits that one of 8 ranks holds
    share = 2 * 48 * 1_024 * 4_096 / 8
    for stage, sent in ((1, 2 * 7 / 8 * share), (3, 2 * 7 / 8 * share), (0, 7 * share)):
        both = [system(replace(software, zero=stage), FREE) for software in (muon, PLAIN)]
        with_muon, without = (times.traffic(MODEL, 1, 8, one) for one in both)
        assert with_muon.during == without.during
        assert with_muon.after[0] - without.after[0] == pytest.approx(sent / H100.link)


def test_rows_that_come_too_slowly_are_waited_for() -> None:
    slow = times.step_seconds(MODEL, GpuShare(BATCH, 1, rows_seconds=2.0), 8, system())
    assert slow.seconds == pytest.approx(2.0) and slow.data == pytest.approx(2.0 - step(8).seconds)
