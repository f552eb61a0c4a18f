"""Files in a run folder, beside `checkpoints/`: their names, and the step of a log line."""

from __future__ import annotations

import json
import math
from pathlib import Path

CONFIG = "config.json"
# one JSON object a line: a logged step, an evaluation's samples, a start, an update that was skipped or whose loss jumped
METRICS, SAMPLES, STARTS, TROUBLE = "metrics.jsonl", "samples.jsonl", "starts.jsonl", "trouble.jsonl"
# the ranks that are slow at the newest log line; not there while none is
SLOW_RANKS = "slow-ranks.json"
# link to the checkpoint with the lowest held-out loss, of a run with `eval.patience`
BEST = "best"
# the id under which Weights & Biases knows the run
SINK_IDS = "sinks.json"


def checkpoints_of(run: str | Path) -> Path:
    """The folder of a run's checkpoints. Raises ValueError where there is none."""
    folder = Path(run) / "checkpoints"
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; name a run folder")
    return folder


def holds_checkpoint(folder: Path) -> bool:
    """Whether it is a run folder with a checkpoint, or one checkpoint."""
    alone = folder.resolve().name.startswith("step-") and (folder / "manifest.json").is_file()
    return alone or any(folder.glob("checkpoints/step-*"))


def step_of(line: str | bytes) -> float:
    """The step of a log's line; infinite for one that a kill cut short."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
