"""Weights of labels in the loss, for labels that are rare."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from megabert.finetune.examples import Example
from megabert.finetune.tasks import LABELLED, Task

BALANCED = "balanced"


def weights_of(given: Sequence[str], task: Task, labels: Sequence[str], train: Sequence[Example]) -> tuple[float, ...]:
    """The weights of the labels in the loss; () where none are `given`.

    "balanced" of classes: examples (of tags: words) / (labels * those of the label), of mean 1 over the examples; of several
    labels, where a weight is of the texts that have the label: texts without it / texts with it. Raises ValueError naming what is wrong.
    """
    if not given:
        return ()
    if task.kind not in LABELLED:
        raise ValueError(f"--class-weights: are for {', '.join(LABELLED)}; {task.name} is {task.kind}")
    if list(given) == [BALANCED]:
        return _balanced(task, labels, train)
    try:
        found = tuple(float(value) for value in given)
    except ValueError:
        found = ()
    if len(found) != len(labels) or not all(0 < value < math.inf for value in found):
        raise ValueError(
            f"--class-weights {' '.join(given)}: give {BALANCED}, or a number above 0 for each of {', '.join(labels)}"
        )
    return found


def _balanced(task: Task, labels: Sequence[str], train: Sequence[Any]) -> tuple[float, ...]:
    if task.kind == "tag":
        seen = Counter(tag for example in train for tag in example.tags)
    elif task.kind == "multilabel":
        seen = Counter(label for example in train for label in set(example.label))
        return tuple((len(train) - seen[label]) / max(seen[label], 1) or 1.0 for label in labels)
    else:
        seen = Counter(example.label for example in train)
    return tuple(seen.total() / (len(labels) * max(seen[label], 1)) for label in labels)
