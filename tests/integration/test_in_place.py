"""Ranks that are killed and start again in place, from copies in memory: no update is lost, none differs."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from benchmarks.survival.in_place import KeptRanks
from benchmarks.survival.network import Network, address
from tests.helpers.job import SMALL

pytestmark = [pytest.mark.dist, pytest.mark.slow]
STEPS = 120
Curve = dict[int, tuple[float, float, str]]


def words(data: Path) -> list[str]:
    return ["--config", "tiny", "--data", str(data), *SMALL, f"schedule.total_steps={STEPS}", "checkpoint.interval=0"]


def started(data: Path, run: Path, hosts: tuple[int, ...], *extra: str) -> KeptRanks:
    return KeptRanks([*words(data), *extra], run, hosts)


@pytest.fixture(scope="module")
def undisturbed(dataset, tmp_path_factory) -> Callable[..., Curve]:
    """By its settings, what a run logs that nobody kills."""

    @cache
    def curve(*settings: str) -> Curve:
        job = started(dataset, tmp_path_factory.mktemp("undisturbed") / "run", (0, 0), *settings)
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
    assert text.count("2 of 2 ranks restart") == 3 and text.count("resuming from copies in memory at step") == 3
    assert job.curve() == undisturbed(setting)


def test_a_lost_host_loses_no_row(dataset, tmp_path: Path, undisturbed) -> None:
    settings = ("zero.stage=1", "precision=fp32")  # sums in another order, not rounded to bf16
    job = started(dataset, tmp_path / "run", (0, 1), *settings)
    job.wait_for_step(30)
    job.processes[0].kill()
    assert job.codes() == [-signal.SIGKILL, 0], job.log.read_text()
    text = job.log.read_text()
    assert "1 of 2 ranks restart, without 0 (host n0)" in text and "resuming from copies in memory at step" in text
    found, whole = job.curve(), undisturbed(*settings)
    assert {step: rows for step, (_, _, rows) in found.items()} == {step: rows for step, (_, _, rows) in whole.items()}
    assert [loss for loss, _, _ in found.values()] == pytest.approx([loss for loss, _, _ in whole.values()], rel=1e-5)


def test_a_host_and_the_host_with_its_copies_are_lost(dataset, tmp_path: Path, undisturbed) -> None:
    job = started(dataset, tmp_path / "run", (0, 1, 2, 3), "zero.stage=1", "checkpoint.interval=10")
    job.wait_for_step(35)
    for rank in (0, 1):  # rank 1's host has the copies of rank 0
        job.processes[rank].kill()
    assert job.codes() == [-signal.SIGKILL, -signal.SIGKILL, 0, 0], job.log.read_text()
    text = job.log.read_text()
    assert re.search(r"the files of ranks \[0(, 1)?\] are lost; the newest checkpoint is used", text)
    assert "2 of 4 ranks restart" in text and re.search(r"resuming from \S*/step-\d{7}0 at step", text)
    whole = undisturbed("zero.stage=1")
    assert {step: rows for step, (_, _, rows) in job.curve().items()} == {s: rows for s, (_, _, rows) in whole.items()}


def test_a_host_that_is_cut_off_is_left_behind(dataset, tmp_path: Path, undisturbed) -> None:
    """Three hosts with addresses of their own; the first one, where the ranks met, loses its network and keeps the run folder."""
    nodes = ("n1", "n2", "n3")
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(Network(tmp_path, nodes))
        except OSError as error:
            pytest.skip(f"no hosts of their own here: {error}")
        job = Apart(network, dataset, tmp_path / "run")
        stack.callback(job.stop)
        job.wait_for_step(30)
        network.set_link("n1", "down")
        assert job.codes() == [4, 0, 0], job.log.read_text()
    text = job.log.read_text()
    assert "2 of 3 ranks restart, without 0 (host n1)" in text and "rank 0 was late or unreachable" in text
    assert "resuming from copies in memory at step" in text
    found, whole = job.curve(), undisturbed("zero.stage=1")
    assert {step: rows for step, (_, _, rows) in found.items()} == {step: rows for step, (_, _, rows) in whole.items()}


class Apart(KeptRanks):
    """A rank on each node of a network."""

    def __init__(self, network: Network, data: Path, run: Path) -> None:
        self.network = network
        super().__init__([*words(data), "zero.stage=1"], run, tuple(range(len(network.nodes))))

    def _process(self, command: list[str], env: dict[str, object]) -> subprocess.Popen[bytes]:
        node = self.network.nodes[int(str(env["RANK"]))]
        more = {"MASTER_ADDR": address(self.network.nodes[0]), "SLURMD_NODENAME": node}
        return super()._process([*self.network.inside(node), *command], env | more)


def test_a_signal_saves_on_all_ranks(dataset, tmp_path: Path) -> None:
    job = started(dataset, tmp_path / "run", (0, 0))
    job.wait_for_step(5)
    job.processes[0].terminate()
    assert job.codes() == [85, 85], job.log.read_text()
    assert list((tmp_path / "run/checkpoints").glob("step-*"))
