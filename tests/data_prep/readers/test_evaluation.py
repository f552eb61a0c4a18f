"""Texts of evaluation files of every kind that tasks come in."""

import gzip
import json

import pytest

from data_prep.common.errors import BadInput
from data_prep.readers.evaluation import texts

SQUAD = {
    "data": [
        {
            "title": "T",
            "paragraphs": [
                {"context": "A context.", "qas": [{"question": "Why?", "answers": [{"text": "A"}], "id": "7"}]}
            ],
        }
    ]
}
CASES = {
    "a.tsv": ("sentence\tlabel\nOne text.\t1\n", [("line 1", "sentence"), ("line 1", "label"), ("line 2", "One text."), ("line 2", "1")]),
    "a.csv": ('text,label\n"One, ""two""\nlines",1\n', [("line 1", "text"), ("line 1", "label"), ("line 3", 'One, "two"\nlines'), ("line 3", "1")]),
    "a.jsonl": ('{"a": "One.", "n": 1, "b": ["Two."]}\n', [("line 1", "One."), ("line 1", "Two.")]),
    "a.json": (json.dumps(SQUAD, indent=1), [("", "A context."), ("", "Why?")]),
    "b.json": ('{"a": "One."}\n{"a": "Two."}\n', [("line 1", "One."), ("line 2", "Two.")]),
    "a.conll": ("It\tO\n's\tO\n\nParis\tB-loc\n", [("line 1", "It 's"), ("line 4", "Paris")]),
    "a.txt": ("It\tO\n's\tO\n\nParis\tB-loc\n", [("line 1", "It 's"), ("line 4", "Paris")]),
    "b.txt": ("One line.\n\nTwo.\n", [("line 1", "One line."), ("line 2", ""), ("line 3", "Two.")]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_every_kind_of_file(name, packed, tmp_path):
    content, expected = CASES[name]
    path = tmp_path / (name + ".gz" * packed)
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    found = [(where.removeprefix(str(path)).removeprefix(", "), text) for where, text in texts(str(path))]
    assert found == expected


def test_what_is_wrong_with_a_file_is_named(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b"ok\n\xff\n")
    (tmp_path / "a.jsonl").write_text("{")
    for name, said in (("a.tsv", "line 2: is not UTF-8"), ("a.jsonl", "line 1: is not JSON"), ("none.tsv", "no such file")):  # fmt: skip
        with pytest.raises(BadInput, match=said):
            list(texts(str(tmp_path / name)))
