"""`sbatch launch/pretrain_large.slurm` on two nodes of a real SLURM: resumed after whatever ends it early."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import programs
from tests.helpers.waiting import wait_until
from tests.integration.conftest import BIN, MPI_AS_ROOT, ROOT, logged, output_of
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
        site = {"PROJECT": str(ROOT), "VENV": str(BIN.parent), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        site |= {"RUNS": str(folder / "runs"), "DATA_128": str(dataset), "DATA_512": str(dataset)}
        preset = (ROOT / "megabert/presets/tiny.toml").read_text().replace("warmup_steps = 60", "warmup_steps = 1")
        for number, count in ((1, steps), (2, 2)):
            file = folder / f"phase{number}.toml"
            file.write_text(preset.replace("total_steps = 600", f"total_steps = {count}"))
            site[f"PHASE{number}"] = str(file)
        overrides = [word for word in options if not word.startswith("--") or word == "--in-place"]
        own = [word for word in options if word not in overrides]
        self.number = cluster.submit(*NODES, *own, SCRIPT, *SMALL, *overrides, cwd=folder, **site | env)

    @property
    def log(self) -> str:
        return (self.folder / f"megabert-large-{self.number}.log").read_text()

    def losses(self, phase: int = 1) -> dict[int, float]:
        """Training loss by step, of a file that is being written perhaps."""
        file = self.folder / f"runs/large_phase{phase}/metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        found = [line for text in lines if text.endswith("\n") and "train/loss" in (line := json.loads(text))]
        losses = {line["step"]: line["train/loss"] for line in found}
        assert len(losses) == len(found), "a step is logged twice"
        return losses

    def trained(self, step: int, timeout: float = 90) -> None:
        """Waits until `step` updates of phase 1 are logged."""
        wait_until(lambda: max(self.losses(), default=0) >= step, timeout, lambda: self.log)

    def pending(self, timeout: float = 60) -> None:
        """Waits until SLURM has requeued it."""
        over = ("PENDING", "COMPLETED", "FAILED", "TIMEOUT")
        found = self.cluster.wait(self.number, lambda job: job["JobState"] in over, timeout)
        assert found["JobState"] == "PENDING", self.log

    def trained_again(self, fault: float, timeout: float = 90) -> float:
        """Seconds from the moment of a fault to the first update of the next start."""
        wait_until(lambda: "resuming from" in self.log, fault + timeout - time.time(), lambda: self.log)
        self.trained(max(self.losses(), default=0) + 1, timeout)
        return time.time() - fault

    def slow_rank(self, timeout: float = 120) -> str:
        """The line that names one, once it is in the log and in the run's folder."""
        wait_until((self.folder / "runs/large_phase1/slow-ranks.json").exists, timeout, lambda: self.log)
        return next(line for line in self.log.splitlines() if "is slow: " in line)

    def finished(self, *said: str, curve: dict[int, float], restarts: int | None = None, timeout: float = 150) -> None:
        """Waits for the end of both phases; `said` are texts of the log, `restarts` SLURM's."""
        assert self.cluster.ended(self.number, timeout) == "COMPLETED", self.log
        assert all(text in self.log for text in said), self.log
        assert restarts is None or int(self.cluster.job(self.number)["Restarts"]) == restarts
        assert self.losses() == curve and list(self.losses(2)) == [1, 2]


def uninterrupted(
    folder: Path, dataset: Path, steps: int = STEPS, total: int = STEPS, ranks: int = 2
) -> dict[int, float]:
    """Losses of the same run without SLURM, never stopped."""
    words = ("train", "--config", "tiny", "--data", dataset, "--run", folder / "straight", "--stop-after", steps)
    settings = (*SMALL, f"schedule.total_steps={total}", "schedule.warmup_steps=1")
    output_of(*words, *settings, ranks=ranks, timeout=600, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    return logged(folder / "straight")


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    """The module's cluster; a test leaves no job to the next one."""
    yield running
    running.cancel_all()


@pytest.fixture(scope="module")
def curve(dataset, tmp_path_factory) -> dict[int, float]:
    """Losses of `STEPS` updates that nothing interrupted."""
    return uninterrupted(tmp_path_factory.mktemp("straight"), dataset)


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
    job.finished(f"starting from the weights of {tmp_path}/runs/large_phase1 at step {STEPS}", curve=curve)
    assert list(curve) == list(range(1, STEPS + 1)) and job.losses(2)[1] < curve[1] - 0.1
    assert job.log.count("2 rank(s) on cpu (srun)") == 2
    assert not list((tmp_path / "runs").glob(".job-*")), "the job's own notes are gone"


@pytest.mark.slow
def test_three_time_limits_leave_no_seam(cluster, dataset, tmp_path) -> None:
    total = 1_000_000
    limit = ("--time=2", "--signal=B:USR2@45")  # sent up to a minute earlier
    job = Job(cluster, tmp_path, dataset, *limit, f"checkpoint.interval={total}", steps=total, MAX_RESTARTS="9")
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
    urgent = cluster.submit("-p", "urgent", "--nodes=2", "--wrap", "true", cwd=tmp_path)  # needs all nodes
    job.pending()
    assert cluster.ended(urgent) == "COMPLETED"
    saved = max(job.losses())
    assert 3 <= saved < STEPS
    cluster.restarted(job.number, 1)
    job.finished(f"at step {saved},", curve=curve)
    assert ("cannot requeue" in job.log) == (not scontrol)


@pytest.mark.slow
def test_the_job_of_a_failed_node_starts_again(cluster, dataset, curve, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, "checkpoint.interval=2")
    job.trained(3)
    cluster.kill_node("n2")
    cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    job.pending()
    cluster.start_node("n2")
    cluster.run("scontrol", "update", "nodename=n2", "state=resume")
    job.finished("resuming from", curve=curve)


def test_lost_ranks_and_mistakes_are_not_requeued(cluster, dataset, tmp_path) -> None:
    """A rank without progress is started again once on the nodes that the job has."""
    lost_in, mistaken_in = tmp_path / "lost", tmp_path / "mistake"
    mistaken_in.mkdir()
    # a rank that the kernel kills as it starts
    programs.write(lost_in / "python/python", "#!/usr/bin/env bash\nkill -9 $$\n")
    (lost_in / "bin").symlink_to(lost_in / "python")
    lost = Job(cluster, lost_in, dataset, VENV=str(lost_in), MAX_RESTARTS="1", RESTART_WAIT="0")
    assert cluster.ended(lost.number) == "FAILED" and cluster.job(lost.number)["Restarts"] == "0"
    assert "ended with 4, and 1 restarts in a row made no progress" in lost.log
    mistake = Job(cluster, mistaken_in, dataset, "modle.layers=2")
    assert cluster.ended(mistake.number) == "FAILED"
    assert cluster.job(mistake.number).items() >= {"Restarts": "0", "ExitCode": "2:0"}.items()
    assert "unknown config key modle" in mistake.log


TWO_RANKS = ("--nodes=2", "--ntasks-per-node=2", "checkpoint.interval=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "env", "said"),
    [
        (("checkpoint.interval=2",), {}, ("resuming from", "restart 1 of 3 in this job on n1 n2;")),
        (("--in-place",), {}, ("2 of 2 ranks restart", "resuming from copies in memory")),
        (TWO_RANKS, {"NODES": "1"}, ("failed nodes: n1; restart 1 of 3 in this job on n2;",)),
    ],
    ids=["within the job", "in place", "on a spare node"],
)
def test_a_killed_rank_restarts(options, env, said, cluster, dataset, curve, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *options, **env)
    job.trained(3)
    kill = cluster.kill_kept_rank if "--in-place" in options else cluster.kill_rank
    kill(1)
    job.finished(*said, curve=curve, restarts=0)
    assert "requeued" not in job.log and ("restart 1 of" in job.log) == ("--in-place" not in options), job.log


def check_left_out(cluster: Cluster, job: Job, node: str) -> None:
    """A requeued job runs without the node that it ran on before."""
    found = cluster.restarted(job.number, 1)
    assert found["ExcNodeList"] == node != found["NodeList"] and f"left out from now on: {node}\n" in job.log


@pytest.mark.slow
def test_restarts_used_up_requeue_without_the_failed_node(cluster, dataset, curve, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *TWO_RANKS, "--nodes=1", RESTARTS="0")
    job.trained(3)
    first = cluster.job(job.number)["NodeList"]
    cluster.kill_rank(1)
    check_left_out(cluster, job, first)
    job.finished(curve=curve)
    assert "in this job" not in job.log


SLOW = ("watchdog.slow_ratio=1.5", "watchdog.slow_minutes=0.05")


@pytest.mark.slow
def test_a_spare_node_replaces_a_slow_one(cluster, dataset, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *TWO_RANKS, *SLOW, steps=100_000, NODES="1", EXCLUDE_SLOW="1")
    job.trained(3)
    with cluster.slowed(rank=1):
        line = job.slow_rank()
        for rank in (0, 1):  # a fault that names no node
            cluster.kill_rank(rank)
    assert "rank 1 (host n1) is slow: " in line and "cause: host" in line, line
    job.trained_again(time.time())
    assert "failed nodes: none named, slow nodes: n1; restart 1 of 3 in this job on n2;" in job.log, job.log


@pytest.mark.slow
@pytest.mark.parametrize("exclude", ["1", "0"])
def test_a_requeue_excludes_a_slow_node_when_asked(exclude, cluster, dataset, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *TWO_RANKS, "--nodes=1", *SLOW, steps=100_000, EXCLUDE_SLOW=exclude)
    job.trained(3)
    first = cluster.job(job.number)["NodeList"]
    with cluster.slowed(rank=1):
        assert f"rank 1 (host {first}) is slow: " in job.slow_rank()
        cluster.run("scancel", "--batch", "--signal=USR2", str(job.number))
        job.pending()
    if exclude == "1":
        check_left_out(cluster, job, first)
    else:
        assert cluster.restarted(job.number, 1)["ExcNodeList"] == "(null)" and "left out" not in job.log
    assert "ended with 85: requeued" in job.log


@pytest.mark.slow
def test_a_cancelled_job_stays_cancelled(cluster, dataset, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset)
    job.trained(1)
    cluster.run("scancel", str(job.number))
    assert cluster.ended(job.number) == "CANCELLED"
    wait_until(lambda: "SLURM ends this job itself" in job.log, 20, lambda: job.log)
    assert "requeued" not in job.log and cluster.job(job.number)["Restarts"] == "0"


@pytest.mark.slow
def test_a_task_of_an_array_requeues_itself_alone(cluster, dataset, tmp_path) -> None:
    """The last task has the number of the array."""
    job = Job(cluster, tmp_path, dataset, "--array=1-2%1", steps=100_000)
    tasks = [f"{job.number}_{task}" for task in (1, 2)]
    first = cluster.wait(tasks[0], lambda task: task["JobState"] == "RUNNING", 60)
    job.number = int(first["JobId"])
    job.trained(3)
    cluster.run("scancel", tasks[0])
    assert cluster.ended(tasks[0]) == "CANCELLED"
    cluster.wait(tasks[1], lambda task: task["JobState"] == "RUNNING", 60)
    job.trained(max(job.losses()) + 3)
    cluster.run("scancel", "--batch", "--signal=USR2", tasks[1])
    assert cluster.restarted(tasks[1], 1)["ArrayTaskId"] == "2"
    assert cluster.ended(tasks[0]) == "CANCELLED"


@pytest.mark.parametrize("script", ["pretrain_large", "prep"])
def test_slurm_accepts_both_scripts_as_they_are(script, cluster) -> None:
    command = ["sbatch", "--test-only", "-N", "2", f"launch/{script}.slurm"]
    done = subprocess.run(command, cwd=ROOT, env=cluster.env, capture_output=True, text=True)
    assert done.returncode == 0 and "to start at" in done.stderr, done.stderr


@pytest.mark.slow
def test_build_is_requeued_and_goes_on(cluster, corpus, tmp_path) -> None:
    data = tmp_path / "data"
    site = {"PROJECT": str(ROOT), "VENV": str(BIN.parent), "RUNS": str(tmp_path / "runs"), "DATA": str(data)}
    site |= MPI_AS_ROOT | {"CORPUS": str(corpus), "VOCAB": "1000"}
    options = ("--nodes=1", "--ntasks-per-node=2", "--time=10")
    number = cluster.submit(*options, str(ROOT / "launch/prep.slurm"), cwd=tmp_path, **site)
    wait_until(lambda: list(data.rglob("*")), 60)
    cluster.run("scancel", "--batch", "--signal=USR2", str(number))
    cluster.restarted(number, 1)
    assert cluster.ended(number) == "COMPLETED", (tmp_path / f"megabert-prep-{number}.log").read_text()
    for name in ("seq128", "seq512"):
        assert json.loads((data / name / "manifest.json").read_text())["shards"]
