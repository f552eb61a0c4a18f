"""Commands of the project that benchmarks run for what they compare: any of them with its output in a file, and fine-tuning."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import hardware


class CommandFailed(ValueError):
    """A command ended with the exit code `code`."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def call(command: list[str], threads: int, log: Path) -> None:
    """Runs a command to its end, its output in `log`. Raises CommandFailed when it fails."""
    env = hardware.clone_environment(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        code = subprocess.run(command, env=env, stdout=file, stderr=subprocess.STDOUT).returncode
    if code:
        last = (log.read_text().splitlines() or [""])[-1]
        raise CommandFailed(
            f"{hardware.shown(command)} failed (exit {code}: {last:.200}); its output is in {log}", code
        )


def task_label(spec: str) -> str:
    """`sst2`, or `sst2 frozen`. Raises ValueError for what names no files."""
    words = shlex.split(spec)
    if len(words) < 3:
        raise ValueError(f"{spec!r}: write 'TASK TRAIN_FILE DEV_FILE [options of megabert.finetune]'")
    return words[0] + (" frozen" if "--freeze" in words else "")


def fine_tune(model: Path, spec: str, output: Path, threads: int, *options: str) -> dict[str, Any]:
    """Mean and deviation of the task's first metric on its dev file, at the best grid point; goes on where it was."""
    task, train_file, dev_file, *more = shlex.split(spec)
    command = [sys.executable, "-m", "megabert.finetune", "--model", str(model), "--task", task]
    command += ["--train", train_file, "--dev", dev_file, "--output", str(output), *more, *options]
    call(command, threads, output.with_name(f"{output.name}.log"))
    return {"command": hardware.shown(command), **score_of(output / "summary.json")}


def score_of(summary: Path) -> dict[str, Any]:
    """Dev score of a fine-tuning's best grid point. Raises ValueError for what is no summary."""
    try:
        tree = json.loads(summary.read_text())
        task, metric, best = tree["settings"]["task"], tree["settings"]["metrics"][0], tree["points"][0]
        return {"task": task, "metric": metric, "runs": best["runs"], **best["scores"]["dev"][metric]}
    except (ValueError, KeyError, IndexError, TypeError):
        raise ValueError(f"{summary}: is no summary.json of megabert.finetune") from None
