"""A file to predict is read by the columns that it has, which may be others than the training file's."""

from __future__ import annotations

import pytest

from megabert.finetune.datasets import Choices, Words, for_prediction, read
from megabert.finetune.tasks import PRESETS, custom
from tests.finetune.test_datasets import write


def test_a_file_to_predict_may_have_its_own_columns(tmp_path) -> None:
    path = write(tmp_path, "t.tsv", "n\tsaid\nx1\tSo it is.\n")
    for task in (PRESETS["sst2"], PRESETS["cola"], custom("classify", ["3"], "1"), custom("score", ["a"], "b")):
        (example,) = read(for_prediction(task, path, ["said"], "n"), path, labelled=False)
        assert (example.id, example.a) == ("x1", "So it is.")
    with pytest.raises(ValueError, match=r"no column 'sentence\|content'; its columns are n, said"):
        read(for_prediction(PRESETS["sst2"], path), path, labelled=False)
    own = custom("classify", ["text"], "y")  # of a task of one's own, index is a column like any other
    path = write(tmp_path, "i.tsv", "index\ttext\n5\tA.\n5\tB.\n")
    assert [e.id for e in read(for_prediction(own, path), path, labelled=False)] == ["0", "1"]


def test_a_file_to_predict_may_be_of_the_other_form(tmp_path) -> None:
    lines = write(tmp_path, "new.jsonl", '{"tokens": ["Ada", "ran"], "a": "x", "b": "y", "c": "z"}\n')
    columns = write(tmp_path, "new.conll", "Ada\nran\n")
    tagger = custom("tag", ["tokens"], "ner_tags")
    for task, path, text in ((PRESETS["conll2003"], lines, "tokens"), (tagger, columns, "0")):
        (sentence,) = read(for_prediction(task, path, [text]), path, labelled=False)
        assert isinstance(sentence, Words) and sentence.words == ("Ada", "ran")
    table = write(tmp_path, "new.tsv", "x\ty\tz\n")
    by_name, by_number = (custom("choose", *c[:2], choices=c[2]) for c in (("a", "l", "bc"), ("0", "9", "12")))
    for task, path, names in ((by_name, table, "012"), (by_number, lines, "abc")):
        meant = for_prediction(task, path, names[0], choices=names[1:])
        (choices,) = read(meant, path, labelled=False)
        assert isinstance(choices, Choices) and (choices.a, choices.options) == ("x", ("y", "z"))
