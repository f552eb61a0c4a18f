"""Published BERT-LARGE runs of MLPerf Training, rounds 0.7 to 5.0: hardware and speed.

`published.csv` has facts from the rounds' logs (mlcommons/training_results_v*, Apache-2.0): training samples of 512 places until a
masked-LM accuracy of 0.72, and samples a second including evaluations; for several runs the mean without the fastest and the slowest.
Networks are from the system descriptions there.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import get_type_hints

from megabert.commands.plan.forecast import ForecastJob, ForecastPoint
from megabert.commands.plan.quality import SAMPLE_TOKENS
from megabert.commands.plan.step_time import DEVICES
from megabert.common.logs import aligned
from megabert.config import ModelConfig
from megabert.metrics import training_flops


@dataclass(frozen=True)
class PublishedRun:
    """A submission. `network`: of a node, in the form of `Fabric.of`; `samples`: 0 if only the rate is known."""

    round: str
    submitter: str
    system: str
    # name in the device table if `left_out` is empty
    gpu: str
    gpus: int
    nodes: int
    network: str
    batch: int
    # samples a second
    rate: float
    samples: int
    # why it is not used to judge the planner
    left_out: str
    # 2: added after the constants were frozen, which it judges
    table: int
    # GB/s of the GPUs' link in one direction where the host's is slower than that of the device table; 0 elsewhere
    link: float

    @property
    def name(self) -> str:
        return f"{self.submitter} {self.gpus} x {self.gpu}, {self.round} ({self.system})"

    @property
    def year(self) -> int:
        """Of publication: rounds N.x were published in 2020 + N."""
        return 2020 + int(self.round.partition(".")[0])


@functools.cache
def published_runs() -> tuple[PublishedRun, ...]:
    """All rows, in the order of rounds and submitters."""
    text = (files(__package__) / "published.csv").read_text(encoding="utf-8")
    kinds = get_type_hints(PublishedRun)
    return tuple(
        PublishedRun(**{name: kinds[name](cell) if cell else kinds[name]() for name, cell in row.items()})
        for row in csv.DictReader(text.splitlines())
    )


# the model of every row
LARGE = ModelConfig(layers=24, hidden=1024, heads=16, vocab_size=30_528)
# mean squared length over the squared mean length (assumed; attention is 5% of the operations), share of predicted tokens
SQUARES, PREDICTED = 1.35, 0.15


def nearest(gpu: str, size: int, count: int = 3) -> list[PublishedRun]:
    """The nearest runs: on this GPU, then on others of its generation, with the most similar number of GPUs."""

    def distance(run: PublishedRun) -> tuple[bool, bool, float, float]:
        other = DEVICES[run.gpu].generation != DEVICES[gpu].generation
        return other, run.gpu != gpu, abs(math.log2(run.gpus / size)), -float(run.round)

    return sorted((run for run in published_runs() if not run.left_out), key=distance)[:count]


def comparison(job: ForecastJob, points: Sequence[ForecastPoint], gpu: str) -> str:
    """Each forecast, followed by the nearest published runs: real tokens a second and useful TFLOP/s of a GPU."""
    tokens = SAMPLE_TOKENS
    thousand = (1e3 * tokens, 1e3 * LARGE.layers * SQUARES * tokens**2, 1e3 * PREDICTED * tokens, 1e3)
    sample = training_flops(LARGE, *map(round, thousand)) / 1e3
    lines = [["GPUs", "tokens/s/GPU", "TFLOP/s/GPU", "run"]]
    for point in points:
        seconds = point.step.seconds * point.size
        rates = f"{job.update.tokens / seconds:,.0f}", f"{job.operations / seconds / 1e12:,.0f}"
        lines.append([f"{point.size:,}", *rates, "this forecast"])
        for run in nearest(gpu, point.size):
            rate = run.rate / run.gpus
            cells = [f"{run.gpus:,}", f"{rate * tokens:,.0f}", f"{rate * sample / 1e12:,.0f}"]
            lines.append([*cells, f"{run.submitter} {run.gpu}, MLPerf {run.round}, batch {run.batch:,}"])
    return f"published runs of BERT-LARGE nearest to it\n{aligned(lines)}"
