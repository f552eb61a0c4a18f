"""Speed of the fused operations against what torch users write, forward and backward, on the CPU or a GPU.

    python benchmarks/bench_ops.py [--device cuda] [--small] [--only mlm_loss …] [--json FILE]

BERT-LARGE's sizes, bf16; sides run in turn in one process (on a GPU in CUDA graphs, whose replays are timed by events) and
medians are compared. `mlm_loss` stands beside its three
matrix products alone; `softmax_mask` beside torch's scale, mask, softmax and dropout, and as attention beside
scaled_dot_product_attention with the same mask; `bias_gelu`, `bias_geglu`, `rotate` and `dropout_add_layer_norm` beside eager
and compiled torch;
`optimizer` is a step over two layers and the embeddings: Muon's beside AdamW's, LAMB's, and torch.optim.Muon with AdamW.
Extra memory is the growth at the peak of one call. On a GPU each operation's bytes (every tensor it must read or write,
once) are given as a share of the measured copy bandwidth. ratio is the peer's time over ours; above 1 is better.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import hardware
from benchmarks.common.measure import Memory, kernel_times, quantiles, synchronise
from benchmarks.ops.cases import Call, Case, Maker, size_of
from benchmarks.ops.layer import layer
from megabert import ops
from megabert.common.malloc import keep_freed_memory
from megabert.config import ModelConfig, OpsConfig, OptimizerConfig
from megabert.metrics import matmul_tflops
from megabert.model import BertForPreTraining
from megabert.optim.build import build_optimizer
from megabert.optim.muon import find_matrices


def mlm_loss(make: Maker, small: bool) -> list[Case]:
    count, width, entries = (64, 32, 512) if small else (2048, 1024, 30528)
    hidden, weight, bias = (make.normal(count, width), make.normal(entries, width, scale=0.02), make.normal(entries))
    labels = torch.randint(0, entries, (count,), generator=make.generator).to(make.device)
    logits = make.normal(count, entries)

    def products() -> None:
        hidden @ weight.T
        logits @ weight
        logits.T @ hidden

    def plain(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w, b), labels, reduction="sum")

    def with_copy(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w, b).float(), labels, reduction="sum")

    inputs = (hidden, weight, bias)
    sides = {
        "ours": make.both_ways(lambda h, w, b: ops.mlm_loss(h, w, b, labels, entries, "native"), *inputs),
        "three products alone": products,
        "torch": make.both_ways(plain, *inputs),
        "torch, fp32 copy": make.both_ways(with_copy, *inputs),
    }
    peers = [("ours", name) for name in sides if name != "ours"]
    size = f"{count} x {width} x {entries}"
    rows = {
        "ours": make.both_ways(lambda x: ops.mlm_loss_of_logits(x, labels, "native"), logits),
        "torch": make.both_ways(lambda x: F.cross_entropy(x, labels, reduction="sum"), logits),
    }
    moved = {"ours": 4 * size_of(logits)}  # the copy is read and written, the loss pass reads and writes it
    return [
        Case("mlm_loss", size, sides, peers, extra_memory=("ours", "torch")),
        Case("mlm_loss from logits", f"{count} x {entries}", rows, [("ours", "torch")], moved),
    ]


def softmax_mask(make: Maker, small: bool) -> list[Case]:
    batch, heads, width, size = (2, 2, 32, 16) if small else (8, 16, 512, 64)
    cut = width * 2 // 3  # two sequences in each row
    start = torch.zeros(batch, width, dtype=torch.int32)
    start[:, cut:] = cut
    end = torch.full_like(start, width)
    end[:, :cut] = cut
    start, end = start.to(make.device), end.to(make.device)
    key = torch.arange(width, device=make.device)
    mask = ((key >= start[..., None]) & (key < end[..., None]))[:, None]
    full_start, full_end = torch.zeros_like(start), torch.full_like(end, width)
    scores, scale, p = make.normal(batch, heads, width, width), size**-0.5, 0.1

    def ours(x: Tensor, first: Tensor, last: Tensor) -> Tensor:
        return ops.fused_softmax_mask(x, key_start=first, key_end=last, scale=scale, p=p, seed=make.seed)

    def plain(x: Tensor) -> Tensor:
        return F.dropout((x * scale).masked_fill(~mask, -torch.inf).softmax(-1), p)

    qkv = make.normal(batch, width, 3 * heads * size)

    def attend(backend: str, inputs: list[Tensor], p: float) -> Call:
        return make.both_ways(lambda x: ops.attend(x, heads, inputs, p, make.seed, 0, backend), qkv)

    moved = {"ours, whole rows": 6 * size_of(scores)}  # scores, out, probs; grad, probs, dscores
    sides = {
        "ours": make.both_ways(lambda x: ours(x, start, end), scores),
        "ours, whole rows": make.both_ways(lambda x: ours(x, full_start, full_end), scores),
        "torch": make.both_ways(plain, scores),
    }
    shape = f"[{batch}, {heads}, {width}, {width}], dropout {p}"
    cases = [
        Case("softmax_mask", shape, sides, [("ours", "torch"), ("ours, whole rows", "torch")], moved, ("ours", "torch"))
    ]
    native = ["native"] if ops.has_kernel("attention", make.device.type) else []
    for chance in (0.1, 0.0):
        sides = {name: attend(name, [start, end], chance) for name in ("fused_softmax", *native)}
        peers = [(name, "sdpa") for name in sides]
        sides["sdpa"] = attend("sdpa", [mask], chance)
        cases.append(Case("attention", f"[{batch}, {heads}, {width}, {size}], dropout {chance}", sides, peers))
    return cases


def optimizer(make: Maker, small: bool) -> list[Case]:
    """Norm, clip and update of fp32 weights; every step starts from the same gradients."""
    width, vocab = (32, 512) if small else (1024, 30_000)
    shape = ModelConfig(layers=2, hidden=width, heads=width // 16, vocab_size=vocab)
    plain = OpsConfig(attention="sdpa", mlm_loss="torch", layer="torch")

    def build() -> tuple[BertForPreTraining, list[Tensor], Callable[[], None]]:
        with make.device:
            model = BertForPreTraining(shape, plain, make.device.type)
            start = [torch.randn(p.shape) * 1e-3 for p in model.parameters()]
            held = [torch.empty_like(gradient) for gradient in start]
        for parameter, gradient in zip(model.parameters(), held, strict=True):
            parameter.grad = gradient
        return model, held, lambda: torch._foreach_copy_(held, start)

    def ours(name: Literal["adamw", "lamb", "muon"]) -> Call:
        model, gradients, begin = build()
        update = build_optimizer(OptimizerConfig(name=name), model, dtype=torch.bfloat16)
        for group in update.param_groups:
            if "capturable" in group:  # torch refuses to be captured otherwise; what runs is the same kernel
                group["capturable"] = True
        update.attach()

        def call() -> None:
            begin()
            update.guard(gradients, 1.0)
            update.step()

        return call

    def theirs() -> Call:
        model, _, begin = build()
        parameters = list(model.parameters())
        matrices = [p for n, p in enumerate(parameters) if n in find_matrices(model)]
        rest = [p for n, p in enumerate(parameters) if n not in find_matrices(model)]
        updates = (
            torch.optim.Muon(matrices, lr=1e-4, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=1e-4, fused=True, capturable=make.device.type == "cuda"),
        )

        def call() -> None:
            begin()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            for update in updates:
                update.step()

        return call

    sides = {name: ours(name) for name in ("adamw", "lamb", "muon")} | {"torch's Muon and AdamW": theirs()}
    peers = [("muon", name) for name in sides if name != "muon"]
    count = sum(p.numel() for p in build()[0].parameters())
    return [Case("optimizer", f"{count / 1e6:.1f} M parameters", sides, peers, what="one step")]


CASES = {"mlm_loss": mlm_loss, "softmax_mask": softmax_mask, "layer": layer, "optimizer": optimizer}


def copy_bandwidth(device: torch.device, small: bool) -> float:
    """Bytes a second of a copy larger than any cache, reads and writes together."""
    source = torch.zeros((1 << 16 if small else 1 << 28), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    times = kernel_times({"copy": lambda: target.copy_(source)}, device, 3)["copy"]
    return 2 * size_of(source) / min(times)


def extra_memory(call: Call, device: torch.device) -> int:
    """Bytes by which one call goes above what is held before it."""
    memory = Memory(device)
    call()
    before = memory.now()
    memory.restart()
    call()
    synchronise(device)
    return max(0, memory.peak() - before)


def measure(case: Case, device: torch.device, rounds: int, bandwidth: float, seconds: float) -> dict[str, Any]:
    times = kernel_times(case.sides, device, rounds, seconds)
    medians = {name: quantiles(values)["p50"] for name, values in times.items()}
    return {
        "op": case.name,
        "size": case.size,
        "what": case.what,
        "seconds": {name: quantiles(values) for name, values in times.items()},
        "extra_memory_mib": {name: extra_memory(case.sides[name], device) / 2**20 for name in case.extra_memory},
        "bandwidth_share": {name: size / medians[name] / bandwidth for name, size in case.bytes.items()},
        "comparisons": [
            {"what": f"{case.name} {case.size}", "ours": ours, "peer": peer, "ratio": medians[peer] / medians[ours]}
            for ours, peer in case.comparisons
        ],
    }


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['op']} {result['size']}, {result['what']}")
    for name, s in result["seconds"].items():
        more = [f"{result['extra_memory_mib'][name]:,.0f} MiB more"] if name in result["extra_memory_mib"] else []
        if name in result["bandwidth_share"]:
            more.append(f"{result['bandwidth_share'][name]:.0%} of the copy bandwidth")
        print(f"  {name:<22} {s['p50'] * 1e3:>10.3f} ms   {'   '.join(more)}")
    for c in result["comparisons"]:
        print(f"  ratio {c['ratio']:.2f}   {c['ours']} against {c['peer']}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="tiny sizes: shows that everything runs, and no figure")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=7)
    hardware.add_json(parser)
    args = parser.parse_args(argv)
    hardware.refuse_dirty(parser, args)
    warnings.filterwarnings("ignore")
    if ops.MISSING or not ops.has_kernel("mlm_loss", args.device):
        print(f"error: {ops.MISSING or f'the native library has no {args.device} code'}", file=sys.stderr)
        return 2
    device = torch.device(args.device)
    keep_freed_memory()
    print(hardware.describe(), flush=True)
    bandwidth = copy_bandwidth(device, args.small)
    ceiling = matmul_tflops(device, torch.bfloat16, 0.05 if args.small else 0.5)
    print(f"copy {bandwidth / 1e9:.1f} GB/s, bf16 matrix product {ceiling:.3f} TFLOP/s")
    results = []
    for name in args.only:
        for case in CASES[name](Maker(device, torch.bfloat16), args.small):
            results.append(measure(case, device, args.rounds, bandwidth, 0.0 if args.small else 0.2))
            show(results[-1])
    report = {
        "benchmark": "ops", "unit": "seconds", "small": args.small, "threads": torch.get_num_threads(),
        "copy_bytes_per_sec": bandwidth, "matmul_ceiling_tflops": ceiling, "results": results,
    }  # fmt: skip
    if args.json:
        hardware.write_json(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
