"""A profile covers the updates that were named, once, and leaves a trace and a table."""

from __future__ import annotations

import json

import pytest
import torch

from megabert.engine.profiler import Profiler, parse_steps


@pytest.mark.parametrize("text", ["", "3", "5:4", "0:3", "a:b", "1:2:3", "-1:2"])
def test_what_is_no_range_of_updates_is_refused(text) -> None:
    with pytest.raises(ValueError, match="write the first and the last update, as 10:20"):
        parse_steps(text)


def test_the_named_updates_are_profiled_and_no_others(tmp_path, capsys) -> None:
    first, last = parse_steps("2:3")
    profiler = Profiler(tmp_path / "profile", 1, first, last)
    for step in range(1, 6):
        profiler.update(step)
        with torch.profiler.record_function(f"update {step}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.close()
    trace = json.loads((tmp_path / "profile/rank1-steps2-3.pt.trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"update 2", "update 3", "aten::matmul"} <= names and not names & {"update 1", "update 4", "update 5"}
    table = (tmp_path / "profile/rank1-steps2-3.txt").read_text()
    assert "aten::mm" in table and table in capsys.readouterr().out
    assert len(list((tmp_path / "profile").iterdir())) == 2


def test_without_updates_nothing_is_written(tmp_path) -> None:
    profiler = Profiler(tmp_path / "profile")
    for step in range(1, 4):
        profiler.update(step)
    profiler.close()
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize("steps", [range(4, 8), range(1, 2), ()])
def test_a_range_that_no_update_of_this_start_is_in_is_said_once(steps, tmp_path, capsys) -> None:
    profiler = Profiler(tmp_path / "profile", 0, 2, 3)
    for step in steps:
        profiler.update(step)
    profiler.close()
    assert capsys.readouterr().err.count("--profile 2:3: none of these updates was trained here") == 1
    assert not (tmp_path / "profile").exists()
