"""TensorBoard: event files in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megabert.common.run_files import METRICS, read_step, read_tail
from megabert.config import Config, flat
from megabert.sinks import Sink
from megabert.trackers import final, numbers

# TensorBoard sorts groups by name and shows the first one: the losses and the learning rate
FIRST_CURVES = {"train/loss": "1_loss/training", "eval/mlm_loss": "1_loss/held_out", "train/lr": "1_loss/learning_rate"}
RANK_CURVES = 64  # ranks up to which TensorBoard has a curve for each; with more a histogram


class TensorBoard(Sink):
    """Scalars, samples and the resolved config as text, hparams with the final evaluation."""

    def __init__(self, folder: Path, config: Config, resume_step: int, project: str = "") -> None:
        from torch.utils.tensorboard import SummaryWriter

        tail = read_tail(folder / METRICS, resume_step)[2]
        lines = [json.loads(line) for line in tail if read_step(line) == resume_step]
        evaluated = any(name.startswith("eval/") for line in lines for name in line)
        # without its evaluation, which may be repeated, the step's points are written again
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=max(resume_step + evaluated, 0))
        self._config = config
        text = json.dumps(config.model_dump(), indent=2)
        self._writer.add_text("config", f"```json\n{text}\n```", max(resume_step, 0))
        for line in () if evaluated else lines:
            self.write(line)

    def write(self, values: dict[str, Any]) -> None:
        step = values["step"]
        for name, value in numbers(values).items():
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
        every = flat(self._config.model_dump()).items()
        settings = {name: value if isinstance(value, int | float | str) else str(value) for name, value in every}
        self._writer.add_hparams(settings, final(results), run_name="hparams")

    def close(self) -> None:
        self._writer.close()


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
