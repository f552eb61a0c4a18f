"""Metrics of several labels, of ordered labels and of ranked pairs; a missing prediction is a wrong one.

Each function gives figures by name, computed where they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

Figures = dict[str, Callable[[], float]]


def several(
    truth: list[tuple[str, ...]], predictions: Sequence[Sequence[str] | None], labels: Sequence[str]
) -> Figures:
    """F1 over all decisions, or its mean over the labels; a label that is nowhere and never said counts 0 there."""
    from sklearn import metrics

    def marks(of: Sequence[Sequence[str] | None]) -> np.ndarray:
        return np.array([[label in (found or ()) for label in labels] for found in of])

    true, found = marks(truth), marks(predictions)
    missing = np.array([p is None for p in predictions])

    def f1(average: str) -> float:
        return metrics.f1_score(true, found, average=average, zero_division=0)

    return {
        "micro_f1": lambda: f1("micro"),
        "macro_f1": lambda: f1("macro"),
        "accuracy": lambda: ((true == found).all(1) & ~missing).mean(),
    }


def ordered(truth: list[str], predictions: Sequence[str | None], labels: Sequence[str]) -> Figures:
    """Of places in the order; a missing prediction is as far off as can be."""
    from scipy import stats
    from sklearn import metrics

    place = {label: i for i, label in enumerate(labels)}
    true = np.array([place[label] for label in truth])
    worst = np.where(true > (len(labels) - 1) / 2, 0, len(labels) - 1)
    found = np.array([w if p is None else place[p] for p, w in zip(predictions, worst, strict=True)])

    def some(figure: float) -> float:
        return 0.0 if math.isnan(figure) else figure

    def spearman() -> float:
        return some(float(stats.spearmanr(true, found).statistic)) if len(true) > 1 else 0.0

    return {
        "kappa": lambda: some(metrics.cohen_kappa_score(true, found, labels=range(len(labels)), weights="quadratic")),
        "accuracy": lambda: (true == found).mean(),
        "within_one": lambda: (abs(true - found) <= 1).mean(),
        "spearman": spearman,
    }


def ranked(truth: Sequence[str], predictions: Sequence[Sequence[float] | None]) -> Figures:
    """Pairs in their order; a tie is none."""
    return {"accuracy": lambda: sum(p is not None and p[0] > p[1] for p in predictions) / len(truth)}
