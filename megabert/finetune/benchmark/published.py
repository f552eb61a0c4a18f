"""Published scores, in percent, each with its source and the examples it was measured on.

Only models that saw what BERT saw: no ensembles, no further data. Matthews correlation and correlations are times 100 too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """One row of a paper's table. `scores`: (row of our table, metric) -> percent."""

    name: str
    source: str
    measured_on: str
    scores: dict[tuple[str, str], float]


DEVLIN = "Devlin et al. 2019 (arXiv 1810.04805)"
TURC = "Turc et al. 2019 (arXiv 1908.08962), in the README of google-research/bert"
TEST = "GLUE's test server"


def _devlin(name: str, figures: str) -> Model:
    """A line of its table 1: MNLI-m, -mm, QQP, QNLI, SST-2, CoLA, STS-B, MRPC, RTE."""
    keys = [
        *(("MNLI-m", "accuracy"), ("MNLI-mm", "accuracy"), ("QQP", "f1"), ("QNLI", "accuracy")),
        *(("SST-2", "accuracy"), ("CoLA", "matthews"), ("STS-B", "spearman"), ("MRPC", "f1")),
        ("RTE", "accuracy"),
    ]
    scores = dict(zip(keys, map(float, figures.split()), strict=True))
    return Model(name, f"{DEVLIN}, table 1", TEST, scores)


def _turc(name: str, figures: str) -> Model:
    """A line of its table: CoLA, SST-2, MRPC, STS-B, QQP, MNLI-m, -mm, QNLI, RTE, WNLI."""
    keys = [
        *(("CoLA", "matthews"), ("SST-2", "accuracy"), ("MRPC", "f1"), ("MRPC", "accuracy")),
        *(("STS-B", "pearson"), ("STS-B", "spearman"), ("QQP", "f1"), ("QQP", "accuracy")),
        *(("MNLI-m", "accuracy"), ("MNLI-mm", "accuracy"), ("QNLI", "accuracy"), ("RTE", "accuracy")),
        ("WNLI", "accuracy"),
    ]
    scores = dict(zip(keys, map(float, figures.replace("/", " ").split()), strict=True))
    return Model(name, TURC, TEST, scores)


MODELS = {
    "glue": (
        _devlin("BERT-LARGE", "86.7 85.9 72.1 92.7 94.9 60.5 86.5 89.3 70.1"),
        _devlin("BERT-BASE", "84.6 83.4 71.2 90.5 93.5 52.1 85.8 88.9 66.4"),
        _turc("BERT-Medium", "38.0 89.6 86.6/81.6 80.4/78.4 69.6/87.9 80.0 79.1 87.7 62.2 62.3"),
        _turc("BERT-Small", "27.8 89.7 83.4/76.2 78.8/77.0 68.1/87.0 77.6 77.0 86.4 61.8 62.3"),
        _turc("BERT-Mini", "0.0 85.9 81.1/71.8 75.4/73.3 66.4/86.2 74.8 74.3 84.1 57.9 62.3"),
        _turc("BERT-Tiny", "0.0 83.2 81.1/71.1 74.3/73.6 62.2/83.4 70.2 70.3 81.5 57.2 62.3"),
    ),
    "squad": (
        Model(
            "BERT-LARGE",
            f"{DEVLIN}, tables 2 and 3, single model without further data",
            "the published dev file",
            {
                **{("SQuAD 1.1", "em"): 84.1, ("SQuAD 1.1", "f1"): 90.9},
                **{("SQuAD 2.0", "em"): 78.7, ("SQuAD 2.0", "f1"): 81.9},
            },
        ),
        Model(
            "BERT-BASE",
            f"{DEVLIN}, table 2, single model without further data",
            "the published dev file",
            {("SQuAD 1.1", "em"): 80.8, ("SQuAD 1.1", "f1"): 88.5},
        ),
    ),
    "own": (),
}
