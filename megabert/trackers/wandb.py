"""Weights & Biases: a run of a project, by the `wandb` package."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabert.config import Config
from megabert.sinks import Sink
from megabert.trackers import final, keep_id, known_id, numbers


class WeightsAndBiases(Sink):
    """A run of a project, continued after restarts. WANDB_MODE=offline keeps it in the run's folder."""

    def __init__(self, folder: Path, config: Config, resume_step: int, project: str) -> None:
        """Raises ValueError where Weights & Biases refuses."""
        self._wandb: Any = importlib.import_module("wandb")
        run_id = known_id(folder, "wandb", resume_step) or secrets.token_hex(8)
        try:
            self._run = self._wandb.init(
                project=project,
                id=run_id,
                name=folder.resolve().name,
                dir=str(folder),
                config=config.model_dump(),
                resume="allow",
                settings=self._wandb.Settings(console="off", silent=True),
            )
        except self._wandb.errors.Error as error:
            raise ValueError(
                f"log.wandb={project}: {' '.join(str(error).split())}; `wandb login`, or WANDB_MODE=offline"
            ) from None
        # with an explicit step: after a resume or a rollback steps are repeated
        self._run.define_metric("*", step_metric="step")
        keep_id(folder, "wandb", run_id)

    def write(self, values: dict[str, Any]) -> None:
        self._run.log({"step": values["step"]} | numbers(values))

    def conclude(self, results: Mapping[str, float]) -> None:
        self._run.summary.update(final(results))

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # its process does not accept the same id twice, as after a rollback
