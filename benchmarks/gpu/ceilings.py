"""Ceilings of a device: the rate of every matrix product of BERT-LARGE's training step, in bf16 and FP8, and of a large copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.common.measure import kernel_seconds

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HIDDEN, VOCABULARY = 1024, 30_592  # a published vocabulary of 30,522, padded to a multiple of 128
LINEARS = {"qkv": (3, 1), "attention_output": (1, 1), "feed_forward": (4, 1), "feed_forward_output": (1, 4)}
LAYERS = 24
PREDICTIONS = 2688  # of 128 rows of 128: ceil(0.15 * 128) + 1 slots each
KINDS = ("forward", "input_gradient", "weight_gradient")


def shapes(tokens: int, hidden: int, vocabulary: int, predictions: int) -> dict[str, tuple[int, int, int, int]]:
    """(rows, outputs, inputs, times a step) of each linear layer y [rows, outputs] = x [rows, inputs] w^T."""
    found = {n: (tokens, o * hidden, i * hidden, LAYERS) for n, (o, i) in LINEARS.items()}
    return found | {"mlm": (predictions, hidden, hidden, 1), "decoder": (predictions, vocabulary, hidden, 1)}


def products(device: str, tokens: int, small: bool, precision: str) -> dict[str, Any]:
    """TFLOP/s and seconds of the three products of each linear layer; their sum over a step of BERT-LARGE."""
    where = torch.device(device)
    hidden, vocabulary, predictions = (64, 512, 32) if small else (HIDDEN, VOCABULARY, PREDICTIONS)
    if precision == "fp8" and where.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise RuntimeError("this device has no FP8 matrix products (compute capability 8.9 or newer)")
    table, flops, total = [], 0.0, 0.0
    for name, (rows, outputs, inputs, times) in shapes(tokens, hidden, vocabulary, predictions).items():
        if precision == "fp8" and name in ("mlm", "decoder"):
            continue  # the head stays in bf16
        x, w, dy = (_normal(where, *shape) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs)))
        for kind, call in (_fp8 if precision == "fp8" else _bf16)(x, w, dy).items():
            seconds = kernel_seconds(call, where, 0.0 if small else 0.05)
            work = 2.0 * rows * outputs * inputs
            flops, total = flops + times * work, total + times * seconds
            table.append(
                {"linear": name, "product": kind, "shape": [rows, outputs, inputs], "seconds": seconds,
                 "tflops": work / seconds / 1e12}
            )  # fmt: skip
    return {"precision": precision, "tokens": tokens, "products": table, "step_tflop": flops / 1e12,
            "step_seconds": total, "tflops": flops / total / 1e12}  # fmt: skip


def _bf16(x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Any]:
    return dict(zip(KINDS, (lambda: x @ w.T, lambda: dy @ w, lambda: dy.T @ x), strict=True))


def _fp8(x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Any]:
    """cuBLAS takes the first operand by rows and the second by columns, so the backward products read transposes."""
    one = torch.ones((), device=x.device)

    def product(a: Tensor, b: Tensor, fast: bool) -> Any:
        return lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return {
        "forward": product(x.to(E4M3), w.to(E4M3), True),
        "input_gradient": product(dy.to(E5M2), w.T.contiguous().to(E4M3), False),
        "weight_gradient": product(dy.T.contiguous().to(E5M2), x.T.contiguous().to(E4M3), False),
    }


def copy(device: str, small: bool) -> dict[str, float]:
    """Bytes a second of a copy far larger than any cache, reads and writes counted."""
    where = torch.device(device)
    source = torch.empty(1 << 16 if small else 1 << 28, dtype=torch.int32, device=where).random_()
    target = torch.empty_like(source)
    seconds = kernel_seconds(lambda: target.copy_(source), where, 0.0 if small else 0.2)
    return {"bytes_per_sec": 2 * source.numel() * source.element_size() / seconds}


def _normal(device: torch.device, *shape: int) -> Tensor:
    """Random data: a product of zeros draws less power and runs faster than training ever will."""
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)
