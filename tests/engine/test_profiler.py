"""A profile covers the updates that were named, once, and leaves a trace and a table."""

from __future__ import annotations

import json

import pytest
import torch

from megabert.common.arguments import parse_steps
from megabert.engine.profiler import Profiler


@pytest.mark.parametrize("steps", ["2:3", "4:9"])
def test_the_named_updates_alone_are_profiled(steps, tmp_path) -> None:
    for wrong in ("", "3", "5:4", "0:3", "a:b", "1:2:3"):
        with pytest.raises(ValueError, match="write the first and the last update, as 10:20"):
            parse_steps(wrong)
    first, last = parse_steps(steps)
    profiler = Profiler(tmp_path / "profile", 1, first, last, range(1, 6))
    for step in range(1, 6):
        profiler.update(step)
        with torch.profiler.record_function(f"update {step}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.close()
    stem = f"{tmp_path}/profile/rank1-steps{first}-{last}"
    with open(f"{stem}.pt.trace.json") as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    updates = {f"update {step}" for step in range(1, 6)}
    assert names & updates == {f"update {step}" for step in range(first, min(last, 5) + 1)} and "aten::matmul" in names
    with open(f"{stem}.txt") as table:
        assert "aten::mm" in table.read()
    assert len(list((tmp_path / "profile").iterdir())) == 2


def test_updates_that_never_run_are_named(tmp_path, caplog) -> None:
    for left in (range(11, 101), range(1, 4), range(7, 4), range(5, 101), range(1, 5)):
        profiler = Profiler(tmp_path / "profile", 0, 4, 6, left)
        profiler.update(3)
        profiler.close()
    never, ended = "--profile 4:6: none of these updates runs; ", "--profile 4:6: training ended before these updates"
    lines = [f"{never}the next is 11", f"{never}the last is 3", f"{never}the next is 7", ended, ended]
    assert [record.getMessage() for record in caplog.records] == lines and not list(tmp_path.iterdir())
