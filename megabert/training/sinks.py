"""Sinks of metrics: `metrics.jsonl`, which is the truth, and what shows the same numbers: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megabert.common.atomic_io import write_whole
from megabert.common.logs import log
from megabert.config import Config

METRICS, SAMPLES, NAMES = "metrics.jsonl", "samples.jsonl", "sinks.json"
STARTS, TROUBLE = ("starts.jsonl", "trouble.jsonl")  # of the run, which are no sinks: one line a start, one a trouble
CURVES = 64  # of as many ranks each has its own
PACKAGES = ("wandb", "mlflow")  # optional ones, by their settings
PARAMETERS_AT_ONCE = 100  # that MLflow takes
# seconds and further tries, unless the user sets them: training waits meanwhile, MLflow's own take longer than the watchdog does
MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}


@dataclass(frozen=True)
class Shown:
    """What an evaluation looked at besides its figures.

    `samples` as of `megabert.training.samples`. `curves` are of precision and recall: for each label, whether an example has
    it (bool [n]) and how probable the model holds that (float [n]).
    """

    samples: list[dict[str, Any]] = field(default_factory=list)
    curves: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


def as_json(values: dict[str, Any]) -> str:
    """One line of JSON; what JSON has no number for is written as text."""
    return json.dumps({key: _finite(value) for key, value in values.items()})


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Sink:
    """What takes the figures of a run; each kind takes what it can show."""

    def write(self, values: dict[str, Any]) -> None:
        """Figures, and the "step" they are of."""

    def show(self, step: int, shown: Shown) -> None:
        """What an evaluation looked at."""

    def conclude(self, results: Mapping[str, float]) -> None:
        """The final figures."""

    def close(self) -> None:
        """Nothing more is to come."""


class JsonLines(Sink):
    """One object a line, each with its step. Lines past the step a run resumes from are cut."""

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


class SampleLines(Sink):
    """`samples.jsonl`: the samples of each evaluation; there is no file before the first one."""

    def __init__(self, path: Path, resume_step: int) -> None:
        self._path, self._resume_step = path, resume_step
        self._lines = JsonLines(path, resume_step) if path.exists() else None

    def show(self, step: int, shown: Shown) -> None:
        if shown.samples:
            self._lines = self._lines or JsonLines(self._path, self._resume_step)
            self._lines.write({"step": step, "samples": shown.samples})

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


class TensorBoard(Sink):
    """Scalars, samples and the resolved config as text, curves of precision and recall, hparams with the final evaluation."""

    def __init__(self, folder: Path, config: Config, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else None)
        self._config = config
        text = json.dumps(config.model_dump(), indent=2)
        self._writer.add_text("config", f"```json\n{text}\n```", resume_step)

    def write(self, values: dict[str, Any]) -> None:
        for name, value in _numbers(values).items():
            self._writer.add_scalar(name, value, values["step"])
        for name, value in values.items():
            if isinstance(value, list) and name.startswith("perf/rank_"):
                self._ranks(name, value, values["step"])

    def _ranks(self, name: str, values: list[float], step: int) -> None:
        """A curve a rank, or of many ranks their histogram."""
        if len(values) > CURVES:
            self._writer.add_histogram(name, np.array(values), step)
            return
        for rank, value in enumerate(values):
            self._writer.add_scalar(f"{name}/{rank:02}", value, step)

    def show(self, step: int, shown: Shown) -> None:
        if shown.samples:
            self._writer.add_text("samples", as_markdown(shown.samples), step)
        for label, (truth, probabilities) in shown.curves.items():
            self._writer.add_pr_curve(f"dev/precision_recall/{label}", truth, probabilities, step)

    def conclude(self, results: Mapping[str, float]) -> None:
        flat = _flatten(self._config.model_dump())
        self._writer.add_hparams(flat, {f"final/{k.split('/')[-1]}": v for k, v in results.items()}, run_name="hparams")

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Sink):
    """A run of the project `log.wandb`, the same one after a restart. WANDB_MODE=offline keeps it in the run's folder."""

    def __init__(self, folder: Path, config: Config, fresh: bool) -> None:
        """`fresh`: the run begins. Raises ValueError where Weights & Biases refuses."""
        wandb: Any = importlib.import_module("wandb")
        self._wandb = wandb
        name = _kept_name(folder, "wandb", fresh) or secrets.token_hex(8)
        try:
            self._run = wandb.init(
                project=config.log.wandb,
                id=name,
                name=folder.resolve().name,
                dir=str(folder),
                config=config.model_dump(),
                resume="allow",
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.errors.Error as error:
            raise ValueError(
                f"log.wandb={config.log.wandb}: {' '.join(str(error).split())}; `wandb login`, or WANDB_MODE=offline"
            ) from None
        self._run.define_metric("*", step_metric="step")  # steps that are done again come again
        _keep_name(folder, "wandb", name)

    def write(self, values: dict[str, Any]) -> None:
        self._run.log({"step": values["step"]} | _numbers(values))

    def conclude(self, results: Mapping[str, float]) -> None:
        self._run.summary.update({f"final/{name.split('/')[-1]}": value for name, value in results.items()})

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # its process takes no second run of one id, as after a rollback


class MLflow(Sink):
    """A run of the experiment `log.mlflow`, the same one after a restart, at MLFLOW_TRACKING_URI or in the run's own folder.

    A server that does not answer later on ends what is sent to it, not the training.
    """

    def __init__(self, folder: Path, config: Config, fresh: bool) -> None:
        """`fresh`: the run begins. Raises ValueError where the server refuses a run that is new there."""
        for name, value in MLFLOW_PATIENCE.items():
            os.environ.setdefault(name, value)
        self._mlflow: Any = importlib.import_module("mlflow")
        place, own = os.environ.get("MLFLOW_TRACKING_URI", ""), folder.resolve()
        self._silent = False
        known = _kept_name(folder, "mlflow", fresh)
        try:
            self._client = self._mlflow.MlflowClient(place or f"sqlite:///{own}/mlflow.db")
            self._name = known or self._begin(config, own, bool(place))
        except self._mlflow.exceptions.MlflowException as error:
            raise ValueError(f"log.mlflow={config.log.mlflow}: {' '.join(str(error).split())}") from None
        _keep_name(folder, "mlflow", self._name)
        if known:
            self._tell(lambda: self._client.set_terminated(known, "RUNNING"))

    def _begin(self, config: Config, folder: Path, elsewhere: bool) -> str:
        """A new run with its settings; its id."""
        found = self._client.get_experiment_by_name(config.log.mlflow)
        own = None if elsewhere else (folder / "mlartifacts").as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(config.log.mlflow, own)
        run: str = self._client.create_run(experiment, run_name=folder.name).info.run_id
        of = self._mlflow.entities.Param
        settings = [of(name, str(value)) for name, value in _flatten(config.model_dump()).items()]
        for first in range(0, len(settings), PARAMETERS_AT_ONCE):
            self._client.log_batch(run, params=settings[first : first + PARAMETERS_AT_ONCE])
        return run

    def _tell(self, call: Callable[[], None]) -> None:
        """Call the server, unless it has failed before; a failure is warned of once."""
        if self._silent:
            return
        try:
            call()
        except self._mlflow.exceptions.MlflowException as error:
            self._silent = True
            log.warning(f"mlflow: {' '.join(str(error).split())}; no more is sent to it until the next start")

    def _send(self, values: Mapping[str, float], step: int) -> None:
        now, of = int(time.time() * 1000), self._mlflow.entities.Metric
        metrics = [of(name, value, now, step) for name, value in values.items()]
        self._tell(lambda: self._client.log_batch(self._name, metrics))

    def write(self, values: dict[str, Any]) -> None:
        self._send(_numbers(values), values["step"])

    def conclude(self, results: Mapping[str, float]) -> None:
        self._send({f"final/{name.split('/')[-1]}": value for name, value in results.items()}, 0)

    def close(self) -> None:
        self._tell(lambda: self._client.set_terminated(self._name))


def as_markdown(samples: Iterable[dict[str, Any]]) -> str:
    """The samples as a text of TensorBoard: each with its masks numbered, and under it what is said for each."""
    lines = []
    for sample in samples:
        tokens = list(sample["tokens"])
        for number, mask in enumerate(sample["masks"], 1):
            tokens[mask["at"]] = f" **[{number}]**"
        lines += ["".join(map(_plain, tokens)).strip(), ""]
        for number, mask in enumerate(sample["masks"], 1):
            said = ", ".join(f"{_plain(word)} {p:.0%}" for word, p in mask["said"])
            lines.append(f"{number}. **{_plain(sample['tokens'][mask['at']])}**: {said}")
        lines.append("")
    return "\n".join(lines)


def _plain(piece: str) -> str:
    """A piece that Markdown shows as it is."""
    kept = piece if piece.isprintable() else ascii(piece)
    return kept if kept.startswith(" **[") else "".join(f"\\{c}" if c in "\\`*_[]<>#|" else c for c in kept)


class Sinks:
    """All sinks of a run; without a folder there are none."""

    def __init__(self, folder: Path | None, config: Config, step: int, saved_step: int) -> None:
        """Goes on from `step`; `saved_step` is that of the newest checkpoint, -1 where there is none. Raises ValueError
        where one that is asked for cannot be had."""
        self._sinks: list[Sink] = []
        if folder is None:
            return
        fresh = saved_step < 0
        if config.log.wandb:
            self._sinks.append(WeightsAndBiases(folder, config, fresh))
        if config.log.mlflow:
            self._sinks.append(MLflow(folder, config, fresh))
        self._sinks += [JsonLines(folder / METRICS, saved_step), SampleLines(folder / SAMPLES, saved_step)]
        if config.log.tensorboard:
            self._sinks.append(TensorBoard(folder / "tensorboard", config, step))

    def write(self, values: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(values)

    def show(self, step: int, shown: Shown) -> None:
        """What the evaluation at `step` looked at."""
        for sink in self._sinks:
            sink.show(step, shown)

    def hparams(self, results: Mapping[str, float]) -> None:
        """The run's settings with what came of it, where a sink shows them together."""
        for sink in self._sinks if results else ():
            sink.conclude(results)

    def close(self) -> None:
        """Each of them, also where another one fails, whose error is raised then."""
        with ExitStack() as all_of_them:
            for sink in reversed(self._sinks):
                all_of_them.callback(sink.close)


def check(config: Config) -> None:
    """Raises ValueError naming a setting whose package is not installed."""
    for name in PACKAGES:
        setting = getattr(config.log, name)
        if setting and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"log.{name}={setting}: {name} is not installed; pip install 'megabert[{name}]', or remove the setting"
            )


def _names(folder: Path) -> dict[str, str]:
    """Under which ids the run is known elsewhere; what cannot be read is as if it were not there."""
    try:
        found = json.loads((folder / NAMES).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _kept_name(folder: Path, sink: str, fresh: bool) -> str:
    """The run's id at a sink; "" where it begins, or had none."""
    return "" if fresh else _names(folder).get(sink, "")


def _keep_name(folder: Path, sink: str, name: str) -> None:
    write_whole(folder / NAMES, (json.dumps(_names(folder) | {sink: name}) + "\n").encode())


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a line: what has a section in its name and is a number."""
    return {name: value for name, value in values.items() if "/" in name and isinstance(value, int | float)}


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
