"""`sbatch launch/pretrain_large.slurm` on two nodes of a real SLURM: whatever ends it early, it goes on and is finished."""

from __future__ import annotations

import json
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
    *("schedule.warmup_steps=1", "peak_tflops=1.0", "log.interval=1", "log.tensorboard=false"),
    *("eval.rows=32", "eval.interval=0", "data.workers=1"),
)


class Job:
    """One submission of the script, with its runs and its log in `folder`."""

    def __init__(
        self, cluster: Cluster, folder: Path, dataset: Path, steps: int, *options: str, **env: str
    ) -> None:
        self.cluster, self.folder = cluster, folder
        site = {"PROJECT": str(ROOT), "VENV": str(Path(sys.executable).parents[1]), "OMP_NUM_THREADS": "1"}
        site |= {"RUNS": str(folder / "runs"), "DATA_128": str(dataset), "DATA_512": str(dataset)}
        site |= {"PHASE1": "tiny", "PHASE2": "tiny", "CUDA_VISIBLE_DEVICES": ""}
        arguments = (*NODES, *options, SCRIPT, f"schedule.total_steps={steps}", *SMALL)
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


def uninterrupted(folder: Path, dataset: Path, steps: int, total: int) -> dict[int, float]:
    """Losses of the same run by another launcher, never stopped."""
    run = folder / "straight"
    done = command(
        *("megabert/train.py", "--config", "tiny", "--data", dataset, "--run", run),
        *(*SMALL, f"schedule.total_steps={total}", "--stop-after", steps),
        ranks=2, timeout=600, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def test_two_nodes_run_both_phases_to_the_end(cluster, dataset, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, 6)
    job.finished()
    for phase in (1, 2):
        assert list(job.losses(phase)) == [1, 2, 3, 4, 5, 6]
    assert job.log.count("2 rank(s) on cpu (srun)") == 2
    assert f"starting from the weights of {tmp_path}/runs/large_phase1 at step 6" in job.log
    assert not list((tmp_path / "runs").glob(".job-*")), "the job's own notes are gone"
    assert job.losses() == uninterrupted(tmp_path, dataset, 6, 6)
