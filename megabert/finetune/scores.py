"""Logits to predictions to figures; a missing prediction is a wrong one, and every figure is its published rule's.

All figures are fractions (1.0 is everything right), correlations -1 to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megabert.finetune.encoding import Item
from megabert.finetune.files import Example
from megabert.finetune.tasks import Task


def decode(
    task: Task,
    examples: Sequence[Example],
    items: Sequence[Item],
    logits: Sequence[np.ndarray],
    labels: Sequence[str],
    null_threshold: float = 0.5,
) -> list[Any]:
    """One prediction an example, None for one without an item. `logits[i]` are of item i, in fp32:

    classify [k] -> label; score [1] -> float; tag [p, k] -> list of tags; span [p, 2] (start, end) -> {"text": answer or "",
    "no_answer_probability": 0..1, "n_best": [{"text", "start", "probability"}, ...]}, "" where the task allows no answer
    and its probability is above `null_threshold`. The windows of one text are averaged.
    """
    raise NotImplementedError


def score(
    task: Task, examples: Sequence[Example], predictions: Sequence[Any], labels: Sequence[str] = ()
) -> dict[str, float]:
    """The task's metrics by name, in their order. `labels` as in training (F1 of two classes is of the last one)."""
    raise NotImplementedError


def write(task: Task, examples: Sequence[Example], predictions: Sequence[Any], path: str | Path) -> None:
    """The predictions file: TSV (GLUE's `index`, `prediction`), CoNLL columns (word, true tag, predicted), SQuAD's JSON."""
    raise NotImplementedError
