"""Ranks that are killed and start again in place, from copies in memory: no update is lost, none differs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from benchmarks.survival.in_place import KeptRanks
from tests.helpers.job import SMALL

pytestmark = [pytest.mark.dist, pytest.mark.slow]
STEPS = 120
Curve = dict[int, tuple[float, float, str]]


def started(data: Path, run: Path, hosts: tuple[int, ...], *extra: str) -> KeptRanks:
    words = ["--config", "tiny", "--data", str(data), *SMALL, f"schedule.total_steps={STEPS}", "checkpoint.interval=0"]
    return KeptRanks([*words, *extra], run, hosts)


@pytest.fixture(scope="module")
def undisturbed(dataset, tmp_path_factory) -> Callable[[str], Curve]:
    """By a setting, what a run logs that nobody kills."""

    @cache
    def curve(setting: str) -> Curve:
        job = started(dataset, tmp_path_factory.mktemp("undisturbed") / "run", (0, 0), setting)
        assert job.codes() == [0, 0], job.log.read_text()
        assert len(job.curve()) == STEPS
        return job.curve()

    return curve


@pytest.mark.parametrize("setting", ["zero.stage=1", "zero.stage=3"])
def test_killed_ranks_lose_no_update(dataset, tmp_path: Path, undisturbed, setting: str) -> None:
    job = started(dataset, tmp_path / "run", (0, 0), setting)
    for step, rank in ((20, 1), (50, 0), (90, 1)):
        job.wait_for_step(step)
        job.kill_rank(rank)
    assert job.codes() == [0, 0], job.log.read_text()
    text = job.log.read_text()
    assert text.count("2 of 2 ranks start again") == 3 and text.count("resuming from copies in memory at step") == 3
    assert job.curve() == undisturbed(setting)


def test_a_lost_host_loses_no_row(dataset, tmp_path: Path, undisturbed) -> None:
    job = started(dataset, tmp_path / "run", (0, 1), "zero.stage=1")
    job.wait_for_step(30)
    job.processes[0].kill()
    assert job.codes() == [-signal.SIGKILL, 0], job.log.read_text()
    text = job.log.read_text()
    assert "1 of 2 ranks start again, without 0 (host n0)" in text and "resuming from copies in memory at step" in text
    found, whole = job.curve(), undisturbed("zero.stage=1")
    assert {step: rows for step, (_, _, rows) in found.items()} == {step: rows for step, (_, _, rows) in whole.items()}
    assert [loss for loss, _, _ in found.values()] == pytest.approx([loss for loss, _, _ in whole.values()], rel=1e-4)


def test_a_signal_saves_on_all_ranks(dataset, tmp_path: Path) -> None:
    job = started(dataset, tmp_path / "run", (0, 0))
    job.wait_for_step(5)
    job.processes[0].terminate()
    assert job.codes() == [85, 85], job.log.read_text()
    assert list((tmp_path / "run/checkpoints").glob("step-*"))
