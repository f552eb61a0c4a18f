"""Tasks are refused in one line when they are described."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megabert.finetune.tasks import Task


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": ("accuracy", "bleu")}, "'bleu' is none of those of classify: accuracy, f1"),
        ({"text": ()}, "one or two text columns and a label column; name them"),
        ({"text": ("0",)}, "all columns by name or all by number"),
        ({"labels": ("x", "y", "x")}, "not distinct"),
        ({"kind": "score", "metrics": (), "labels": ("1", "2")}, "has no labels"),
        ({"kind": "tag", "metrics": (), "label": "-1"}, "columns of words and tags are numbers"),
        ({"kind": "tag", "metrics": (), "text": ("0",), "label": "1", "id": "2"}, "have no id"),
        ({"kind": "tag", "metrics": (), "text": ("0", "1"), "label": "2"}, "one text column"),
        ({"kind": "span", "metrics": ()}, "no columns to name"),
    ],
)
def test_contradictory_task_is_refused(changes, message) -> None:
    with pytest.raises(ValueError) as caught:
        replace(Task("mine", "classify", ("a",), "y"), **changes)
    assert message in str(caught.value) and "\n" not in str(caught.value) and "task mine" in str(caught.value)
