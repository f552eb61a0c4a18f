from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from megabert.finetune import datasets, tasks
from megabert.finetune.benchmark import splits
from megabert.finetune.benchmark.suites import Entry
from megabert.finetune.examples import Choices, Question, Text, Words
from tests.helpers import glue_folder


def texts(count: int, same: int = 1) -> list[Text]:
    return [Text(str(n), f"f, line {n}", f"first {n // same}", f"second {n}", "0") for n in range(count)]


def test_a_tenth_is_held_out_and_nothing_is_in_both_parts() -> None:
    kept, held = splits.hold_out(texts(500), "decides")
    assert (len(kept), len(held)) == (450, 50)
    assert {e.id for e in kept} & {e.id for e in held} == set()
    assert [int(e.id) for e in held] == sorted(int(e.id) for e in held), "the order of the file stays"
    assert len(splits.hold_out(texts(500), "decides", most=7)[1]) == 7


def test_what_is_held_out_follows_the_text_alone() -> None:
    _, held = splits.hold_out(texts(500), "decides")
    _, again = splits.hold_out(texts(500)[::-1], "decides")
    assert {e.id for e in held} == {e.id for e in again}
    _, other = splits.hold_out(texts(500), "reported")
    assert len({e.id for e in held} & {e.id for e in other}) < 15, "another purpose, other examples"


def test_pairs_of_one_first_text_and_questions_of_one_article_stay_together() -> None:
    kept, held = splits.hold_out(texts(300, same=3), "decides")
    assert {e.a for e in kept} & {e.a for e in held} == set()  # type: ignore[union-attr]
    questions = [
        Question(str(n), f"f, data[{n // 10}].paragraphs[{n // 2 % 5}], question {n}", "q", f"c{n}", ())
        for n in range(100)
    ]
    kept, held = splits.hold_out(questions, "decides")
    assert len(held) == 10 and len({e.where.split("]")[0] for e in held}) == 1
    sentences = [Words(str(n), "f", ("a", str(n // 2)), None) for n in range(40)]
    assert len(splits.hold_out(sentences, "decides")[1]) == 4
    for given in (None, "said"):
        options = [Choices(str(n), "f", given and f"{given} {n // 4}", (f"a{n // 4}", "b"), "0") for n in range(40)]
        assert len(splits.hold_out(options, "decides")[1]) == 4


def test_large_groups_are_passed_over() -> None:
    """950 pairs of one first text and 50 of another; 500 and 500; one prompt before all of them."""
    for firsts, want in (((950, 50), 50), ((500, 500), 100), ((1000,), 100), ((990, 10), 100)):
        given = [f"first {n}" for n, count in enumerate(firsts) for _ in range(count)]
        pairs = [Text(str(n), f"f, line {n}", a, f"second {n}", "0") for n, a in enumerate(given)]
        kept, held = splits.hold_out(pairs, "decides")
        assert (len(kept), len(held)) == (1000 - want, want), firsts


def test_questions_of_a_table_stay_with_their_context(tmp_path) -> None:
    rows = {
        "id": [f"q{n}" for n in range(200)],
        "question": [f"which {n}" for n in range(200)],
        "context": [f"context {n // 5}" for n in range(200)],
        "answers": [{"text": ["context"], "answer_start": [0]}] * 200,
    }
    parquet.write_table(pa.table(rows), tmp_path / "train.parquet")
    examples = datasets.read(tasks.preset("squad1.1"), tmp_path / "train.parquet")
    kept, held = splits.hold_out(examples, "decides")
    assert len(held) == 20 and {e.context for e in kept} & {e.context for e in held} == set()  # type: ignore[union-attr]


def test_examples_of_one_text_cannot_be_parted() -> None:
    same = [Text(str(n), f"f, line {n}", "first", "second", "0") for n in range(9)]
    with pytest.raises(ValueError, match=r"f: its examples share too few texts"):
        splits.hold_out(same, "decides")


def entry(folder: Path, **dev: Path) -> Entry:
    task = tasks.preset("mnli" if len(dev) > 1 else "rte")
    return Entry("T", task, folder / ("MNLI" if len(dev) > 1 else "RTE") / "train.tsv", dev, {})


def test_what_is_reported_does_not_decide_unless_it_is_asked_for(tmp_path) -> None:
    glue_folder.write_folder(tmp_path, train=40)
    dev = {part: tmp_path / f"MNLI/dev_{name}.tsv" for part, name in (("m", "matched"), ("mm", "mismatched"))}
    found, labels = splits.read(entry(tmp_path, **dev), "train")
    assert {name: len(part) for name, part in found.items()} == {
        **{"train": 36, "reported-m": 8, "reported-mm": 8, "dev": 4}
    }
    assert labels == ("contradiction", "entailment", "neutral")
    held = {example.where for example in found["dev"]}
    assert all("train.tsv" in where for where in held)
    assert not held & {example.where for example in found["train"]}

    found, _ = splits.read(entry(tmp_path, **dev), "dev")
    assert {name: len(part) for name, part in found.items()} == {"train": 40, "dev": 8, "reported-mm": 8}
    assert splits.reported(entry(tmp_path, **dev), "dev") == {"m": "dev", "mm": "reported-mm"}

    found, _ = splits.read(entry(tmp_path), "train")  # no dev file: two parts of train
    assert {name: len(part) for name, part in found.items()} == {"train": 32, "reported": 4, "dev": 4}
    assert len({example.where for part in found.values() for example in part}) == 40
