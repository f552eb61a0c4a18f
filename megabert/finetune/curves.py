"""Curves of precision and recall of a classifier: what they are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megabert.finetune.encoding import Item
from megabert.finetune.examples import Example
from megabert.finetune.tasks import Task

CLASSES = 20  # of which curves are drawn at most


def curves(
    task: Task, examples: Sequence[Example], items: Sequence[Item], logits: Sequence[np.ndarray], labels: Sequence[str]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What curves of precision and recall are drawn from: by label whether each example has it (bool [n]) and its
    probability (float [n]). Arguments as of `metrics.decode`.

    {} for tasks without classes and for more than CLASSES of them; of two classes the curve is the last one's, as F1 is.
    """
    if task.kind != "classify" or len(labels) > CLASSES:
        return {}
    sums, windows = np.zeros((len(examples), len(labels))), np.zeros((len(examples), 1))
    for item, values in zip(items, logits, strict=True):
        sums[item.example] += values
        windows[item.example] += 1
    means = sums / np.maximum(windows, 1)
    shares = np.exp(means - means.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    given: Any = examples
    truth = np.array([example.label for example in given])
    seen = windows[:, 0] > 0
    shown = list(enumerate(labels))[-1:] if len(labels) == 2 else enumerate(labels)
    return {label: ((truth == label)[seen], shares[seen, k]) for k, label in shown}
