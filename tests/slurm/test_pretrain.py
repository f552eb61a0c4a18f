"""`sbatch launch/pretrain_large.slurm` on two nodes of a real SLURM: resumed after whatever ends it early."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT, command
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.dist]
SCRIPT = str(ROOT / "launch/pretrain_large.slurm")
NODES = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=1", "--time=10")
SMALL = (
    *("model.layers=1", "model.hidden=32", "model.heads=2", "batch.global_size=128", "batch.micro_size=8"),
    *("peak_tflops=1.0", "log.interval=1", "log.tensorboard=false"),
    *("eval.rows=32", "eval.interval=0", "data.workers=1"),
)


STEPS = 30


class Job:
    """One submission of the script, with its runs and its log in `folder`."""

    def __init__(
        self, cluster: Cluster, folder: Path, dataset: Path, *options: str, steps: int = STEPS, **env: str
    ) -> None:
        self.cluster, self.folder = cluster, folder
        site = {"PROJECT": str(ROOT), "VENV": str(Path(sys.executable).parents[1]), "OMP_NUM_THREADS": "1"}
        site |= {"RUNS": str(folder / "runs"), "DATA_128": str(dataset), "DATA_512": str(dataset)}
        for number, count in ((1, steps), (2, 2)):
            preset = (
                (ROOT / "megabert/presets/tiny.toml").read_text().replace("total_steps = 600", f"total_steps = {count}")
            )
            (folder / f"phase{number}.toml").write_text(preset.replace("warmup_steps = 60", "warmup_steps = 1"))
            site[f"PHASE{number}"] = str(folder / f"phase{number}.toml")
        site["CUDA_VISIBLE_DEVICES"] = ""
        overrides = [word for word in options if not word.startswith("--") or word == "--in-place"]
        own = [word for word in options if word not in overrides]
        arguments = (*NODES, *own, SCRIPT, *SMALL, *overrides)
        self.number = cluster.submit(*arguments, cwd=folder, **site | env)

    @property
    def log(self) -> str:
        return (self.folder / f"megabert-large-{self.number}.log").read_text()

    def losses(self, phase: int = 1) -> dict[int, float]:
        """Training loss by step, of a file that is being written perhaps."""
        file = self.folder / f"runs/large_phase{phase}/metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        assert len({line["step"] for line in found if "train/loss" in line}) == sum(
            "train/loss" in line for line in found
        ), "a step is logged twice"
        return {line["step"]: line["train/loss"] for line in found if "train/loss" in line}

    def trained(self, step: int, timeout: float = 90) -> None:
        """Waits until `step` updates of phase 1 are logged."""
        deadline = time.monotonic() + timeout
        while max(self.losses(), default=0) < step:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.2)

    def finished(self, timeout: float = 150) -> None:
        """Waits for the end; fails with the log unless the job is COMPLETED."""
        assert self.cluster.ended(self.number, timeout) == "COMPLETED", self.log


def uninterrupted(folder: Path, dataset: Path, steps: int, total: int, ranks: int = 2) -> dict[int, float]:
    """Losses of the same run without SLURM, never stopped."""
    run = folder / "straight"
    done = command(
        *("megabert/train.py", "--config", "tiny", "--data", dataset, "--run", run),
        *(*SMALL, f"schedule.total_steps={total}", "schedule.warmup_steps=1", "--stop-after", steps),
        ranks=ranks, timeout=600, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.fixture(scope="module")
def curve(dataset, tmp_path_factory) -> dict[int, float]:
    """Losses of `STEPS` updates that nothing interrupted."""
    return uninterrupted(tmp_path_factory.mktemp("straight"), dataset, STEPS, STEPS)


def preempt(cluster: Cluster, folder: Path) -> int:
    """A job of the higher partition that needs both nodes for a moment."""
    return cluster.submit("-p", "urgent", "--nodes=2", "--wrap", "true", cwd=folder)


def without_scontrol(folder: Path) -> str:
    """A PATH with every command of this one but scontrol."""
    tools = folder / "tools"
    tools.mkdir()
    for directory in reversed(os.environ["PATH"].split(":")):
        for command_file in Path(directory).glob("*"):
            link = tools / command_file.name
            if command_file.name != "scontrol":
                link.unlink(missing_ok=True)
                link.symlink_to(command_file)
    assert shutil.which("sbatch", path=str(tools)) and not shutil.which("scontrol", path=str(tools))
    return str(tools)


def test_two_nodes_run_both_phases_to_the_end(cluster, dataset, curve, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset)
    job.finished()
    assert job.losses() == curve and list(curve) == list(range(1, STEPS + 1))
    assert list(job.losses(2)) == [1, 2] and job.losses(2)[1] < curve[1] - 0.1
    assert job.log.count("2 rank(s) on cpu (srun)") == 2
    assert f"starting from the weights of {tmp_path}/runs/large_phase1 at step {STEPS}" in job.log
    assert not list((tmp_path / "runs").glob(".job-*")), "the job's own notes are gone"


@pytest.mark.slow
def test_three_time_limits_leave_no_seam_in_the_curve(cluster, dataset, tmp_path) -> None:
    total = 1_000_000
    limit = ("--time=2", "--signal=B:USR2@45")  # sent up to a minute earlier
    job = Job(cluster, tmp_path, dataset, *limit, "checkpoint.interval=1000000", steps=total, MAX_RESTARTS="9")
    steps, limits = [0], 0
    while len(steps) < 4:  # a limit that comes before the first update is survived too, but shows nothing
        limits += 1
        cluster.restarted(job.number, limits, timeout=180)
        newest = max(job.losses(), default=0)
        steps += [newest] * (newest > steps[-1])
        assert limits < 9, steps
    job.trained(steps[-1] + 3)
    cluster.run("scancel", str(job.number))
    assert cluster.ended(job.number) == "CANCELLED"
    assert job.log.count("ended with 85: requeued") == limits, job.log
    print(f"{limits} time limits, updates after each that had some: {steps[1:]}")
    losses = job.losses()
    assert list(losses) == list(range(1, len(losses) + 1)), "a step is missing or out of order"
    assert losses == uninterrupted(tmp_path, dataset, len(losses), total)


@pytest.mark.slow
@pytest.mark.parametrize("scontrol", [True, False], ids=["scontrol", "without scontrol"])
def test_a_preempted_job_is_requeued_and_finished_later(scontrol, cluster, dataset, curve, tmp_path) -> None:
    env = {} if scontrol else {"PATH": without_scontrol(tmp_path), "MASTER_ADDR": "127.0.0.1"}
    job = Job(cluster, tmp_path, dataset, **env)
    job.trained(3)
    urgent = preempt(cluster, tmp_path)
    over = ("PENDING", "COMPLETED", "FAILED", "TIMEOUT")
    assert cluster.wait(job.number, lambda found: found["JobState"] in over, 60)["JobState"] == "PENDING", job.log
    assert cluster.ended(urgent) == "COMPLETED"
    saved = max(job.losses())
    assert 3 <= saved < STEPS
    cluster.restarted(job.number, 1)
    job.finished()
    assert f"at step {saved}," in job.log and job.losses() == curve and len(job.losses(2)) == 2
    assert ("cannot requeue" in job.log) == (not scontrol)


@pytest.mark.slow
def test_the_job_of_a_failed_node_starts_again(cluster, dataset, curve, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, "checkpoint.interval=2")
    job.trained(3)
    cluster.kill_node("n2")
    cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    cluster.wait(job.number, lambda found: found["JobState"] == "PENDING", 60)
    cluster.start_node("n2")
    cluster.run("scontrol", "update", "nodename=n2", "state=resume")
    job.finished()
    assert "resuming from" in job.log and job.losses() == curve and len(job.losses(2)) == 2


def test_a_lost_rank_without_progress_is_given_up_and_a_mistake_is_never_requeued(cluster, dataset, tmp_path) -> None:
    folders = [tmp_path / "lost", tmp_path / "mistake"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "python").mkdir()
    dies = folders[0] / "python/python"  # a rank that the kernel kills as it starts
    dies.write_text("#!/usr/bin/env bash\nkill -9 $$\n")
    dies.chmod(0o755)
    (folders[0] / "bin").symlink_to(folders[0] / "python")
    lost = Job(cluster, folders[0], dataset, VENV=str(folders[0]), MAX_RESTARTS="1", RESTART_WAIT="0")
    assert cluster.ended(lost.number) == "FAILED"
    assert cluster.job(lost.number)["Restarts"] == "0", "it was started again on the nodes that it has"
    assert "ended with 4, and 1 restarts in a row made no progress" in lost.log
    mistake = Job(cluster, folders[1], dataset, "modle.layers=2")
    assert cluster.ended(mistake.number) == "FAILED"
    assert cluster.job(mistake.number) | {"Restarts": "0", "ExitCode": "2:0"} == cluster.job(mistake.number)
    assert "unknown config key modle" in mistake.log


def wait_for_update(job: Job, fault: float, timeout: float) -> float:
    """Seconds from the moment of a fault to the first update of the next start."""
    while "resuming from" not in job.log:
        assert time.time() < fault + timeout, job.log
        time.sleep(0.1)
    job.trained(max(job.losses(), default=0) + 1, timeout)
    return time.time() - fault


@pytest.mark.slow
def test_a_killed_rank_restarts_within_the_job(cluster, dataset, curve, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, "checkpoint.interval=2")
    job.trained(3)
    killed = cluster.kill_rank(1)
    print(f"{wait_for_update(job, killed, timeout=90):.0f} s from the kill to the next update")
    job.finished()
    assert "restart 1 of 3 in this job on n1 n2;" in job.log and "requeued" not in job.log, job.log
    assert cluster.job(job.number)["Restarts"] == "0" and job.losses() == curve and len(job.losses(2)) == 2


@pytest.mark.slow
def test_a_killed_rank_restarts_in_place(cluster, dataset, curve, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, "--in-place")
    job.trained(3)
    cluster.kill_kept_rank(1)
    job.finished()
    assert "2 of 2 ranks restart" in job.log and "resuming from copies in memory" in job.log, job.log
    assert "restart 1 of" not in job.log and "requeued" not in job.log, job.log
    assert cluster.job(job.number)["Restarts"] == "0" and job.losses() == curve and len(job.losses(2)) == 2


TWO_RANKS = ("--nodes=2", "--ntasks-per-node=2", "checkpoint.interval=2")


@pytest.mark.slow
def test_a_spare_node_replaces_the_one_that_failed(cluster, dataset, curve, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *TWO_RANKS, NODES="1")
    job.trained(3)
    cluster.kill_rank(1)
    job.finished()
    assert "failed nodes: n1; restart 1 of 3 in this job on n2;" in job.log and "requeued" not in job.log, job.log
    assert cluster.job(job.number)["Restarts"] == "0" and job.losses() == curve


@pytest.mark.slow
def test_restarts_used_up_requeue_without_the_failed_node(cluster, dataset, curve, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *TWO_RANKS, "--nodes=1", RESTARTS="0")
    job.trained(3)
    first = cluster.job(job.number)["NodeList"]
    cluster.kill_rank(1)
    found = cluster.restarted(job.number, 1)
    assert found["ExcNodeList"] == first != found["NodeList"] and f"left out from now on: {first}\n" in job.log
    job.finished()
    assert job.losses() == curve and "in this job" not in job.log


SLOW = ("watchdog.slow_ratio=1.5", "watchdog.slow_minutes=0.05")


def wait_for_slow_rank(job: Job, timeout: float = 120) -> str:
    """The line that names one, once it is in the log and in the run's folder."""
    deadline = time.monotonic() + timeout
    while not (job.folder / "runs/large_phase1/slow-ranks.json").exists():
        assert time.monotonic() < deadline, job.log
        time.sleep(0.1)
    return next(line for line in job.log.splitlines() if "is slow: " in line)


@pytest.mark.slow
def test_a_spare_node_replaces_a_slow_one(cluster, dataset, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *TWO_RANKS, *SLOW, steps=100_000, NODES="1", EXCLUDE_SLOW="1")
    job.trained(3)
    with cluster.slowed(rank=1):
        line = wait_for_slow_rank(job)
        for rank in (0, 1):  # a fault that names no node
            cluster.kill_rank(rank)
    assert "rank 1 (host n1) is slow: " in line and "cause: host" in line, line
    wait_for_update(job, time.time(), timeout=90)
    assert "failed nodes: none named, slow nodes: n1; restart 1 of 3 in this job on n2;" in job.log, job.log


@pytest.mark.slow
@pytest.mark.parametrize("exclude", ["1", "0"])
def test_a_requeue_excludes_a_slow_node_when_asked(exclude, cluster, dataset, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *TWO_RANKS, "--nodes=1", *SLOW, steps=100_000, EXCLUDE_SLOW=exclude)
    job.trained(3)
    first = cluster.job(job.number)["NodeList"]
    with cluster.slowed(rank=1):
        assert f"rank 1 (host {first}) is slow: " in wait_for_slow_rank(job)
        cluster.run("scancel", "--batch", "--signal=USR2", str(job.number))
        cluster.wait(job.number, lambda found: found["JobState"] == "PENDING", 60)
    found = cluster.restarted(job.number, 1)
    assert "ended with 85: requeued" in job.log
    if exclude == "1":
        assert found["ExcNodeList"] == first != found["NodeList"] and f"left out from now on: {first}\n" in job.log
    else:
        assert found["ExcNodeList"] == "(null)" and "left out" not in job.log


@pytest.mark.slow
def test_a_cancelled_job_stays_cancelled(cluster, dataset, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset)
    job.trained(1)
    cluster.run("scancel", str(job.number))
    assert cluster.ended(job.number) == "CANCELLED"
    deadline = time.monotonic() + 20
    while "SLURM ends this job itself" not in job.log and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "SLURM ends this job itself" in job.log and "requeued" not in job.log
    assert cluster.job(job.number)["Restarts"] == "0"


def test_slurm_accepts_both_scripts_as_they_are(cluster) -> None:
    for script in ("pretrain_large", "prep"):
        done = subprocess.run(
            ["sbatch", "--test-only", "-N", "2", f"launch/{script}.slurm"],
            cwd=ROOT, env=cluster.env, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0 and "to start at" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_build_is_requeued_at_its_limit_and_goes_on(cluster, corpus, tmp_path) -> None:
    site = {"PROJECT": str(ROOT), "VENV": str(Path(sys.executable).parents[1]), "RUNS": str(tmp_path / "runs")}
    site |= {"CORPUS": str(corpus), "VOCAB": "1000", "DATA": str(tmp_path / "data")}
    site |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    number = cluster.submit(
        "--nodes=1", "--ntasks-per-node=2", "--time=10", str(ROOT / "launch/prep.slurm"), cwd=tmp_path, **site
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "data").rglob("*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    cluster.run("scancel", "--batch", "--signal=USR2", str(number))
    cluster.restarted(number, 1)
    assert cluster.ended(number) == "COMPLETED", (tmp_path / f"megabert-prep-{number}.log").read_text()
    for name in ("seq128", "seq512"):
        assert json.loads((tmp_path / "data" / name / "manifest.json").read_text())["shards"]
