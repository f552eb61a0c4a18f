"""The record of rates belongs to one run, whatever was trained in its folder before."""

from __future__ import annotations

from typing import Any

import pytest

from megabert.checkpoint.rate_record import RateRecord
from megabert.config import Config
from tests.helpers import tiny

MINUTES = {"schedule__by": "minutes", "schedule__budget_minutes": 5.0}


def config(**overrides: Any) -> Config:
    return tiny.config(**(MINUTES | overrides))


@pytest.mark.parametrize(
    ("overrides", "known"),
    [({}, (1.5, 0.25)), ({"model__dropout": 0.1, "zero__stage": 2}, (1.5, 0.25)), ({"optimizer__lr": 0.001}, None)],
)
def test_rates_of_other_settings_are_not_taken(overrides: dict[str, Any], known: Any, world, tmp_path) -> None:
    RateRecord(tmp_path, config(), world, 0, writes=True).add(0, 0, 1.5, 0.25)
    found = RateRecord(tmp_path, config(**overrides), world, 0, writes=True)
    assert found.known(0, 0) == known


def test_a_run_without_a_checkpoint_has_no_rates(world, tmp_path) -> None:
    RateRecord(tmp_path, config(), world, 0, writes=True).add(0, 0, 1.5, 0.25)
    assert RateRecord(tmp_path, config(), world, 0, writes=False, fresh=True).known(0, 0) == (1.5, 0.25)  # --replay
    assert RateRecord(tmp_path, config(), world, 0, writes=True, fresh=True).known(0, 0) is None
