"""Sinks of a run: its own files, and trackers, where its metrics and samples are written.

`metrics.jsonl` is authoritative; trackers (`log.tensorboard`, `log.wandb`, `log.to`) show the same numbers. What a tracker raises, and
what it is too slow for, never stops or delays training.
"""

from __future__ import annotations

import importlib
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from megabert.common.environment import require_packages
from megabert.common.errors import describe
from megabert.common.files import add_path_when_full
from megabert.common.logs import log
from megabert.common.run_files import METRICS, SAMPLES, as_json, read_step, read_tail
from megabert.config import Config

EVALUATED = re.compile(b'"(eval/|samples")')  # in the lines of an evaluation
# class of each tracker, and the package that it needs, which is also an extra
TRACKERS = {
    "tensorboard": ("megabert.trackers.tensorboard:TensorBoard", ""),
    "wandb": ("megabert.trackers.wandb:WeightsAndBiases", "wandb"),
    "mlflow": ("megabert.trackers.mlflow:MLflow", "mlflow"),
    "trackio": ("megabert.trackers.trackio:Trackio", "trackio"),
}
PROJECT = "megabert"  # of a tracker without a project
MOST_WAITING = 1000  # calls that may wait for a tracker; more are dropped and counted
CLOSING = 60.0  # seconds in which a tracker has to take what is left, and to close


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

    def __init__(self, path: Path, resume_step: int, owed: bool = False) -> None:
        """`owed`: the evaluation of the step is repeated."""
        self._path = path
        self._file: TextIO | None = None
        self.resume(resume_step, owed)

    def resume(self, step: int, owed: bool = False) -> None:
        """Continue from `step`, also after lines were written."""
        self.close()
        self._file = None
        begin, _, lines = read_tail(self._path, step)
        kept = [line for line in lines if read_step(line) <= step and not (owed and EVALUATED.search(line))]
        if kept != lines or (kept and not kept[-1].endswith(b"\n")):
            with open(self._path, "r+b") as file:  # in place, which a full disk allows
                file.seek(begin)
                file.write(b"".join(line.rstrip(b"\n") + b"\n" for line in kept))
                file.truncate()

    def write(self, values: dict[str, Any]) -> None:
        self._file = self._file or open(self._path, "a")  # noqa: SIM115 - open as long as the run
        with add_path_when_full(self._path):
            self._file.write(as_json(values) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            with add_path_when_full(self._path):  # it writes what `write` could not
                self._file.close()


class SampleLines(JsonLines):
    """`samples.jsonl`: the samples of each evaluation."""

    def write(self, values: dict[str, Any]) -> None:
        """Metrics are not written to this file."""

    def show(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        if samples:
            super().write({"step": step, "samples": samples})


class Guarded(Sink):
    """A tracker with a thread of its own. Its first error is logged and ends it."""

    def __init__(self, name: str, make: Callable[[int], Sink], resume_step: int) -> None:
        """`make` returns the tracker from the step from which it resumes. Of a new run (-1) its errors are raised here."""
        self._name, self._make, self._failed = name, make, False
        self._tracker: Sink | None = None
        try:
            self._tracker = make(resume_step)
        except Exception as error:
            if resume_step >= 0:
                self._leave_out(error)
            elif isinstance(error, ValueError | OSError):
                raise
            else:
                raise ValueError(f"log.to={name}: {describe(error)}") from error
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(MOST_WAITING)
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        for method, arguments in iter(self._calls.get, None):
            self._call(method, *arguments)
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        if self._tracker is None or (self._failed and method != "close"):
            return
        try:
            if method == "resume":
                self._tracker.close()
                self._tracker = self._make(*arguments)
            else:
                getattr(self._tracker, method)(*arguments)
        except Exception as error:  # of a library or a network: it must not end training
            self._leave_out(error)

    def _leave_out(self, error: Exception) -> None:
        if not self._failed:
            text = f"fails and is left out from here on ({describe(error)[:200]})"
            log.warning(f"log.to={self._name} {text}; {METRICS} goes on")
        self._failed = True

    def _put(self, method: str, *arguments: Any) -> None:
        try:
            self._calls.put_nowait((method, arguments))
        except queue.Full:
            if not self._dropped:
                log.warning(f"log.to={self._name} is {MOST_WAITING} lines behind and loses some; {METRICS} has all")
            self._dropped += 1

    def write(self, values: dict[str, Any]) -> None:
        self._put("write", dict(values))

    def show(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        self._put("show", step, list(samples))

    def conclude(self, results: Mapping[str, float]) -> None:
        self._put("conclude", dict(results))

    def resume(self, step: int) -> None:
        """Close the tracker, and continue from `step` with another one."""
        self._put("resume", step)

    def close(self) -> None:
        ends = time.monotonic() + CLOSING
        try:
            self._calls.put(None, timeout=CLOSING)
        except queue.Full:
            ends = 0.0
        self._thread.join(max(0.0, ends - time.monotonic()))
        if self._thread.is_alive():
            log.warning(f"log.to={self._name} did not finish within {CLOSING:g} s and is left; {METRICS} has all")


class Sinks:
    """All sinks of a run; without a folder there are none."""

    def __init__(self, folder: Path | None, config: Config, saved_step: int, owed: bool = False) -> None:
        """Continue from `saved_step`, -1 without a checkpoint, whose evaluation is repeated if it is `owed`. Raises ValueError if a
        tracker of a new run cannot be opened."""
        self._sinks: list[JsonLines | Guarded] = []
        if folder is None:
            return

        def opener(tracker: Any, project: str) -> Callable[[int], Sink]:
            return lambda step: tracker(folder, config, step, project)

        # first, since trackers may read their files
        self._sinks += [JsonLines(folder / METRICS, saved_step, owed), SampleLines(folder / SAMPLES, saved_step, owed)]
        self._sinks += [
            Guarded(name, opener(tracker, project), saved_step) for name, tracker, project in trackers(config)
        ]

    def resume(self, step: int) -> None:
        """Continue from `step`, after a rollback."""
        for sink in self._sinks:
            sink.resume(step)

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


def trackers(config: Config) -> Iterator[tuple[str, Any, str]]:
    """Name, class and project of each tracker of a run. Raises ValueError naming one that does not exist, lacks its package, or is
    asked for with two projects, since a run has one id there."""
    names: set[str] = set()
    asked = ["tensorboard"] * config.log.tensorboard + [f"wandb={config.log.wandb}"] * bool(config.log.wandb)
    for text in dict.fromkeys([*asked, *config.log.to]):
        name, _, project = text.partition("=")
        if name in names:
            raise ValueError(f"log.to={text}: {name} is asked for twice, and a run has one run there; remove one")
        if name in TRACKERS:
            names.add(name)
        place, package = TRACKERS.get(name, (name, ""))
        if package:
            require_packages(f"log.wandb={project}" if text in asked else f"log.to={text}", package, package)
        module, colon, kind = place.partition(":")
        if not colon:
            raise ValueError(
                f"log.to={text}: choose of {', '.join(TRACKERS)}, or name a class, as package.module:Class"
            )
        try:
            chosen = getattr(importlib.import_module(module), kind)
        except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
            raise ValueError(f"log.to={text}: {error}") from None
        if not (isinstance(chosen, type) and issubclass(chosen, Sink)):
            raise ValueError(f"log.to={text}: is not a class derived from megabert.sinks.Sink")
        yield name, chosen, project or PROJECT


def check_packages(config: Config) -> None:
    """Raises as `trackers`."""
    list(trackers(config))
