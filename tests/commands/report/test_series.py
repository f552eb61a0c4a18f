"""Curves are thinned to what a picture needs, and no extreme is lost; axes have round numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from megabert.commands.report.__main__ import main
from megabert.commands.report.charts import Chart, Line, compact, draw, ticks
from megabert.commands.report.series import BUCKETS, read_metrics, thinned
from tests.commands.report import folders


def test_a_thinned_curve_keeps_its_ends_and_extremes_of_every_stretch() -> None:
    rng = np.random.default_rng(5)
    x, y = np.arange(1_000_000, dtype=np.float64), rng.normal(size=1_000_000)
    y[123_456], y[777_777] = 1e6, -1e6
    ours, values = thinned(x, y)
    assert len(ours) <= 4 * BUCKETS and (np.diff(ours) > 0).all()
    assert (ours[0], ours[-1]) == (0, 999_999)
    assert {123_456.0, 777_777.0} <= set(ours) and (values.max(), values.min()) == (1e6, -1e6)
    assert np.array_equal(values, y[ours.astype(int)])
    for part in range(0, 1_000_000, 100_000):  # as high and as low in every tenth as the whole curve
        inside = (ours >= part) & (ours < part + 100_000)
        assert values[inside].max() == y[part : part + 100_000].max()
        assert values[inside].min() == y[part : part + 100_000].min()


def test_a_short_curve_stays_and_an_unsorted_one_is_put_in_order() -> None:
    x, y = np.array([3.0, 1.0, 2.0]), np.array([30.0, 10.0, 20.0])
    ours, values = thinned(x, y)
    assert ours.tolist() == [1, 2, 3] and values.tolist() == [10, 20, 30]


def lines(path: Path, count: int) -> None:
    rng = random.Random(3)
    with open(path, "w") as file:
        for step in range(1, count + 1):
            line = folders.figures(step, train__loss=5e6 if step == count // 3 else rng.random() + 1)
            file.write(json.dumps(line) + "\n")


@pytest.mark.parametrize("count", [5_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_a_long_run_makes_a_small_page_that_shows_its_one_spike(count: int, tmp_path: Path) -> None:
    run = folders.make(tmp_path / "run")
    lines(run / "metrics.jsonl", count)
    assert main([str(run)]) == 0
    page = (run / "report.html").read_text()
    assert len(page) < 300_000
    assert "5e+06" in page and "logarithmic" in page


def test_figures_that_are_no_numbers_are_counted_and_lines_that_are_none_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    values = ["nan", 2.0, "inf", True, None, 4]
    folders.write_lines(path, [{"step": step, "train/loss": value} for step, value in enumerate(values)])
    with open(path, "a") as file:
        file.write('{"step": -1, "train/loss": 1}\n{"train/loss": 1}\n{"step": "x"}\n{"st')
    found = read_metrics(path)
    loss = found.series["train/loss"]
    assert (loss.steps.tolist(), loss.values.tolist(), loss.not_finite) == ([1, 5], [2.0, 4.0], 2)
    assert (found.lines, found.unreadable, found.step) == (6, 4, 5)


def test_ticks_are_round_and_short() -> None:
    assert ticks(0, 9.3, 4) == [0, 2.5, 5, 7.5]
    assert ticks(0.9, 1.1, 4) == pytest.approx([0.9, 0.95, 1.0, 1.05, 1.1])
    shown = [compact(v) for v in (0, 12_000, 2_500_000, 0.00025, 0.02, 9500, 1e9, -3e-7)]
    assert shown == ["0", "12k", "2.5M", "2.5e-4", "0.02", "9500", "1G", "-3e-7"]


@pytest.mark.parametrize("values", [[1.0], [0.0], [2.0, 2.0], [-1.0, 1.0], [1e-9, 1.0], [5e6, 1.0]])
def test_any_curve_can_be_drawn(values: list[float]) -> None:
    x = np.arange(len(values), dtype=np.float64)
    for run in range(6):
        line = Line(run, "a", x, np.array(values), held_out=bool(run % 2))
        for zero in (False, True):
            chart = Chart("t", [line], compact, may_be_logarithmic=not zero, from_zero=zero)
            assert "nan" not in draw(chart, True) and "inf" not in draw(chart, True)
