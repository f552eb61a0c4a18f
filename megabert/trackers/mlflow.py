"""MLflow: a run of an experiment, by the client of the `mlflow` or `mlflow-skinny` package. MLFLOW_TRACKING_URI names the server or folder;
without it the run is kept in the run's folder."""

from __future__ import annotations

import importlib
import json
import os
import posixpath
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megabert.common.logs import log
from megabert.config import Config, flat
from megabert.sinks import Sink
from megabert.trackers import final, keep_id, known_id, numbers

LONGEST = 6000  # characters of a parameter that a server takes


def allowed(name: str) -> str:
    """A name of a metric or parameter that MLflow takes."""
    return posixpath.normpath(re.sub(r"[^/\w.\- ]", "_", name))[:250]


class MLflow(Sink):
    """Metrics by step, settings as parameters, samples as JSON artifacts."""

    def __init__(self, folder: Path, config: Config, resume_step: int, project: str) -> None:
        """Raises ValueError where MLflow refuses."""
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._errors: Any = importlib.import_module("mlflow.exceptions")
        place = os.environ.get("MLFLOW_TRACKING_URI")
        if not place:
            place = (folder / "mlruns").resolve().as_uri()
            # else a folder is refused, and a database needs all of MLflow
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            self._client = mlflow.MlflowClient(place)
            number = self._experiment(project)
            self._run = self._known_run(known_id(folder, "mlflow", resume_step), number)
            if not self._run:
                self._run = self._client.create_run(number, run_name=folder.resolve().name).info.run_id
                settings = flat(config.model_dump()).items()
                parameters = [self._entities.Param(allowed(name), str(value)[:LONGEST]) for name, value in settings]
                self._client.log_batch(self._run, params=parameters)
        except self._errors.MlflowException as error:
            raise ValueError(f"log.to=mlflow={project}: {' '.join(str(error).split())}") from None
        keep_id(folder, "mlflow", self._run)

    def _experiment(self, project: str) -> str:
        experiment = self._client.get_experiment_by_name(project)
        if experiment is None:
            try:
                return str(self._client.create_experiment(project))
            except self._errors.MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # by another job
                    raise
                experiment = self._client.get_experiment_by_name(project)
        return str(experiment.experiment_id)

    def _known_run(self, known: str, experiment: str) -> str:
        """The run of this experiment to go on with; "" if there is none, or none any more: `mlruns` is not in a run's mirror."""
        if known:
            try:
                if self._client.get_run(known).info.experiment_id != experiment:
                    return ""
                self._client.update_run(known, status="RUNNING")
            except self._errors.MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                log.warning(f"log.to=mlflow: run {known} does not exist any more; another is begun")
                return ""
        return known

    def write(self, values: dict[str, Any]) -> None:
        self._log(numbers(values), values["step"])

    def show(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        if samples:
            self._client.log_text(self._run, json.dumps(samples, ensure_ascii=False), f"samples/{step:08d}.json")

    def conclude(self, results: Mapping[str, float]) -> None:
        self._log(final(results), 0)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(allowed(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)
