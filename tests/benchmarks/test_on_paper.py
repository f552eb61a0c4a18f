"""A traced step has the FLOPs of the formula and moves what can be counted by hand."""

from __future__ import annotations

import pytest

from benchmarks import on_paper
from megabert import ops
from megabert.config import ModelConfig
from megabert.metrics import training_flops

pytestmark = pytest.mark.skipif(not ops.has_kernel("attention", "cuda"), reason="no CUDA kernels in the library")


def test_products_are_those_of_the_formula() -> None:
    rows, length, predictions = 4, 128, 20
    cost = on_paper.step(on_paper.BACKENDS["ours"], rows, length, "adamw")
    shape = ModelConfig(**on_paper.LARGE, max_positions=512)
    tokens, d, f = rows * length, shape.hidden, shape.ffn
    whole = training_flops(shape, tokens, 0, rows * predictions, rows)
    whole += 6 * d * (shape.padded_vocab - shape.vocab_size) * rows * predictions
    # after attention the last layer computes only positions that are read
    unread = 6 * (d * d + 2 * d * f) * (tokens - rows * (predictions + 1))
    assert cost["products"].flops == pytest.approx(whole - unread, rel=1e-3)
    parameters = 336e6
    moved = {"gradients": 2 + 4, "optimizer": 4 + 7 * 4 + 4 + 2}  # bf16 to fp32; norm, AdamW's pass, bf16 weights
    for kind, size in moved.items():
        assert cost[kind].bytes == pytest.approx(size * parameters, rel=0.02), kind


def test_our_layer_moves_less_and_lamb_more() -> None:
    ours, torchs = (on_paper.step(on_paper.BACKENDS[name], 128, 128, "lamb") for name in ("ours", "torch"))
    assert ours["element-wise"].bytes < 0.5 * torchs["element-wise"].bytes
    assert ours["optimizer"].bytes == pytest.approx((4 + 8 + 28 + 8 + 12 + 6) * 336e6, rel=0.02)
    halves = [on_paper.milliseconds("products", cost["products"], "h100") for cost in (ours, torchs)]
    assert halves[0] == pytest.approx(halves[1], rel=0.05)
