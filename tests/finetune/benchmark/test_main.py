"""`megabert glue` on made-up files of all nine tasks, SQuAD's two and a folder of one's own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from megabert import hf as pretrained
from megabert.common.errors import USER_ERROR
from megabert.distributed.watchdog import Watchdog
from megabert.finetune import datasets, metrics
from megabert.finetune.benchmark import __main__ as command
from megabert.finetune.benchmark import evaluation, submission, suites
from tests.helpers import finetune_problem, glue_folder

ROOT = Path(__file__).resolve().parents[3]


pytestmark = pytest.mark.usefixtures("own_signals")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    finetune_problem.write_run(folder / "run", model__layers=1)
    glue_folder.write_folder(folder / "glue")
    (folder / "squad").mkdir()
    for name, count in (("train", 40), ("dev", 12)):
        path = folder / f"squad/{name}-v2.0.json"
        finetune_problem.write_questions(path, count, 1)
        tree = json.loads(path.read_text())
        (article,) = tree["data"]
        for number, paragraph in enumerate(article["paragraphs"]):
            if number % 2:
                paragraph["qas"][0] |= {"answers": [], "is_impossible": True}
        tree["data"] = [{"title": "t", "paragraphs": [paragraph]} for paragraph in article["paragraphs"]]
        path.write_text(json.dumps(tree))
    return folder


def arguments(base: Path, output: Path, *more: str, data: str = "glue") -> list[str]:
    small = ("--max-length", "32", "--batch", "10", "--epochs", "1", "--precision", "fp32", "--zero", "0")
    given = ("--model", str(base / "run"), "--data", str(base / data), "--output", str(output))
    return [*given, *small, *more]


class Never:
    requested = False

    def updated(self, seconds: float) -> None:
        """It reads no clock."""

    saved = updated


class Stopped(Never):
    requested = True


def do(argv: list[str], world: Any, stop: Any = Never) -> dict[str, Any] | None:
    """What the command does for its first task, as one rank; its figures, or None where it was stopped."""
    args = command.parse(argv)
    start, output = pretrained.load(args.model), Path(args.output)
    (entry, *_) = suites.find(args.suite, Path(args.data), args.tasks)
    plan = command.plan(args, entry, start)
    command.check(plan, args.suite, start, world.size)
    examples, folder = command.read(plan), output / entry.name
    folder.mkdir(parents=True, exist_ok=True)
    watchdog = Watchdog(world, "", 0)
    results = command.train(plan, folder, examples, start, world, stop(), watchdog)
    if results is None:
        return None
    tree = evaluation.evaluate(
        folder, entry, results, list(plan.grid), examples.splits, plan.facts, world, watchdog.progress
    )
    command.publish(output, args.suite, args.model)
    command.hand_in(output, args.suite)
    return tree


def test_mnli_chooses_on_train_and_reports_both_dev_parts(base, tmp_path, world, capsys) -> None:
    argv = arguments(base, tmp_path, "--tasks", "mnli", "--seeds", "1", "--grid", "lr=1e-3,1e-12")
    assert do(argv, world, Stopped) is None
    tree = do(argv, world)
    assert tree is not None and tree["points"] == 2
    assert list(tree["scores"]) == ["MNLI-m", "MNLI-mm"]
    assert tree["reported_on"] == {"MNLI-m": "dev, 8", "MNLI-mm": "dev, 8"}
    assert tree["decided_on"] == "held out of train, 2" and not tree["published_way"]
    result = json.loads((tmp_path / "mnli" / tree["best_run"] / "result.json").read_text())
    assert set(result["scores"]) == {"dev", "reported-m", "reported-mm"}
    for part in ("m", "mm"):
        figure = tree["scores"][f"MNLI-{part}"]["accuracy"]
        assert figure["values"] == [result["scores"][f"reported-{part}"]["accuracy"]]
    assert "| MNLI-mm | accuracy |" in (tmp_path / "results.md").read_text()
    with zipfile.ZipFile(tmp_path / "submission" / submission.ZIP) as archive:
        assert archive.namelist() == ["MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"]
        assert len(archive.read("AX.tsv").splitlines()) == 7
    assert "GLUE's site also wants CoLA" in capsys.readouterr().out

    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "mnli").rglob("*") if p.is_file()}
    assert do(argv, world) == tree
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps, "a finished task is not done again"
    assert all((tmp_path / "mnli" / name / "best").is_dir() for name in tree["runs"])
    command.discard(tmp_path / "mnli", tree)
    assert [p.parent.name for p in (tmp_path / "mnli").glob("*/best")] == [tree["best_run"]]


def test_squad_2s_threshold_comes_from_the_split_that_decides(base, tmp_path, world) -> None:
    argv = arguments(base, tmp_path, "--suite", "squad", "--seeds", "1", data="squad")
    argv += ["--stride", "16", "--lr", "1e-3"]
    tree = do(argv, world)
    assert tree is not None and set(tree["scores"]["SQuAD 2.0"]) == {"f1", "em"}
    folder = tmp_path / "squad2.0" / tree["best_run"]
    result = json.loads((folder / "result.json").read_text())
    (entry,) = suites.find("squad", base / "squad")
    reported: list[Any] = datasets.read(entry.task, entry.dev[""])
    answers = json.loads((tmp_path / "submission/squad2.0.json").read_text())
    assert list(answers) == [example.id for example in reported]

    def at(threshold: float) -> dict[str, float]:
        result["scores"]["dev"]["best_f1_threshold"] = threshold
        given = (folder, entry, result, "reported", reported, world, lambda: None)
        return evaluation.reported_scores(*given)

    mean = tree["scores"]["SQuAD 2.0"]["f1"]["mean"]
    assert at(result["scores"]["dev"]["best_f1_threshold"])["f1"] == mean
    assert at(0.0) == {"f1": 0.5, "em": 0.5}, "nothing is answered, half of the questions have no answer"
    predictions = [{"text": answers[example.id], "no_answer_probability": 0.5, "n_best": []} for example in reported]
    assert metrics.score(entry.task, reported, predictions)["f1"] == pytest.approx(mean)


def test_the_published_grid_and_settings_give_way_to_options(base, tmp_path) -> None:
    start = pretrained.load(base / "run")

    def plan(*more: str, suite: str = "glue") -> command.Plan:
        (entry, *_) = suites.find(suite, base / suite)
        given = ["--model", "m", "--data", "d", "--output", str(tmp_path), "--suite", suite, *more]
        return command.plan(command.parse(given), entry, start)

    usual = plan()
    assert usual.grid == {"lr": [5e-5, 4e-5, 3e-5, 2e-5]} and len(usual.runs) == 12
    assert (usual.settings.batch, usual.settings.epochs) == (32, 3)
    assert usual.settings.max_length == 32, "128, as far as the model has positions"
    assert plan("--lr", "1e-3").grid == {} and plan("--grid", "small").grid == {"lr": [5e-5, 2e-5]}
    assert plan("--grid", "batch=16,32").grid == {"batch": [16, 32]}
    squad = plan(suite="squad")
    assert (squad.settings.batch, squad.settings.epochs, squad.settings.lr) == (48, 2, 5e-5)
    assert squad.grid == {} and len(squad.runs) == 3


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--data", "absent"], "absent: no such folder"),
        (["--suite", "squad"], "has no task of --suite squad"),
        (["--tasks", "sst"], "--tasks sst: .*did you mean sst2"),
        (["--model", "absent"], "absent: no such folder"),
        (["--seeds", "0"], "--seeds 0"),
        (["--grid", "momentum=1"], "--grid momentum=1"),
        (["--grid", "publisched"], "--grid publisched"),
        (["--batch", "0"], "--batch 0"),
        (["--limit", "-1"], "--limit -1"),
        (["--max-length", "512"], "--max-length 512: the model has 32 positions"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(more, says, base, tmp_path, capsys) -> None:
    assert command.main(arguments(base, tmp_path / "out", *more)) == USER_ERROR
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1, text
    assert re.search(says, text), text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("RTE/dev.tsv", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe\n", "RTE/dev.tsv, line 2: label 'maybe'"),
        ("QNLI/test.tsv", "index\tsentence\n0\ta\n", "QNLI/test.tsv: no column 'question'"),
        ("SST-2/train.tsv", "", "SST-2/train.tsv: is empty"),
        ("SST-2/test.tsv", "index\tsentence\n1\ta\n", "SST-2: its test file has no index 0"),
    ],
)
def test_a_wrong_file_of_a_later_task_is_said_before_anything_is_written(
    name, text, says, base, tmp_path, capsys
) -> None:
    shutil.copytree(base / "glue", tmp_path / "glue")
    (tmp_path / "glue" / name).write_text(text)
    argv = [*arguments(base, tmp_path / "out"), "--data", str(tmp_path / "glue")]
    assert command.main(argv) == USER_ERROR
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_label_that_a_later_task_does_not_train_is_said_before_anything_is_written(base, tmp_path, capsys) -> None:
    for name, unknown in (("first", "yes"), ("second", "maybe")):
        (tmp_path / f"{name}.tsv").write_text(
            "text\tlabel\n" + "".join(f"w{n}\t{'yes' if n % 2 else 'no'}\n" for n in range(20))
        )
        (tmp_path / f"{name}-dev.tsv").write_text(f"text\tlabel\nw1\tno\nw2\t{unknown}\n")
        (tmp_path / f"{name}.toml").write_text(
            f'kind = "classify"\ntext = ["text"]\nlabel = "label"\ntrain = "{name}.tsv"\ndev = "{name}-dev.tsv"\n'
        )
    argv = [*arguments(base, tmp_path / "out", "--suite", "own", "--seeds", "1"), "--data", str(tmp_path)]
    assert command.main([*argv, "--grid", "none"]) == USER_ERROR
    assert "second-dev.tsv, line 3: label 'maybe' is not in the training file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def run(argv: list[str], ranks: int = 1) -> subprocess.CompletedProcess[str]:
    start = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    line = [sys.executable, *start, "-m", "megabert.finetune.benchmark", *argv]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=600)


BINARY = {"0", "1"}
LABELS = dict.fromkeys(("CoLA", "SST-2", "MRPC", "QQP", "WNLI"), BINARY)
LABELS |= {name: {"entailment", "not_entailment"} for name in ("QNLI", "RTE")}
LABELS |= {name: {"contradiction", "entailment", "neutral"} for name in ("MNLI-m", "MNLI-mm", "AX")}


@pytest.mark.slow
def test_all_nine_tasks_to_one_table_and_one_zip(base, tmp_path) -> None:
    done = run(arguments(base, tmp_path / "out", "--seeds", "2", "--grid", "none"))
    assert done.returncode == 0, done.stderr
    trees = json.loads((tmp_path / "out/results.json").read_text())["tasks"]
    assert [tree["title"] for tree in trees] == list(suites.GLUE.values())
    rows = [line.split(" | ")[0] for line in (tmp_path / "out/results.md").read_text().splitlines()]
    assert [row for row in rows if row == "| WNLI"] == ["| WNLI"] * 2, "the table and the comparison"
    assert all(len(f["values"]) == 2 and f["interval"] for t in trees for s in t["scores"].values() for f in s.values())  # fmt: skip
    with zipfile.ZipFile(tmp_path / "out/submission/submission.zip") as archive:
        assert archive.namelist() == [f"{name}.tsv" for name in submission.NAMES]
        for name in submission.NAMES:
            header, *lines = archive.read(f"{name}.tsv").decode().splitlines()
            assert header == "index\tprediction"
            found = [line.split("\t") for line in lines]
            assert [index for index, _ in found] == [str(i) for i in range(6 if name == "AX" else 5)]
            if name == "STS-B":
                assert all(re.fullmatch(r"[0-5]\.\d{3}", value) for _, value in found)
            else:
                assert {value for _, value in found} <= LABELS[name]
    again = run(arguments(base, tmp_path / "out", "--seeds", "2", "--grid", "none", "--tasks", "rte"))
    assert again.returncode == 0 and "rte/seed" not in again.stdout and "| CoLA |" in again.stdout
    other = run(arguments(base, tmp_path / "out", "--choose-on", "dev", "--tasks", "rte"))
    assert other.returncode == USER_ERROR and "was made with choose_on='train'" in other.stderr


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_do_what_one_does_in_the_published_way(base, tmp_path) -> None:
    """Without dropout, whose masks are of rows that ranks pack differently."""
    more = ("--tasks", "stsb", "rte", "--seeds", "1", "--grid", "lr=1e-3,1e-4", "dropout=0", "--choose-on", "dev")
    for ranks in (1, 2):
        done = run(arguments(base, tmp_path / str(ranks), *more), ranks)
        assert done.returncode == 0, done.stderr
    one, two = (json.loads((tmp_path / str(n) / "results.json").read_text())["tasks"] for n in (1, 2))
    assert [tree["scores"].keys() for tree in one] == [tree["scores"].keys() for tree in two]
    for first, second in zip(one, two, strict=True):
        assert first["published_way"] and first["point"] == second["point"]
        for row, by in first["scores"].items():
            for metric, figure in by.items():
                assert figure["mean"] == pytest.approx(second["scores"][row][metric]["mean"], abs=2e-3)
    assert "also chose the epoch" in (tmp_path / "2/results.md").read_text()


@pytest.mark.slow
def test_a_folder_of_ones_own_tasks(base, tmp_path) -> None:
    finetune_problem.write_texts(tmp_path / "train.tsv", 60, 1)
    finetune_problem.write_tags(tmp_path / "tags.conll", 60, 1)
    (tmp_path / "parity.toml").write_text(
        'kind = "classify"\ntext = ["text"]\nlabel = "label"\ntrain = "train.tsv"\ntest = "train.tsv"\n'
    )
    (tmp_path / "names.toml").write_text(
        'kind = "tag"\nmetrics = ["f1", "accuracy"]\ntrain = "tags.conll"\n[settings]\nlr = 3e-3\n'
    )
    argv = arguments(base, tmp_path / "out", "--suite", "own", "--seeds", "1", "--grid", "small")
    done = run([*argv, "--data", str(tmp_path)])
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out/results.md").read_text()
    assert "| names | f1 |" in page and "no grid" in page and "| parity | accuracy |" in page
    assert "held out of train, 6 | held out of train, 5 |" in page
    lines = (tmp_path / "out/submission/parity.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction" and len(lines) == 61
