"""`megabert glue` on made-up files of all nine tasks: what decides, what is reported, the table, resuming."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megabert import hf as pretrained
from megabert.common.errors import USER_ERROR
from megabert.distributed.watchdog import Watchdog
from megabert.finetune import datasets, glue
from megabert.finetune.datasets import TextExample
from tests.helpers import finetune_problem, glue_folder

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("own_signals")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("glue")
    finetune_problem.write_run(folder / "run", model__layers=1)
    glue_folder.write_folder(folder / "glue", train=40)
    return folder


def arguments(base: Path, output: Path, *more: str) -> list[str]:
    small = ("--max-length", "32", "--batch", "10", "--epochs", "1", "--precision", "fp32", "--zero", "0")
    return ["--model", str(base / "run"), "--data", str(base / "glue"), "--output", str(output), *small, *more]


# ---- tasks and splits


def test_glue_layout_is_found_whole(base) -> None:
    found = {entry.title: entry for entry in glue.find_tasks(base / "glue")}
    assert list(found) == list(glue.GLUE.values())
    names = {part: path.name for part, path in found["MNLI"].dev.items()}
    assert names == {"m": "dev_matched.tsv", "mm": "dev_mismatched.tsv"}
    assert found["MNLI"].reported == {"MNLI-m": "reported-m", "MNLI-mm": "reported-mm"}
    assert found["STS-B"].reported == {"STS-B": "reported"}
    for entry in found.values():
        assert len(datasets.read(entry.task, entry.train)) == 40
        assert all(len(datasets.read(entry.task, path)) == 8 for path in entry.dev.values())


def test_folders_by_task_name_and_gzip(tmp_path) -> None:
    (tmp_path / "sst2").mkdir()
    with gzip.open(tmp_path / "sst2/train.tsv.gz", "wt") as file:
        file.write("sentence\tlabel\ngood\t1\nbad\t0\n")
    (entry,) = glue.find_tasks(tmp_path)
    assert (entry.title, entry.dev) == ("SST-2", {})
    assert len(datasets.read(entry.task, entry.train)) == 2


def test_missing_tasks_are_named(base, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"has no task of GLUE; .*train\.tsv and dev\.tsv"):
        glue.find_tasks(tmp_path)
    with pytest.raises(ValueError, match=r"--tasks ret: is none of cola, .*; did you mean rte"):
        glue.find_tasks(base / "glue", ["ret"])
    (tmp_path / "RTE").mkdir()
    with pytest.raises(ValueError, match=r"RTE: has no train\.tsv"):
        glue.find_tasks(tmp_path)
    (tmp_path / "rte").mkdir()
    with pytest.raises(ValueError, match="holds RTE twice, RTE and rte"):
        glue.find_tasks(tmp_path)


def texts(count: int, same: int = 1) -> list[TextExample]:
    return [TextExample(str(n), f"f, line {n}", f"first {n // same}", f"second {n}", "0") for n in range(count)]


def test_hold_out_depends_on_texts_alone() -> None:
    examples = texts(200)
    rest, held = glue.hold_out(examples, "decides")
    assert len(held) == 20 and len(rest) == 180
    again = glue.hold_out(examples[::-1], "decides")[1]
    assert {e.id for e in again} == {e.id for e in held}
    assert {e.id for e in glue.hold_out(examples, "reported")[1]} != {e.id for e in held}
    assert len(glue.hold_out(examples, "decides", most=5)[1]) == 5


def test_pairs_of_a_first_text_stay_together() -> None:
    rest, held = glue.hold_out(texts(200, same=5), "decides")
    assert 20 <= len(held) <= 40 and not {e.a for e in rest} & {e.a for e in held}
    # one first text alone: its pairs are parted
    rest, held = glue.hold_out(texts(100, same=100), "decides")
    assert len(held) == 10 and len(rest) == 90
    alone = [TextExample(str(n), f"f, line {n}", "same", None, "0") for n in range(9)]
    with pytest.raises(ValueError, match=r"^f: its examples share too few texts"):
        glue.hold_out(alone, "decides")


def test_splits_do_not_overlap(base) -> None:
    (mnli,) = glue.find_tasks(base / "glue", ["mnli"])
    found = glue.read_splits(mnli)
    assert {name: len(part) for name, part in found.splits.items()} == {
        **{"train": 36, "reported-m": 8, "reported-mm": 8, "dev": 4}
    }
    assert found.labels == ("contradiction", "entailment", "neutral")
    without_dev = glue.read_splits(glue.GlueTask(mnli.task, mnli.train, {}))
    assert {name: len(part) for name, part in without_dev.splits.items()} == {"train": 32, "reported": 4, "dev": 4}
    for splits in (found.splits, without_dev.splits):
        assert len({example.where for part in splits.values() for example in part}) == sum(map(len, splits.values()))
    assert len(glue.read_splits(mnli, limit=3).splits["train"]) == 3


# ---- the table


def test_interval_is_students_over_the_seeds() -> None:
    found = glue.over_seeds([0.70, 0.72, 0.74])
    assert found["mean"] == pytest.approx(0.72) and found["std"] == pytest.approx(0.02)
    low, high = found["interval"]
    # t of 2 degrees of freedom at 97.5% is 4.302653 (any table); 4.302653 * 0.02 / sqrt(3) = 0.0496828
    assert low == pytest.approx(0.72 - 0.0496828, abs=1e-7) and high == pytest.approx(0.72 + 0.0496828, abs=1e-7)
    alone = glue.over_seeds([0.5])
    assert (alone["mean"], alone["std"], alone["interval"]) == (0.5, None, None)


def test_page_has_a_row_a_metric() -> None:
    task = {
        **{"title": "RTE", "point": {"lr": 2e-5}, "points": 4, "limit": 0},
        **{"scores": {"RTE": {"accuracy": glue.over_seeds([0.60, 0.62])}}},
        **{"reported_on": {"RTE": "dev, 277"}, "decided_on": "held out of train, 249"},
    }
    page = glue.page_of("runs/mini", [task])
    assert page.startswith("# GLUE: runs/mini\n") and "--limit" not in page and "Student's t" in page
    (row,) = [line for line in page.splitlines() if line.startswith("| RTE | accuracy | 61.0 | 1.4 |")]
    assert row.endswith("| 48.3 to 73.7 | 2 | lr 2e-05 (4 tried) | dev, 277 | held out of train, 249 |")
    assert "`--limit`" in glue.page_of("m", [task | {"limit": 100}])


# ---- runs


class Never:
    requested = False

    def updated(self, seconds: float) -> None:
        """It reads no clock."""

    saved = updated


class Stopped(Never):
    requested = True


def test_mnli_chooses_on_train_and_reports_both_parts(base, tmp_path, world) -> None:
    args = glue.parse(arguments(base, tmp_path, "--seeds", "1", "--grid", "lr=1e-3,1e-12"))
    start = pretrained.load(args.model)
    (entry,) = glue.find_tasks(base / "glue", ["mnli"])
    plan = glue.plan(args, entry, start)
    examples = glue.read_splits(entry)

    def train(stop: Any) -> Any:
        return glue.train(plan, tmp_path, examples, start, world, stop, Watchdog(world, "", 0))

    assert train(Stopped()) is None
    results = train(Never())
    tree = glue.rows_of(plan, results, examples, 0)
    assert tree["points"] == 2 and tree["reported_on"] == {"MNLI-m": "dev, 8", "MNLI-mm": "dev, 8"}
    assert tree["decided_on"] == "held out of train, 4"
    best = results[tree["best_run"]]
    assert best["scores"]["dev"]["accuracy"] == max(r["scores"]["dev"]["accuracy"] for r in results.values())
    for part in ("m", "mm"):
        figure = tree["scores"][f"MNLI-{part}"]["accuracy"]
        assert figure["values"] == [best["scores"][f"reported-{part}"]["accuracy"]]
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    assert train(Never()) == results
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps, "finished runs are not repeated"
    glue.discard(tmp_path, tree)
    assert [p.parent.name for p in tmp_path.glob("*/best")] == [tree["best_run"]]


def test_published_grid_gives_way_to_options(base, tmp_path) -> None:
    start = pretrained.load(base / "run")
    (entry,) = glue.find_tasks(base / "glue", ["rte"])

    def plan(*more: str) -> glue.GluePlan:
        return glue.plan(glue.parse(["--model", "m", "--data", "d", "--output", "o", *more]), entry, start)

    usual = plan()
    assert usual.grid == {"lr": [5e-5, 4e-5, 3e-5, 2e-5]} and len(usual.runs) == 12
    assert (usual.settings.batch, usual.settings.epochs, usual.settings.max_length) == (32, 3, 32)
    assert plan("--lr", "1e-3").grid == {} and plan("--grid", "batch=16,32").grid == {"batch": [16, 32]}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "absent"], "absent: no such folder"),
        (["--tasks", "sst"], "--tasks sst: .*did you mean sst2"),
        (["--model", "absent"], "absent: no such folder"),
        (["--seeds", "0"], "--seeds 0"),
        (["--grid", "momentum=1"], "--grid momentum=1"),
        (["--batch", "0"], "--batch 0"),
        (["--limit", "-1"], "--limit -1"),
        (["--max-length", "512"], "--max-length 512: the model has 32 positions"),
    ],
)
def test_mistake_is_one_line_and_writes_nothing(more, message, base, tmp_path, capsys) -> None:
    assert glue.main(arguments(base, tmp_path / "out", *more)) == USER_ERROR
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1, text
    assert re.search(message, text), text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("RTE/dev.tsv", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe\n", "RTE/dev.tsv, line 2: label 'maybe'"),
        ("QNLI/dev.tsv", "index\tsentence\n0\ta\n", "QNLI/dev.tsv, line 2: no column 'question'"),
        ("SST-2/train.tsv", "", "SST-2/train.tsv: is empty"),
    ],
)
def test_wrong_file_of_a_later_task_is_reported_first(name, text, message, base, tmp_path, capsys) -> None:
    shutil.copytree(base / "glue", tmp_path / "glue")
    (tmp_path / "glue" / name).write_text(text)
    argv = [*arguments(base, tmp_path / "out"), "--data", str(tmp_path / "glue")]
    assert glue.main(argv) == USER_ERROR
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "megabert.finetune.glue", *argv]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_all_nine_tasks_to_one_table(base, tmp_path) -> None:
    done = run(arguments(base, tmp_path / "out", "--seeds", "2", "--lr", "1e-4"))
    assert done.returncode == 0, done.stderr
    trees = json.loads((tmp_path / "out/results.json").read_text())["tasks"]
    assert [tree["title"] for tree in trees] == list(glue.GLUE.values())
    assert all(len(f["values"]) == 2 and f["interval"] for t in trees for s in t["scores"].values() for f in s.values())
    rows = [line.split(" | ")[0] for line in (tmp_path / "out/results.md").read_text().splitlines()]
    assert rows.count("| WNLI") == 1 and rows.count("| MRPC") == 2
    again = run(arguments(base, tmp_path / "out", "--seeds", "2", "--lr", "1e-4", "--tasks", "rte"))
    assert again.returncode == 0 and "rte/seed" not in again.stdout and "| CoLA |" in again.stdout
    other = run(arguments(base, tmp_path / "out", "--lr", "1e-4", "--tasks", "rte", "--limit", "9"))
    assert other.returncode == USER_ERROR and "was made with limit=0" in other.stderr
