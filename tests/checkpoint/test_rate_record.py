"""The record of rates belongs to one run, whatever was trained in its folder before."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from megabert.checkpoint.rate_record import FILE, RECORD, RateRecord
from megabert.common.canonical_json import canonical
from megabert.config import Config
from tests.helpers import tiny

MINUTES = {"schedule__by": "minutes", "schedule__budget_minutes": 5.0}


def config(**overrides: Any) -> Config:
    return tiny.config(**(MINUTES | overrides))


@pytest.mark.parametrize(
    ("overrides", "known"),
    [
        ({}, (1.5, 0.25)),
        ({"model__dropout": 0.1, "batch__micro_size": 4, "zero__stage": 2}, (1.5, 0.25)),
        ({"model__layers": 3}, None),
        ({"batch__global_size": 16}, None),
        ({"optimizer__name": "lamb"}, None),
        ({"seed": 1}, None),
        ({"optimizer__lr": 0.001}, None),
    ],
)
def test_rates_of_another_run_are_not_taken(overrides: dict[str, Any], known: Any, world, tmp_path) -> None:
    RateRecord(tmp_path, config(), world, 0, writes=True).add(0, 0, 1.5, 0.25)
    found = RateRecord(tmp_path, config(**overrides), world, 0, writes=True)
    assert found.known(0, 0) == known


def test_records_of_earlier_versions_are_those_of_the_run_that_goes_on(world, tmp_path) -> None:
    cfg = config()
    rates = {"schedule": cfg.schedule.model_dump(), "lr": cfg.optimizer.lr}
    for step in (0, 3):
        values = RECORD.pack(step, step, 1.5, 0.25, 0)[:-4]
        crc = zlib.crc32(values, zlib.crc32(canonical(rates)))
        with open(tmp_path / FILE, "ab") as file:
            file.write(values + crc.to_bytes(4, "little"))
    assert RateRecord(tmp_path, cfg, world, 3, writes=True).known(3, 3) == (1.5, 0.25)
    assert RateRecord(tmp_path, cfg, world, 0, writes=False).known(0, 0) == (1.5, 0.25)  # --replay
    assert RateRecord(tmp_path, cfg, world, 0, writes=True).known(0, 0) is None  # begins, whatever was here
