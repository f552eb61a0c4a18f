"""Fine-tuning benchmark: files that share nothing, predictions counted as they are scored, intervals over items and seeds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench_finetune as bench
from megabert.finetune import scores, tasks
from megabert.finetune.files import SentenceExample


def test_rows_to_choose_on_are_not_learnt_from(tmp_path: Path) -> None:
    for name in ("sst2", "wnut17"):
        (tmp_path / name).mkdir()
    rows, blocks = [f"{n % 2}\trow {n}" for n in range(100)], [f"w{n}\tB-person\nx\tO" for n in range(21)]
    (tmp_path / "sst2/train.tsv").write_text("\n".join(["label\tsentence", *rows]) + "\n")
    (tmp_path / "wnut17/wnut17train.conll").write_bytes("\n\n".join(blocks).replace("\n", "\r\n").encode())
    files = bench.tables("sst2", tmp_path, tmp_path, 30)
    train, chosen_on = (path.read_text().splitlines() for path in (files.train, files.chosen_on))
    assert train[0] == "label\tsentence" and chosen_on == ["label\tsentence", *rows[::10]]
    assert len(set(train)) == 1 + 30 and set(train[1:]) <= set(rows) - set(chosen_on)
    for most in (30, 4):
        files = bench.sentences(tmp_path, tmp_path, most)
        train, chosen_on = (path.read_text().strip("\n").split("\n\n") for path in (files.train, files.chosen_on))
        rest = [b for n, b in enumerate(blocks) if n % 10]
        assert chosen_on == blocks[::10] and (train == rest if most == 30 else set(train) < set(rest))
        assert len(train) == min(most, 18)


def test_entities_count_as_fine_tuning_scores_them(tmp_path: Path) -> None:
    draw = random.Random(3)
    lengths = [draw.randint(1, 9) for _ in range(40)]
    truth, predictions = ([draw.choices(["O", "B-a", "I-a", "B-b"], k=n) for n in lengths] for _ in range(2))
    examples = [SentenceExample(str(n), "f", ("w",) * len(tags), tags) for n, tags in enumerate(truth)]
    task = tasks.Task("t", "tag", ("0",), "1")
    scores.write(task, [(examples, predictions)], tmp_path / "found.conll")
    found = bench.entity_tallies(tmp_path / "unused", tmp_path / "found.conll")
    assert len(found) == 40 and bench.ratio(found) == pytest.approx(scores.score(task, examples, predictions)["f1"])


def test_the_interval_is_paired_over_items_and_wider_where_seeds_differ() -> None:
    """Against the normal interval of a paired difference; unpaired it would be 2.6 times as wide."""

    def interval(ours: np.ndarray, theirs: np.ndarray) -> dict[str, float]:
        return bench.interval(*([[(float(item), 1.0) for item in run] for run in side] for side in (ours, theirs)))

    draw = np.random.default_rng(1)
    theirs = draw.random((1, 2_000)) < 0.7
    ours = theirs ^ (draw.random((1, 2_000)) < 0.06)
    difference = ours.astype(float) - theirs
    mean, error = difference.mean(), difference.std() / np.sqrt(2_000)
    found, normal = interval(ours, theirs), {"low": mean - 1.96 * error, "gain": mean, "high": mean + 1.96 * error}
    assert {name: found[name] for name in normal} == pytest.approx(normal, abs=0.1 * error)
    with pytest.raises(AssertionError, match="other items"):
        interval(np.ones((1, 3)), np.ones((1, 4)))
    theirs = np.repeat(draw.random((1, 500)) < 0.5, 5, axis=0)
    steady, unsteady = theirs | (draw.random((1, 500)) < 0.1), np.where(np.arange(5)[:, None] % 2, True, theirs)
    narrow, wide = (interval(ours, theirs) for ours in (steady, unsteady))
    assert 0 < narrow["low"] < narrow["gain"] < narrow["high"] and wide["low"] <= 0 < wide["gain"]
    assert wide["high"] - wide["low"] > 5 * (narrow["high"] - narrow["low"])


# predictions of two seeds for the rows labelled 1 and 0; random weights and the Trainer have the same
CORRECT = {"ours": ("10", "10"), "theirs": ("11", "10"), "random-weights": ("00", "01"), "ours-trainer": ("00", "01")}
CORRECT["ours-as-the-trainer"] = ("11", "00")


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`stand_in(arguments of main)`: the sides of the runs it started, in order. A run leaves the predictions of CORRECT."""
    (tmp_path / "dev.tsv").write_text("label\tsentence\n1\ta\n0\tb\n")
    files = bench.TaskFiles(Path("a"), Path("b"), tmp_path / "dev.tsv")
    case = bench.TaskCase("SST-2", "--task sst2 --batch 64", "accuracy", lambda *_: files, bench.label_tallies)
    monkeypatch.setattr(bench, "CASES", (case,))
    about = {"model.dropout": 0.25}
    monkeypatch.setattr(bench, "described", lambda path: about | {"weights_sha256": f"weights of {path}"})
    monkeypatch.setattr(bench, "exported", lambda name, path, work: Path(f"export of {path}"))
    monkeypatch.setattr(bench.hardware, "write_json", lambda path, result: Path(path).write_text(json.dumps(result)))
    started: list[str] = []

    def call(command: list[str], threads: int, log: Path) -> None:
        output, seed = Path(command[command.index("--output") + 1]), int(command[command.index("--seeds") + 1])
        side = output.name.removeprefix("sst-2-")
        batch = [value for option, value in pairwise(command) if option == "--batch"][-1]  # the last one counts
        started.append(f"{side} {seed}" if batch == "64" else f"{side} {seed} {batch}")
        peer = side == "ours-trainer"
        assert ("benchmarks.peers.hf_finetune" in command, "export of x" in command) == (peer, peer)
        assert ("--from-scratch" in command) == (side == "random-weights") and threads == 1
        assert ("--dropout 0.25 --weight-decay 0" in " ".join(command)) == (side == "ours-as-the-trainer")
        folder, labels = output / f"seed{seed}", CORRECT[side][seed - 1]
        folder.mkdir(parents=True)  # it was not there
        (folder / "predictions-test.tsv").write_text(f"index\tprediction\n0\t{labels[0]}\n1\t{labels[1]}\n")
        score = {"test": {"accuracy": sum(a == b for a, b in zip(labels, "10", strict=True)) / 2}}
        (folder / "result.json").write_text(json.dumps({"scores": score, "seconds": 1.0 + seed}))

    monkeypatch.setattr(bench.hardware, "call", call)
    fixed = ["--tasks", "t", "--work", str(tmp_path / "work"), "--threads", "1", "--json", str(tmp_path / "out.json")]

    def run(*given: str) -> list[str]:
        started.clear()
        bench.main([*given, *fixed, "--allow-dirty"])
        return list(started)

    return run


def test_every_start_is_compared_with_the_first(stand_in: Callable[..., list[str]], tmp_path: Path, capsys) -> None:
    starts = stand_in("--models", "ours=x", "theirs=y", "--seeds", "2")
    assert starts == ["ours 1", "theirs 1", "random-weights 1", "ours 2", "theirs 2", "random-weights 2"]
    found = json.loads((tmp_path / "out.json").read_text())
    (result,) = found["tasks"].values()
    assert list(result["rows"]) == ["ours", "theirs", bench.RANDOM] and list(found["models"]) == ["ours", "theirs"]
    assert {name: gain["gain"] for name, gain in result["gains"].items()} == {"theirs": 0.25, bench.RANDOM: 0.75}
    theirs = result["rows"]["theirs"]
    assert theirs["scores"]["accuracy"] == {"mean": 0.75, "std": pytest.approx(0.5 / 2**0.5)}
    assert theirs["training_seconds"] == {"mean": 2.5, "std": pytest.approx(0.5**0.5)}
    lines = capsys.readouterr().out.splitlines()
    assert "| task | metric | ours | theirs | random weights |" in lines
    assert "100.0 ± 0.0, 0 s | 75.0 ± 35.4 (+25.0," in lines[-1]


def test_finished_runs_are_kept_and_checked(stand_in: Callable[..., list[str]], tmp_path: Path) -> None:
    given = ["--models", "ours=x", "--peer", "--seeds"]
    assert stand_in(*given, "1") == ["ours 1", "ours-trainer 1"]
    # a run that was interrupted before its end was recorded is repeated whole
    (tmp_path / "work/sst-2-ours-trainer/seed1/benchmark.json").unlink()
    (tmp_path / "work/sst-2-ours/seed2").mkdir()
    assert stand_in(*given, "2") == ["ours-trainer 1", "ours 2", "ours-trainer 2"]
    assert stand_in(*given, "2") == []
    with pytest.raises(ValueError, match="is a run of command"):
        stand_in(*given, "2", "--batch", "8")
    (result,) = json.loads((tmp_path / "out.json").read_text())["tasks"].values()
    assert {name: gain["gain"] for name, gain in result["gains"].items()} == {"ours, Trainer": 0.75}
    assert [run["seed"] for run in result["rows"]["ours, Trainer"]["runs"]] == [1, 2]
    assert stand_in(*given, "2", "--control") == ["ours-as-the-trainer 1", "ours-as-the-trainer 2"]
    with pytest.raises(ValueError, match=r"seed1: is a run of command .*--lr 3e-4.*; name another --work"):
        stand_in(*given, "2", "--lr", "1e-3")
    (tmp_path / "work/sst-2-ours/seed1/predictions-test.tsv").write_text("index\tprediction\n0\t1\n1\t1\n")
    with pytest.raises(ValueError, match=r"its run scores 1.0, its predictions 0.5"):
        stand_in(*given, "2")


def test_batch_given_is_that_of_every_task(stand_in: Callable[..., list[str]], tmp_path: Path) -> None:
    assert stand_in("--models", "ours=x", "--seeds", "1", "--batch", "8") == ["ours 1 8", "random-weights 1 8"]
    (result,) = json.loads((tmp_path / "out.json").read_text())["tasks"].values()
    assert result["rows"]["ours"]["scores"] == {"accuracy": {"mean": 1.0}}, "one seed has no deviation"
