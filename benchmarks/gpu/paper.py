"""What one H200 was computed to reach before anything ran on it, and the verdict on each line once it was measured.

The projection is arithmetic (2026-11): a BERT-LARGE step of 16,384 tokens needs 29.4 TFLOP of matrix products at 620 to
700 TFLOP/s; 1,095 ATen operations and 67 GB outside products and attention, counted by tracing the model on the `meta`
device; optimizer traffic by bytes over 4.3 TB/s. Nothing in it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TOKENS = 16384  # of the step that the milliseconds below are of
PRODUCTS_TFLOP = 29.4  # of its matrix products, forward and backward


@dataclass(frozen=True)
class Line:
    """One expectation: `low` to `high` of milliseconds (less is better), or at least `low` (`high` 0)."""

    key: str  # of the measured values
    what: str
    low: float
    high: float
    unit: str


LINES = (
    Line("products_ms", "matrix products of a step, bf16", 42, 47, "ms"),
    Line("attention_128_flash_ms", "attention at 128, torch's flash, dropout 0.1", 6, 11, "ms"),
    Line("attention_512_flash_ms", "attention at 512, torch's flash, dropout 0.1", 11, 16, "ms"),
    Line("elementwise_torch_ms", "element-wise operations, plain torch", 16, 17, "ms"),
    Line("elementwise_ours_ms", "element-wise operations, ours: 8 to 11 less", 5, 9, "ms"),
    Line("accumulate_ms", "bf16 gradients added in fp32, and zeroed", 2, 2.5, "ms"),
    Line("adamw_ms", "norm, clip, AdamW, copies", 5, 6, "ms"),
    Line("lamb_ms", "norm, clip, LAMB, copies: 8 more", 13, 14, "ms"),
    Line("step_torch_ms", "whole step at 128, plain torch, 16,384 tokens", 75, 88, "ms"),
    Line("step_best_ms", "whole step at 128, the best, for 16,384 tokens", 53, 57, "ms"),
    Line("rows_128", "full rows/s at 128, bf16", 2100, 0, "rows/s"),
    Line("rows_512", "full rows/s at 512, bf16", 480, 0, "rows/s"),
    Line("fp8_ratio_128", "FP8 over bf16, rows/s at 128", 1.3, 0, "x"),
    Line("fp8_ratio_512", "FP8 over bf16, rows/s at 512", 1.3, 0, "x"),
    Line("attention_ratio_128", "our attention over the best other at 128", 1.0, 0, "x"),
    Line("layer_ratio_128", "our layer over the best other at 128", 1.0, 0, "x"),
)


def verdicts(measured: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Expected, measured and verdict of each line: as expected, better, short, or not measured."""
    return [
        {"what": line.what, "unit": line.unit, "expected": expected(line), "measured": value,
         "verdict": verdict(line, value)}
        for line in LINES
        for value in [measured.get(line.key)]
    ]  # fmt: skip


def expected(line: Line) -> str:
    return f"{line.low:g} to {line.high:g}" if line.high else f"at least {line.low:g}"


def verdict(line: Line, value: float | None) -> str:
    if value is None:
        return "not measured"
    if not line.high:
        return "met" if value >= line.low else f"short by {1 - value / line.low:.0%}"
    if value < line.low:
        return "better than expected"
    return "as expected" if value <= line.high else f"slower than expected by {value / line.high - 1:.0%}"


def show(rows: list[dict[str, Any]]) -> str:
    """The verdicts as a table; the middle column is a projection."""
    lines = [f"{'line':<52} {'projected':>16} {'measured':>10}         verdict"]
    for row in rows:
        found = "-" if row["measured"] is None else f"{row['measured']:,.2f}"
        lines.append(f"{row['what']:<52} {row['expected']:>16} {found:>10} {row['unit']:<7} {row['verdict']}")
    return "\n".join(lines)
