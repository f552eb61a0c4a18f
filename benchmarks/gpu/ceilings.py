"""Ceilings of a device: the rate of each matrix product of BERT-LARGE's training step in bf16, and of a large copy.

python benchmarks/gpu/ceilings.py [--device cuda] [--small] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a clone need not be installed

import torch

from benchmarks.common import hardware
from benchmarks.common.measure import copy_bandwidth, kernel_seconds

TOKENS, HIDDEN, LAYERS = 16_384, 1024, 24
# a published vocabulary of 30,522, padded to a multiple of 128; 128 rows of 128: ceil(0.15 * 128) + 1 predictions each
VOCABULARY, PREDICTIONS = 30_592, 2688


def shapes(tokens: int, hidden: int, vocabulary: int, predictions: int) -> dict[str, tuple[int, int, int, int]]:
    """(rows, outputs, inputs, times a step) of each linear layer y [rows, outputs] = x [rows, inputs] w^T."""
    return {
        "qkv": (tokens, 3 * hidden, hidden, LAYERS),
        "attention_output": (tokens, hidden, hidden, LAYERS),
        "feed_forward": (tokens, 4 * hidden, hidden, LAYERS),
        "feed_forward_output": (tokens, hidden, 4 * hidden, LAYERS),
        "mlm": (predictions, hidden, hidden, 1),
        "decoder": (predictions, vocabulary, hidden, 1),
    }


def products(device: torch.device, small: bool) -> dict[str, Any]:
    """TFLOP/s and seconds of the three products of each linear layer; their sum over a step of BERT-LARGE."""
    sizes = (64, 64, 512, 32) if small else (TOKENS, HIDDEN, VOCABULARY, PREDICTIONS)
    table, flops, total = [], 0.0, 0.0
    for name, (rows, outputs, inputs, times) in shapes(*sizes).items():
        x, w, dy = (
            torch.randn(*shape, device=device).bfloat16()
            for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
        )
        calls: dict[str, Any] = {
            "forward": lambda x=x, w=w: x @ w.T,
            "input_gradient": lambda dy=dy, w=w: dy @ w,
            "weight_gradient": lambda dy=dy, x=x: dy.T @ x,
        }
        for kind, call in calls.items():
            seconds = kernel_seconds(call, device, 0.0 if small else 0.05)
            work = 2.0 * rows * outputs * inputs
            flops, total = flops + times * work, total + times * seconds
            row = {"linear": name, "product": kind, "shape": [rows, outputs, inputs], "seconds": seconds}
            table.append(row | {"tflops": work / seconds / 1e12})
    return {"products": table, "step_tflop": flops / 1e12, "step_seconds": total, "tflops": flops / total / 1e12}


def facts(device: torch.device) -> dict[str, Any]:
    """The device and its software, as torch reports them."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if device.type == "cpu":
        return found
    p = torch.cuda.get_device_properties(device)
    found |= {"device": p.name, "capability": f"{p.major}.{p.minor}", "processors": p.multi_processor_count}
    return found | {"memory_gib": round(p.total_memory / 2**30, 1), "cudnn": torch.backends.cudnn.version()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes: shows that everything runs")
    hardware.add_json(parser)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    report: dict[str, Any] = {"facts": facts(device)}
    report |= {"copy_bytes_per_sec": copy_bandwidth(device, 1 << 16 if args.small else 1 << 28)}
    report |= products(device, args.small)
    print(f"bf16 {report['tflops']:,.1f} TFLOP/s, copy {report['copy_bytes_per_sec'] / 1e9:,.1f} GB/s")
    if args.json:
        hardware.write_json(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
