"""Curves of precision and recall are of each text once, its windows averaged, by the probability of each class."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from megabert.finetune.curves import CLASSES, curves
from megabert.finetune.encoding import Item
from megabert.finetune.examples import Text
from megabert.finetune.tasks import METRICS, PRESETS, custom

TASK = custom("classify", ["text"], "label", METRICS["classify"])


def texts(labels: str) -> list[Text]:
    return [Text(str(i), f"t.tsv, line {i + 2}", "a", None, label) for i, label in enumerate(labels)]


def items(of: list[int]) -> list[Item]:
    ids = np.array([2, 3])
    blank = Item(0, ids, second=2, positions=ids[:1], targets=ids[:1], char_spans=np.zeros((0, 2), np.int64))
    return [replace(blank, example=example) for example in of]


def test_of_two_classes_it_is_the_last_ones_and_windows_are_averaged() -> None:
    logits = [np.array(pair, np.float32) for pair in ([0, 2], [0, 4], [1, 0])]
    found = curves(TASK, texts("nyn"), items([0, 0, 1]), logits, ("n", "y"))  # the third text has no item
    ((label, (truth, shares)),) = found.items()
    assert label == "y" and truth.tolist() == [False, True]
    assert np.allclose(shares, [1 / (1 + math.exp(-3)), 1 / (1 + math.exp(1))])


def test_of_more_classes_there_is_one_each_up_to_a_limit() -> None:
    logits = [np.array([1000.0, 0.0, 0.0], np.float32), np.array([0.0, 0.0, 0.0], np.float32)]
    found = curves(TASK, texts("ac"), items([0, 1]), logits, ("a", "b", "c"))
    assert {label: truth.tolist() for label, (truth, _) in found.items()} == {
        "a": [True, False],
        "b": [False, False],
        "c": [False, True],
    }
    assert np.allclose([shares for _, shares in found.values()], [[1, 1 / 3], [0, 1 / 3], [0, 1 / 3]])
    many = tuple(map(str, range(CLASSES + 1)))
    assert curves(TASK, texts("0"), items([0]), [np.zeros(CLASSES + 1)], many) == {}


def test_tasks_without_classes_have_none() -> None:
    assert curves(PRESETS["stsb"], texts("1"), items([0]), [np.zeros(1)], ()) == {}
