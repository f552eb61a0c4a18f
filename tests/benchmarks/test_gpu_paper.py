"""Verdicts follow from the items' results line by line; a line without its item is not measured."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_suite
from benchmarks.gpu import paper, plan

ROOT = Path(__file__).resolve().parents[2]


def candidate(role: str, name: str, seq_len: int, ms: float, dropout: float = 0.1) -> tuple[str, dict[str, Any]]:
    value = {"role": role, "name": name, "seq_len": seq_len, "dropout": dropout, "ms": ms}
    return f"operations/{role} {name} {seq_len} dropout {dropout:g}", {"state": "done", "value": value}


def step(name: str, seq_len: int, rows: int, rate: float, **changes: Any) -> tuple[str, dict[str, Any]]:
    value = {
        "backends": "best", "precision": "bf16", "optimizer": "adamw", "dropout": 0.1, "setup": name,
        "seq_len": seq_len, "rows": rows, "full_rows_per_sec": rate,
    } | changes  # fmt: skip
    return f"steps/{name} {seq_len}x{rows}", {"state": "done", "value": value}


RESULTS = dict(
    [
        ("ceilings/products bf16", {"state": "done", "value": {"tflops": 650.0}}),
        candidate("attention", "varlen", 128, 0.4),
        candidate("attention", "cudnn", 128, 0.3),
        candidate("attention", "native", 128, 0.15),
        candidate("attention", "fused_softmax", 128, 0.1),  # ours too: no rival
        candidate("attention", "varlen", 512, 1.0),
        candidate("layer", "torch", 128, 0.7),
        candidate("layer", "native", 128, 0.3),
        candidate("layer", "compiled", 128, 0.27),
        ("operations/optimizer adamw", {"state": "done", "value": {"ms": 5.5}}),
        ("operations/accumulate", {"state": "failed", "reason": "x"}),
        step("torch", 128, 128, 1600.0, backends="torch"),
        step("best", 128, 256, 2000.0),
        step("graphed", 128, 256, 2200.0),
        step("dropout 0", 128, 256, 2900.0, dropout=0.0),  # another thing than what was projected
        step("lamb", 128, 256, 2800.0, optimizer="lamb"),
        step("fp8", 128, 256, 2750.0, precision="fp8"),
        step("best", 512, 64, 432.0),
    ]
)


def test_the_values_are_those_of_the_named_items() -> None:
    found = gpu_suite.measured(RESULTS)
    assert set(found) == {line.key for line in paper.LINES}
    assert found["products_ms"] == pytest.approx(29.4 / 650 * 1000)
    assert found["attention_128_flash_ms"] == pytest.approx(24 * 0.4)
    assert found["attention_512_flash_ms"] == pytest.approx(24.0)
    assert found["elementwise_torch_ms"] == pytest.approx(24 * 0.7)
    assert found["elementwise_ours_ms"] == pytest.approx(24 * 0.3)
    assert found["adamw_ms"] == 5.5 and found["lamb_ms"] is None and found["accumulate_ms"] is None
    assert found["step_torch_ms"] == pytest.approx(1000 * 128 / 1600)
    assert found["step_best_ms"] == pytest.approx(1000 * 128 / 2200)
    assert found["rows_128"] == 2200 and found["rows_512"] == 432
    assert found["fp8_ratio_128"] == pytest.approx(1.25) and found["fp8_ratio_512"] is None
    assert found["attention_ratio_128"] == pytest.approx(2.0)
    assert found["layer_ratio_128"] == pytest.approx(0.9)


def test_each_line_says_what_it_was_expected_to_be() -> None:
    said = {row["what"]: row["verdict"] for row in paper.verdicts(gpu_suite.measured(RESULTS))}
    assert said["matrix products of a step, bf16"] == "as expected"
    assert said["attention at 512, torch's flash, dropout 0.1"] == "slower than expected by 50%"
    assert said["element-wise operations, ours: 8 to 11 less"] == "as expected"
    assert said["full rows/s at 128, bf16"] == "met"
    assert said["full rows/s at 512, bf16"] == "short by 10%"
    assert said["FP8 over bf16, rows/s at 128"] == "short by 4%"
    assert said["FP8 over bf16, rows/s at 512"] == "not measured"
    assert said["our attention over the best other at 128"] == "met"
    assert said["our layer over the best other at 128"] == "short by 10%"


def test_nothing_measured_is_said_of_every_line() -> None:
    rows = paper.verdicts({})
    assert len(rows) == len(paper.LINES) >= 15
    assert {row["verdict"] for row in rows} == {"not measured"} and {row["measured"] for row in rows} == {None}
    table = paper.show(rows)
    assert "projected" in table.splitlines()[0] and len(table.splitlines()) == len(rows) + 1


def test_the_table_of_the_documents_is_this_one() -> None:
    text = (ROOT / "docs" / "measurements.md").read_text()
    table = text[text.index("## One H200: projected, not measured") :].split("\n## ")[0]
    for line in paper.LINES:
        found = paper.expected(line).replace("2100", "2,100")
        assert f"| {found} |" in table, f"{line.what}: {found} is not in docs/measurements.md"


def test_the_projection_adds_up() -> None:
    """The parts of today's step give its sum; the targets are its rates at the share of the peak that they were set at."""
    lines = {line.key: line for line in paper.LINES}
    parts = ["products_ms", "attention_128_flash_ms", "elementwise_torch_ms", "accumulate_ms", "adamw_ms"]
    low, high = (sum(getattr(lines[p], side) for p in parts) for side in ("low", "high"))
    step_line = lines["step_torch_ms"]
    assert math.isclose(low, step_line.low, rel_tol=0.06) and math.isclose(high, step_line.high, rel_tol=0.06)
    assert lines["products_ms"].low == pytest.approx(paper.PRODUCTS_TFLOP / 700 * 1e3, abs=0.5)
    assert lines["products_ms"].high == pytest.approx(paper.PRODUCTS_TFLOP / 620 * 1e3, abs=0.5)


def test_the_plan_holds_what_was_asked_in_the_order_of_its_worth() -> None:
    options = plan.Options("cuda", False, "pack", {128: "a", 512: "b"}, "journal", 0.0)
    items = plan.items(options)
    keys = [item.key for item in items]
    assert len(set(keys)) == len(keys)
    assert items[0].part == "environment" and keys[-1] == "tests/operations"
    shares = list(plan.PARTS.values())
    assert shares == sorted(shares) and shares[-1] == 1.0 and {i.part for i in items} == set(plan.PARTS)
    steps = [item for item in items if item.part == "steps"]
    assert [item.name for item in steps[:3]] == ["best 128x256", "best 128x128", "best 512x64"]
    assert {item.arguments["rows"] for item in steps} >= {64, 128, 256, 512}
    wanted = [
        {"graphed": True},
        {"precision": "fp8"},
        {"backends": "torch", "compiled": True},
        {"optimizer": "lamb"},
        {"dropout": 0.0},
    ]
    for changes in wanted:
        found = [item for item in steps if item.arguments["setup"] == changes]
        assert {item.arguments["data"] for item in found} == {"a", "b"}, changes
    assert sum(item.cost for item in items) < 9.5 * 60 * 1.2, "most of it fits the time"
