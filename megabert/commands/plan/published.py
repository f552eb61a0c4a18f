"""Published BERT-LARGE runs of MLPerf Training, rounds 0.7 to 5.0: what each ran on and how fast it was.

`published.csv` has the facts of the rounds' logs (mlcommons/training_results_v*, Apache-2.0): samples of 512 places that were
trained on until a masked-LM accuracy of 0.72, and samples a second of the run, evaluations included; of several runs the mean
without the fastest and the slowest. Networks are those of the systems' descriptions there.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class PublishedRun:
    """A submission. `network` a node as `Fabric.of` reads it; `samples` 0 where only the rate is known."""

    round: str
    submitter: str
    system: str
    # of the device table, where `left_out` is empty
    gpu: str
    gpus: int
    nodes: int
    network: str
    batch: int
    # samples a second
    rate: float
    samples: int
    # why the planner is not judged by it
    left_out: str

    @property
    def name(self) -> str:
        return f"{self.submitter} {self.gpus} x {self.gpu}, {self.round} ({self.system})"

    @property
    def year(self) -> int:
        return ROUND_YEARS[self.round]


# of publication
ROUND_YEARS = {
    "0.7": 2020,
    "1.0": 2021,
    "1.1": 2021,
    "2.0": 2022,
    "2.1": 2022,
    "3.0": 2023,
    "3.1": 2023,
    "4.0": 2024,
    "4.1": 2024,
    "5.0": 2025,
}


@functools.cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Every row, in the order of rounds and submitters."""
    text = (files(__package__) / "published.csv").read_text(encoding="utf-8")
    return tuple(
        PublishedRun(
            row["round"],
            row["submitter"],
            row["system"],
            row["gpu"],
            gpus=int(row["gpus"]),
            nodes=int(row["nodes"]),
            network=row["network"],
            batch=int(row["batch"]),
            rate=float(row["rate"]),
            samples=int(row["samples"] or 0),
            left_out=row["left_out"],
        )
        for row in csv.DictReader(text.splitlines())
    )
