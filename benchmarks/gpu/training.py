"""`megabert train` as a user runs it, stopped and resumed: losses, tokens/s and MFU of its own log.

    python benchmarks/gpu/training.py --data DIR --json FILE [section.key=value …]

The run logs, evaluates and saves, ends half-way by `--stop-after`, and resumes in a second process.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a clone need not be installed

from benchmarks.common import hardware


def train(config: str, data: Path, run: Path, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Figures of a run of `steps` updates in two starts. Raises CalledProcessError, or ValueError if a figure is missing."""
    half = steps // 2
    command = [sys.executable, "-m", "megabert", "train", "--config", config, "--data", str(data), "--run", str(run)]
    command += [
        f"log.interval={max(1, steps // 10)}",
        f"checkpoint.interval={half}",
        f"eval.interval={half}",
        *overrides,
    ]
    seconds = []
    for until in (half, steps):
        began = time.perf_counter()
        subprocess.run([*command, "--stop-after", str(until)], check=True)
        seconds.append(round(time.perf_counter() - began, 1))
    lines = hardware.logged(run)
    logged = [line for line in lines if "train/loss" in line]
    if logged[-1]["step"] != steps or not any("eval/mlm_loss" in line for line in lines):
        raise ValueError(f"{run}: its last update is {logged[-1]['step']}, not {steps}, or it was not evaluated")
    middle = {name: statistics.median(line[name] for line in logged) for name in ("perf/tokens_per_sec", "perf/mfu")}
    losses = {"first_loss": logged[0]["train/loss"], "last_loss": logged[-1]["train/loss"], "resumed_at": half}
    return {"steps": steps, "seconds_of_starts": seconds} | losses | middle


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("overrides", nargs="*")
    add("--config", default="tiny")
    add("--data", type=Path, required=True)
    add("--steps", type=int, default=40)
    hardware.add_json(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu_run_") as folder:
        figures = train(args.config, args.data, Path(folder) / "run", args.steps, args.overrides)
    hardware.write_json(args.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
