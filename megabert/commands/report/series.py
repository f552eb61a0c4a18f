"""Figures of `metrics.jsonl` as series, and as few of their points as a picture needs."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

CURVES = ("train/", "eval/", "perf/", "time/")  # sections whose figures may be drawn
BUCKETS = 250  # stretches of a curve that are thinned by themselves: about as many as a picture has pixels


@dataclass
class Series:
    """A figure over the updates; those that are no finite number are only counted."""

    steps: array[int] = field(default_factory=lambda: array("Q"))
    values: array[float] = field(default_factory=lambda: array("f"))
    not_finite: int = 0

    def add(self, step: int, value: float) -> None:
        if math.isfinite(value):
            self.steps.append(step)
            self.values.append(value)
        else:
            self.not_finite += 1


@dataclass
class Metrics:
    """What a metrics file says: series by name, the newest value of each key, and where counts and the objective changed.

    `damaged`: (step, rows left out since the line before). `objectives`: (step of the line, what it trained). `unreadable`:
    lines that are no JSON objects with a step.
    """

    series: dict[str, Series] = field(default_factory=dict)
    last: dict[str, Any] = field(default_factory=dict)
    damaged: list[tuple[int, int]] = field(default_factory=list)
    objectives: list[tuple[int, str]] = field(default_factory=list)
    left_out: int = 0  # damaged rows so far
    lines: int = 0
    unreadable: int = 0

    @property
    def step(self) -> int:
        """The newest update there is a line of; 0 without lines."""
        return int(self.last.get("step", 0))

    def take(self, line: dict[str, Any]) -> None:
        """One more line."""
        self.lines += 1
        step = line["step"]
        rows = line.get("data/damaged_rows", self.left_out)
        if isinstance(rows, int) and rows > self.left_out:
            self.damaged.append((step, rows - self.left_out))
            self.left_out = rows
        objective = line.get("train/objective", "")
        if objective and objective != self.last.get("train/objective"):
            self.objectives.append((step, objective))
        self.last |= line
        for name, value in line.items():
            if name.startswith(CURVES) and (number := _number(value)) is not None:
                self.series.setdefault(name, Series()).add(step, number)


def objects(path: Path) -> Iterator[dict[str, Any] | None]:
    """The objects of a JSON-lines file that have a step; None for a line that is none. Nothing where there is no file."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for raw in file:
            try:
                line = json.loads(raw)
            except ValueError:
                yield None if raw.strip() else {}
                continue
            good = isinstance(line, dict) and isinstance(line.get("step"), int) and line["step"] >= 0
            yield line if good else None


def read_metrics(path: Path) -> Metrics:
    """The figures of a metrics file, which may still be written to; empty where there is none."""
    found = Metrics()
    for line in objects(path):
        if line:
            found.take(line)
        else:
            found.unreadable += line is None
    return found


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most 4 x BUCKETS points of a curve that look the same: of each stretch the first, the lowest, the highest and the
    last, so that no extreme is lost. x [n] need not be sorted; the result is."""
    if np.any(x[1:] < x[:-1]):
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
    if len(x) <= 4 * BUCKETS:
        return x, y
    edges = np.searchsorted(x, np.linspace(x[0], x[-1], BUCKETS + 1)[1:-1], side="left")
    kept: set[int] = set()
    for first, end in zip([0, *edges], [*edges, len(x)], strict=True):
        if end > first:
            part = y[first:end]
            kept |= {int(first), int(first + part.argmin()), int(first + part.argmax()), int(end) - 1}
    at = sorted(kept)
    return x[at], y[at]


def _number(value: Any) -> float | None:
    """A figure, also one that JSON has no number for ("nan"); None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
