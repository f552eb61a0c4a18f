"""Trackers beside a run's own files: TensorBoard, Weights & Biases, MLflow, Trackio. Each is made with the run folder, the configuration,
the step from which the run resumes (-1: a new one), and the project that the configuration names; after a rollback it is closed and made
again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabert.common.files import write_atomically
from megabert.common.run_files import SINK_IDS


def known_id(folder: Path, name: str, resume_step: int) -> str:
    """The id of a tracker's run that this run continues; "" for a new one."""
    file = folder / SINK_IDS
    return str(json.loads(file.read_text()).get(name, "")) if resume_step >= 0 and file.is_file() else ""


def keep_id(folder: Path, name: str, run_id: str) -> None:
    """Remember the id of a tracker's run, for the next job."""
    file = folder / SINK_IDS
    known = json.loads(file.read_text()) if file.is_file() else {}
    write_atomically(file, json.dumps(known | {name: run_id}).encode())


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a line: numbers whose name has a section."""
    return {name: value for name, value in values.items() if "/" in name and isinstance(value, int | float)}


def final(results: Mapping[str, float]) -> dict[str, float]:
    """The metrics of the last evaluation under the names of final ones."""
    return {f"final/{name.split('/', 1)[-1]}": value for name, value in results.items()}
