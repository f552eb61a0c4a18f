"""Fine-tuning benchmark: files that share nothing, predictions counted as they are scored, intervals over items and seeds."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import bench_finetune as bench


def test_rows_to_choose_on_are_not_learnt_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TRAIN_ROWS", 30)
    for name in ("sst2", "wnut17"):
        (tmp_path / name).mkdir()
    rows, blocks = [f"{n % 2}\trow {n}" for n in range(100)], [f"w{n}\tB-person\nx\tO" for n in range(21)]
    (tmp_path / "sst2/train.tsv").write_text("\n".join(["label\tsentence", *rows]) + "\n")
    (tmp_path / "wnut17/wnut17train.conll").write_bytes("\n\n".join(blocks).replace("\n", "\r\n").encode())
    files = bench.tables("sst2", tmp_path, tmp_path)
    train, chosen_on = (path.read_text().splitlines() for path in (files.train, files.chosen_on))
    assert train[0] == "label\tsentence" and chosen_on == ["label\tsentence", *rows[::10]]
    assert len(set(train)) == 1 + 30 and set(train[1:]) <= set(rows) - set(chosen_on)
    files = bench.sentences(tmp_path, tmp_path)
    train, chosen_on = (path.read_text().strip("\n").split("\n\n") for path in (files.train, files.chosen_on))
    assert chosen_on == blocks[::10] and train == [b for n, b in enumerate(blocks) if n % 10]


def test_no_article_is_in_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    articles = [
        {"title": f"t{a}", "paragraphs": [{"context": f"{a} {p}", "qas": [{"id": f"{a}-{p}"}]} for p in range(8)]}
        for a in range(30)
    ]
    (tmp_path / "squad1.1").mkdir()
    with gzip.open(tmp_path / "squad1.1/train-v1.1.json.gz", "wt") as file:
        json.dump({"data": articles}, file)
    monkeypatch.setattr(bench, "SQUAD", {"train": 96, "chosen-on": 6, "reported": 6})
    files = bench.questions(tmp_path, tmp_path)
    paths = files.train, files.chosen_on, files.reported
    train, chosen_on, reported = (json.loads(path.read_text())["data"] for path in paths)
    assert [a["title"] for a in reported] == ["t0", "t10", "t20"]
    assert [a["title"] for a in chosen_on] == ["t1", "t12", "t23"]
    assert len(train) == 24 and not {a["title"] for a in train} & {a["title"] for a in (*chosen_on, *reported)}
    assert [len(a["paragraphs"]) for a in train] == [4] * 24 and [len(a["paragraphs"]) for a in reported] == [2] * 3


def test_entities_count_as_fine_tuning_scores_them(tmp_path: Path) -> None:
    from megabert.finetune import scores, tasks
    from megabert.finetune.datasets import SentenceExample

    draw = random.Random(3)
    lengths = [draw.randint(1, 9) for _ in range(40)]
    truth, predictions = ([draw.choices(["O", "B-a", "I-a", "B-b"], k=n) for n in lengths] for _ in range(2))
    examples = [SentenceExample(str(n), "f", ("w",) * len(tags), tags) for n, tags in enumerate(truth)]
    task = tasks.Task("t", "tag", ("0",), "1")
    scores.write(task, [(examples, predictions)], tmp_path / "found.conll")
    found = bench.entity_tallies(tmp_path / "unused", tmp_path / "found.conll")
    assert len(found) == 40
    assert bench.ratio(found) == pytest.approx(scores.score(task, examples, predictions)["f1"])


def test_a_question_counts_its_best_answer(tmp_path: Path) -> None:
    def question(name: str, *answers: str) -> dict[str, Any]:
        return {"id": name, "answers": [{"text": text, "answer_start": 0} for text in answers]}

    asked = [question("p", "the red house", "red"), question("q", "blue"), question("r", "green")]
    dev = {"data": [{"paragraphs": [{"qas": asked[:2]}, {"qas": asked[2:]}]}]}
    (tmp_path / "dev.json").write_text(json.dumps(dev))
    (tmp_path / "found.json").write_text(json.dumps({"q": "dark blue", "p": "red"}))
    found = bench.answer_tallies(tmp_path / "dev.json", tmp_path / "found.json")
    assert found == [(1.0, 1.0), (pytest.approx(2 / 3), 1.0), (0.0, 1.0)]


def test_the_interval_is_paired_over_items_and_wider_where_seeds_differ() -> None:
    """Against the normal interval of a paired difference; unpaired it would be 2.6 times as wide."""

    def interval(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
        return bench.interval(*([[(float(item), 1.0) for item in run] for run in side] for side in (ours, theirs)))

    draw = np.random.default_rng(1)
    theirs = draw.random((1, 2_000)) < 0.7
    ours = theirs ^ (draw.random((1, 2_000)) < 0.06)
    difference = ours.astype(float) - theirs
    mean, error = difference.mean(), difference.std() / np.sqrt(2_000)
    one = interval(ours, theirs)
    found, normal = (one["gain"], one["low"], one["high"]), (mean, mean - 1.96 * error, mean + 1.96 * error)
    assert found == pytest.approx(normal, abs=0.1 * error)
    with pytest.raises(AssertionError, match="other items"):
        interval(np.ones((1, 3)), np.ones((1, 4)))
    theirs = np.repeat(draw.random((1, 500)) < 0.5, 5, axis=0)
    steady, unsteady = theirs | (draw.random((1, 500)) < 0.1), np.where(np.arange(5)[:, None] % 2, True, theirs)
    narrow, wide = (interval(ours, theirs) for ours in (steady, unsteady))
    assert 0 < narrow["low"] < narrow["gain"] < narrow["high"] and wide["low"] <= 0 < wide["gain"]
    assert wide["high"] - wide["low"] > 5 * (narrow["high"] - narrow["low"])


CORRECT = {"ours": ("10", "10"), "theirs": ("11", "10"), bench.RANDOM: ("00", "01")}


@pytest.mark.parametrize("wrong", [False, True])
def test_every_start_is_compared_with_the_first(wrong: bool, tmp_path: Path, monkeypatch, capsys) -> None:
    """By a stand-in for `megabert finetune` that leaves CORRECT's two predictions a seed; wrong ones are an error."""
    (tmp_path / "dev.tsv").write_text("label\tsentence\n1\ta\n0\tb\n")

    def run(command: list[str], **_: Any) -> None:
        output = Path(command[command.index("--output") + 1])
        name = next(name for name in CORRECT if output.name.endswith(name.replace(" ", "-")))
        assert ("--from-scratch" in command) == (name == bench.RANDOM)
        scores = [sum(a == b for a, b in zip(found, "10", strict=True)) / 2 for found in CORRECT[name]]
        for seed, labels in enumerate(CORRECT[name], 1):
            (output / f"seed{seed}").mkdir(parents=True)
            text = f"index\tprediction\n0\t{labels[0]}\n1\t{labels[1]}\n"
            (output / f"seed{seed}/predictions-test.tsv").write_text(text)
        points = [{"scores": {"test": {"accuracy": {"mean": sum(scores) / 2, "std": 0.0}}}, "seconds": 1.0}]
        runs = [{"scores": {"test": {"accuracy": score - wrong}}} for score in scores]
        (output / "summary.json").write_text(json.dumps({"points": points, "runs": runs}))

    files = bench.TaskFiles(Path("a"), Path("b"), tmp_path / "dev.tsv")
    case = bench.TaskCase("SST-2", "--task sst2", "accuracy", lambda *_: files, bench.label_tallies)
    monkeypatch.setattr(bench, "CASES", (case,))
    monkeypatch.setattr(bench, "described", lambda path: {"from": str(path)})
    monkeypatch.setattr(bench.hardware, "write_json", lambda path, result: Path(path).write_text(json.dumps(result)))
    monkeypatch.setattr(bench.subprocess, "run", run)
    out = tmp_path / "out.json"
    given = ["--tasks", "t", "--work", str(tmp_path / "work"), "--seeds", "2", "--json", str(out), "--allow-dirty"]
    if wrong:
        with pytest.raises(ValueError, match="its runs score"):
            bench.main(["--models", "ours=x", *given])
        return
    assert bench.main(["--models", "ours=x", "theirs=y", *given]) == 0
    found = json.loads(out.read_text())
    (result,) = found["tasks"].values()
    assert list(result["rows"]) == ["ours", "theirs", bench.RANDOM] and list(found["models"]) == ["ours", "theirs"]
    assert {name: gain["gain"] for name, gain in result["gains"].items()} == {"theirs": 0.25, bench.RANDOM: 0.75}
    lines = capsys.readouterr().out.splitlines()
    assert "| task | metric | ours | theirs | random weights |" in lines
    assert "100.0 ± 0.0 | 75.0 ± 0.0 (+25.0," in lines[-1]
