"""Commands as they are typed, and what runs leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers import forked
from tests.helpers.job import Job

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
SMALL = (
    *("model.layers=2", "model.hidden=64", "model.heads=2", "batch.global_size=32", "batch.micro_size=8"),
    *("optimizer.lr=2e-3", "schedule.total_steps=16", "schedule.warmup_steps=4", "log.interval=1", "eval.interval=0"),
    *("checkpoint.interval=6", "eval.rows=64", "data.workers=1", "peak_tflops=1.0"),
)
SHORT = ("schedule.total_steps=4", "schedule.warmup_steps=1")


def command(*args: object, timeout: int = 300, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `python args…` from the repository's root; a command of ours is forked where its imports are done."""
    words, environment = [str(word) for word in args], os.environ | {"OMP_NUM_THREADS": "1"} | env
    heads = {"megabert": [], "megabert.finetune": ["finetune"]}
    if words[0] == "-m" and words[1] in heads:
        return forked.run([*heads[words[1]], *words[2:]], environment, timeout)
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


def output_of(*words: object, code: int = 0, ranks: int = 1, timeout: int = 300, **env: str) -> str:
    """What `megabert words…` prints: to stdout, or to stderr where it ends with a `code` that is not 0."""
    done = forked.run(words, os.environ | {"OMP_NUM_THREADS": "1"} | env, timeout, ranks)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def train(data: object, run: Path, *more: object, **options: Any) -> str:
    """What the training of a small model prints."""
    return output_of("train", "--config", "tiny", "--data", data, "--run", run, *SMALL, *more, **options)


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def logged(run: Path, name: str = "train/loss") -> dict[int, Any]:
    """By step, each of which is logged once."""
    lines = [line for line in metrics(run) if name in line]
    found = {line["step"]: line[name] for line in lines}
    assert len(found) == len(lines), f"{name} of a step is logged twice"
    return found


def saved_step(run: Path) -> int:
    """The step of the newest checkpoint, which has every logged update."""
    step: int = json.loads((run / "checkpoints/pointer.json").read_text())["step"]
    assert metrics(run)[-1]["step"] <= step
    return step


def end(job: Job, *codes: int, within: float = 120) -> str:
    """What a job printed, without a traceback, after its ranks have ended with these codes."""
    assert job.codes(within) == list(codes) and "Traceback" not in job.output, job.output
    return job.output
