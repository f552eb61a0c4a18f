"""Real tokens a second of a whole training step, ours and Hugging Face's, on the same sequences in one process.

    python benchmarks/bench_step.py --vs hf [--model base] [--seq-len 128] [--dropout 0.1 0.0] [--data DIR] [--json FILE]

Ours is the project's step: packed rows, `Engine.train_update` (DeepSpeed, in 16 bits with fp32 masters, AdamW, clipping). The peer
is `BertForPreTraining` in a usual loop: sdpa, autocast over fp32 weights, fused AdamW, clipping, one padded sequence a row. Both
compute in `--precision`, by default the fastest of the device, with the same sequences, masks and labels in as many micro-steps,
so that real tokens, predictions and losses are equal (the losses are shown). Batches are made before timing. On a GPU a time is
that of several consecutive updates, without waits of the host. Ours keeps freed memory like `megabert train`; the peer has the
same pool, and glibc's mappings for blocks from 32 MiB on, as without this package. MFU is relative to the best matrix product
measured in the same run, and to the datasheet's peak if the device is known; FLOPs are those of real tokens. The second ceiling is the
median of products of the model's own shapes, measured between the updates. Memory is the growth of the process by weights and
optimizer plus the peak of a step. Ratio is the median of the ratios of adjacent times.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed
import torch

from benchmarks.common import hardware
from benchmarks.common.measure import Memory, costliest_kernels, order_of, quantiles, seconds_of
from megabert import config as configuration
from megabert.common.datasheets import datasheet_tflops
from megabert.common.environment import M_MMAP_MAX, disable_malloc_trimming
from megabert.config import Config, ModelConfig, replace
from megabert.data.loader import Loader, Update
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.distributed import ranks
from megabert.engine import DTYPES, Engine, precision
from megabert.engine.ceiling import matmul_tflops
from megabert.metrics import attending_pairs, training_flops
from megabert.model import BertForPreTraining

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "hidden": 64, "heads": 2}, "mini": {"layers": 4, "hidden": 256, "heads": 4},
    "base": {"layers": 12, "hidden": 768, "heads": 12}, "large": {"layers": 24, "hidden": 1024, "heads": 16},
}  # fmt: skip
M_MMAP_THRESHOLD = -3  # malloc.h of glibc
# vocabulary of the dataset without --data (the documentation of few installations is large enough for the published size), and the
# size of the model's vocabulary then
VOCABULARY, PUBLISHED = 8_000, 30_522
WARM_UP = 2  # untimed rounds: one to allocate, one to read memory
IN_A_ROW = {"cpu": 1, "cuda": 8}  # updates in one time
SHOWN = 20  # kernels of a profile that are printed; the JSON has more
LR = 1e-5  # small, so that the losses of both stay comparable
HF = "hf BertForPreTraining"


def make_config(args: argparse.Namespace, dropout: float) -> Config:
    dropouts, rows = {"dropout": dropout, "attention_dropout": dropout}, args.micro or max(1, 2048 // args.seq_len)
    return configuration.from_dict(
        {
            "model": {**SIZES[args.model], **dropouts, "max_positions": max(512, args.seq_len)},
            "precision": args.precision, "batch": {"micro_size": rows, "global_size": rows * args.accumulation},
            "optimizer": {"name": args.optimizer, "lr": LR}, "schedule": {"name": "constant", "warmup_steps": 0},
            "zero": {"stage": args.zero}, "ops": dict(choice.split("=", 1) for choice in args.ops),
        }
    )  # fmt: skip


class OurStep:
    """The project's training step."""

    def __init__(self, cfg: Config, world: ranks.World) -> None:
        with world.device:
            torch.manual_seed(cfg.seed)
            module = BertForPreTraining(cfg.model, cfg.ops, world.device.type, DTYPES[cfg.precision])
        self.backends = {name: f"{c.name} ({c.reason})" for name, c in module.backends._asdict().items()}
        self.engine = Engine(cfg, module, world)

    def step(self, update: Update) -> torch.Tensor:
        """The loss, on the device."""
        return self.engine.train_update(update, LR).losses.sum()


def map_large_blocks() -> None:
    """Map and return blocks from 32 MiB on, as glibc does by default after the first of them was freed."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_MAX, 65536)
        mallopt(M_MMAP_THRESHOLD, 32 << 20)


def measure(args: argparse.Namespace, dropout: float, world: ranks.World, data: Path) -> dict[str, Any]:
    device, dataset = world.device, Dataset(data)
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    entries = tokenizer.vocab_size if args.data else PUBLISHED
    cfg = replace(make_config(args, dropout), "model.vocab_size", entries)
    if dataset.manifest.seq_len != args.seq_len:
        raise ValueError(f"--data {data}: rows have {dataset.manifest.seq_len} tokens, not --seq-len {args.seq_len}")
    loader = Loader.from_config(replace(cfg, "data.workers", 0), dataset, tokenizer)
    memory, static = Memory(device), dict[str, int]()
    builders: dict[str, Callable[[], Any]] = {"ours": lambda: OurStep(cfg, world)}
    if args.vs == "hf":
        from benchmarks.peers import hf_step  # not on every machine

        builders[HF] = lambda: hf_step.HuggingFaceStep(cfg, device)
    sides: dict[str, Any] = {}
    for name, build in builders.items():
        before = memory.now()
        sides[name] = build()
        static[name] = memory.now() - before
    times: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    peak, ceiling, in_a_row, own_products = dict.fromkeys(sides, 0), 0.0, IN_A_ROW[device.type], list[float]()
    model, d, tokens, dtype = cfg.model, cfg.model.hidden, cfg.batch.micro_size * args.seq_len, DTYPES[cfg.precision]
    # (k, n) of the products of a layer's forward pass, of a micro-step
    shapes = (d, model.qkv_columns), (d, d), (d, model.ffn_inputs), (model.ffn, d)
    for number in range(args.steps + WARM_UP):
        updates = [next(loader) for _ in range(in_a_row)]
        work = {what: float(sum(getattr(update, what) for update in updates)) for what in ("tokens", "sequences")}
        flops = (training_flops(model, u.tokens, attended_pairs(u, model), u.predictions, u.sequences) for u in updates)
        work["flops"] = sum(flops)
        inputs: dict[str, Any] = {"ours": updates}
        if HF in sides:
            inputs[HF] = [hf_step.padded(update, args.seq_len) for update in updates]
        for name in order_of(sides, number):
            (disable_malloc_trimming if name == "ours" else map_large_blocks)()
            before = memory.now() if number < WARM_UP else 0
            memory.restart()
            losses: list[torch.Tensor] = []
            seconds = seconds_of(partial(losses.extend, map(sides[name].step, inputs[name])), device)
            if number == 0:  # optimizer state is allocated, kernels are chosen
                static[name] += max(0, memory.now() - before)
            elif number < WARM_UP:  # memory is read in a separate pass, since reading empties the pool
                peak[name] = memory.peak() - before
            else:
                times[name].append(work | {"seconds": seconds, "loss": float(losses[-1])})
        ceiling = max(ceiling, matmul_tflops(device, dtype, 0.3))
        own_products += [matmul_tflops(device, dtype, 0.05, (tokens, *shape)) for shape in shapes]
    kernels = profile(cfg, sides["ours"], loader, device) if args.profile else None
    sheet = None
    if device.type == "cuda" and cfg.precision != "fp32":
        sheet = datasheet_tflops(torch.cuda.get_device_name(device))
    comparisons = []
    if HF in sides:
        pairs = zip(times["ours"], times[HF], strict=True)
        ratio = statistics.median(theirs["seconds"] / mine["seconds"] for mine, theirs in pairs)
        what = f"real tokens/s, {args.model}, seq {args.seq_len}, dropout {dropout}"
        comparisons = [{"what": what, "ours": "ours", "peer": HF, "ratio": ratio}]
    setting = {name: getattr(args, name) for name in ("model", "seq_len", "precision", "accumulation", "optimizer")}
    return setting | {
        "dropout": dropout, "zero_stage": args.zero, "rows_per_micro_step": cfg.batch.micro_size,
        "real_tokens_per_update": statistics.mean(time["tokens"] for time in times["ours"]) / in_a_row,
        "fill": dataset.manifest.statistics.get("fill"), "times": args.steps, "updates_in_a_time": in_a_row,
        "threads": torch.get_num_threads(), "matmul_ceiling_tflops": ceiling,
        "own_products_tflops": statistics.median(own_products), "datasheet_tflops": sheet,
        "backends": sides["ours"].backends, "comparisons": comparisons, "kernels": kernels,
        "results": {
            name: summary(of, in_a_row, ceiling, sheet)
            | {"memory_static_gib": static[name] / 2**30, "memory_peak_gib": (static[name] + peak[name]) / 2**30}
            for name, of in times.items()
        },
    }  # fmt: skip


def profile(cfg: Config, ours: OurStep, loader: Loader, device: torch.device) -> list[dict[str, Any]]:
    """The costliest kernels of an update of ours. FLOPs of attention are of pairs of real tokens, backward with recomputed scores."""
    update = next(loader)
    forward = 4.0 * attended_pairs(update, cfg.model) * cfg.model.hidden
    flops = {"megabert::attention": forward, "megabert::attention_backward": 2.5 * forward}
    return costliest_kernels(lambda: ours.step(update), device, flops)


def attended_pairs(update: Update, model: ModelConfig) -> int:
    """Pairs of real tokens of a sequence in all layers."""
    lengths = torch.cat([batch.lengths.flatten() for batch in update.batches]).numpy()
    return round(attending_pairs(model, lengths, update.objective == "causal"))


def summary(times: list[dict[str, float]], in_a_row: int, ceiling: float, sheet: float | None) -> dict[str, Any]:
    """Figures of one side; `ceiling` and `sheet` are the measured and the datasheet's peak in TFLOP/s."""
    rate = {key: [time[key] / time["seconds"] for time in times] for key in times[0]}
    tflops = statistics.median(rate["flops"]) / 1e12
    return {
        "step_seconds": quantiles([time["seconds"] / in_a_row for time in times]),
        "real_tokens_per_sec": quantiles(rate["tokens"]),
        "sequences_per_sec": quantiles(rate["sequences"]), "mfu_real": tflops / ceiling,
        "mfu_datasheet_real": tflops / sheet if sheet else None, "losses": [round(time["loss"], 4) for time in times],
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    print(
        f"\n{result['model']}, rows of {result['seq_len']}, dropout {result['dropout']}, {result['precision']}: "
        f"{result['real_tokens_per_update']:,.0f} real tokens an update in {result['accumulation']} micro-steps, "
        f"ceiling {result['matmul_ceiling_tflops']:.3f} TFLOP/s"
        + (f", datasheet {result['datasheet_tflops']:.0f}" if result["datasheet_tflops"] else "")
    )
    head = ("side", "p20 s", "p50 s", "p80 s", "real tokens/s", "sequences/s", "MFU", "of the datasheet", "GiB", "loss")
    rows = []
    for name, r in result["results"].items():
        rates = [f"{r['real_tokens_per_sec']['p50']:,.0f}", f"{r['sequences_per_sec']['p50']:.2f}"]
        rates.append(f"{r['mfu_real']:.1%}")
        sheet = f"{r['mfu_datasheet_real']:.1%}" if r["mfu_datasheet_real"] else ""
        seconds = (f"{s:.2f}" for s in r["step_seconds"].values())
        rows.append([name, *seconds, *rates, sheet, f"{r['memory_peak_gib']:.2f}", f"{r['losses'][0]:.3f}"])
    print(hardware.markdown(head, rows))
    hardware.print_ratios(result["comparisons"])
    if result["kernels"]:
        show_kernels(result)


def show_kernels(result: dict[str, Any]) -> None:
    """The profile: GFLOP/s of an operation, and their share of the model's own products, where its FLOPs are known."""
    # no time at all where the machine lets nobody profile its device
    own, total = result["own_products_tflops"], sum(kernel["ms"] for kernel in result["kernels"]) or 1.0
    print(f"costliest kernels of an update of ours; products of the model's shapes: {1e3 * own:,.0f} GFLOP/s")
    rows = []
    for kernel in result["kernels"][:SHOWN]:
        ms, rate = kernel["ms"], kernel["tflops"]
        known = (f"{1e3 * rate:,.0f}", f"{rate / own:.0%}") if rate and rate > own / 100 else ("", "")
        rows.append([f"{ms:.1f}", f"{ms / total:.1%}", str(kernel["calls"]), *known, kernel["name"][:70]])
    print(hardware.markdown(("ms", "share", "calls", "GFLOP/s", "ceiling", "name"), rows))


def parser() -> hardware.Parser:
    parser = hardware.Parser(__doc__)
    add = parser.add_argument
    add("--vs", choices=["hf"], help="compare with Hugging Face's BertForPreTraining")
    add("--model", choices=list(SIZES), default="base")
    add("--seq-len", type=int, default=128)
    add("--dropout", type=float, nargs="+", default=[0.1, 0.0], help="dropout rates to measure")
    add("--precision", choices=[precision.AUTO, *DTYPES], default=precision.AUTO)
    add("--optimizer", choices=["adamw", "lamb", "muon"], default="adamw", help="our optimizer")
    add("--zero", type=int, choices=[0, 1, 2], default=1)
    add("--micro", type=int, default=0, help="rows of a micro-step; 0 means 2,048 tokens")
    add("--accumulation", type=int, default=2, help="micro-steps of an update")
    add("--ops", nargs="*", default=[], metavar="OP=BACKEND", help="backends of ours, e.g. layer=native")
    add("--steps", type=int, default=5, help="measured times, after two for warm-up")
    add("--profile", action="store_true", help="print the costliest kernels of our update")
    add("--data", metavar="DIR", help="dataset of data_prep; default: built from pydoc")
    return parser


def main() -> None:
    args = parser().parse()
    warnings.filterwarnings("ignore")
    results = []
    try:
        world = ranks.init(ranks.discover({}))
        args.precision = precision.choose(args.precision, world)
        with tempfile.TemporaryDirectory(prefix="bench_step_") as folder:
            if not args.data:
                print("no --data: building a dataset from the documentation installed here", flush=True)
                options = ("--input", "pydoc", "--nsp", "--seq-len", args.seq_len, "--vocab-size", VOCABULARY)
                hardware.build_data(Path(folder, "data"), *options)
            print(hardware.describe(), flush=True)
            for dropout in args.dropout:
                results.append(measure(args, dropout, world, Path(args.data or Path(folder, "data"))))
                show(results[-1])
    finally:
        ranks.shutdown()
    hardware.write_json(args.json, {"benchmark": "step", "unit": "real tokens/s", "results": results})


if __name__ == "__main__":
    hardware.run(main)
