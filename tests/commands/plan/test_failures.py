"""The simulation of failures against Young's and Daly's formulas, and both against cases worked out by hand."""

from __future__ import annotations

import math

import pytest

from megabert.commands.plan.failures import Failures, best_interval, daly, goodput, simulate, young

HOUR = 3_600.0
CASES = [  # mean time between failures, save, restart: a node fails a year; every six hours; every 20 minutes
    Failures(17 * HOUR, 20.0, 300.0),
    Failures(6 * HOUR, 60.0, 600.0),
    Failures(HOUR / 3, 30.0, 120.0),
]


def test_the_formulas_by_hand() -> None:
    failures = Failures(mean_between=100.0, save=2.0, restart=5.0)
    assert young(failures) == 20.0
    assert daly(failures) == pytest.approx(20 * (1 + 0.1 / 3 + 0.01 / 9) - 2)
    # 20 of work and a save of 2: 100 e^0.05 (e^0.22 - 1) = 25.87 expected
    assert goodput(failures, 20.0) == pytest.approx(20 / 25.8690, rel=1e-4)
    assert daly(Failures(10.0, 20.0, 0.0)) == 10.0, "a save that takes twice the time between failures"
    assert goodput(failures, 1e6) == 0.0


@pytest.mark.parametrize("failures", CASES)
def test_dalys_interval_is_the_best_of_the_formula_he_derives_it_from(failures: Failures) -> None:
    best = goodput(failures, daly(failures))
    for factor in (0.8, 0.9, 1.1, 1.25):
        assert goodput(failures, factor * daly(failures)) < best
    assert daly(failures) == pytest.approx(young(failures), rel=0.15)


@pytest.mark.parametrize("failures", CASES)
@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_the_simulation_agrees_with_the_formula(failures: Failures, factor: float) -> None:
    """4,000 failures on average: goodput within 1%, the number of failures within five standard deviations."""
    work, interval = 4_000 * failures.mean_between, factor * daly(failures)
    found = simulate(failures, work, interval, seed=7)
    assert work / found.wall == pytest.approx(goodput(failures, interval), rel=0.01)
    expected = found.wall / failures.mean_between
    assert abs(found.failures - expected) < 5 * math.sqrt(expected)
    # lost by a failure at work: the mean of an exponential time cut at a stretch; of a failing restart: nothing more
    mean, stretch = failures.mean_between, interval + failures.save
    lost = (mean - stretch / math.expm1(stretch / mean)) * math.exp(-failures.restart / mean)
    assert found.lost / found.failures == pytest.approx(lost, rel=0.05)


@pytest.mark.parametrize("failures", CASES)
def test_the_best_simulated_interval_is_dalys(failures: Failures) -> None:
    """Within a factor of 1.6, for the optimum is flat; and Daly's loses at most 0.5% of goodput against it."""
    interval, best = best_interval(failures, 1_000 * failures.mean_between, seed=3)
    assert 1 / 1.6 < interval / daly(failures) < 1.6
    assert goodput(failures, daly(failures)) == pytest.approx(best, rel=0.015)
    assert goodput(failures, interval) > 0.995 * goodput(failures, daly(failures))


def test_a_job_that_never_fails_is_work_and_saves() -> None:
    found = simulate(Failures(1e15, 2.0, 5.0), work=95.0, interval=10.0, seed=1)
    assert (found.wall, found.failures, found.lost, found.saving) == (115.0, 0, 0.0, 20.0)


def test_a_job_that_never_ends_is_said_to() -> None:
    found = simulate(Failures(1.0, 30.0, 0.0), work=100.0, interval=20.0, seed=1)
    assert found.wall == math.inf and found.saving == 0.0
    assert simulate(Failures(44.0, 20.0, 1_200.0), work=88_000.0, interval=100.0, seed=0).wall == math.inf


def test_the_same_seed_is_the_same_job() -> None:
    assert simulate(CASES[1], 1e6, 2_000.0, seed=5) == simulate(CASES[1], 1e6, 2_000.0, seed=5)
    assert simulate(CASES[1], 1e6, 2_000.0, seed=5) != simulate(CASES[1], 1e6, 2_000.0, seed=6)


def test_times_that_cannot_be() -> None:
    for values, said in (
        ((0.0, 1.0, 1.0), "mean time between failures 0"),
        ((1.0, -1.0, 1.0), "time of a save -1: give a number above 0"),
        ((1.0, 1.0, -1.0), "time of a restart -1: give a number of at least 0"),
        ((math.inf, 1.0, 1.0), "mean time between failures inf"),
    ):
        with pytest.raises(ValueError, match=said):
            Failures(*values)
