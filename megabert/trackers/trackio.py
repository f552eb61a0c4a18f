"""Trackio: a run of a project in its local database, or the space that TRACKIO_SPACE_ID names, by the `trackio` package."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabert.config import Config
from megabert.sinks import Sink
from megabert.trackers import final, keep_id, known_id, numbers


class Trackio(Sink):
    """Metrics by step; the settings are the run's configuration."""

    def __init__(self, folder: Path, config: Config, resume_step: int, project: str) -> None:
        trackio: Any = importlib.import_module("trackio")
        name = known_id(folder, "trackio", resume_step) or f"{folder.resolve().name}-{os.urandom(3).hex()}"
        space = os.environ.get("TRACKIO_SPACE_ID")
        self._run = trackio.init(project, name=name, space_id=space, config=config.model_dump(), resume="allow")
        keep_id(folder, "trackio", name)

    def write(self, values: dict[str, Any]) -> None:
        self._run.log(numbers(values), step=values["step"])

    def conclude(self, results: Mapping[str, float]) -> None:
        self._run.log(final(results))

    def close(self) -> None:
        self._run.finish()
