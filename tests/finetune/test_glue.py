"""`megabert glue` on made-up files of all nine tasks: what decides, what is reported, the table, resuming."""

import gzip
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from megabert.finetune import glue
from megabert.finetune.files import TextExample, read
from tests.helpers import finetune_problem, glue_folder
from tests.helpers.refusal import refusal
from tests.integration.conftest import command

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


def test_glue_layout_is_found_whole(base) -> None:
    found = {glue.GLUE[task.name]: (task, files) for task, files in glue.find_tasks(base / "glue")}
    assert list(found) == list(glue.GLUE.values())
    names = {split: path.name for split, path in found["MNLI"][1].items()}
    assert names == {"train": "train.tsv", "reported-m": "dev_matched.tsv", "reported-mm": "dev_mismatched.tsv"}
    for task, files in found.values():
        counts = {split: len(read(task, path)) for split, path in files.items()}
        assert counts.pop("train") == 40 and set(counts.values()) == {8}
    splits = glue.read_splits(*found["MNLI"])
    sizes = {name: len(part) for name, part in splits.items()}
    assert sizes == {"train": 36, "reported-m": 8, "reported-mm": 8, "dev": 4}
    assert len({example.where for part in splits.values() for example in part}) == 56


def test_folders_by_task_name_and_missing_ones(tmp_path, caplog) -> None:
    (tmp_path / "RTE").mkdir()
    (tmp_path / "sst2").mkdir()
    for name in ("train", "dev"):
        (tmp_path / f"sst2/{name}.tsv.gz").write_bytes(gzip.compress(b"sentence\tlabel\ngood\t1\nbad\t0\n"))
    ((task, files),) = glue.find_tasks(tmp_path, ["sst2"])
    assert task.name == "sst2" and len(read(task, files["reported"])) == 2
    for split in ("train", "validation_mismatched", "validation_matched", "test_matched"):
        path = tmp_path / f"mnli/{split}-00000-of-00001.parquet"
        path.parent.mkdir(exist_ok=True)
        parquet.write_table(pa.table({"premise": ["a"], "hypothesis": ["b"], "label": [2], "idx": [0]}), path)
    caplog.set_level("INFO")
    two = {task.name: (task, files.values()) for task, files in glue.find_tasks(tmp_path)}
    labels = {name: [read(task, path)[0].label for path in paths] for name, (task, paths) in two.items()}
    assert labels == {"sst2": ["1", "1"], "mnli": ["contradiction"] * 3}
    assert "has no CoLA, MRPC, STS-B, QQP, QNLI, RTE, WNLI (no train or no dev file): left out" in caplog.text


def test_a_tsv_is_taken_before_other_files(tmp_path: Path) -> None:
    (tmp_path / "RTE").mkdir()
    hubs = (f"{name}-00000-of-00001.parquet" for name in ("train", "validation"))
    for name in ("train.tsv", "train.tsv.gz", "dev.tsv", "train.jsonl", *hubs):
        (tmp_path / "RTE" / name).touch()
    ((_, files),) = glue.find_tasks(tmp_path, ["rte"])
    assert {split: path.name for split, path in files.items()} == {"train": "train.tsv.gz", "reported": "dev.tsv"}


def texts(count: int, same: int = 1) -> list[TextExample]:
    return [TextExample(str(n), f"f, line {n}", f"first {n // same}", f"second {n}", "0") for n in range(count)]


def test_hold_out_depends_on_texts_alone(monkeypatch) -> None:
    examples = texts(200)
    rest, held = glue.hold_out(examples)
    assert len(held) == 20 and len(rest) == 180 and not {e.a for e in rest} & {e.a for e in held}
    assert {e.id for e in glue.hold_out(examples[::-1])[1]} == {e.id for e in held}
    rest, held = glue.hold_out(texts(200, same=5))
    assert 20 <= len(held) <= 40 and not {e.a for e in rest} & {e.a for e in held}
    monkeypatch.setattr(glue, "MOST", 5)
    assert len(glue.hold_out(examples)[1]) == 5
    with pytest.raises(ValueError, match=r"^f: its examples share too few texts"):
        glue.hold_out(texts(9, same=9))


def test_page_has_a_row_a_metric() -> None:
    scores = {"dev": {}, "reported": {"accuracy": {"mean": 0.61, "std": 0.014}}}
    points = [{"point": {"lr": lr}, "runs": 2, "scores": scores} for lr in (2e-5, 5e-5)]
    summary = {"settings": {"task": "rte", "limit": 0}, "points": points}
    page = glue.render_page("runs/mini", [summary])
    assert page.startswith("# GLUE: runs/mini\n") and "--limit" not in page
    assert "| RTE | accuracy | 61.0 | 1.4 | 2 | 2e-05 (2 tried) |" in page.splitlines()
    assert "`--limit`" in glue.render_page("m", [summary | {"settings": {"task": "rte", "limit": 100}}])


def test_page_is_of_one_model(tmp_path, caplog) -> None:
    """A folder may have tasks of another one."""
    scores = {"dev": {}, "reported": {"accuracy": {"mean": 0.61, "std": 0.0}}}
    points = [{"point": {"lr": 2e-5}, "runs": 1, "scores": scores}]
    models = {"sst2": "a", "mrpc": "b", "rte": "b", "cola": "b"}
    settings = {task: {"task": task, "limit": 0, "model_sha256": weights} for task, weights in models.items()}
    settings["cola"]["from_scratch"] = True
    settings["mrpc"]["separators"] = 2  # of RoBERTa's pairs alone
    summaries = {task: {"settings": settings[task], "points": points} for task in models}
    for task, summary in summaries.items():
        (tmp_path / task).mkdir()
        (tmp_path / task / "summary.json").write_text(json.dumps(summary))
    shown = glue.publish(tmp_path, "https://me:secret@host/b?key=secret", summaries["rte"])
    page = (tmp_path / "results.md").read_text()
    assert shown.startswith(page) and page.startswith("# GLUE: https://host/b\n")
    assert [name for name in ("CoLA", "SST-2", "MRPC", "RTE") if name in page] == ["MRPC", "RTE"]
    assert "results.md leaves out cola, sst2, which are of another model or of other settings" in caplog.text


def test_mistake_in_a_later_task_writes_nothing(base, tmp_path, capsys) -> None:
    shutil.copytree(base / "glue", tmp_path / "glue")
    (tmp_path / "glue/WNLI/dev.tsv").write_text("")
    said = refusal(capsys, glue.main, *arguments(base, tmp_path / "out"), "--data", tmp_path / "glue")
    assert "WNLI/dev.tsv: holds no example" in said and not (tmp_path / "out").exists()
    (tmp_path / "out/wnli").mkdir(parents=True)
    (tmp_path / "out/wnli/settings.json").write_text('{"epochs": 9}')
    said = refusal(capsys, glue.main, *arguments(base, tmp_path / "out"))
    assert "out/wnli: was made with" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["wnli"]


@pytest.mark.slow
def test_tasks_to_one_table(base, tmp_path) -> None:
    """Another command on the folder adds a task."""
    out = tmp_path / "out"
    given = arguments(base, out, "--seeds", "1", "--lr", "1e-3", "1e-12")

    def run(*tasks: str) -> None:
        done = command("-m", "megabert.finetune.glue", *given, "--tasks", *tasks, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr

    run("mnli")
    summary = json.loads((out / "mnli/summary.json").read_text())
    assert list(summary["points"][0]["scores"]) == ["dev", "reported-m", "reported-mm"] and len(summary["runs"]) == 2
    run("mnli", "stsb")
    rows = [line.split(" | ")[0] for line in (out / "results.md").read_text().splitlines() if line.startswith("| ")]
    assert rows == ["| task", "| STS-B", "| STS-B", "| MNLI-m", "| MNLI-mm"]
