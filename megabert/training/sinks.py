"""Sinks of metrics: `metrics.jsonl`, which is the truth, and TensorBoard, which shows the same numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from megabert.common.atomic_io import write_whole
from megabert.config import Config

CURVES = 64  # of as many ranks each has its own


def as_json(values: dict[str, Any]) -> str:
    """One line of JSON; what JSON has no number for is written as text."""
    return json.dumps({key: _finite(value) for key, value in values.items()})


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class JsonLines:
    """`metrics.jsonl`: one object a logged step. Lines past the step a run resumes from are cut."""

    def __init__(self, path: Path, resume_step: int) -> None:
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step(line) <= resume_step]
            write_whole(path, "".join(f"{line}\n" for line in kept).encode())
        self._file = open(path, "a")  # noqa: SIM115 - lives as long as the run

    def write(self, values: dict[str, Any]) -> None:
        self._file.write(as_json(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars, the resolved config as text, and hparams with the final evaluation."""

    def __init__(self, folder: Path, config: Config, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else None)
        self._config = config
        text = json.dumps(config.model_dump(), indent=2)
        self._writer.add_text("config", f"```json\n{text}\n```", resume_step)

    def write(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if "/" in name and isinstance(value, int | float):
                self._writer.add_scalar(name, value, values["step"])
            elif isinstance(value, list) and name.startswith("perf/rank_"):
                self._ranks(name, value, values["step"])

    def _ranks(self, name: str, values: list[float], step: int) -> None:
        """A curve a rank, or of many ranks their histogram."""
        if len(values) > CURVES:
            self._writer.add_histogram(name, np.array(values), step)
            return
        for rank, value in enumerate(values):
            self._writer.add_scalar(f"{name}/{rank:02}", value, step)

    def hparams(self, results: dict[str, float]) -> None:
        flat = _flatten(self._config.model_dump())
        self._writer.add_hparams(
            flat, {f"final/{k.split('/')[-1]}": v for k, v in results.items()}, run_name="hparams"
        )

    def close(self) -> None:
        self._writer.close()


class Sinks:
    """All sinks of a run; without a folder there are none."""

    def __init__(self, folder: Path | None, config: Config, step: int, saved_step: int) -> None:
        """Goes on from `step`; `saved_step` is that of the newest checkpoint, -1 where there is none."""
        self._sinks: list[JsonLines | TensorBoard] = []
        self._board: TensorBoard | None = None
        if folder is not None:
            self._sinks.append(JsonLines(folder / "metrics.jsonl", saved_step))
            if config.log.tensorboard:
                self._board = TensorBoard(folder / "tensorboard", config, step)
                self._sinks.append(self._board)

    def write(self, values: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(values)

    def hparams(self, results: dict[str, float]) -> None:
        """The run's settings with what came of it, where TensorBoard is written."""
        if self._board is not None and results:
            self._board.hparams(results)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def _step(line: str) -> float:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line cut short by a kill is dropped with the steps that will be redone


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
