"""`finetune --predict --probabilities`: a column of each label's probability, which the predictions agree with."""

from __future__ import annotations

from pathlib import Path

import pytest
from scipy.special import expit, softmax

from megabert.common.tables import rows
from megabert.distributed.ranks import discover
from megabert.finetune import prediction, save, tasks
from tests.helpers import finetune_problem, finetuned


@pytest.mark.parametrize("kind", ["classify", "multilabel"])
def test_probabilities_are_those_of_the_logits(kind: str, tmp_path: Path) -> None:
    write = finetune_problem.write_texts if kind == "classify" else finetune_problem.write_label_sets
    file, task = write(tmp_path / "texts.tsv", 20, 1), tasks.custom(kind, text=["text"], label="label")
    finetune_problem.write_run(tmp_path / "run")
    finetuned.save_untrained(tmp_path, task, file, max_length=32)
    assert prediction.predict_file(tmp_path, file, tmp_path / "out.tsv", probabilities=True) == 20
    model = save.load(tmp_path, discover().device)
    labels, threshold = model.described.labels, model.described.threshold
    assert (tmp_path / "out.tsv").read_text().splitlines()[0].split("\t") == ["index", "prediction", *labels]
    from megabert.finetune.datasets import read

    items = model.items(model.described.task, read(model.described.task, file))
    logits = prediction.compute_logits(model.module, items, model.described.layout, discover())
    for (_, (shown, *given)), values in zip(rows(tmp_path / "out.tsv", ["prediction", *labels]), logits, strict=True):
        found = [float(p) for p in given]
        assert found == pytest.approx((softmax if kind == "classify" else expit)(values), abs=2e-5)
        if kind == "multilabel":
            assert set(filter(None, shown.split(","))) == {
                name for name, p in zip(labels, found, strict=True) if p > 0.5
            }
        else:
            assert shown == labels[int(found[1] > threshold)]


def test_a_task_without_labels_of_texts_is_refused(tmp_path: Path) -> None:
    file, task = finetune_problem.write_tags(tmp_path / "tags.conll", 10, 1), tasks.custom("tag")
    finetune_problem.write_run(tmp_path / "run")
    finetuned.save_untrained(tmp_path, task, file, max_length=32)
    with pytest.raises(ValueError, match="--probabilities: are of the labels of a text"):
        prediction.predict_file(tmp_path, file, tmp_path / "out", probabilities=True)
    assert not (tmp_path / "out").exists()
