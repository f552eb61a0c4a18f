"""Launches, bytes and milliseconds of BERT-LARGE's step on one GPU by its shapes: traced without a device, nothing is measured.

    python benchmarks/on_paper.py [--gpu h100] [--shapes 128x128 …] [--optimizers adamw lamb] [--json FILE]

The model, gradient hooks and optimizer run on torch's `meta` device; every operation that is not a view counts as launches and moves its
inputs and outputs once. Milliseconds are bytes over a share of the memory's bandwidth plus FLOPs over a rate, products at `PRODUCTS` of
the datasheet, attention at `ATTENTION`. One rank, bf16, ZeRO-1, dropout 0.1, full rows.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.common import hardware
from megabert.config import ModelConfig, OpsConfig
from megabert.engine.deepspeed_step import FlatGradients
from megabert.metrics import training_flops
from megabert.model import BertForPreTraining
from megabert.optim.lamb import AdamByUnit, Lamb

LARGE = {"layers": 24, "hidden": 1024, "heads": 16, "vocab_size": 30_522}
# datasheet: dense bf16 TFLOP/s, memory TB/s
GPUS = {"h100": (989.0, 3.35), "h200": (989.0, 4.8)}
# shares of the datasheet that are assumed: of products, of attention's products, of the memory
PRODUCTS, ATTENTION, MEMORY = 0.70, 0.25, 0.90
BACKENDS = {
    "ours": {"attention": "native", "layer": "native", "mlm_loss": "native"},
    "flash, our layer": {"attention": "varlen", "layer": "native", "mlm_loss": "native"},
    "torch": {"attention": "varlen", "layer": "torch", "mlm_loss": "torch"},
}
MULTIPLICATIONS = {"mm", "addmm", "bmm", "baddbmm"}
# tensors of a launch of an operation on lists, about
LIST = 100


@dataclass
class Cost:
    launches: int = 0
    bytes: float = 0.0
    flops: float = 0.0


class Trace(TorchDispatchMode):
    """Costs of operations by kind; `kind` names those that are neither products nor attention."""

    def __init__(self) -> None:
        super().__init__()
        self.costs: dict[str, Cost] = defaultdict(Cost)
        self.kind = "element-wise"

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        # which has no kernel for meta tensors and returns nothing
        result = None if name == "_fused_adamw_" else function(*args, **(kwargs or {}))
        written = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        lists = [argument for argument in args if isinstance(argument, (list, tuple)) and argument]
        if name == "_fused_adamw_":  # weights and moments
            written = [*args[0], *args[2], *args[3]]
        elif name.startswith("_foreach") and name.endswith("_"):  # the first list is read and written
            written = list(args[0])
        if name.endswith("_like") or name == "copy_":  # the first is not read
            read = read[1:]
        if function.is_view or name in ("detach", "empty", "empty_like", "new_empty", "_unsafe_view", "view"):
            return result
        multiplies = name in MULTIPLICATIONS or name == "mlm_loss"
        cost = self.costs["products" if multiplies else "attention" if "attention" in name else self.kind]
        cost.launches += 1 + (len(lists[0]) // LIST if name.startswith("_f") and lists else 0)
        cost.bytes += sum(t.numel() * t.element_size() for t in (*read, *written))
        if name == "mlm_loss":  # logits, and the gradients of both factors
            cost.flops += 6 * args[0].numel() * len(args[1])
        elif multiplies:
            left, right = (t for t in args if isinstance(t, Tensor) and t.dim() >= 2)
            cost.flops += 2 * left.numel() * right.shape[-1]
        return result


class TracedGradients(FlatGradients):
    """The hooks, whose operations are of a kind of their own."""

    trace: Trace

    def _arrived(self, n: int, parameter: torch.nn.Parameter) -> None:
        before, self.trace.kind = self.trace.kind, "gradients"
        super()._arrived(n, parameter)
        self.trace.kind = before


class FusedAdamW(AdamByUnit):
    """torch's fused kernel, as `optim.adamw`, whose class refuses meta tensors."""

    def _update_group(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        self._adam(group, tensors, [t.detach().view(-1) for t in tensors], group["lr"])


RULES = {"adamw": FusedAdamW, "lamb": Lamb}


def batch_of(rows: int, seq_len: int, predictions: int) -> dict[str, Tensor]:
    """A batch of full rows on the meta device."""
    row = dict.fromkeys(("input_ids", "segment_ids", "position_ids", "key_start", "key_end"), seq_len)
    shapes = row | {"cls_positions": 1, "mlm_positions": predictions, "nsp_labels": 1, "mlm_labels": predictions}
    kinds = {"nsp_labels": torch.int64, "mlm_labels": torch.int64}
    batch = {
        name: torch.empty(rows, n, dtype=kinds.get(name, torch.int32), device="meta") for name, n in shapes.items()
    }
    lengths = torch.empty(rows, dtype=torch.int32, device="meta")
    return batch | {"lengths": lengths, "seed": torch.empty(2, dtype=torch.int64, device="meta")}


def step(backends: dict[str, str], rows: int, seq_len: int, optimizer: str) -> dict[str, Cost]:
    """Costs of a step of one micro-batch by kind."""
    shape = ModelConfig(**LARGE, max_positions=512)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = BertForPreTraining(shape, OpsConfig(**backends), "cuda").bfloat16()  # type: ignore[arg-type]
    predictions = round(0.15 * seq_len) + 1
    parameters = list(model.parameters())
    groups = [[p for p in parameters if (p.dim() < 2) == vector] for vector in (False, True)]
    sizes = [sum(p.numel() for p in group) for group in groups]
    flat, masters = ([torch.empty(size, device="meta") for size in sizes] for _ in range(2))
    copies = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes]
    trace = TracedGradients.trace = Trace()
    gradients = TracedGradients(list(zip(flat, groups, strict=True)), parameters, 1)
    groups_of_masters = [{"params": [m], "weight_decay": d} for m, d in zip(masters, (0.01, 0.0), strict=True)]
    rule = RULES[optimizer](groups_of_masters, lr=1e-3, betas=(0.9, 0.999), eps=1e-6)
    for master, gradient in zip(masters, flat, strict=True):
        master.grad = gradient
    rule.attach()
    for _ in range(2):  # the first time creates state
        trace.costs.clear()
        with trace:
            trace.kind = "element-wise"
            losses = model(**batch_of(rows, seq_len, predictions))
            gradients.last()
            (losses[0] + losses[1]).backward()
            gradients.finish()
            trace.kind = "optimizer"
            rule.guard(flat, 1.0)
            rule.step()
            for weights, master in zip(copies, masters, strict=True):
                weights.copy_(master)
    squares = rows * seq_len**2
    whole, without = (training_flops(shape, rows * seq_len, s, rows * predictions, rows) for s in (squares, 0))
    trace.costs["attention"].flops = whole - without
    return dict(trace.costs)


def milliseconds(kind: str, cost: Cost, gpu: str) -> float:
    """On paper: products wait for arithmetic or memory, whichever takes longer; attention for both."""
    tflops, memory = GPUS[gpu]
    moving = cost.bytes / (memory * MEMORY * 1e9)
    if kind == "products":
        return max(moving, cost.flops / (tflops * PRODUCTS * 1e9))
    return moving + cost.flops / (tflops * ATTENTION * 1e9)


def main() -> None:
    parser = hardware.Parser(__doc__)
    add = parser.add_argument
    add("--gpu", choices=GPUS, default="h100")
    add("--shapes", nargs="+", default=["128x128", "256x128", "32x512", "128x512"], metavar="ROWSxLENGTH")
    add("--optimizers", nargs="+", choices=RULES, default=list(RULES))
    args = parser.parse()
    results = []
    for shape, optimizer, (name, backends) in product(args.shapes, args.optimizers, BACKENDS.items()):
        rows, seq_len = map(int, shape.split("x"))
        costs = step(backends, rows, seq_len, optimizer)
        kinds = {
            kind: {"launches": c.launches, "gigabytes": c.bytes / 1e9, "ms": milliseconds(kind, c, args.gpu)}
            for kind, c in costs.items()
        }
        total = {key: sum(line[key] for line in kinds.values()) for key in ("launches", "gigabytes", "ms")}
        mfu = sum(c.flops for c in costs.values()) / total["ms"] / 1e9 / GPUS[args.gpu][0]
        setting = {"backends": name, "rows": rows, "seq_len": seq_len, "optimizer": optimizer}
        results.append(setting | {"kinds": kinds, "total": total, "mfu": mfu})
        print(f"\n{name}, {rows} rows of {seq_len}, {optimizer}, {args.gpu}, on paper: MFU {mfu:.1%}")
        for kind, line in (kinds | {"total": total}).items():
            print(f"  {kind:<14}{line['launches']:>6} launches {line['gigabytes']:>7.1f} GB {line['ms']:>7.2f} ms")
    shares = {"products": PRODUCTS, "attention": ATTENTION, "memory": MEMORY}
    hardware.write_json(args.json, {"benchmark": "on paper", "gpu": args.gpu, "shares": shares, "results": results})


if __name__ == "__main__":
    hardware.run(main)
