"""Speed of the fused operations against the usual torch code, forward and backward, on the CPU or a GPU.

    python benchmarks/bench_ops.py [--device cuda] [--small] [--only attention …] [--json FILE]

BERT-LARGE's sizes, bf16; `products` are the matrix products of a training step, for each linear layer. Sides run alternately in
one process and medians are compared (on a GPU in CUDA graphs, whose replays are timed by events; the peers run first, and if a
side cannot be captured the process restarts without it). `mlm_loss` is compared with its three matrix products; `attention` of
packed rows with scaled_dot_product_attention with the same mask and, on CUDA, the flash and cuDNN kernels; the operations of
`layer` with eager and compiled torch; `optimizer`, a step of Muon, with AdamW, LAMB, and torch.optim.Muon with AdamW. Extra memory
is the growth at the peak of a call. Bytes (each tensor that has to be read or written, once) are given as a share of the measured
copy bandwidth. ratio is the peer's time over ours; above 1 is better.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import hardware
from benchmarks.common.measure import Call, CaptureFailed, Memory, copy_bandwidth, kernel_times, quantiles, synchronise
from megabert import ops
from megabert.common.environment import disable_malloc_trimming
from megabert.config import ModelConfig, OpsConfig, OptimizerConfig
from megabert.engine.ceiling import matmul_tflops
from megabert.model import BertForPreTraining
from megabert.optim.build import build_optimizer
from megabert.optim.muon import find_matrices

# (rows, tokens of a row) of attention: those of the published figure on the CPU, 16,384 tokens on a GPU
ATTENTION = {"cpu": [(8, 512)], "cuda": [(128, 128), (32, 512)]}


@dataclass
class OpCase:
    """One operation at one size: its sides, and the compared pairs."""

    name: str
    size: str
    sides: dict[str, Call]
    # (ours, peer)
    comparisons: list[tuple[str, str]]
    bytes: dict[str, int] = field(default_factory=dict)  # bytes that a side has to move, each tensor once
    flops: float = 0.0  # of each side
    # sides whose memory is measured
    extra_memory: tuple[str, ...] = ()
    what: str = "forward and backward"

    @property
    def label(self) -> str:
        return f"{self.name} {self.size}"


class Maker:
    """Random tensors on the device, and forward and backward of a function as one call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(1)
        self.seed = torch.tensor([1234], device=device)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        value = torch.randn(*shape, generator=self.generator) * scale
        return value.to(self.device, torch.bfloat16)

    def both_ways(self, function: Callable[..., Any], *inputs: Tensor) -> Call:
        """Forward and backward; the gradient of the first output is random, or 1 for a scalar."""
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        with torch.no_grad():
            first = first_of(function(*leaves))
        grad = torch.ones_like(first) if first.dim() == 0 else self.normal(*first.shape).to(first.dtype)

        def call() -> None:
            for leaf in leaves:
                leaf.grad = None
            first_of(function(*leaves)).backward(grad)

        return call


def first_of(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def products(make: Maker, small: bool) -> list[OpCase]:
    """The three products of each linear layer y [rows, outputs] = x [rows, inputs] w^T; 21 predictions in 128 tokens."""
    tokens = {"cpu": 2048, "cuda": 16_384}[make.device.type]
    tokens, width, entries = (64, 64, 512) if small else (tokens, 1024, 30_592)
    predictions = tokens * 21 // 128
    shapes = {
        "qkv": (tokens, 3 * width, width), "attention output": (tokens, width, width),
        "feed-forward": (tokens, 4 * width, width), "feed-forward output": (tokens, width, 4 * width),
        "mlm": (predictions, width, width), "decoder": (predictions, entries, width),
    }  # fmt: skip
    cases = []
    for name, (rows, outputs, inputs) in shapes.items():
        x, w, dy = make.normal(rows, inputs), make.normal(outputs, inputs), make.normal(rows, outputs)
        factors = {"forward": (x, w.T), "input gradient": (dy, w), "weight gradient": (dy.T, x)}
        sides: dict[str, Call] = {side: partial(torch.matmul, *pair) for side, pair in factors.items()}
        size, work = f"{name} {rows} x {outputs} x {inputs}", 2.0 * rows * outputs * inputs
        cases.append(OpCase("products", size, sides, [], flops=work, what="one product"))
    return cases


def mlm_loss(make: Maker, small: bool) -> list[OpCase]:
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

    def ours(h: Tensor, w: Tensor, b: Tensor) -> Any:
        return ops.mlm_loss(h, w, b, labels, entries, "native")

    functions = {"ours": ours, "torch": plain}
    sides = {name: make.both_ways(function, hidden, weight, bias) for name, function in functions.items()}
    sides["three products alone"] = products
    peers = [("ours", "three products alone"), ("ours", "torch")]
    return [OpCase("mlm_loss", f"{count} x {width} x {entries}", sides, peers, extra_memory=("ours", "torch"))]


def packed_bounds(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """key_start, key_end int32 [B, T] and lengths int32 [B, 2] of rows with two sequences each."""
    cut = width * 2 // 3
    start = torch.zeros(rows, width, dtype=torch.int32)
    start[:, cut:] = cut
    end = torch.full_like(start, width)
    end[:, :cut] = cut
    lengths = torch.tensor([[cut, width - cut]], dtype=torch.int32).expand(rows, 2)
    return start.to(device), end.to(device), lengths.to(device)


def softmax_mask(make: Maker, small: bool) -> list[OpCase]:
    rows, heads, width, size = (2, 2, 32, 16) if small else (8, 16, 512, 64)
    start, end, _ = packed_bounds(rows, width, make.device)
    key = torch.arange(width, device=make.device)
    mask = ((key >= start[..., None]) & (key < end[..., None]))[:, None]  # (B, 1, T, T)
    scores, scale, p = make.normal(rows, heads, width, width), size**-0.5, 0.1

    def ours(x: Tensor) -> Tensor:
        return ops.fused_softmax_mask(x, key_start=start, key_end=end, scale=scale, p=p, seed=make.seed)

    def plain(x: Tensor) -> Tensor:
        return F.dropout((x * scale).masked_fill(~mask, -torch.inf).softmax(-1), p)

    sides = {"ours": make.both_ways(ours, scores), "torch": make.both_ways(plain, scores)}
    shape = f"[{rows}, {heads}, {width}, {width}], dropout {p}"
    return [OpCase("softmax_mask", shape, sides, [("ours", "torch")], extra_memory=("ours", "torch"))]


def attention(make: Maker, small: bool) -> list[OpCase]:
    device = make.device.type
    heads, size = (2, 16) if small else (16, 64)
    obstacles = ops.obstacles("attention", device, torch.bfloat16, head_size=size)
    obstacles["flash3"] = "takes varlen's place in the whole process: bench_step.py measures it"
    cases = []
    for rows, width in [(2, 32)] if small else ATTENTION[device]:
        bounds = packed_bounds(rows, width, make.device)
        qkv = make.normal(rows, width, 3 * heads * size)

        def side(backend: str, p: float, qkv: Tensor = qkv, bounds: Any = bounds) -> Call:
            inputs = ops.attention_inputs(backend, *bounds)
            return make.both_ways(lambda x: ops.attend(x, heads, inputs, p, make.seed, 0, backend), qkv)

        for p in (0.1, 0.0):
            sides = {backend: side(backend, p) for backend, obstacle in obstacles.items() if not obstacle}
            ours = [backend for backend in sides if backend in ("native", "fused_softmax")]
            peers = [(mine, peer) for mine in ours for peer in sides if peer not in ours]
            cases.append(OpCase("attention", f"[{rows}, {heads}, {width}, {size}], dropout {p}", sides, peers))
    return cases


def layer(make: Maker, small: bool) -> list[OpCase]:
    """The element-wise operations of a layer."""
    rows, width, size = (64, 48, 16) if small else (8192, 1024, 64)
    ffn, heads = 4 * width, width // size
    compiled = torch.compile if not small else (lambda f, **_: f)

    def case(name: str, shape: str, ours: Any, plain: Any, moved: int, *inputs: Tensor) -> OpCase:
        functions = {"ours": ours, "torch": plain, "torch.compile": compiled(plain, dynamic=False)}
        sides = {side: make.both_ways(function, *inputs) for side, function in functions.items()}
        return OpCase(name, shape, sides, [("ours", "torch"), ("ours", "torch.compile")], {"ours": moved})

    def geglu(x: Tensor, b: Tensor) -> Tensor:
        value, gate = (x + b).chunk(2, -1)
        return F.gelu(value) * gate

    angles = ops.rotation(torch.arange(rows, device=make.device) % 128, size)
    cos, sin = (t[:, None, None].to(torch.bfloat16) for t in angles)

    def rotated(x: Tensor) -> Tensor:
        query_key, value = x.view(rows, 3, heads, size).split([2, 1], 1)
        first, second = query_key.chunk(2, -1)
        query_key = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return torch.cat([query_key, value], 1)

    def norm(x: Tensor, r: Tensor, b: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.layer_norm(r + F.dropout(x + b, 0.1), (width,), w, s, 1e-12)

    def our_norm(x: Tensor, r: Tensor, b: Tensor, w: Tensor, s: Tensor) -> Any:
        return ops.dropout_add_layer_norm(x, b, r, w, s, 0.1, 1e-12, make.seed, 0, "native")

    narrow, wide = (make.normal(rows, ffn), make.normal(ffn)), (make.normal(rows, 2 * ffn), make.normal(2 * ffn))
    qkv, vectors = make.normal(rows, 3 * width), [make.normal(width) for _ in range(3)]
    y, residual = make.normal(rows, width), make.normal(rows, width)
    return [
        case(
            "bias_gelu", f"[{rows}, {ffn}]", lambda x, b: ops.bias_gelu(x, b, "native"), lambda x, b: F.gelu(x + b),
            5 * narrow[0].nbytes, *narrow,
        ),
        case(
            "bias_geglu", f"[{rows}, 2 x {ffn}]", lambda x, b: ops.bias_geglu(x, b, "native"), geglu,
            8 * narrow[0].nbytes, *wide,
        ),
        case(
            "rotate", f"[{rows}, 3 x {width}]", lambda x: ops.rotate(x, heads, angles, "native"), rotated,
            4 * qkv.nbytes, qkv,
        ),
        # x, residual, y, z; grad, z, dx, dresidual
        case(
            "dropout_add_layer_norm", f"[{rows}, {width}], dropout 0.1", our_norm, norm,
            8 * y.nbytes, y, residual, *vectors,
        ),
    ]  # fmt: skip


def optimizer(make: Maker, small: bool) -> list[OpCase]:
    """Norm, clip and update of fp32 weights; every step starts from the same gradients."""
    width, vocab = (32, 512) if small else (1024, 30_000)
    layers = 24 if make.device.type == "cuda" and not small else 2
    shape = ModelConfig(layers=layers, hidden=width, heads=width // 16, vocab_size=vocab)
    plain = OpsConfig(attention="sdpa", mlm_loss="torch", layer="torch")

    def build() -> tuple[BertForPreTraining, list[Tensor], Call]:
        with make.device:
            model = BertForPreTraining(shape, plain, make.device.type)
            start = [torch.randn(p.shape) * 1e-3 for p in model.parameters()]
            gradients = [torch.empty_like(gradient) for gradient in start]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        return model, gradients, lambda: torch._foreach_copy_(gradients, start)

    def ours(name: Literal["adamw", "lamb", "muon"]) -> Call:
        model, gradients, begin = build()
        update = build_optimizer(OptimizerConfig(name=name), model, dtype=torch.bfloat16)
        for group in update.param_groups:
            # otherwise torch refuses to capture it; the kernel is the same
            group |= {"capturable": True} if "capturable" in group else {}
        update.attach()

        def call() -> None:
            begin()
            update.guard(gradients, 1.0)
            update.step()

        return call

    def theirs() -> Call:
        model, _, begin = build()
        parameters, by_index = list(model.parameters()), find_matrices(model)
        matrices = [p for n, p in enumerate(parameters) if n in by_index]
        rest = [p for n, p in enumerate(parameters) if n not in by_index]
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
    return [OpCase("optimizer", f"{count / 1e6:.1f} M parameters", sides, peers, what="one step")]


CASES = {case.__name__: case for case in (products, mlm_loss, softmax_mask, attention, layer, optimizer)}


def extra_memory(call: Call, device: torch.device) -> float:
    """Peak MiB of a call above those allocated before it."""
    memory = Memory(device)
    call()
    before = memory.now()
    memory.restart()
    call()
    synchronise(device)
    return max(0, memory.peak() - before) / 2**20


def measure(case: OpCase, device: torch.device, rounds: int, bandwidth: float, seconds: float) -> dict[str, Any]:
    ours = {mine for mine, _ in case.comparisons}
    sides = {name: case.sides[name] for name in sorted(case.sides, key=ours.__contains__)}  # the peers run first
    times = {name: quantiles(each) for name, each in kernel_times(sides, device, rounds, seconds).items()}
    extra = {name: extra_memory(sides[name], device) for name in case.extra_memory if name in sides}
    moved = {name: size / times[name]["p50"] / bandwidth for name, size in case.bytes.items() if name in sides}
    return {
        "op": case.name, "size": case.size, "what": case.what, "seconds": times, "extra_memory_mib": extra,
        "tflops": {name: case.flops / s["p50"] / 1e12 for name, s in times.items()} if case.flops else {},
        "bandwidth_share": moved,
        "comparisons": [
            {"what": case.label, "ours": mine, "peer": peer, "ratio": times[peer]["p50"] / times[mine]["p50"]}
            for mine, peer in case.comparisons
            if mine in sides and peer in sides
        ],
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['op']} {result['size']}, {result['what']}")
    head, rows = ("side", "p50, ms", "MiB more", "of the copy bandwidth", "TFLOP/s"), []
    forms = {"extra_memory_mib": ",.0f", "bandwidth_share": ".0%", "tflops": ",.2f"}
    for name, s in result["seconds"].items():
        more = [format(result[key][name], form) if name in result[key] else "" for key, form in forms.items()]
        rows.append([name, f"{s['p50'] * 1e3:.3f}", *more])
    print(hardware.markdown(head, rows))
    hardware.print_ratios(result["comparisons"])


def main() -> int:
    parser = hardware.Parser(__doc__)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--small", action="store_true", help="tiny sizes: a test without meaningful figures")
    add("--only", nargs="+", choices=list(CASES), default=list(CASES))
    add("--rounds", type=int, default=7)
    add("--without", nargs=3, action="append", default=[], metavar=("OP", "SIDE", "REASON"), help="a side to leave out")
    args = parser.parse()
    warnings.filterwarnings("ignore")
    if ops.MISSING or not ops.has_kernel("mlm_loss", args.device):
        raise ValueError(ops.MISSING or f"the native library has no {args.device} code")
    device = torch.device(args.device)
    disable_malloc_trimming()
    print(hardware.describe(), flush=True)
    ceiling = matmul_tflops(device, torch.bfloat16, 0.05 if args.small else 0.5)
    bandwidth = copy_bandwidth(device, 1 << 16 if args.small else 1 << 28)
    print(f"copy {bandwidth / 1e9:.1f} GB/s, bf16 matrix product {ceiling:.3f} TFLOP/s")
    report = {"benchmark": "ops", "unit": "seconds", "small": args.small, "threads": torch.get_num_threads()}
    report |= {"copy_bytes_per_sec": bandwidth, "matmul_ceiling_tflops": ceiling}
    results = []
    for case in (case for name in args.only for case in CASES[name](Maker(device), args.small)):
        for label, side, _ in args.without:
            case.sides.pop(side if label == case.label else "", None)
        try:
            results.append(measure(case, device, args.rounds, bandwidth, 0.0 if args.small else 0.2))
        except CaptureFailed as error:
            left_out = ["--without", case.label, error.side, str(error)]
            print(f"starting again: {left_out}", flush=True)
            os.execv(sys.executable, [sys.executable, *sys.argv, *left_out])
        show(results[-1])
        hardware.write_json(args.json, report | {"results": results, "left_out": args.without})
    return 0


if __name__ == "__main__":
    hardware.run(main)
