"""A run that is asked to stop has saved everything when it ends, whatever it was doing."""

from __future__ import annotations

import json
import random
import signal
import time

import pytest

from megabert.distributed.signals import SIGNALS
from tests.helpers.job import Job
from tests.integration.conftest import metrics

pytestmark = pytest.mark.dist
# each says where it is once, and stays there for two seconds on rank 1 while rank 0 waits for it
WAITING_FOR_DATA = """
import time
from megabert.data.loader import Loader
def slow(self, take=Loader.__next__):
    if self.step == 7:
        print("waiting for data", flush=True)
        time.sleep(2)
    return take(self)
Loader.__next__ = slow
"""
SAVING = """
import time
from megabert.checkpoint import Checkpoints
def slow(self, engine, state, save=Checkpoints.save):
    print("saving", flush=True)
    time.sleep(2)
    return save(self, engine, state)
Checkpoints.save = slow
"""
EVALUATING = """
import time
from megabert.trainer import Trainer
def slow(self, evaluate=Trainer.evaluate):
    print("evaluating", flush=True)
    time.sleep(2)
    return evaluate(self)
Trainer.evaluate = slow
"""


def saved_step(run) -> int:
    return json.loads((run / "checkpoints/pointer.json").read_text())["step"]


def losses(run) -> dict[int, float]:
    return {m["step"]: m["train/loss"] for m in metrics(run) if "train/loss" in m}


@pytest.fixture(scope="module")
def uninterrupted(dataset, tmp_path_factory):
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    job = Job(dataset, run, "--stop-after", 60)
    assert job.codes() == [0, 0], job.output
    return {m["step"]: (m["train/loss"], m["data/row_digest"]) for m in metrics(run) if "train/loss" in m}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "driver", "number"),
    [
        ("waiting for data", WAITING_FOR_DATA, signal.SIGUSR2),
        ("saving", SAVING, signal.SIGTERM),
        ("evaluating", EVALUATING, signal.SIGUSR1),
    ],
)
def test_a_signal_to_one_rank_saves_on_all_and_the_curve_goes_on(
    place, driver, number, dataset, tmp_path, uninterrupted
):
    run = tmp_path / "run"
    job = Job(dataset, run, driver=driver)
    job.wait_for(place)
    job.signal(number, 1)
    assert job.codes(30) == [85, 85], job.output
    step = saved_step(run)
    assert step == (8 if place == "waiting for data" else step) and "Traceback" not in job.output
    job = Job(dataset, run, "--stop-after", step + 2)
    assert job.codes() == [0, 0] and f"at step {step}," in job.output, job.output
    found = {m["step"]: (m["train/loss"], m["data/row_digest"]) for m in metrics(run) if "train/loss" in m}
    assert found == {s: uninterrupted[s] for s in range(1, step + 3)}


def test_before_training_a_signal_ends_the_process_at_once_with_nothing_written(dataset, tmp_path):
    job = Job(dataset, tmp_path / "run", ranks=1, driver="import time\nprint('starting', flush=True)\ntime.sleep(60)\n")
    job.wait_for("starting")
    job.signal(signal.SIGTERM)
    assert job.codes(5) == [85]
    assert not (tmp_path / "run").exists()


def test_a_second_signal_ends_at_once(dataset, tmp_path):
    job = Job(dataset, tmp_path / "run", ranks=1, driver=SAVING.replace("sleep(2)", "sleep(60)"))
    job.wait_for("step       3/")
    job.signal(signal.SIGUSR1)
    job.wait_for("saving")
    time.sleep(1.5)
    job.signal(signal.SIGTERM)
    assert job.codes(5) == [128 + signal.SIGTERM]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["--max-time", "SLURM_JOB_END_TIME"])
def test_the_end_of_the_time_allowed_is_not_reached(how, dataset, tmp_path):
    started = time.time()
    extra, env = (("--max-time", "40s"), {}) if how == "--max-time" else ((), {how: str(int(started) + 40)})
    job = Job(dataset, tmp_path / "run", *extra, **env)
    assert job.codes(60) == [85, 85], job.output
    assert 20 < time.time() - started < 40
    assert saved_step(tmp_path / "run") == max(losses(tmp_path / "run"))


LEAVES = """
import os
from megabert.distributed import ranks
def init(world, init=ranks.init):
    world = init(world)
    if world.rank == 1:
        os._exit(85)
    return world
ranks.init = init
"""


def test_a_rank_that_left_before_all_had_met_is_one_line(dataset, tmp_path):
    """As by a signal that only one rank got, between the rendezvous and the first agreement."""
    job = Job(dataset, tmp_path / "run", driver=LEAVES)
    assert job.codes(60) == [4, 85], job.output
    assert "error: another rank left before rank 0 met it" in job.output and "Traceback" not in job.output
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.soak
def test_signals_at_50_random_instants(dataset, tmp_path, uninterrupted):
    """To one rank or both, from the first moment on: saved, or cleanly finished, each time; the curve shows no seam.

    Every fifth comes while the ranks start, the others from the first update of that life on, until after its end.
    """
    draw, run, outcomes = random.Random(5), tmp_path / "run", []
    for number in range(50):
        job = Job(dataset, run, "checkpoint.interval=2", "--stop-after", 60)
        if number % 5:
            job.wait_for("step ")
        time.sleep(draw.uniform(0.0, 4.0))
        ranks = draw.choice([(0, 1), (0, 1), (0, 1), (0,), (1,)])
        for rank in ranks:
            if job.processes[rank].poll() is None:
                job.signal(draw.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]), rank)
        while all(process.poll() is None for process in job.processes):
            time.sleep(0.1)
        together = time.monotonic() + 10  # by then what leaves together has left; a launcher ends the rest
        while any(process.poll() is None for process in job.processes) and time.monotonic() < together:
            time.sleep(0.1)
        job_early = "rank(s) on cpu" not in job.output
        for process in job.processes:
            if job_early and process.poll() is None:
                process.send_signal(signal.SIGTERM)
        codes = job.codes(120)
        step = saved_step(run) if (run / "checkpoints/pointer.json").exists() else 0
        outcomes.append((codes, step))
        print(codes, step, flush=True)
        assert "Traceback" not in job.output, job.output
        early = "rank(s) on cpu" not in job.output  # one rank left before the ranks knew each other
        # In Python's own first moments a signal has its default action.
        ended = {4, 85, *(-number for number in SIGNALS)} if early else set()
        assert codes in ([85, 85], [0, 0]) or set(codes) <= ended, job.output
        found = (
            {m["step"]: (m["train/loss"], m["data/row_digest"]) for m in metrics(run) if "train/loss" in m}
            if step
            else {}
        )
        assert found == {s: uninterrupted[s] for s in range(1, step + 1)}
        if step == 60:
            run = tmp_path / f"run{len(outcomes)}"
    assert len(outcomes) == 50
    assert sum(codes == [85, 85] and step > 0 for codes, step in outcomes) >= 20, outcomes
