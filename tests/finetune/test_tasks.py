"""Tasks: the presets, and tasks refused in one line when they are described."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megabert.finetune.tasks import PRESETS, Task, custom, preset

GLUE = {"cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"}


def test_presets_are_glue_squad_and_conll() -> None:
    assert set(PRESETS) == GLUE | {"squad1.1", "squad2.0", "conll2003"}
    assert {name for name, task in PRESETS.items() if task.pair} == GLUE - {"cola", "sst2"}
    # first metrics as Wang et al. 2019 list them in their table 1
    first = {"cola": "matthews", "stsb": "pearson", "mrpc": "f1", "qqp": "f1"}
    assert {name: PRESETS[name].metrics[0] for name in GLUE} == dict.fromkeys(GLUE, "accuracy") | first
    assert preset("squad2.0").unanswerable and not preset("squad1.1").unanswerable
    with pytest.raises(ValueError, match=r"no task 'sst-2'; known are cola, sst2, .*conll2003"):
        preset("sst-2")


def test_custom_task_defaults() -> None:
    tagged = custom("tag")
    assert (tagged.text, tagged.label, tagged.metrics) == (("0",), "-1", ("f1",))
    assert custom("score", text=["a", "b"], label="y").metrics == ("pearson",)
    assert custom("span").metrics == ("f1",) and not custom("span").unanswerable


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
