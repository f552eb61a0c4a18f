"""The plan agrees with what really happens, with numbers worked out by hand and with limits; a mistake is one line."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megabert import config as configuration
from megabert.commands.plan import __main__ as plan
from megabert.commands.plan import forecast as planner
from megabert.commands.plan import workload
from megabert.commands.plan.forecast import forecast
from megabert.commands.plan.published import nearest
from megabert.commands.plan.quality import target_samples
from megabert.commands.plan.step_time import (
    DEVICES,
    Constants,
    Fabric,
    GpuShare,
    MicroBatch,
    Ranks,
    Software,
    StepTime,
    System,
    groups,
    parameters,
    pass_seconds,
    products,
    step_seconds,
    traffic,
    wave_share,
)
from megabert.config import Config, ModelConfig, accumulation
from megabert.distributed.ranks import World
from megabert.engine.gradients import LEAST
from megabert.metrics import training_flops
from megabert.model import BertForPreTraining
from megabert.optim.muon import Matrix
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import make_dataset
from tests.ops.oracle import needs_library

# ---- memory and work of a run

STATES = [
    *(("fp32", stage, "adamw") for stage in (0, 2)),
    *(("bf16", stage, "adamw") for stage in range(4)),
    *(("bf16", stage, "muon") for stage in (0, 1)),
]
BASE = ["model.vocab_size=30000", "schedule.total_steps=1000", "schedule.warmup_steps=100"]


def measure(world: World) -> list[tuple[int, int]]:
    """(parameters, bytes of weights, masters and moments after an update) of each case of STATES."""
    results = []
    for precision, stage, optimizer in STATES:
        fields = {"precision": precision, "zero__stage": stage, "model__hidden": 128, "optimizer__name": optimizer}
        engine = tiny.engine(tiny.config(**fields, batch__global_size=4 * world.size), world)
        tiny.train(engine, range(1))
        tensors = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
        tensors += [master.tensor for master in engine.layout.masters]
        tensors += [t for state in engine.optimizer.state.values() for t in state.values() if t.numel() > 1]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        results.append((sum(shape.numel() for shape in engine.layout.shapes), sum(storages.values())))
    return results


@pytest.mark.dist
@pytest.mark.slow
def test_states_take_what_the_formula_says() -> None:
    """Gradients are not compared: how many of them live at once is DeepSpeed's own business from moment to moment."""
    ranks = 2
    model = tiny.config(model__hidden=128).model
    for (precision, stage, optimizer), (count, found) in zip(STATES, run_ranks(ranks, measure)[0], strict=True):
        single = sum(m.size for m in workload.matrices(model)) if optimizer == "muon" else 0
        states = workload.states(count, precision, stage, ranks, single)
        expected = states["weights"] + states["masters"] + states["moments"]
        print(f"{precision} ZeRO-{stage} {optimizer}: {found / expected:.3f} of {expected / count:.1f} bytes")
        assert found == pytest.approx(expected, rel=0.03), (precision, stage)


def full_rows(config: Config, length: int) -> dict[str, torch.Tensor]:
    """`batch.micro_size` full rows of random ids, with as many predictions as a row of `length` has room for."""
    rows, capacity = config.batch.micro_size, config.data.masking.capacity(length)
    places = torch.arange(rows * length, dtype=torch.int32).view(rows, length)
    full = torch.full_like(places, length)
    ids = torch.randint(5, config.model.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    tokens = {"input_ids": ids.int(), "segment_ids": (places % length >= length // 2).int()}
    tokens |= {"position_ids": places % length, "key_start": full - length, "key_end": full, "lengths": full[:, :1]}
    heads = {"cls_positions": places[:, :1], "nsp_labels": ids[:, :1] % 2}
    return tokens | heads | {"mlm_positions": places[:, 1 : capacity + 1], "mlm_labels": ids[:, 1 : capacity + 1]}


NATIVE = ("ops.attention=native", "ops.layer=native", "ops.mlm_loss=native")
LONG = (
    *(
        "model.kind=modern",
        "model.norm=pre",
        "model.nsp=false",
        "model.bias=false",
        "model.layers=4",
        "batch.micro_size=1",
    ),
    *("model.window=128", "model.max_positions=8192", "model.dropout=0", "model.attention_dropout=0"),
)
# model, backends, tokens of a row
KEPT = {
    "bert": (["model.dropout=0.1", "batch.micro_size=4", *NATIVE], 128),
    "recomputed": (["model.activation_checkpointing=true", "batch.micro_size=4", *NATIVE], 128),
    "modern, 8192 tokens": ([*LONG, *NATIVE], 8192),
    "torch's layers": ([*LONG, "ops.attention=native", "ops.layer=torch", "ops.mlm_loss=torch"], 1024),
    "masks": ([*LONG, *NATIVE, "ops.attention=sdpa"], 1024),
    "attention matrices": ([*LONG, *NATIVE, "ops.attention=fused_softmax"], 1024),
}


@needs_library
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("case", KEPT)
def test_activations_take_what_the_formula_says(case: str, precision: str) -> None:
    """Tensors that autograd keeps for the backward pass, on the CPU."""
    overrides, length = KEPT[case]
    settings = ["model.vocab_size=2000", f"precision={precision}"]
    cfg = configuration.load("mini", settings + overrides)
    dtype = workload.DTYPES[precision]
    model = BertForPreTraining(cfg.model, cfg.ops, "cpu", dtype).to(dtype)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    # held, so that no address is used twice
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(**full_rows(cfg, length))
    found, expected = sum(storage.nbytes() for storage in kept.values()), workload.activations(cfg, length)
    print(f"{precision} {case}: {found / 2**20:.1f} MiB, formula {expected / 2**20:.1f}")
    assert math.isfinite(output.mlm_loss_sum.item())
    # with recomputation the formula holds one layer more, which exists in the backward pass only
    if cfg.model.activation_checkpointing:
        assert (
            found < expected < 0.6 * workload.activations(configuration.load("mini", settings + KEPT["bert"][0]), 128)
        )
    else:
        assert found == pytest.approx(expected, rel=0.05)


def test_windows_save_attention_unless_a_mask_hides_pairs() -> None:
    """6 layers, of which 2 see a row of 8,192 tokens and 4 see 129 tokens, by hand."""
    cfg = ModelConfig(kind="modern", layers=6, norm="pre", nsp=False, vocab_size=30_000, window=128)
    batch = MicroBatch(8192, 8192**2, 1000, 1)

    def attention(software: Software, model: ModelConfig) -> float:
        return pass_seconds(model, batch, System(DEVICES["h100"], Fabric.of(8, ""), software)).attention

    whole = attention(PLAIN, cfg.model_copy(update={"window": 0}))
    assert attention(PLAIN, cfg) / whole == pytest.approx((2 * 8192 + 4 * 129) / (6 * 8192), rel=1e-9)
    assert attention(replace(PLAIN, every_pair=True), cfg) == pytest.approx(whole, rel=1e-9)
    # a configuration's backend decides
    ops = {name: base(f"ops.attention={name}") for name in ("sdpa", "varlen", "fused_softmax")}
    assert {n: planner.software_of(c).every_pair for n, c in ops.items()} == {
        "sdpa": True, "varlen": False, "fused_softmax": True,
    }  # fmt: skip


def base(*overrides: str) -> Config:
    return configuration.load("base", [*BASE, *overrides])


def test_the_work_of_an_update_by_hand() -> None:
    update = workload.work(base(), None)
    assert (update.rows, update.seq_len, update.tokens, update.sequences) == (256, 512, 131_072, 256)
    layers = 6 * 12 * (4 * 768**2 + 8 * 768**2) * 131_072 + 12 * 12 * 768 * 256 * 512**2
    heads = 6 * (30_000 * 768 + 768**2) * round(131_072 * 0.15) + 6 * 768**2 * 256
    assert update.flops(base()) == pytest.approx(layers + heads, rel=1e-9)
    # a causal run predicts nearly every token
    causal = base("data.masking.strategy=causal", "model.nsp=false")
    update = workload.work(causal, None)
    assert (update.tokens, update.predictions, update.pairs) == (131_072, 131_072 - 256, 256 * (512 * 513 / 2))
    # a quarter of such updates among masked ones
    mix = workload.work(base("data.masking.causal_every=4", "model.nsp=false"), None)
    assert mix.predictions == 0.75 * 131_072 * 0.15 + 0.25 * update.predictions
    assert mix.pairs == 256 * (0.75 * 512**2 + 0.25 * 512 * 513 / 2)
    logits = 32 * 512 * 2 * causal.model.padded_vocab * 2
    assert workload.activations(causal, 512) - workload.activations(base(), 512) > 0.8 * logits


def test_a_plan_goes_through_the_phases(capsys) -> None:
    overrides = [
        "model.nsp=false",
        "objective.causal_share=0.25",
        "schedule.total_steps=1000",
        "schedule.warmup_steps=9",
    ]
    text = workload.report(base(*overrides), 8)
    first, second = text.partition("\n\n")[0].split("phase ")[1:]
    assert first.startswith("1 of 2: data.masking.strategy=causal\n") and second.startswith(
        "2 of 2: the run's own settings"
    )
    assert "run      250 updates" in first and "131,072 tokens, 256 sequences, 130,816 predictions" in first
    assert "run      750 updates" in second and "19,661 predictions" in second
    # memory is that of the causal phase
    causal = base(*overrides[:1], "data.masking.strategy=causal", *overrides[2:])
    assert text.partition("memory")[2] == workload.report(causal, 8).partition("memory")[2]
    mix = workload.report(base("model.nsp=false", "data.masking.causal_every=16"), 8)
    assert "26,608 predictions (a mean: 1 of 16 updates is causal)" in mix
    assert mix.partition("memory")[2] == workload.report(causal, 8).partition("memory")[2]
    command = ["--config", "base", "--gpus", "h100", "--over", "8", "--", "precision=bf16", *overrides]
    assert plan.main(command) == 0
    shown = capsys.readouterr().out
    days = [float(line.split()[-2]) for line in shown.splitlines() if line.lstrip().startswith("8 ") and " x " in line]
    assert "phase 2 of 2" in shown and len(days) == 2
    assert float(shown.partition("all phases: ")[2].split()[0]) == pytest.approx(sum(days), rel=0.01)


def test_each_phase_has_its_row_length(capsys) -> None:
    assert plan.main(["--config", "base_modernbert"]) == 0
    shown = capsys.readouterr().out
    lengths = [int(line.partition("steps, ")[2].split()[0]) for line in shown.splitlines() if line.startswith("batch ")]
    assert lengths == [1024] * 6 + [8192] * 2
    assert shown.count("no dataset named: full rows of 1024 tokens assumed (data.seq_len)") == 6
    (memory,) = (line.split() for line in shown.splitlines() if line.endswith("<- this run"))
    assert float(memory[5]) < 80
    assert plan.main(["--config", "base_modernbert", "--gpus", "h100", "phases.8.data.seq_len=4096"]) == 0
    shown = capsys.readouterr().out
    assert "576 rows of 8192 tokens" in shown and "full rows of 4096 tokens assumed (data.seq_len)" in shown


def test_an_assumed_row_length_is_named(capsys, tmp_path) -> None:
    halves = "phases=[{share=0.5},{share=0.5}]"
    for overrides, key in (([], "data.seq_len"), (["model.nsp=false", halves], "phases.2.data.seq_len")):
        assert plan.main([*TINY, *overrides]) == 0
        said = f"full rows of 512 tokens assumed (model.max_positions); or give {key}=N"
        assert said in capsys.readouterr().out
        assert plan.main([*TINY, *overrides, f"{key}=64"]) == 0
        assert "64 tokens a row" in capsys.readouterr().out
    make_dataset(tmp_path, 16, slots=8, seq_len=128, statistics={"sequences": 64, "tokens": 1600})
    assert plan.main([*TINY, "--data", str(tmp_path), "model.nsp=false"]) == 0
    assert "assumed" not in capsys.readouterr().out


def test_the_plan_counts_all_the_data(tmp_path) -> None:
    for name, rows, tokens in (("a", 24, 90), ("b", 16, 128)):
        counts = {"sequences": 4 * rows, "tokens": tokens * rows}
        make_dataset(tmp_path / name, rows, slots=8, seq_len=128, statistics=counts)
    named = [f"data.path={tmp_path / 'a'}", f'data.mix={{"{tmp_path / "b"}"=0.5}}']
    cfg = configuration.load("tiny", [*named, "batch.global_size=64", "precision=bf16"])
    manifest = workload.manifest_of(cfg)
    assert manifest is not None and workload.manifest_of(configuration.load("tiny")) is None
    update = workload.work(cfg, manifest)
    assert update.tokens == 64 * (90 + 128) / 2 and update.sequences == 64 * 4
    assert planner.job_of(cfg).update.tokens == update.tokens


def test_the_report_says_what_the_run_needs() -> None:
    cfg = base()
    text = workload.report(cfg, 8)
    assert "256 rows = 32 x 8 ranks x 1 micro-steps, 512 tokens a row" in text
    assert f"{workload.work(cfg, None).flops(cfg) * 1000:.4g} the run" in text
    assert json.loads(text.partition("DeepSpeed's configuration\n")[2])["train_batch_size"] == 256
    # ZeRO-1 on 8 GPUs: 2 + 4 + 4 / 8 + 8 / 8 bytes of 110 M parameters
    (line,) = (line for line in text.splitlines() if line.endswith("<- this run"))
    cells = [float(cell) for cell in line.split()[:5]]
    gib = 110.1e6 / 2**30
    assert cells == pytest.approx([1, 2 * gib, 4 * gib, 0.5 * gib, gib], abs=0.01)
    by_tokens = base("schedule.by=tokens", "schedule.budget_tokens=13107201")
    by_minutes = workload.report(
        base("schedule.by=minutes", "schedule.budget_minutes=30", "schedule.total_steps=1000000000"), 8
    )
    assert (
        "run      30 minutes of training, in as many updates as fit" in by_minutes and "1,000,000,000" not in by_minutes
    )
    assert "101 updates, 25,856 rows" in workload.report(by_tokens, 8)
    assert "rows = 37 x 7 ranks x 1 micro-steps less 3 seats" in workload.report(base("batch.micro_size=37"), 7)


def test_buckets_and_moments_on_a_gpu() -> None:
    """DeepSpeed allocates the bucket whole, 500 M elements of `communication_data_type` (runtime/zero/stage_1_and_2.py); Muon
    keeps one moment of the matrices."""
    sizes = {("bf16", 1): 0, ("bf16", 2): 2e9, ("fp32", 1): 2e9, ("fp32", 3): 2e9, ("bf16", 0): 0}
    for (precision, stage), expected in sizes.items():
        assert workload.bucket_bytes(base(f"precision={precision}", f"zero.stage={stage}")) == expected
    assert "stages 1 to 3 need 1.86 more" in workload.report(base("precision=bf16"), 8)
    muon, single = base("optimizer.name=muon"), 12 * 12 * 768**2
    for stage, ranks in ((0, 1), (1, 8), (3, 8)):
        less = workload.resident(base(), stage, 8)["moments"] - workload.resident(muon, stage, 8)["moments"]
        assert less == pytest.approx(4 * single / ranks)


@pytest.mark.parametrize(("phase", "length"), [(1, 128), (2, 512)])
@pytest.mark.parametrize(("name", "gib"), [("80gb", 79), ("141gb", 139)])
def test_presets_take_the_largest_micro_batch_that_fits(phase, length, name, gib) -> None:
    plain, preset = (configuration.load(f"large_phase{phase}"), configuration.load(f"large_phase{phase}_{name}"))
    # and nothing else differs
    assert preset == workload.with_micro_size(plain, preset.batch.micro_size)
    for ranks in (1, 8, 32):
        found = workload.largest_micro_size(workload.with_vocabulary(preset, None), length, ranks, gib)
        assert found == preset.batch.micro_size, (found, ranks)


def test_the_next_larger_micro_batch_does_not_fit() -> None:
    cfg = base("batch.global_size=360", "batch.micro_size=30")
    micro = workload.largest_micro_size(cfg, 512, 2, 16)
    states = sum(workload.states(workload.padded_parameters(cfg.model), "bf16", 1, 2).values())
    needs = {n: states + workload.activations(workload.with_micro_size(cfg, n), 512) for n in range(1, 181)}
    fitting = [n for n, need in needs.items() if 180 % n == 0 and need <= 0.9 * 16 * 2**30]
    assert micro == max(fitting) and 1 < micro < 180, micro
    text = workload.report(cfg, 2, memory_gib=16)
    assert f"batch.micro_size={micro}, {needs[micro] / 2**30:.1f} GiB, {180 // micro} micro-steps" in text
    assert "no micro-batch fits 1 GiB" in workload.report(cfg, 2, memory_gib=1)
    uneven = max(n for n in range(1, 53) if needs[n] <= 0.9 * 16 * 2**30)
    assert workload.largest_micro_size(cfg, 512, 7, 16) == uneven


# ---- collectives

GB, US = 1e9, 1e-6
BARE = Constants(link=1.0, network=1.0, base_latency=0.0, link_latency=0.0, network_latency=0.0)
H100, FABRIC = DEVICES["h100"], Fabric.of(8, "8x400")


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
    inside, across, whole = groups(H100, FABRIC, 64, BARE)
    assert (inside.bandwidth, across.bandwidth, whole.bandwidth) == (450 * GB, 50 * GB, 400 * GB)
    assert (inside.size, across.size, whole.size) == (8, 8, 64)
    # one node has no use for a network, and with a wide one NVLink is narrower
    assert groups(H100, FABRIC, 8, BARE)[2].bandwidth == 450 * GB
    assert groups(H100, Fabric(8, 8, 10_000 * GB), 64, BARE)[2].bandwidth == 450 * GB
    # half of a slot of 64 GB/s is less than an adapter's 50, but more than 25
    assert groups(H100, FABRIC, 64, replace(BARE, network=0.5))[2].bandwidth == 8 * 32 * GB
    assert groups(H100, Fabric.of(8, "8x200"), 64, replace(BARE, network=0.5))[2].bandwidth == 8 * 25 * GB
    # an NVLink domain larger than a node
    assert groups(DEVICES["gb200"], Fabric(4), 64, BARE)[1].bandwidth == 900 * GB
    with pytest.raises(ValueError, match="128 GPUs in nodes of 4 need a network"):
        groups(DEVICES["gb200"], Fabric(4), 128, BARE)
    assert Fabric.of(4, "2x12.5") == Fabric(4, 2, 1.5625 * GB)
    # PCIe 3.0 instead of 5.0
    assert groups(DEVICES["h100-pcie"].linked(16), FABRIC, 8, BARE)[0].bandwidth == 16 * GB
    assert DEVICES["h100-pcie"].linked(0) == DEVICES["h100-pcie"]


# ---- one update

MODEL = ModelConfig(layers=24, hidden=1024, heads=16, vocab_size=30_528)
BATCH = MicroBatch(tokens=16_384, pairs=32 * 512**2, predictions=2_464, sequences=32)
PLAIN = Software(elementwise=166, attention=0, kernels=60, accumulate=27, optimizer=67)
FREE = Constants(memory=1, link=1, network=1, kernel=0, base_latency=0, link_latency=0, network_latency=0)


def system(software: Software = PLAIN, constants: Constants | None = None, gpu: str = "h100") -> System:
    return System(DEVICES[gpu], FABRIC, software, constants or Constants())


def step(size: int, software: Software = PLAIN, steps: int = 1, constants: Constants | None = None) -> StepTime:
    return step_seconds(MODEL, GpuShare(BATCH, steps), size, system(software, constants))


def test_the_products_are_the_models_operations() -> None:
    for model in (MODEL, ModelConfig(layers=3, hidden=64, heads=4, vocab_size=1_000, nsp=False)):
        counted = sum(2 * m * n * k * count for m, n, k, count in products(model, BATCH))
        counted += 12 * model.layers * model.hidden * BATCH.pairs
        assert counted == training_flops(model, 16_384, 32 * 512**2, 2_464, 32)


def test_waves_of_tiles() -> None:
    # whole; a tile left for a second wave; split in five, three waves; half of a tile missing; not modelled
    full, left, split, half, unknown = (128 * 108, 108), (128 * 109, 108), (1_024, 108), (64, 1), (64, 0)
    for (m, processors), (n, k), want in (
        (full, (128, 512), 1), (left, (128, 512), 109 / 216), (split, (1_024, 4_096), 320 / 324),
        (half, (128, 512), 0.5), (unknown, (128, 512), 1),
    ):  # fmt: skip
        assert wave_share(m, n, k, processors) == pytest.approx(want)


def test_a_pass_by_hand() -> None:
    """A device of 1 TFLOP/s and 1 TB/s in a model of one layer whose every product is one whole wave."""
    model = ModelConfig(layers=1, hidden=128, heads=2, vocab_size=128, nsp=False)
    one = replace(H100, peak=1e12, achieved=1.0, memory=1e12, processors=1)
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
    recomputed = pass_seconds(model, batch, System(one, FABRIC, replace(software, recompute=True), constants))
    assert recomputed.seconds == pytest.approx(4 / 3 * found.seconds)
    # where the host is slower than the device, its launches are the time
    slow = pass_seconds(model, batch, System(one, FABRIC, replace(software, launch=1e-3), constants))
    assert slow.seconds == pytest.approx(20e-3)


def test_traffic_of_the_zero_stages() -> None:
    """In units of a reduce-scatter: 511/512 of the bytes through the narrowest place of a node."""
    unit = parameters(MODEL) * 511 / 512 / 400e9
    # stage, each share to its rank, traffic of gradients and weights: all-reduced once an update, in every one of four
    # micro-steps at stage 2, layer by layer at stage 3
    cases = ((0, False, 2, 0), (1, False, 2, 1), (1, True, 1, 1), (2, False, 8, 1), (3, False, 4, 4))
    for stage, own, gradients, weights in cases:
        for gradient_bytes in (2, 4):
            least = parameters(MODEL) // 512 if own else math.inf
            software = replace(PLAIN, zero=stage, gradient_bytes=gradient_bytes, least_share=least)
            found = traffic(MODEL, 4, 512, system(software, FREE))
            expected = (gradients * gradient_bytes + weights * 2) * unit
            assert found.during[1] + found.after[1] == pytest.approx(expected, rel=1e-9), stage
            assert found.during[0] == found.after[0] == 0.0


def test_traffic_is_that_of_the_engine() -> None:
    """Gradients in fp32; at stage 1 each share to its rank during the backward pass, until the shares are smaller than the
    engine reduces so."""
    for stage in range(4):
        software = planner.software_of(base("precision=bf16", f"zero.stage={stage}"))
        found = software.gradient_bytes, software.overlap, software.least_share
        assert found == (4, stage in (1, 3), LEAST if stage == 1 else math.inf)
    size, moved = parameters(MODEL), system(planner.software_of(base("precision=bf16")), FREE)
    assert size / 512 < LEAST < size / 256
    for ranks, times in ((256, 1), (512, 2)):
        found = traffic(MODEL, 1, ranks, moved).during[1]
        assert found == pytest.approx(times * 4 * size * (ranks - 1) / ranks / 400e9)


class CountedBytes(TorchDispatchMode):
    """Bytes of a rank's collectives in units of a reduce-scatter: an all-reduce is two."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.size += (2 if "allreduce" in name else 1) * max((tensor.nbytes for tensor in tensors), default=0)
        return func(*args, **(kwargs or {}))


def count_bytes(world: World) -> list[tuple[Config, int]]:
    """Each stage's configuration, and what its second update sends."""
    found = []
    for stage in range(4):
        fields = {"precision": "bf16", "zero__stage": stage, "model__hidden": 128}
        engine = tiny.engine(tiny.config(**fields, batch__global_size=4 * world.size), world)
        tiny.train(engine, range(1))
        with CountedBytes() as counted:
            tiny.train(engine, range(1, 2))
        found.append((engine.config, counted.size))
    return found


@pytest.mark.dist
@pytest.mark.slow
def test_traffic_is_what_two_ranks_send() -> None:
    for config, counted in run_ranks(2, count_bytes)[0]:
        moved = traffic(config.model, accumulation(config, 2), 2, system(planner.software_of(config), FREE))
        # of a reduce-scatter over two ranks half travels
        planned = 2 * H100.link * (moved.during[0] + moved.after[0])
        assert counted == pytest.approx(planned, rel=0.02), config.zero.stage


def test_overlap_hides_at_most_half_the_backward_pass() -> None:
    software = replace(PLAIN, overlap=True)
    bare, found = step(512), step(512, software)
    one = pass_seconds(MODEL, BATCH, system())
    assert 0 < bare.seconds - found.seconds <= 0.5 * 2 / 3 * one.seconds
    assert found.network == 0 and found.inside >= traffic(MODEL, 1, 512, system()).after[0]
    assert step(512, software, constants=Constants(overlap=0.0)) == bare


def test_optimizer_shares_and_muons_traffic() -> None:
    matrices = tuple(Matrix(n, 0, 1_024, 4_096) for n in range(48))
    muon = replace(PLAIN, orthogonal=matrices, zero=1)
    flops = 48 * 5 * (4 * 1_024**2 * 4_096 + 2 * 1_024**3)
    # bytes a parameter: accumulated in each of three micro-steps, updated in shares
    whole = parameters(MODEL) / (H100.memory * 0.85)
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
        with_muon, without = (
            traffic(MODEL, 1, 8, system(replace(software, zero=stage), FREE)) for software in (muon, PLAIN)
        )
        assert with_muon.during == without.during
        assert with_muon.after[0] - without.after[0] == pytest.approx(sent / H100.link)


def test_rows_that_come_too_slowly_are_waited_for() -> None:
    slow = step_seconds(MODEL, GpuShare(BATCH, 1, rows_seconds=2.0), 8, system())
    assert slow.seconds == pytest.approx(2.0) and slow.data == pytest.approx(2.0 - step(8).seconds)


# ---- forecast

LARGE = ["model.vocab_size=30000", "model.max_positions=128"]
TINY = ["--config", "tiny"]
COMMAND = ["--config", "large_phase1", "--gpus", "h100", "--network", "8x400", *LARGE]


def job(*overrides: str) -> planner.ForecastJob:
    return planner.job_of(configuration.load("large_phase1", [*LARGE, *overrides]))


def test_the_work_of_an_update_is_dealt_out() -> None:
    whole, share = job(), job().share(512)
    assert share.micro_steps == 1 and share.batch.tokens == 128 * 128
    assert share.batch.tokens * share.micro_steps * 512 == whole.counts.tokens == 65_536 * 128
    assert share.rows_seconds == pytest.approx(128 * 128 / (45_812 * 128 * 2))
    # the largest share, where they are not equal
    small = job("batch.global_size=100", "batch.micro_size=64")
    points = forecast(small, [8, 64, 128, 256], H100, FABRIC)
    assert [(point.micro_size, point.micro_steps) for point in points] == [(13, 1), (2, 1), (1, 1), (1, 1)]
    assert points[3].step.products == points[2].step.products > 0
    # pairs are those that the backend computes
    rows, length, causal = 65_536, 128, ("data.masking.strategy=causal", "model.nsp=false")
    assert whole.counts.pairs == job("ops.attention=sdpa").counts.pairs == rows * length**2
    assert job(*causal).counts.pairs == rows * length * (length + 1) / 2
    assert job(*causal, "ops.attention=sdpa").counts.pairs == rows * length**2


def test_a_forecast_adds_up() -> None:
    points = forecast(job(), [8, 64, 512], H100, FABRIC)
    for point in points:
        assert point.step.seconds == pytest.approx(sum(vars(point.step).values()))
        assert point.seconds == pytest.approx(7_038 * point.step.seconds)
        assert point.size * point.micro_size * point.micro_steps == 65_536
    assert 0.8 < 8 * points[0].step.seconds / (512 * points[2].step.seconds) < 1.0
    timed = forecast(job("schedule.name=budget", "schedule.budget_minutes=60"), [8], H100, FABRIC)
    assert timed[0].seconds == 3_600
    tokens = job("schedule.by=tokens", f"schedule.budget_tokens={100 * 65_536 * 128}")
    (point,) = forecast(tokens, [8], H100, FABRIC)
    assert point.seconds == pytest.approx(100 * point.step.seconds)


def test_the_table_of_a_forecast() -> None:
    whole = job()
    points = forecast(whole, [8, 64], H100, FABRIC)
    head, _, line = (re.split("  +", line.strip()) for line in planner.table(whole, points, H100).splitlines()[:3])
    cells = dict(zip(head, line, strict=True))
    mfu = whole.operations / (points[1].step.seconds * 64 * 989e12)
    assert cells["MFU"] == f"{mfu:.1%}" and cells["rows x steps"] == "128 x 8"
    assert cells["updates"] == "7,038"
    assert cells["GPU-hours"] == f"{64 * points[1].seconds / 3_600:,.0f}"
    assert cells["efficiency"] == f"{points[0].step.seconds / (8 * points[1].step.seconds):.1%}"


def test_micro_steps_that_the_host_binds_are_named() -> None:
    small = job("batch.micro_size=64")
    text = planner.table(small, forecast(small, [8, 64], H100, FABRIC), H100).splitlines()
    # 24 layers of 60 kernels and 12 sums of gradients, 19 us each
    assert "at 8 GPUs the host may be the limit: a micro-step of 64 rows runs 5" in text[-1]
    assert "launching its kernels takes 33 ms of Python; take a larger batch.micro_size" in text[-1]
    assert planner.host_bound(small, forecast(small, [8], DEVICES["a100"], FABRIC)) == ""


@pytest.mark.parametrize(("preset", "length", "gib"), [
    ("base", 128, 16), ("base_modern", 128, 80), ("large_24h", 128, 24), ("large_modern", 128, 80),
    ("large_phase1", 128, 24), ("large_phase2", 512, 24),
])  # fmt: skip
def test_presets_fill_gpus_and_fit(preset: str, length: int, gib: float) -> None:
    config = configuration.load(preset, ["model.vocab_size=30000", f"model.max_positions={length}"])
    assert workload.needed(config, length, 8) <= (1 - workload.SPARE) * gib * workload.GIB
    whole = planner.job_of(config)
    for name in ("a100", "h100", "h200"):
        assert planner.host_bound(whole, forecast(whole, [1], DEVICES[name], FABRIC)) == ""


# ---- the command


def test_the_command(capsys) -> None:
    assert plan.main([*COMMAND, "--over", "8", "64"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("projection, not measured: h100, nodes of 8, network 8x400: 65,536 rows of 128")
    assert "milliseconds of an update" in text
    assert plan.main(["--config", "large_phase1", "--gpus", "a100", *LARGE, "--over", "8", "64"]) == 0
    assert "a100, nodes of 8, network 8x200 (assumed, " in capsys.readouterr().out.splitlines()[0]
    assert plan.main([*TINY, "--world-size", "4"]) == 0
    assert "64 rows = 16 x 4 ranks x 1 micro-steps" in capsys.readouterr().out


TARGET = ["--config", "large_phase2", "--gpus", "h100", "model.vocab_size=30000", "model.max_positions=512"]


def test_the_target_of_mlperfs_task(capsys) -> None:
    assert target_samples(1_536) == pytest.approx(0.903 * 2_778_000)
    assert target_samples(256, 2022) == pytest.approx(1.064 * 2_553_000) == target_samples(64, 2022)
    assert 2_625_000 < target_samples(900) / 0.903 < 2_778_000
    assert plan.main([*TARGET, "batch.global_size=2304", "--price", "2.5", "--over", "8", "--compare"]) == 0
    text = capsys.readouterr().out
    # 2,304 rows of 512 tokens are 4,635 samples of 254.5
    target = text[text.index("to MLPerf's target") :].splitlines()
    assert "batch of 4,635 of its samples" in target[0]
    cells = dict(zip(target[2].split(), target[3].split(), strict=True))
    whole = planner.job_of(configuration.load("large_phase2", [*TARGET[4:], "batch.global_size=2304"]))
    (point,) = forecast(whole, [8], H100, Fabric(8))
    hours = target_samples(whole.update.tokens / 254.5) * 254.5 / whole.update.tokens * point.step.seconds / 3_600
    assert float(cells["minutes"]) == pytest.approx(60 * hours, abs=0.05)
    assert float(cells["kWh"]) == pytest.approx(8 * hours * 0.7, abs=0.05)
    assert float(cells["cost"]) == pytest.approx(8 * hours * 2.5, abs=0.005)
    assert text.count("MLPerf 4.1") == 3 and "this forecast" in text
    assert plan.main(TARGET) == 0
    assert "published are 256 to 14,336, set batch.global_size" in capsys.readouterr().out


def test_the_nearest_published_runs() -> None:
    assert {(run.gpu, run.gpus) for run in nearest("h100", 512, 2)} == {("h100", 512), ("h100", 768)}
    # of a GPU with few rows its generation's follow
    assert [run.gpu for run in nearest("a5000", 4)] == ["a5000", "a5000", "a100-pcie"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([*COMMAND, "--gpus", "k80"], "--gpus k80: not in the device table; choose one of v100, v100-sxm3"),
        ([*COMMAND, "--network", "fast"], "--network fast: write ADAPTERSxGBITS"),
        ([*COMMAND, "--nodes-of", "0"], "--nodes-of 0: a node has at least 1 GPU"),
        ([*COMMAND, "--over", "0"], "--over 0: give numbers of GPUs from 1 on"),
        ([*COMMAND, "--over", "8", "20"], "--over 20 is not a whole number of nodes of 8"),
        ([*COMMAND, "--over", "16", "--network="], "16 GPUs in nodes of 8 need a network: give --network"),
        ([*COMMAND, "precision=fp32"], "precision=fp32: --gpus forecasts 16-bit training alone"),
        ([*TINY, "--over", "8"], "--over belongs to a forecast"),
        ([*TINY, "--compare"], "--compare belongs to a forecast"),
        ([*COMMAND, "--price", "0"], "--price 0: give a number above 0"),
        ([*COMMAND, "--link", "0"], "--link 0: give a number above 0"),
        ([*TINY, "--link", "16"], "--link belongs to a forecast"),
        ([*TINY, "--world-size", "0"], "--world-size 0: give a number above 0"),
        ([*TINY, "--data", "nowhere"], "nowhere"),
        ([*TINY, "--deepspeed_config", "none.json"], "none.json: No such file"),
    ],
)
def test_a_mistake_is_one_line(command: list[str], message: str, capsys) -> None:
    assert plan.main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1
