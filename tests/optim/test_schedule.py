"""Learning rates against values worked out by hand; the record of them belongs to one run."""

from typing import Any

import pytest

from megabert.config import ScheduleConfig
from megabert.optim.rate_record import RateRecord
from megabert.optim.schedule import learning_rate, limit_reached, share_used
from tests.helpers import tiny


def schedule(name, **values):
    return ScheduleConfig(name=name, total_steps=110, warmup_steps=10, **values)


@pytest.mark.parametrize(
    ("name", "extra", "expected"),
    [
        ("linear", {}, {0: 0.2, 4: 1.0, 10: 2.0, 35: 1.5, 60: 1.0, 110: 0.0, 500: 0.0}),
        ("linear", {"final_ratio": 0.1}, {10: 2.0, 60: 1.1, 110: 0.2}),
        ("polynomial", {"power": 0.5}, {0: 0.2, 9: 2.0, 10: 2.0, 85: 1.0, 109: 0.2, 110: 0.0}),
        ("cosine", {}, {0: 0.2, 10: 2.0, 60: 1.0, 110: 0.0, 35: 1.0 + 0.5**0.5}),
        ("constant", {}, {0: 0.2, 10: 2.0, 110: 2.0}),
        ("wsd", {"decay_share": 0.5}, {9: 2.0, 10: 2.0, 55: 2.0, 66: 1.6, 88: 0.8, 109: 2 / 55, 110: 0.0}),
    ],
)
def test_warm_up_and_decay(name, extra, expected):
    for step, value in expected.items():
        assert learning_rate(schedule(name, **extra), 2.0, step) == pytest.approx(value, abs=1e-12), step


@pytest.mark.parametrize("unit", ["minutes", "tokens"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear", {5: 1.0, 10: 2.0, 55: 1.0, 100: 0.0, 120: 0.0}),
        ("budget", {5: 1.0, 10: 2.0, 55: 1.0, 99.9: 0.002 / 0.9, 100: 0.0, 120: 0.0}),
        ("wsd", {5: 1.0, 10: 2.0, 70: 2.0, 85: 1.0, 100: 0.0}),
    ],
)
def test_shapes_by_minutes_and_by_tokens(unit, name, expected):
    """Of a budget of 100 minutes or 1,000 tokens, at so many hundredths of it; steps are long past."""
    fields = {"budget_minutes": 100.0, "budget_tokens": 1000, "budget_warmup": 0.1, "decay_share": 0.3}
    plan = ScheduleConfig(name=name, by=unit, total_steps=1_000_000, **fields)
    for used, value in expected.items():
        spent = {"minutes": used} if "minutes" in (unit, plan.unit) else {"tokens": round(10 * used)}
        assert learning_rate(plan, 2.0, 999_999, **spent) == pytest.approx(value), used
        assert share_used(plan, 999_999, **spent) == min(used / 100, 1.0)
        limit = limit_reached(plan, 999_999, spent.get("minutes", 0.0), spent.get("tokens", 0))
        budget = "minutes=100.0" if "minutes" in (unit, plan.unit) else "tokens=1000"
        assert limit == (f"schedule.budget_{budget}" if used >= 100 else "")
    assert learning_rate(plan, 2.0, 0) > 0
    assert limit_reached(plan, 1_000_000, 0.0) == "schedule.total_steps=1000000"


@pytest.mark.parametrize(
    "fields", [{"by": "tokens", "budget_tokens": 10**13}, {"name": "budget", "budget_minutes": 1e6}]
)
def test_a_budget_has_no_default_limit_of_steps(fields):
    assert not limit_reached(ScheduleConfig(**fields), 100_000, 10.0, 2 * 10**11)
    assert limit_reached(ScheduleConfig(total_steps=100_000, **fields), 100_000, 10.0) == "schedule.total_steps=100000"
    assert limit_reached(ScheduleConfig(), 100_000, 10.0) == "schedule.total_steps=100000"


def test_shares_of_a_run_by_steps():
    assert [share_used(schedule("linear"), step, 9e9, 9) for step in (0, 11, 110, 500)] == [0, 0.1, 1, 1]


def test_rates_of_other_settings_or_runs_are_not_taken(world, tmp_path) -> None:
    def record(fresh: bool = False, **changes: Any) -> RateRecord:
        cfg = tiny.config(schedule__by="minutes", schedule__budget_minutes=5.0, **changes)
        return RateRecord(tmp_path, cfg, world, 0, fresh=fresh)

    record().add(0, 0, 1.5, 0.25)
    for changes in ({}, {"model__dropout": 0.1, "zero__stage": 2}):
        assert record(**changes).known(0, 0) == (1.5, 0.25)
    assert record(optimizer__lr=0.001).known(0, 0) is None
    record().add(0, 0, 1.5, 0.25)
    assert record(fresh=True).known(0, 0) is None  # a run without a checkpoint
