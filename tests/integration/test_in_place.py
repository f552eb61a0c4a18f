"""Ranks that are killed and start again in place, from copies in memory: no update is lost, none differs."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from benchmarks.survival.in_place import KeptRanks
from benchmarks.survival.life import last_step
from benchmarks.survival.network import Network, address
from megabert.checkpoint import chain
from tests.helpers.forked import ROOT
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


@pytest.mark.parametrize("delay", [0.05, 0.6, 2.0])
def test_a_stop_during_a_restart_saves(dataset, tmp_path: Path, undisturbed, delay: float) -> None:
    job = started(dataset, tmp_path / "run", (0, 0), "zero.stage=1")
    job.wait_for_step(30)
    job.kill_rank(1)
    time.sleep(delay)
    for process in job.processes:
        process.terminate()
    assert job.codes() == [85, 85], job.log.read_text()
    (saved,) = (tmp_path / "run/checkpoints").glob("step-*")
    # the copies of the last two updates may not have been complete
    assert int(saved.name[5:]) == last_step(job.run) >= 28
    assert started(dataset, tmp_path / "run", (0, 0), "zero.stage=1").codes() == [0, 0]
    assert job.curve() == undisturbed("zero.stage=1")


# A rank's first syncs of a checkpoint's files take seconds, until a file exists.
SLOW_SAVES = """
import os, time
def slow(file, fsync=os.fsync):
    if "/.saving-" in os.readlink(f"/proc/self/fd/{{file}}"):
        for _ in range(600):
            if not os.path.exists({fast!r}):
                time.sleep(0.1)
    fsync(file)
os.fsync = slow
"""


def test_a_save_in_flight_at_a_kill_is_made_again(dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of step 7, which is the best one and kept for good, is not written when a rank is killed after step 12."""
    fast = tmp_path / "fast"
    (tmp_path / "sitecustomize.py").write_text(SLOW_SAVES.format(fast=str(fast)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    settings = ("eval.interval=7", "eval.patience=99", "checkpoint.keep=1", "checkpoint.keep_every=7", "eval.rows=16")
    job = started(dataset, tmp_path / "run", (0, 0), *settings, "schedule.total_steps=30", "optimizer.lr=1e-2")
    job.wait_for_step(12)
    assert not list((tmp_path / "run/checkpoints").glob("step-*07"))
    job.kill_rank(1)
    fast.touch()
    assert job.codes() == [0, 0], job.log.read_text()
    text = job.log.read_text()
    assert "saved at step 7: the save that was interrupted" in text and "is missing" not in text
    assert re.search(r"resuming from copies in memory at step 1[0-9]", text)
    kept = {int(path.name[5:]) for path in (tmp_path / "run/checkpoints").glob("step-*")}
    assert kept >= {7, 14, 21, 28, 30} and (tmp_path / "run/best").resolve().is_dir()
    assert chain.read(tmp_path / "run/checkpoints")[-1]["step"] == 30


def test_a_signal_saves_on_all_ranks(dataset, tmp_path: Path) -> None:
    job = started(dataset, tmp_path / "run", (0, 0))
    job.wait_for_step(5)
    job.processes[0].terminate()
    assert job.codes() == [85, 85], job.log.read_text()
    assert list((tmp_path / "run/checkpoints").glob("step-*"))
