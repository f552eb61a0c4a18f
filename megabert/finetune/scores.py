"""What stands behind predictions: probabilities of labels, of each word's tags, and of the likeliest answers, as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megabert.finetune.encoding import Item
from megabert.finetune.examples import Example
from megabert.finetune.metrics import Form, mean_of, windows_of
from megabert.finetune.tasks import Task

FORM = Form(lambda _example, line: json.dumps(line, ensure_ascii=False) + "\n")  # of what `lines` gives


def lines(
    task: Task,
    examples: Sequence[Example],
    items: Sequence[Item],
    logits: Sequence[np.ndarray],
    predictions: Sequence[Any],
    labels: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """`{"id", "prediction", …}` of each example, in their order, and with it

    classify, choose, multilabel, ordinal: "probabilities" by label; of several labels each is its own.
    tag: "words", and "probabilities" by tag, one a word.
    span: "no_answer_probability" and "n_best" answers with theirs.
    rank, score: nothing, the prediction is the score.
    """
    windows = windows_of(examples, items, logits)
    for example, of, prediction in zip(examples, windows, predictions, strict=True):
        line: dict[str, Any] = {"id": example.id, "prediction": prediction}
        if task.kind == "span":
            line = {"id": example.id, **({} if prediction is None else {"prediction": prediction["text"]} | prediction)}
            line.pop("text", None)
        elif task.kind == "tag":
            line["words"] = list(example.words)  # type: ignore[union-attr]
            line["probabilities"] = [
                _by_name(labels, row) for i in of for row in softmax(np.asarray(logits[i], np.float64))
            ]
        elif task.kind not in ("score", "rank") and of:
            line["probabilities"] = _by_name(labels, probabilities(task, mean_of([logits[i] for i in of])))
        yield line


def probabilities(task: Task, logits: np.ndarray) -> np.ndarray:
    """fp64 [labels] of [k] logits of one text.

    An ordinal label's is what is left between two decisions; one that is surer than the decision before it counts as that.
    """
    if task.kind == "multilabel":
        return sigmoid(logits)
    if task.kind == "ordinal":
        more = np.minimum.accumulate(sigmoid(logits))
        return -np.diff(np.concatenate([[1.0], more, [0.0]]))
    return softmax(logits)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * logits))


def _by_name(labels: Sequence[str], values: np.ndarray) -> dict[str, float]:
    return dict(zip(labels, values.tolist(), strict=True))
