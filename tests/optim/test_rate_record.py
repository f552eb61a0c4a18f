"""The record of rates belongs to one run, whatever was trained in its folder before."""

from __future__ import annotations

from typing import Any

from megabert.optim.rate_record import RateRecord
from tests.helpers import tiny


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
