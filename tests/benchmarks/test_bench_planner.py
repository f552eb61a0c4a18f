"""The planner's fitted constants and its model of MLPerf's evaluations."""

from __future__ import annotations

import pytest

from benchmarks import bench_planner
from benchmarks.common.mlperf import FROZEN, OWN_SOFTWARE, calibration, error, terms


def test_no_single_change_improves_the_fit() -> None:
    """The committed constants are a minimum on the calibrating rows, to their rounding."""
    least = bench_planner.loss(FROZEN)
    for move in bench_planner.moves(FROZEN):
        for factor in (0.97, 1.03):
            assert bench_planner.loss(move(FROZEN, factor)) > least - 3e-4
    fitted_to = [abs(error(run, FROZEN)) for run in calibration() if run.submitter != OWN_SOFTWARE]
    assert sorted(fitted_to)[len(fitted_to) // 2] < 0.03


def test_evaluations_by_the_rules() -> None:
    """Batch 4,608: every floor(0.05 x (230.23 x 4,608 + 3 M) / 25,000) x 25,000 = 200,000 samples, 157 a GPU, forward."""
    run = next(run for run in calibration() if run.batch == 4_608 and run.gpu == "h100")
    found, sample = terms(run, FROZEN), 4_608 / 64
    passes = sum(found[name] for name in ("products", "attention", "elementwise", "kernels"))
    assert found["evaluations"] == pytest.approx(passes / 3 * 157 / sample * 4_608 / 200_000, rel=0.05)
