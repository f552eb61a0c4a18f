"""Training of an entry in a separate process, and the points of its curve: weights at steps of the training."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from benchmarks.common import hardware
from benchmarks.race import recipes
from benchmarks.race.dataset import RaceData
from benchmarks.race.recipes import RaceRecipe, Track
from megabert import checkpoint

POINTS, KEPT = 10, 24  # points of a curve, about, and the newest ones that are kept in any case
WEIGHTS = "weights.safetensors"  # the peer's files in the folder of a point


@dataclass(frozen=True)
class CurvePoint:
    """The state of a run at a point of its curve: seconds of training, updates, real tokens."""

    seconds: float
    step: int
    tokens: int
    folder: Path

    def weights(self) -> dict[str, Tensor]:
        """fp32 weights by parameter name, under our names."""
        if (self.folder / "manifest.json").is_file():
            return checkpoint.load_weights(self.folder)[0]
        return load_file(self.folder / WEIGHTS)

    def described(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "step": self.step, "tokens": self.tokens}


@dataclass(frozen=True)
class Trained:
    """A finished run. `tokens_per_second`: the median, of real tokens; `config`: configuration of its model, as nested dicts."""

    command: str
    points: tuple[CurvePoint, ...]
    tokens_per_second: float | None
    config: dict[str, Any]


def train_ours(recipe: RaceRecipe, track: Track, data: RaceData, run: Path, seed: int) -> Trained:
    """Train an entry for the track's budget in the folder `run`, or resume there. Raises ValueError if it fails."""
    overrides, config = recipes.our_config(recipe, track, data.tokens_a_row, seed)
    if track.minutes:
        spaced = ["checkpoint.interval=0", f"checkpoint.minutes={track.minutes / POINTS:g}"]
    else:  # the preset may save by minutes, too
        interval = max(1, round(config.schedule.total_steps / POINTS))
        spaced = [f"checkpoint.interval={interval}", f"checkpoint.keep_every={interval}"]
    overrides += [*spaced, f"checkpoint.keep={KEPT}", "eval.interval=0"]
    command = [sys.executable, str(hardware.ROOT / "megabert/train.py"), "--config", recipe.preset]
    command += ["--data", str(data.train), "--run", str(run), *overrides]
    hardware.call(command, track.cores, run.with_name(f"{run.name}.log"))
    points, tree = [], {}
    for folder in sorted(run.glob("checkpoints/step-*")):
        state = json.loads((folder / "manifest.json").read_text())["state"]
        points.append(CurvePoint(round(state["seconds"], 2), state["step"], state["tokens"], folder))
        tree = state["config"]
    rates = [line["perf/tokens_per_sec"] for line in hardware.logged(run) if "perf/tokens_per_sec" in line]
    return Trained(hardware.shown(command), tuple(points), median(rates), tree)


def train_peer(recipe: RaceRecipe, track: Track, data: RaceData, run: Path, seed: int) -> Trained:
    """The same for the peer, which cannot resume. Raises ValueError if it fails."""
    command = [sys.executable, "-m", "benchmarks.peers.hf_plain_loop", "--data", str(data.train), "--run", str(run)]
    command += ["--preset", recipe.preset, "--points", str(POINTS)]
    fields = {"minutes": track.minutes, "tokens": track.tokens, "seed": seed, **recipe.keys}
    command += ["--recipe", json.dumps(fields, sort_keys=True)]
    hardware.call(command, track.cores, run.with_name(f"{run.name}.log"))
    finished = json.loads((run / "finished.json").read_text())
    points = tuple(CurvePoint(**point, folder=run / f"step-{point['step']:08d}") for point in finished["points"])
    rates = [(b.tokens - a.tokens) / (b.seconds - a.seconds) for a, b in pairwise(points) if b.seconds > a.seconds]
    return Trained(hardware.shown(command), points, median(rates), finished["config"])


def median(rates: list[float]) -> float | None:
    return round(statistics.median(rates), 1) if rates else None
