"""Memory and work that a plan names are those of real runs and of numbers worked out by hand."""

import json
import math
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megabert import config as configuration
from megabert.commands import plan
from megabert.commands.plan import forecast as planner
from megabert.commands.plan import workload
from megabert.commands.plan.step_time import System, traffic
from megabert.config import Config, ModelConfig, accumulation
from megabert.distributed.ranks import World
from megabert.engine.ceiling import Ceiling
from megabert.model import BertForPreTraining
from tests.commands.plan.cases import FABRIC, FREE, H100, TINY, base
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import make_dataset
from tests.ops.oracle import needs_library

STATES = [
    *(("fp32", stage, "adamw") for stage in (0, 2)),
    *(("bf16", stage, "adamw") for stage in range(4)),
    *(("bf16", stage, "muon") for stage in (0, 1)),
]


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


def measure(world: World) -> list[tuple[Config, int, int, int]]:
    """Of each case of STATES configuration, parameters, bytes of weights, masters and moments after an update, and bytes that the next
    one sends."""
    results = []
    for precision, stage, optimizer in STATES:
        fields = {"precision": precision, "zero__stage": stage, "model__hidden": 128, "optimizer__name": optimizer}
        engine = tiny.engine(tiny.config(**fields, batch__global_size=4 * world.size), world)
        tiny.train(engine, range(1))
        tensors = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
        tensors += [master.tensor for master in engine.layout.masters]
        tensors += [t for state in engine.optimizer.state.values() for t in state.values() if t.numel() > 1]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        with CountedBytes() as counted:
            tiny.train(engine, range(1, 2))
        count = sum(shape.numel() for shape in engine.layout.shapes.values())
        results.append((engine.config, count, sum(storages.values()), counted.size))
    return results


@pytest.mark.dist
@pytest.mark.slow
def test_states_and_traffic_are_those_of_two_ranks() -> None:
    """Gradients are not compared: how many of them live at once is DeepSpeed's own business from moment to moment."""
    for (precision, stage, optimizer), (config, count, kept, sent) in zip(
        STATES, run_ranks(2, measure)[0], strict=True
    ):
        single = sum(m.size for m in workload.matrices(config.model)) if optimizer == "muon" else 0
        states = workload.states(count, precision, stage, 2, single)
        expected = states["weights"] + states["masters"] + states["moments"]
        assert kept == pytest.approx(expected, rel=0.03), (precision, stage)
        if (precision, optimizer) == ("bf16", "adamw"):
            system = System(H100, FABRIC, planner.describe_software(config), FREE)
            moved = traffic(config.model, accumulation(config, 2), 2, system)
            # of a reduce-scatter over two ranks half travels
            planned = 2 * H100.link * (moved.during[0] + moved.after[0])
            assert sent == pytest.approx(planned, rel=0.02), stage


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
    *("model.kind=modern", "model.norm=pre", "model.nsp=false", "model.bias=false", "model.layers=4"),
    *("batch.micro_size=1", "model.window=128", "model.max_positions=8192", "model.dropout=0"),
    "model.attention_dropout=0",
)
# model, backends, tokens of a row
KEPT = {
    "bert": (["model.dropout=0.1", "batch.micro_size=4", *NATIVE], 128),
    "recomputed": (["model.activation_checkpointing=true", "batch.micro_size=4", *NATIVE], 128),
    "modern, 2048 tokens": ([*LONG, *NATIVE], 2048),
    "torch's layers": ([*LONG, "ops.attention=native", "ops.layer=torch", "ops.mlm_loss=torch"], 1024),
    "masks": ([*LONG, *NATIVE, "ops.attention=sdpa"], 1024),
    "attention matrices": ([*LONG, *NATIVE, "ops.attention=fused_softmax"], 1024),
}


@needs_library
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("case", KEPT)
def test_activations_take_what_the_formula_says(case: str, precision: str, monkeypatch) -> None:
    """Tensors that autograd keeps for the backward pass, on the CPU; torch's norm in bf16 as on a GPU."""
    monkeypatch.setattr(sys.modules["megabert.ops.dropout_add_layer_norm"], "adds_in_16_bits", lambda x: False)
    overrides, length = KEPT[case]
    plain = ["model.vocab_size=2000", f"precision={precision}"]
    cfg = configuration.load("mini", plain + overrides)
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
    assert math.isfinite(output.mlm_loss_sum.item())
    # with recomputation the formula holds one layer more, which exists in the backward pass only
    if cfg.model.activation_checkpointing:
        whole = workload.activations(configuration.load("mini", plain + KEPT["bert"][0]), 128)
        assert found < expected < 0.6 * whole
    else:
        assert found == pytest.approx(expected, rel=0.05)


def test_windows_save_attention_unless_a_mask_hides_pairs() -> None:
    """6 layers, of which 2 see a row of 8,192 tokens and 4 see 64 tokens on a side, fewer at its ends, by hand."""
    shape = ("kind=modern", "layers=6", "norm=pre", "nsp=false", "window=128", "max_positions=8192")

    def pairs(*overrides: str) -> float:
        return planner.build_job(base(*(f"model.{field}" for field in shape), *overrides)).counts.pairs / 256

    two_sides, causal = 2 * 8192**2 + 4 * (129 * 8192 - 64 * 65), 8192 * 8193 + 4 * (65 * 8192 - 64 * 65 / 2)
    assert pairs("ops.attention=varlen") == two_sides
    assert pairs("ops.attention=varlen", "data.masking.strategy=causal") == causal
    assert pairs("ops.attention=sdpa") == pairs("ops.attention=fused_softmax") == 6 * 8192**2


def test_the_work_of_an_update_by_hand() -> None:
    update = workload.work(base(), None)
    assert (update.rows, update.seq_len, update.tokens, update.sequences) == (256, 512, 131_072, 256)
    layers = 6 * 12 * (4 * 768**2 + 8 * 768**2) * 131_072 + 12 * 12 * 768 * 256 * 512**2
    heads = 6 * (30_000 * 768 + 768**2) * round(131_072 * 0.15) + 6 * 768**2 * 256
    assert update.flops(base()) == pytest.approx(layers + heads, rel=1e-9)
    # a causal run predicts nearly every token
    causal = base("data.masking.strategy=causal", "model.nsp=false")
    update = workload.work(causal, None)
    assert (update.tokens, update.predictions, update.pairs) == (131_072, 131_072 - 256, 12 * 256 * (512 * 513 / 2))
    # a quarter of such updates among masked ones
    mix = workload.work(base("data.masking.causal_every=4", "model.nsp=false"), None)
    assert mix.predictions == 0.75 * 131_072 * 0.15 + 0.25 * update.predictions
    assert mix.pairs == 12 * 256 * (0.75 * 512**2 + 0.25 * 512 * 513 / 2)
    logits = 32 * 512 * 2 * causal.model.padded_vocab * 2
    assert workload.activations(causal, 512) - workload.activations(base(), 512) > 0.8 * logits


def test_a_plan_goes_through_the_phases(capsys) -> None:
    overrides = ["model.nsp=false", "objective.causal_share=0.25"]
    overrides += ["schedule.total_steps=1000", "schedule.warmup_steps=9"]
    text = workload.report(base(*overrides), 8)
    first, second = text.partition("\n\n")[0].split("phase ")[1:]
    assert first.startswith("1 of 2: data.masking.strategy=causal\n") and second.startswith("2 of 2: the run's own")
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
    manifest = workload.read_manifest_or_none(cfg)
    assert manifest is not None and workload.read_manifest_or_none(configuration.load("tiny")) is None
    update = workload.work(cfg, manifest)
    assert update.tokens == 64 * (90 + 128) / 2 and update.sequences == 64 * 4
    assert planner.build_job(cfg).update.tokens == update.tokens


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
    tokens = workload.report(base("schedule.by=tokens", "schedule.budget_tokens=13107201"), 8)
    assert "101 updates, 25,856 rows" in tokens
    timed = ("schedule.by=minutes", "schedule.budget_minutes=30", "schedule.total_steps=1000000000")
    minutes = workload.report(base(*timed), 8)
    assert "run      30 minutes of training, in as many updates as fit" in minutes and "1,000,000,000" not in minutes
    assert "rows = 37 x 7 ranks x 1 micro-steps minus 3 filler rows" in workload.report(base("batch.micro_size=37"), 7)


def test_the_time_on_this_cpu(monkeypatch) -> None:
    monkeypatch.setattr(workload, "kept_ceiling", lambda device, dtype: Ceiling(0.1, "measured"))
    monkeypatch.setattr(workload.environment, "cpu_flags", lambda: {"amx_bf16"})
    for precision, share in (("fp32", 0.65), ("bf16", 0.25)):
        cfg = base(f"precision={precision}", "schedule.total_steps=100")
        sized = workload.with_vocabulary(cfg, None)
        flops = workload.work(sized, None).flops(sized)
        seconds = flops / (share * 1e11)
        shown = workload.report(cfg, 1, this_cpu=True)
        assert f"time     {seconds:.3g} s an update, {seconds / 36:.3g} hours on this CPU" in shown
    timed = base("precision=fp32", "schedule.by=minutes", "schedule.budget_minutes=30")
    assert f"{1800 / (flops / 0.65e11):,.0f} updates on this CPU" in workload.report(timed, 1, this_cpu=True)


def test_buckets_and_moments_on_a_gpu() -> None:
    """DeepSpeed allocates the bucket whole, 500 M elements of `communication_data_type` (runtime/zero/stage_1_and_2.py); Muon
    keeps one moment of the matrices."""
    sizes = {("bf16", 1): 0, ("bf16", 2): 2e9, ("fp32", 1): 2e9, ("fp32", 3): 2e9, ("bf16", 0): 0}
    for (precision, stage), expected in sizes.items():
        assert workload.bucket_bytes(base(f"precision={precision}", f"zero.stage={stage}")) == expected
    assert "stages 1 to 3 need 1.86 more" in workload.report(base("precision=bf16"), 8)
    small = {"zero_optimization": {"reduce_bucket_size": 50_000_000}}
    text = workload.report(base("zero.stage=2"), 8, 4, small)  # of the usual size batch.micro_size=8 is the largest
    assert "stages 1 to 3 need 0.19 more" in text and "batch.micro_size=16, 3.1 GiB" in text
    muon, single = base("optimizer.name=muon"), 12 * 12 * 768**2
    for stage, ranks in ((0, 1), (1, 8), (3, 8)):
        less = workload.resident(base(), stage, 8)["moments"] - workload.resident(muon, stage, 8)["moments"]
        assert less == pytest.approx(4 * single / ranks)


@pytest.mark.parametrize(("phase", "length"), [(1, 128), (2, 512)])
@pytest.mark.parametrize(("name", "gib"), [("80gb", 79), ("141gb", 139)])
def test_presets_take_the_largest_micro_batch_that_fits(phase, length, name, gib) -> None:
    plain, preset = (configuration.load(f"large_phase{phase}"), configuration.load(f"large_phase{phase}_{name}"))
    # and nothing else differs
    assert preset == configuration.replace(plain, "batch.micro_size", preset.batch.micro_size)
    for ranks in (1, 8, 32):
        found = workload.largest_micro_size(workload.with_vocabulary(preset, None), length, ranks, gib)
        assert found == preset.batch.micro_size, (found, ranks)


def test_parameters_are_counted_without_a_decoder_bias() -> None:
    shape = {"kind": "modern", "norm": "pre", "nsp": False, "decoder_bias": False}
    model = ModelConfig(**shape, layers=1, hidden=64, heads=2, vocab_size=1000)
    real = BertForPreTraining(model, base().ops, "cpu", torch.float32)
    assert model.padded_vocab > 1000
    assert workload.padded_parameters(model) == sum(parameter.numel() for parameter in real.parameters())


def test_the_next_larger_micro_batch_does_not_fit() -> None:
    cfg = base("batch.global_size=360", "batch.micro_size=30")
    micro = workload.largest_micro_size(cfg, 512, 2, 16)
    states = sum(workload.states(workload.padded_parameters(cfg.model), "bf16", 1, 2).values())
    sized = {n: configuration.replace(cfg, "batch.micro_size", n) for n in range(1, 181)}
    needs = {n: states + workload.activations(sized[n], 512) for n in sized}
    fitting = [n for n, need in needs.items() if 180 % n == 0 and need <= 0.9 * 16 * 2**30]
    assert micro == max(fitting) and 1 < micro < 180, micro
    text = workload.report(cfg, 2, memory_gib=16)
    assert f"batch.micro_size={micro}, {needs[micro] / 2**30:.1f} GiB, {180 // micro} micro-steps" in text
    assert "no micro-batch fits 1 GiB" in workload.report(cfg, 2, memory_gib=1)
    uneven = max(n for n in range(1, 53) if needs[n] <= 0.9 * 16 * 2**30)
    assert workload.largest_micro_size(cfg, 512, 7, 16) == uneven
