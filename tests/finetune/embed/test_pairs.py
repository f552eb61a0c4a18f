from __future__ import annotations

import json
from pathlib import Path

import pytest

from megabert.finetune.embed import pairs
from megabert.finetune.embed.pairs import Columns, Pairs, Scored

PAIR = Columns(("a", "b"))


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def texts_of(found: Pairs | Scored) -> list[tuple[str, str]]:
    return [(found.texts[i], found.texts[j]) for i, j in zip(found.first, found.second, strict=True)]


def test_a_text_that_occurs_twice_has_one_number(tmp_path) -> None:
    found = pairs.read(write(tmp_path, "x.tsv", "a\tb\none\ttwo\nthree\ttwo\none\tfour\n"), PAIR)
    assert isinstance(found, Pairs)
    assert texts_of(found) == [("one", "two"), ("three", "two"), ("one", "four")]
    assert found.texts == ["one", "two", "three", "four"] and found.first.tolist() == [0, 2, 0]


def test_a_query_is_judged_by_all_texts_that_belong_to_it(tmp_path) -> None:
    path = write(tmp_path, "x.tsv", "a\tb\tc\none\ttwo\tx\nthree\ttwo\tx\none\tfour\ty\n")
    found = pairs.read(path, Columns(("a", "b"), ("c",)))
    assert isinstance(found, Pairs)
    queries, corpus, wanted = pairs.relevant(found)
    assert [found.texts[i] for i in queries] == ["one", "three"]
    searched = [found.texts[i] for i in corpus]
    assert sorted(searched) == ["four", "two", "x", "y"]
    assert [{searched[i] for i in places} for places in wanted] == [{"two", "four"}, {"two"}]


def test_negatives_are_columns_or_lists(tmp_path) -> None:
    rows = [{"q": "one", "p": "two", "n": ["x", "y"]}, {"q": "three", "p": "four", "n": "x"}]
    path = write(tmp_path, "x.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    found = pairs.read(path, Columns(("q", "p"), ("n",)))
    assert isinstance(found, Pairs)
    assert [[found.texts[i] for i in part] for part in found.negatives] == [["x", "y"], ["x"]]


def test_pairs_of_another_label_are_left_out(tmp_path) -> None:
    """RTE's layout."""
    text = "index\tsentence1\tsentence2\tlabel\n0\tp\th\tnot_entailment\n1\tq\ti\tentailment\n"
    columns = Columns(("sentence1", "sentence2"), label="label", positive="entailment")
    assert texts_of(pairs.read(write(tmp_path, "rte.tsv", text), columns)) == [("q", "i")]


def test_a_label_may_be_true(tmp_path) -> None:
    rows = [{"a": "p", "b": "h", "same": False}, {"a": "q", "b": "i", "same": True}]
    path = write(tmp_path, "x.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert texts_of(pairs.read(path, Columns(("a", "b"), label="same", positive="true"))) == [("q", "i")]


def test_sts_b_with_and_without_a_header(tmp_path) -> None:
    glue = (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
        '0\tmain\tMSRvid\t2012\t1\tnone\tnone\tA plane "takes off.\tAn air plane takes off.\t5.000\n'
    )
    own = 'main\tMSRvid\t2012\t1\t5.000\tA plane "takes off.\tAn air plane takes off.\n'
    for name, text, columns in (
        ("dev.tsv", glue, Columns(("sentence1", "sentence2"), score="score")),
        ("sts-dev.tsv", own, Columns(("5", "6"), score="4")),
    ):
        found = pairs.read(write(tmp_path, name, text), columns)
        assert isinstance(found, Scored) and found.scores.tolist() == [5.0]
        assert texts_of(found) == [('A plane "takes off.', "An air plane takes off.")]


def test_squads_questions_and_paragraphs(tmp_path) -> None:
    asked = {"id": "1", "question": "Where? ", "answers": [{"text": "here", "answer_start": 3}]}
    none = {"id": "2", "question": "Why?", "answers": [], "is_impossible": True}
    article = {"title": "t", "paragraphs": [{"context": "It here is.", "qas": [asked, none]}]}
    path = write(tmp_path, "dev.json", json.dumps({"data": [article]}))
    assert texts_of(pairs.read(path, Columns())) == [("Where?", "It here is.")]


def test_lines_are_texts_alone(tmp_path) -> None:
    found = pairs.read(write(tmp_path, "x.txt", "one\ntwo\nthree\n"), Columns(), limit=2)
    assert texts_of(found) == [("one", "one"), ("two", "two")]


@pytest.mark.parametrize(
    ("name", "text", "columns", "said"),
    [
        ("x.tsv", "a\tb\none\t \n", PAIR, "line 2, column 'b': empty text"),
        ("x.tsv", "a\tc\none\ttwo\n", PAIR, "no column 'b'; its columns are a, c"),
        ("x.parquet", "PAR1", Columns(), "is a table; name the columns of its texts with --text"),
        ("x.tsv", "a\tb\none\ttwo\n", Columns(), "is a table; name the columns of its texts with --text"),
        ("x.tsv", "a\tb\ts\none\ttwo\tnan\n", Columns(("a", "b"), score="s"), "score 'nan' is no finite number"),
        ("x.tsv", "a\tb\tl\n1\t2\tno\n", Columns(("a", "b"), label="l", positive="yes"), "no pair whose l is yes"),
        ("x.txt", "", Columns(), "holds no pair"),
        ("x.jsonl", '{"a": "one", "b": ["two"]}\n', PAIR, "column 'b': is no text but ['two']"),
    ],
)
def test_a_mistake_in_a_file_is_named(name, text, columns, said, tmp_path) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(ValueError) as raised:
        pairs.read(path, columns)
    assert str(raised.value).startswith(str(path)) and said in str(raised.value)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"text": ("a", "b", "c")}, "--text c: a pair has two texts"),
        ({"text": ("a", "b"), "label": "c"}, "--label COLUMN and --positive LABEL go together"),
        ({"label": "c", "positive": "1"}, "--label c: is of a table"),
        ({"text": ("a",), "negative": ("c",)}, "--negative c: is for pairs"),
        ({"text": ("a",), "score": "c"}, "--score c: is for pairs"),
        ({"text": ("1", "2"), "score": "c"}, "give all by name or all by number"),
    ],
)
def test_columns_that_do_not_go_together_are_refused(columns, said) -> None:
    with pytest.raises(ValueError) as raised:
        Columns(**columns)
    assert said in str(raised.value)
