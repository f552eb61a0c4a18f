"""The comparison of starts cuts its files cleanly, counts predictions as the fine-tuning scores them, and calls a difference
by an interval that sees items and seeds."""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import bench_finetune as bench
from benchmarks.finetune import cases, tallies


def row(mean: float, std: float) -> dict[str, Any]:
    return {"metric": "f1", "scores": {"f1": {"mean": mean, "std": std}}}


# ---- files


def test_a_table_is_cut_into_rows_to_learn_from_and_rows_to_choose_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "TRAIN_ROWS", 30)
    (tmp_path / "sst2").mkdir()
    rows = [f"{n % 2}\trow {n}" for n in range(100)]
    (tmp_path / "sst2" / "train.tsv").write_text("\n".join(["label\tsentence", *rows]) + "\n")
    files = cases.rows_of("sst2")(tmp_path, tmp_path)
    train, chosen_on = (path.read_text().splitlines() for path in (files.train, files.chosen_on))
    assert train[0] == chosen_on[0] == "label\tsentence"
    assert chosen_on[1:] == rows[::10] and len(train) == 1 + 30
    assert set(train[1:]) <= set(rows) - set(chosen_on) and len(set(train)) == 31
    assert files.reported == tmp_path / "sst2" / "dev.tsv"
    assert train == cases.rows_of("sst2")(tmp_path, tmp_path).train.read_text().splitlines()


def test_every_tenth_sentence_of_either_class_is_reported_on(tmp_path: Path) -> None:
    folder = tmp_path / "sentence_polarity" / "sentence_polarity"
    folder.mkdir(parents=True)
    for ending in ("neg", "pos"):
        lines = [f"{ending} caf\xe9 {n}\tend" for n in range(25)]
        (folder / f"rt-polarity.{ending}").write_text("\n".join([*lines, " "]) + "\n", encoding="utf-8")
    files = cases.polarity(tmp_path, tmp_path)
    train, chosen_on, reported = (
        path.read_text().splitlines() for path in (files.train, files.chosen_on, files.reported)
    )
    assert reported == ["label\tsentence"] + [
        f"{label}\t{name} caf\xe9 {n} end" for label, name in enumerate(("neg", "pos")) for n in (0, 10, 20)
    ]
    assert len(train) == 1 + 2 * 19 and len(chosen_on) == 1 + 2 * 3
    assert len({*train[1:], *chosen_on[1:], *reported[1:]}) == 50


def test_sentences_of_tagged_words_stay_whole(tmp_path: Path) -> None:
    (tmp_path / "wnut17").mkdir()
    blocks = [f"w{n}\tB-person\nx\tO" for n in range(21)]
    text = "\r\n\r\n".join(block.replace("\n", "\r\n") for block in blocks)
    (tmp_path / "wnut17" / "wnut17train.conll").write_bytes(text.encode())
    files = cases.sentences(tmp_path, tmp_path)
    train, chosen_on = (path.read_text().strip("\n").split("\n\n") for path in (files.train, files.chosen_on))
    assert chosen_on == blocks[::10] and train == [b for n, b in enumerate(blocks) if n % 10]


def test_no_article_is_in_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    articles = [
        {"title": f"t{a}", "paragraphs": [{"context": f"{a} {p}", "qas": [{"id": f"{a}-{p}"}]} for p in range(8)]}
        for a in range(30)
    ]
    (tmp_path / "squad1.1").mkdir()
    with gzip.open(tmp_path / "squad1.1" / "train-v1.1.json.gz", "wt") as file:
        json.dump({"data": articles}, file)
    for name, most in (("SQUAD_TRAIN", 96), ("SQUAD_CHOSEN", 6), ("SQUAD_REPORTED", 6)):
        monkeypatch.setattr(cases, name, most)
    files = cases.squad(tmp_path, tmp_path)
    train, chosen_on, reported = (
        json.loads(path.read_text())["data"] for path in (files.train, files.chosen_on, files.reported)
    )
    assert [a["title"] for a in reported] == ["t0", "t10", "t20"]
    assert [a["title"] for a in chosen_on] == ["t1", "t12", "t23"]
    assert len(train) == 24 and not {a["title"] for a in train} & {a["title"] for a in (*chosen_on, *reported)}
    assert [len(a["paragraphs"]) for a in train] == [4] * 24
    assert [len(a["paragraphs"]) for a in reported] == [2] * 3


# ---- what predictions count


def test_labels_are_right_or_wrong(tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text('label\tsentence\n1\ta "quote\n0\tb\n1\tc\n')
    (tmp_path / "found.tsv").write_text("index\tprediction\n0\t1\n1\t1\n2\t\n")
    found = tallies.labels(tmp_path / "dev.tsv", tmp_path / "found.tsv")
    assert found == [(1.0, 1.0), (0.0, 1.0), (0.0, 1.0)] and tallies.ratio(found) == pytest.approx(1 / 3)


def test_entities_count_as_the_fine_tuning_scores_them(tmp_path: Path) -> None:
    from megabert.finetune import metrics, tasks
    from megabert.finetune.examples import Words

    draw = random.Random(3)
    tags = ["O", "B-a", "I-a", "B-b", "I-b"]

    def some(length: int) -> tuple[str, ...]:
        return tuple(draw.choice(tags) for _ in range(length))

    lengths = [draw.randint(1, 9) for _ in range(40)]
    examples = [Words(str(n), "f", ("w",) * length, some(length)) for n, length in enumerate(lengths)]
    predictions = [some(length) for length in lengths]
    task = tasks.Task("t", "tag", ("word",), "tag")
    metrics.write(task, examples, predictions, tmp_path / "found.conll")
    found = tallies.entities(tmp_path / "unused", tmp_path / "found.conll")
    assert len(found) == 40
    assert tallies.ratio(found) == pytest.approx(metrics.score(task, examples, predictions)["f1"])


def test_answers_count_the_best_of_a_question(tmp_path: Path) -> None:
    def question(name: str, *answers: str) -> dict[str, Any]:
        return {"id": name, "answers": [{"text": text, "answer_start": 0} for text in answers]}

    asked = [question("p", "the red house", "red"), question("q", "blue"), question("r", "green")]
    dev = {"data": [{"paragraphs": [{"qas": asked[:2]}, {"qas": asked[2:]}]}]}
    (tmp_path / "dev.json").write_text(json.dumps(dev))
    (tmp_path / "found.json").write_text(json.dumps({"q": "dark blue", "p": "red"}))
    found = tallies.answers(tmp_path / "dev.json", tmp_path / "found.json")
    assert found == [(1.0, 1.0), (pytest.approx(2 / 3), 1.0), (0.0, 1.0)]


# ---- the interval


def runs(right: np.ndarray) -> list[list[tallies.Tally]]:
    """Tallies of [seeds, items] right or wrong."""
    return [[(float(item), 1.0) for item in run] for run in right]


def test_the_interval_of_one_seed_is_that_of_the_difference_of_items() -> None:
    """Against the normal interval of a paired difference; unpaired it would be 2.6 times as wide."""
    draw = np.random.default_rng(1)
    theirs = draw.random(2_000) < 0.7
    ours = theirs ^ (draw.random(2_000) < 0.06)
    difference = ours.astype(float) - theirs
    mean, error = difference.mean(), difference.std() / np.sqrt(2_000)
    found = tallies.interval(runs(ours[None]), runs(theirs[None]))
    assert found["gain"] == pytest.approx(mean)
    assert found["low"] == pytest.approx(mean - 1.96 * error, abs=0.1 * error)
    assert found["high"] == pytest.approx(mean + 1.96 * error, abs=0.1 * error)


def test_seeds_that_differ_widen_the_interval() -> None:
    draw = np.random.default_rng(2)
    theirs = np.repeat(draw.random((1, 500)) < 0.5, 5, axis=0)
    steady = theirs | (draw.random((1, 500)) < 0.1)
    unsteady = np.where(np.arange(5)[:, None] % 2, True, theirs)
    narrow, wide = (tallies.interval(runs(ours), runs(theirs)) for ours in (steady, unsteady))
    assert 0 < narrow["low"] < narrow["gain"] < narrow["high"]
    assert wide["high"] - wide["low"] > 5 * (narrow["high"] - narrow["low"]) and wide["low"] <= 0 < wide["gain"]


def test_other_items_are_not_compared() -> None:
    with pytest.raises(AssertionError, match="other items"):
        tallies.interval(runs(np.ones((1, 3))), runs(np.ones((1, 4))))


# ---- rows


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Two seeds of a table of two rows as `megabert.finetune` leaves them."""
    output = tmp_path / "sst-2-winner"
    for seed, found in ((1, "10"), (2, "11")):
        (output / f"seed{seed}").mkdir(parents=True)
        lines = ["index\tprediction", *(f"{n}\t{label}" for n, label in enumerate(found))]
        (output / f"seed{seed}" / "predictions-test.tsv").write_text("\n".join(lines) + "\n")
    summary = {
        "points": [{"scores": {"test": {"accuracy": {"mean": 0.75, "std": 0.35}}}, "seconds": 1.0}],
        "runs": [{"scores": {"test": {"accuracy": value}}} for value in (1.0, 0.5)],
    }
    (output / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "dev.tsv").write_text("label\tsentence\n1\ta\n0\tb\n")
    monkeypatch.setattr(bench.subprocess, "run", lambda command, **_: command)
    return argparse.Namespace(work=tmp_path, lr="3e-4", batch=32, seeds=2)


def test_a_row_is_what_the_runs_report_of_the_other_items(finished: argparse.Namespace) -> None:
    files = cases.Files(Path("a"), Path("b"), finished.work / "dev.tsv")
    made, counted = bench.finetune(cases.CASES[0], "winner", Path("m"), "", files, finished)
    assert made["scores"]["accuracy"]["mean"] == 0.75 and made["runs"] == [{"accuracy": 1.0}, {"accuracy": 0.5}]
    assert counted == [[(1.0, 1.0), (1.0, 1.0)], [(1.0, 1.0), (0.0, 1.0)]]
    assert "--train a --dev b --test" in made["command"]
    (finished.work / "dev.tsv").write_text("label\tsentence\n0\ta\n0\tb\n")
    with pytest.raises(ValueError, match="its runs score"):
        bench.finetune(cases.CASES[0], "winner", Path("m"), "", files, finished)


def test_seeds_of_an_earlier_command_are_left_out(finished: argparse.Namespace) -> None:
    (finished.work / "sst-2-winner" / "seed10").mkdir()
    (finished.work / "sst-2-winner" / "seed10" / "predictions-test.tsv").write_text("index\tprediction\n0\t0\n1\t1\n")
    files = cases.Files(Path("a"), Path("b"), finished.work / "dev.tsv")
    _, counted = bench.finetune(cases.CASES[0], "winner", Path("m"), "", files, finished)
    assert counted == [[(1.0, 1.0), (1.0, 1.0)], [(1.0, 1.0), (0.0, 1.0)]]


@pytest.mark.parametrize(("change", "said"), [({"models": {"m": {"updates": "9"}}}, "models"), ({"seeds": 5}, "seeds")])
def test_rows_of_other_models_are_not_added_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:  # fmt: skip
    def train(*_: Any) -> Any:
        raise AssertionError("it trains")

    file, model = tmp_path / "finetune.json", {"updates": "5"}
    monkeypatch.setattr(bench, "described", lambda path: model)
    monkeypatch.setattr(bench, "finetune", train)
    monkeypatch.setattr(bench, "CASES", [cases.Case("SST-2", "", "accuracy", lambda *_: None, tallies.labels)])  # type: ignore[arg-type,return-value]
    given = ["--models", "m=x", "--tasks", "t", "--work", str(tmp_path), "--seeds", "3", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["bench_finetune.py", *given, "--only", "SST-2"])
    file.write_text(json.dumps({"models": {"m": model}, "seeds": 3, "tasks": {}} | change))
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    assert f"{file}: holds rows of other {said}; name another file" in capsys.readouterr().err
    file.write_text(json.dumps({"models": {"m": model}, "seeds": 3, "tasks": {}}))
    with pytest.raises(AssertionError, match="it trains"):
        bench.main()


@pytest.mark.parametrize(
    ("options", "starts"), [([], ["ours", "theirs", bench.RANDOM]), (["--no-random"], ["ours", "theirs"])]
)
def test_the_first_model_is_compared_with_all_other_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], starts: list[str]
) -> None:
    """Two items, two seeds: the first model has both right, all others one."""
    tallied = {True: [[(1.0, 1.0)] * 2] * 2, False: [[(1.0, 1.0), (0.0, 1.0)]] * 2}
    seen = []

    def train(case: cases.Case, name: str, *_: Any) -> Any:
        seen.append(name)
        return row(0.5, 0.0), tallied[name == "ours"]

    monkeypatch.setattr(bench, "described", lambda path: {})
    monkeypatch.setattr(bench, "finetune", train)
    monkeypatch.setattr(bench, "CASES", [cases.Case("SST-2", "", "f1", lambda *_: None, tallies.labels)])  # type: ignore[arg-type,return-value]
    given = ["--models", "ours=x", "theirs=y", "--tasks", "t", "--work", str(tmp_path)]
    given += ["--json", str(tmp_path / "out.json")]
    monkeypatch.setattr("sys.argv", ["bench_finetune.py", *given, *options])
    bench.main()
    found = json.loads((tmp_path / "out.json").read_text())["tasks"]["SST-2"]
    assert seen == list(found["rows"]) == starts
    assert {name: gain["gain"] for name, gain in found["gains"].items()} == dict.fromkeys(starts[1:], 0.5)


@pytest.mark.parametrize("text", ["run", "=run", "a=", "random weights=run"])
def test_a_model_has_a_name_of_its_own(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write NAME=RUN"):
        bench.named(text)
    assert bench.named("a=b=c") == ("a", Path("b=c"))


def test_the_table_has_a_line_a_task() -> None:
    gains = {"control": {"gain": 0.2512, "low": 0.2, "high": 0.3}}
    results = {
        "A": {"metric": "f1", "rows": {"ours": row(0.7512, 0.0234), "control": row(0.5, 0.01)}, "gains": gains},
        "B": {"metric": "f1", "rows": {"ours": row(0.5, 0.01)}, "gains": {}},
    }
    lines = bench.table(results).splitlines()
    assert lines[0] == "| task | metric | ours | control |"
    assert lines[2:] == ["| A | f1 | 75.1 ± 2.3 | 50.0 ± 1.0 (+25.1, +20.0 to +30.0) |", "| B | f1 | 50.0 ± 1.0 |  |"]
