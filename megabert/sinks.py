"""Sinks of a run: where its metrics and samples are written.

`metrics.jsonl` is authoritative; TensorBoard and Weights & Biases show the same numbers.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from megabert.common.files import write_whole
from megabert.common.run_files import METRICS, SAMPLES, SINK_IDS, as_json, read_step
from megabert.config import Config, flat

# TensorBoard sorts groups by name and shows the first one: the losses
FIRST_CURVES = {"train/loss": "1_loss/training", "eval/mlm_loss": "1_loss/held_out"}
# ranks up to which TensorBoard has a curve for each; with more a histogram
RANK_CURVES = 64


class Sink:
    """A destination for metrics of a run; subclasses implement what they can show."""

    def write(self, values: dict[str, Any]) -> None:
        """Write metrics with their "step"."""

    def show(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        """Show samples of an evaluation (`megabert.evaluation.HeldOutSamples`); [] has none."""

    def conclude(self, results: Mapping[str, float]) -> None:
        """Write the final metrics."""

    def close(self) -> None:
        """End of the run."""


class JsonLines(Sink):
    """One object a line, each with its step, in a file created with the first line. Lines after the step from which a run resumes
    are removed."""

    def __init__(self, path: Path, resume_step: int) -> None:
        self._path = path
        self._file: TextIO | None = None
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if read_step(line) <= resume_step]
            write_whole(path, "".join(f"{line}\n" for line in kept).encode())

    def write(self, values: dict[str, Any]) -> None:
        self._file = self._file or open(self._path, "a")  # noqa: SIM115 - open as long as the run
        self._file.write(as_json(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class SampleLines(JsonLines):
    """`samples.jsonl`: the samples of each evaluation."""

    def write(self, values: dict[str, Any]) -> None:
        """Metrics are not written to this file."""

    def show(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        if samples:
            super().write({"step": step, "samples": samples})


class TensorBoard(Sink):
    """Scalars, samples and the resolved config as text, hparams with the final evaluation."""

    def __init__(self, folder: Path, config: Config, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)
        self._config = config
        text = json.dumps(config.model_dump(), indent=2)
        self._writer.add_text("config", f"```json\n{text}\n```", max(resume_step, 0))

    def write(self, values: dict[str, Any]) -> None:
        step = values["step"]
        for name, value in _numbers(values).items():
            self._writer.add_scalar(name, value, step)
            if name in FIRST_CURVES:
                self._writer.add_scalar(FIRST_CURVES[name], value, step)
        for name, value in values.items():
            if isinstance(value, list) and name.startswith("perf/rank_"):
                if len(value) > RANK_CURVES:
                    self._writer.add_histogram(name, np.array(value), step)
                    continue
                for rank, seconds in enumerate(value):
                    self._writer.add_scalar(f"{name}/{rank:02}", seconds, step)

    def show(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        if samples:
            self._writer.add_text("samples", as_markdown(samples), step)

    def conclude(self, results: Mapping[str, float]) -> None:
        settings = flat(self._config.model_dump()) | {"phases": str(self._config.phases)}
        self._writer.add_hparams(settings, _final(results), run_name="hparams")

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Sink):
    """A run of the project `log.wandb`, continued after restarts. WANDB_MODE=offline keeps it in the run's folder."""

    def __init__(self, folder: Path, config: Config, fresh: bool) -> None:
        """`fresh`: the run starts at step 0. Raises ValueError where Weights & Biases refuses."""
        self._wandb: Any = importlib.import_module("wandb")
        known = folder / SINK_IDS
        ids = json.loads(known.read_text()) if known.is_file() and not fresh else {}
        run_id = ids.get("wandb") or secrets.token_hex(8)
        try:
            self._run = self._wandb.init(
                project=config.log.wandb,
                id=run_id,
                name=folder.resolve().name,
                dir=str(folder),
                config=config.model_dump(),
                resume="allow",
                settings=self._wandb.Settings(console="off", silent=True),
            )
        except self._wandb.errors.Error as error:
            raise ValueError(
                f"log.wandb={config.log.wandb}: {' '.join(str(error).split())}; `wandb login`, or WANDB_MODE=offline"
            ) from None
        # with an explicit step: after a resume or a rollback steps are repeated
        self._run.define_metric("*", step_metric="step")
        write_whole(known, json.dumps({"wandb": run_id}).encode())

    def write(self, values: dict[str, Any]) -> None:
        self._run.log({"step": values["step"]} | _numbers(values))

    def conclude(self, results: Mapping[str, float]) -> None:
        self._run.summary.update(_final(results))

    def close(self) -> None:
        self._run.finish()
        # its process does not accept the same id twice, as after a rollback
        self._wandb.teardown()


class Sinks:
    """All sinks of a run; without a folder there are none."""

    def __init__(self, folder: Path | None, config: Config, saved_step: int) -> None:
        """Continue from `saved_step`, -1 without a checkpoint. Raises ValueError if a requested sink is unavailable."""
        self._sinks: list[Sink] = []
        if folder is None:
            return
        fresh = saved_step < 0
        if config.log.wandb:
            self._sinks.append(WeightsAndBiases(folder, config, fresh))
        self._sinks += [JsonLines(folder / METRICS, saved_step), SampleLines(folder / SAMPLES, saved_step)]
        if config.log.tensorboard:
            self._sinks.append(TensorBoard(folder / "tensorboard", config, saved_step))

    def write(self, values: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(values)

    def show(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        """Show the samples of the evaluation at `step`."""
        for sink in self._sinks:
            sink.show(step, samples)

    def hparams(self, results: Mapping[str, float]) -> None:
        """Write the run's settings with its final metrics to sinks that show them together."""
        for sink in self._sinks if results else ():
            sink.conclude(results)

    def close(self) -> None:
        """Close all sinks, then raise the error of one that failed."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)


def check_packages(config: Config) -> None:
    """Raises ValueError naming a setting whose package is not installed."""
    if config.log.wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"log.wandb={config.log.wandb}: wandb is not installed; pip install 'megabert[wandb]', or remove the setting"
        )


def as_markdown(samples: Iterable[dict[str, Any]]) -> str:
    """The samples as Markdown for TensorBoard: each with numbered masks, followed by the predictions for each mask."""
    lines = []
    for sample in samples:
        tokens = [_escaped(token) for token in sample["tokens"]]
        answers = []
        for number, mask in enumerate(sample["masks"], 1):
            words = ", ".join(f"{_escaped(word)} {p:.0%}" for word, p in mask["predicted"])
            answers.append(f"{number}. **{tokens[mask['at']]}**: {words}")
            tokens[mask["at"]] = f" **[{number}]**"
        lines += ["".join(tokens).strip(), "", *answers, ""]
    return "\n".join(lines)


def _escaped(token: str) -> str:
    """A token, escaped for Markdown."""
    shown = token if token.isprintable() else ascii(token)
    return "".join(f"\\{c}" if c in "\\`*_[]<>#|" else c for c in shown)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a line: numbers whose name has a section."""
    return {name: value for name, value in values.items() if "/" in name and isinstance(value, int | float)}


def _final(results: Mapping[str, float]) -> dict[str, float]:
    return {f"final/{name.split('/', 1)[-1]}": value for name, value in results.items()}
