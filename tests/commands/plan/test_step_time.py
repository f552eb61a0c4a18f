"""The step-time model by hand-made numbers, at its limits and in its directions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megabert.commands.plan.devices import ACHIEVED, DEVICES, Constants, Fabric, device
from megabert.commands.plan.step_time import (
    MicroBatch,
    Share,
    Software,
    StepTime,
    System,
    parameters,
    pass_seconds,
    products,
    step_seconds,
    traffic,
    wave_share,
)
from megabert.config import ModelConfig
from megabert.metrics import training_flops
from megabert.optim.muon import Matrix

MODEL = ModelConfig(layers=24, hidden=1024, heads=16, vocab_size=30_528)
BATCH = MicroBatch(tokens=16_384, pairs=32 * 512**2, predictions=2_464, sequences=32)
PLAIN = Software(elementwise=166, attention=0, kernels=60, accumulate=27, optimizer=67)
FABRIC = Fabric(8, 400e9)
FREE = Constants(memory=1, link=1, network=1, kernel=0, base_latency=0, link_latency=0, network_latency=0)


def system(software: Software = PLAIN, constants: Constants | None = None, gpu: str = "h100") -> System:
    return System(DEVICES[gpu], FABRIC, software, constants or Constants())


def step(size: int, software: Software = PLAIN, steps: int = 1, constants: Constants | None = None) -> StepTime:
    return step_seconds(MODEL, Share(BATCH, steps), size, system(software, constants))


def test_the_products_are_the_models_operations() -> None:
    for model in (MODEL, ModelConfig(layers=3, hidden=64, heads=4, vocab_size=1_000, nsp=False)):
        counted = sum(2 * m * n * k * count for m, n, k, count in products(model, BATCH))
        counted += 12 * model.layers * model.hidden * BATCH.pairs
        assert counted == training_flops(model, 16_384, 32 * 512**2, 2_464, 32)


def test_waves_of_tiles() -> None:
    assert wave_share(128 * 108, 128, 512, 108) == 1.0
    assert wave_share(128 * 109, 128, 512, 108) == pytest.approx(109 / 216)  # one tile is left for a second wave
    assert wave_share(1_024, 1_024, 512, 108) == pytest.approx(64 / 108)
    assert wave_share(1_024, 1_024, 4_096, 108) == pytest.approx(320 / 324)  # split in five: three waves
    assert wave_share(64, 128, 512, 1) == 0.5  # half of a tile is not there
    assert wave_share(64, 128, 512, 0) == 1.0
    assert wave_share(1e7, 4_096, 1_024, 132) > 0.999


def test_a_pass_by_hand() -> None:
    """A device of 1 TFLOP/s and 1 TB/s in a model of one layer whose every product is one whole wave."""
    model = ModelConfig(layers=1, hidden=128, heads=2, vocab_size=128, nsp=False)
    one = replace(DEVICES["h100"], peak=1e12, achieved=1.0, memory=1e12, processors=1)
    batch = MicroBatch(tokens=128, pairs=128**2, predictions=128, sequences=1)
    software = Software(elementwise=100, attention=10, kernels=20)
    constants = replace(FREE, kernel=1e-6)
    found = pass_seconds(model, batch, System(one, FABRIC, software, constants))
    # per token 6 x (12 d^2) in the layer and 6 x 2 d^2 in the heads; 12 d a pair
    assert found.products == pytest.approx(128 * 6 * 14 * 128**2 / 1e12)
    assert found.attention == pytest.approx((12 * 128 + 10 * 2) * 128**2 / 1e12)
    assert found.elementwise == pytest.approx(100 * 128 * 128 / 1e12)
    assert found.kernels == pytest.approx(20e-6)
    eight = pass_seconds(model, batch, System(one, FABRIC, replace(software, fp8=True), constants))
    assert eight.products == pytest.approx(found.products / 1.4) and eight.attention == found.attention
    again = pass_seconds(model, batch, System(one, FABRIC, replace(software, recompute=True), constants))
    assert again.seconds == pytest.approx(4 / 3 * found.seconds)
    slow = pass_seconds(model, batch, System(one, FABRIC, replace(software, launch=1e-3), constants))
    assert slow.seconds == pytest.approx(20e-3), "the host is slower than the device: its launches are the time"


def test_one_gpu_has_nobody_to_talk_to() -> None:
    for stage in (None, 0, 1, 2, 3):
        found = step(1, replace(PLAIN, zero=stage))
        assert found.inside == found.network == 0.0
    assert step(8, replace(PLAIN, zero=1)).network == 0.0 < step(8, replace(PLAIN, zero=1)).inside
    assert step(16, replace(PLAIN, zero=1)).network > 0.0


def test_with_infinite_bandwidth_only_computing_is_left() -> None:
    endless = replace(DEVICES["h100"], link=1e30, memory=1e30)
    free = System(endless, Fabric(8, 1e30), PLAIN, FREE)
    found = step_seconds(MODEL, Share(BATCH, 4), 512, free)
    one = pass_seconds(MODEL, BATCH, free)
    assert found.seconds == pytest.approx(4 * (one.products + one.attention), rel=1e-9)
    assert found.seconds > 4 * training_flops(MODEL, 16_384, 32 * 512**2, 2_464, 32) / free.rate


@pytest.mark.parametrize(("stage", "micro_steps", "units"), [(0, 4, 2), (1, 4, 3), (2, 4, 5), (3, 4, 12), (3, 1, 3)])
def test_traffic_of_the_zero_stages(stage: int, micro_steps: int, units: int) -> None:
    """In units of a reduce-scatter of all weights: 511/512 of them through the narrowest place of a node."""
    found = traffic(MODEL, micro_steps, 512, system(replace(PLAIN, zero=stage), FREE))
    unit = 2 * parameters(MODEL) * 511 / 512 / 400e9
    assert (found.during[1] + found.after[1]) / unit == pytest.approx(units, rel=1e-9)
    assert found.during[0] == found.after[0] == 0.0


def test_traffic_of_an_optimizer_sharded_in_the_node() -> None:
    found = traffic(MODEL, 1, 512, system(PLAIN, FREE))
    size = 2 * parameters(MODEL)
    assert found.during[0] == found.after[0] == pytest.approx(size * 7 / 8 / 450e9)
    # each of eight groups of 64 all-reduces an eighth over an adapter of 50 GB/s
    assert found.during[1] == pytest.approx(2 * 63 / 64 * size / 8 / 50e9)
    assert found.after[1] == 0.0


def test_overlap_hides_gradients_behind_half_of_the_backward_pass_and_no_more() -> None:
    software = replace(PLAIN, overlap=True)
    bare, found = step(512), step(512, software)
    one = pass_seconds(MODEL, BATCH, system())
    assert 0 < bare.seconds - found.seconds <= 0.5 * 2 / 3 * one.seconds
    assert found.network == 0.0 and found.inside >= traffic(MODEL, 1, 512, system()).after[0]
    little = Share(BATCH.times(1 / 32))  # of a backward pass too short for all gradients, half is used
    room = 0.5 * 2 / 3 * pass_seconds(MODEL, little.batch, system()).seconds
    saved = step_seconds(MODEL, little, 512, system()).seconds
    saved -= step_seconds(MODEL, little, 512, system(software)).seconds
    assert saved == pytest.approx(room)
    none = step(512, software, constants=Constants(overlap=0.0))
    assert none == bare


def test_the_optimizers_share() -> None:
    memory = DEVICES["h100"].memory * 0.85
    whole = parameters(MODEL) / memory
    assert step(16, replace(PLAIN, zero=0), steps=3).optimizer == pytest.approx((3 * 27 + 67) * whole)
    assert step(16, replace(PLAIN, zero=1), steps=3).optimizer == pytest.approx((3 * 27 + 67 / 16) * whole)
    assert step(16, PLAIN, steps=3).optimizer == pytest.approx((3 * 27 + 67 / 8) * whole)


def test_rows_that_come_slowly_are_waited_for() -> None:
    fast = step(8)
    slow = step_seconds(MODEL, Share(BATCH, 1, rows_seconds=2.0), 8, system())
    assert slow.seconds == pytest.approx(2.0) and slow.data == pytest.approx(2.0 - fast.seconds)


def test_directions() -> None:
    """More of a resource is never slower, more GPUs with the same share each never faster."""
    for stage in (None, 0, 1, 2, 3):
        software = replace(PLAIN, zero=stage)
        times = [step(size, software).seconds for size in (8, 16, 64, 512, 4_096)]
        assert times == sorted(times), stage
        for name in ("memory", "link", "network", "fp8"):
            more = replace(Constants(), **{name: 1.2 * getattr(Constants(), name)})
            assert step(64, software, constants=more).seconds <= step(64, software).seconds, name
        for name in ("kernel", "link_latency", "network_latency", "base_latency"):
            more = replace(Constants(), **{name: 2 * getattr(Constants(), name)})
            assert step(64, software, constants=more).seconds > step(64, software).seconds, name
    for gpu in ("a100", "h100", "h200", "b200"):
        assert (
            pass_seconds(MODEL, BATCH, system(gpu=gpu)).seconds < pass_seconds(MODEL, BATCH, system(gpu="v100")).seconds
        )
    assert pass_seconds(MODEL, BATCH.times(2), system()).seconds == pytest.approx(
        2 * pass_seconds(MODEL, BATCH, system()).seconds, rel=0.05
    )


def test_the_device_table() -> None:
    assert {d.generation for d in DEVICES.values()} == set(ACHIEVED)
    for found in DEVICES.values():
        assert 0 < found.achieved < 1 and 100 < found.watts < 2_000 and found.link < found.memory < found.peak
    assert DEVICES["h100"].peak == 989e12 and device("H100") is DEVICES["h100"]
    with pytest.raises(ValueError, match="--gpus k80: not in the device table; choose one of v100, a100"):
        device("k80")


def test_muons_matrices_are_shared_out_and_travel_twice() -> None:
    matrices = tuple(Matrix(n, 0, 1_024, 4_096) for n in range(48))
    muon = replace(PLAIN, orthogonal=matrices, zero=1)
    flops = 48 * 5 * (4 * 1_024**2 * 4_096 + 2 * 1_024**3)
    rate = system().rate
    for size in (1, 8):
        more = step(size, muon).optimizer - step(size, replace(PLAIN, zero=1)).optimizer
        assert more == pytest.approx(flops / size / rate)
    most = step(64, muon).optimizer - step(64, replace(PLAIN, zero=1)).optimizer
    assert most == pytest.approx(flops / 48 / rate), "no rank has less than a matrix"
    share = 2 * 48 * 1_024 * 4_096 / 8  # bytes of the matrices in 16 bits that one of 8 ranks holds
    for stage, sent in ((1, 2 * 7 / 8 * share), (3, 2 * 7 / 8 * share), (0, 7 * share)):
        with_muon, without = (
            traffic(MODEL, 1, 8, system(replace(software, zero=stage), FREE)) for software in (muon, PLAIN)
        )
        assert with_muon.during == without.during
        assert with_muon.after[0] - without.after[0] == pytest.approx(sent / DEVICES["h100"].link)
