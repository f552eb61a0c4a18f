"""What predictions count, item by item, and the interval of a difference between two models on the same items.

The metrics here are ratios of sums over items: a tally is what one item adds above and below the line.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

Tally = tuple[float, float]
DRAWS, MIDDLE = 10_000, 0.95


def labels(reported: Path, predictions: Path) -> list[Tally]:
    """Of a table with a column `label`: whether each row is right."""
    both = zip(column(reported, "label"), column(predictions, "prediction"), strict=True)
    return [(float(truth == found), 1.0) for truth, found in both]


def column(path: Path, name: str) -> list[str]:
    """Of a table with tabs between its fields and no quoting."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row[name] for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]


def entities(reported: Path, predictions: Path) -> list[Tally]:
    """Of sentences whose lines are word, true tag, predicted tag: F1's two sums, over entities."""
    from seqeval.metrics.sequence_labeling import get_entities

    tallies = []
    for sentence in predictions.read_text(encoding="utf-8").strip("\n").split("\n\n"):
        fields = [line.split("\t" if "\t" in line else " ") for line in sentence.split("\n")]
        truth, found = (set(get_entities([field[column] for field in fields])) for column in (1, 2))
        tallies.append((2.0 * len(truth & found), float(len(truth) + len(found))))
    return tallies


def answers(reported: Path, predictions: Path) -> list[Tally]:
    """Of SQuAD's JSON: each question's F1 by SQuAD's rule, the best over its answers."""
    from megabert.finetune.metrics import overlap

    found = json.loads(predictions.read_text(encoding="utf-8"))
    articles = json.loads(reported.read_text(encoding="utf-8"))["data"]
    questions = [q for a in articles for p in a["paragraphs"] for q in p["qas"]]
    return [(max(overlap(found.get(q["id"], ""), a["text"], False) for a in q["answers"]), 1.0) for q in questions]


def ratio(tallies: Sequence[Tally]) -> float:
    """The metric."""
    above, below = np.array(tallies).sum(0)
    return float(above / below) if below else 0.0


def interval(ours: Sequence[Sequence[Tally]], theirs: Sequence[Sequence[Tally]]) -> dict[str, float]:
    """What our mean over seeds is above theirs, and the middle 95% of it by a paired bootstrap: items are drawn again, the
    same for both and for every seed, and seeds of either on their own (Efron and Tibshirani 1993, chapter 13).

    `ours[s][i]`: tally of item i with seed s; both name the same items in the same order.
    """
    assert len({len(run) for run in (*ours, *theirs)}) == 1, "other items"
    random, items = np.random.default_rng(0), len(ours[0])
    counts = random.multinomial(items, np.full(items, 1 / items), size=DRAWS).astype(np.float64)

    def drawn(runs: Sequence[Sequence[Tally]]) -> tuple[np.ndarray, float]:
        """Mean over seeds drawn again of items drawn again [DRAWS], and as it is."""
        above, below = np.moveaxis(np.array(runs), -1, 0)  # [seeds, items] each
        with np.errstate(invalid="ignore"):
            scores = np.nan_to_num((counts @ above.T) / (counts @ below.T))  # [DRAWS, seeds]
        seeds = random.integers(len(runs), size=(DRAWS, len(runs)))
        return np.take_along_axis(scores, seeds, 1).mean(1), float(np.mean([ratio(run) for run in runs]))

    (our_draws, our_mean), (their_draws, their_mean) = drawn(ours), drawn(theirs)
    low, high = np.quantile(our_draws - their_draws, [(1 - MIDDLE) / 2, (1 + MIDDLE) / 2])
    return {"gain": our_mean - their_mean, "low": float(low), "high": float(high)}
