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
from megabert.common import chain
from tests.helpers.job import SMALL
from tests.helpers.network import Network, address
from tests.integration.conftest import ROOT

pytestmark = [pytest.mark.dist, pytest.mark.slow]
STEPS = 120
Curve = dict[int, tuple[float, float, str]]
FROM_MEMORY = "resuming from copies in memory at step"


def words(data: Path, *extra: str) -> list[str]:
    steps = (f"schedule.total_steps={STEPS}", "checkpoint.interval=0")
    return ["--config", "tiny", "--data", str(data), *SMALL, *steps, *extra]


def start(data: Path, run: Path, *extra: str, hosts: tuple[int, ...] = (0, 0)) -> KeptRanks:
    return KeptRanks(words(data, *extra), run, hosts)


def end(job: KeptRanks, *codes: int) -> str:
    """Its log, after it has ended with these codes."""
    assert job.codes() == list(codes), job.log.read_text()
    return job.log.read_text()


def rows(curve: Curve) -> dict[int, str]:
    return {step: rows for step, (_, _, rows) in curve.items()}


@pytest.fixture(scope="module")
def undisturbed(dataset, tmp_path_factory) -> Callable[..., Curve]:
    """By its settings, what a run logs that nobody kills."""

    @cache
    def curve(*settings: str) -> Curve:
        job = start(dataset, tmp_path_factory.mktemp("undisturbed") / "run", *settings)
        end(job, 0, 0)
        assert len(job.curve()) == STEPS
        return job.curve()

    return curve


@pytest.mark.parametrize("setting", ["zero.stage=1", "zero.stage=3"])
def test_killed_ranks_lose_no_update(dataset, tmp_path: Path, undisturbed, setting: str) -> None:
    job = start(dataset, tmp_path / "run", setting)
    for step, rank in ((20, 1), (50, 0), (90, 1)):
        job.wait_for_step(step)
        job.kill_rank(rank)
    text = end(job, 0, 0)
    assert text.count("2 of 2 ranks restart") == text.count(FROM_MEMORY) == 3
    assert job.curve() == undisturbed(setting)


def test_lost_host_loses_no_row(dataset, tmp_path: Path, undisturbed) -> None:
    settings = ("zero.stage=1", "precision=fp32")  # sums in another order, not rounded to bf16
    job = start(dataset, tmp_path / "run", *settings, hosts=(0, 1))
    job.wait_for_step(30)
    job.processes[0].kill()
    text = end(job, -signal.SIGKILL, 0)
    assert "1 of 2 ranks restart, without 0 (host n0)" in text and FROM_MEMORY in text
    found, whole = job.curve(), undisturbed(*settings)
    assert rows(found) == rows(whole)
    assert [loss for loss, _, _ in found.values()] == pytest.approx([loss for loss, _, _ in whole.values()], rel=1e-5)


def test_host_and_its_copies_are_lost(dataset, tmp_path: Path, undisturbed) -> None:
    job = start(dataset, tmp_path / "run", "zero.stage=1", "checkpoint.interval=10", hosts=(0, 1, 2, 3))
    job.wait_for_step(35)
    for rank in (0, 1):  # rank 1's host has the copies of rank 0
        job.processes[rank].kill()
    text = end(job, -signal.SIGKILL, -signal.SIGKILL, 0, 0)
    assert re.search(r"the in-memory copies of ranks \[0(, 1)?\] are lost", text)
    assert "2 of 4 ranks restart" in text and re.search(r"resuming from \S*/step-\d{7}0 at step", text)
    assert rows(job.curve()) == rows(undisturbed("zero.stage=1"))


def test_host_that_is_cut_off_is_left_behind(dataset, tmp_path: Path, undisturbed) -> None:
    """Three hosts with addresses of their own; the first one, where the ranks met, loses its network and keeps the run folder."""
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(Network(tmp_path, ("n1", "n2", "n3")))
        except OSError as error:
            pytest.skip(f"no hosts of their own here: {error}")
        job = Apart(network, dataset, tmp_path / "run")
        stack.callback(job.stop)
        job.wait_for_step(30)
        network.set_link("n1", "down")
        text = end(job, 4, 0, 0)
    assert "2 of 3 ranks restart, without 0 (host n1)" in text and "rank 0 missed the rendezvous" in text
    assert FROM_MEMORY in text and rows(job.curve()) == rows(undisturbed("zero.stage=1"))


class Apart(KeptRanks):
    """A rank on each node of a network."""

    def __init__(self, network: Network, data: Path, run: Path) -> None:
        self.network = network
        super().__init__(words(data, "zero.stage=1"), run, tuple(range(len(network.nodes))))

    def _process(self, command: list[str], env: dict[str, object]) -> subprocess.Popen[bytes]:
        node = self.network.nodes[int(str(env["RANK"]))]
        more = {"MASTER_ADDR": address(self.network.nodes[0]), "SLURMD_NODENAME": node}
        return super()._process([*self.network.inside(node), *command], env | more)


@pytest.mark.parametrize("delay", [None, 0.05, 0.6, 2.0])
def test_signal_saves_also_during_a_restart(dataset, tmp_path: Path, undisturbed, delay: float | None) -> None:
    """To one keeper in training, to both so many seconds after a rank was killed."""
    job = start(dataset, tmp_path / "run", "zero.stage=1")
    job.wait_for_step(30)
    if delay is not None:
        job.kill_rank(1)
        time.sleep(delay)
    for process in job.processes[: 1 if delay is None else 2]:
        process.terminate()
    end(job, 85, 85)
    (saved,) = (tmp_path / "run/checkpoints").glob("step-*")
    # the copies of the last two updates may not have been complete
    assert int(saved.name[5:]) == last_step(job.run) >= 28
    end(start(dataset, tmp_path / "run", "zero.stage=1"), 0, 0)
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


def test_save_in_flight_at_a_kill_is_repeated(dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of step 7, which is the best one and kept for good, is not written when a rank is killed after step 12."""
    fast, saves = tmp_path / "fast", tmp_path / "run/checkpoints"
    (tmp_path / "sitecustomize.py").write_text(SLOW_SAVES.format(fast=str(fast)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    settings = ("eval.interval=7", "eval.patience=99", "checkpoint.keep=1", "checkpoint.keep_every=7", "eval.rows=16")
    job = start(dataset, tmp_path / "run", *settings, "schedule.total_steps=30", "optimizer.lr=1e-2")
    job.wait_for_step(12)
    assert not list(saves.glob("step-*07"))
    job.kill_rank(1)
    fast.touch()
    text = end(job, 0, 0)
    assert "saved at step 7: the save that was interrupted" in text and "is missing" not in text
    assert re.search(rf"{FROM_MEMORY} 1[0-9]", text)
    kept = {int(path.name[5:]) for path in saves.glob("step-*")}
    assert kept >= {7, 14, 21, 28, 30} and (tmp_path / "run/best").resolve().is_dir()
    assert chain.read(saves)[-1]["step"] == 30
