"""The command: its mistakes are one line and leave nothing; any model can be judged."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pytest

from megabert import hf as pretrained
from megabert.common.atomic_io import sha256_of
from megabert.common.errors import USER_ERROR
from megabert.finetune.embed import __main__ as command
from tests.helpers import finetune_problem, runs
from tests.helpers import pairs as problem


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("embed")
    finetune_problem.write_run(folder / "run")
    for name, seed in (("train", 1), ("dev", 2)):
        problem.write(folder / f"{name}.tsv", 40, seed)
    return folder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("TRAIN DEV PAIR --batch 1", "--batch 1: a pair alone has no negatives"),
        ("TRAIN DEV PAIR --temperature 0", "--temperature 0: must be above 0"),
        ("TRAIN DEV PAIR --max-length 64", "--max-length 64: the model has 32 positions"),
        ("TRAIN DEV PAIR --text c", "--text c: a pair has two texts"),
        ("TRAIN DEV PAIR --limit -1", "--limit -1: must be at least 0"),
        ("--train LINES --dev LINES", "texts alone cannot be judged by"),
        (
            "--train LINES DEV --dev-text a --dev-text b --max-length 16 --dropout 0",
            "--dropout 0: texts alone are learned from by two dropout masks",
        ),
        ("TRAIN PAIR --dev nowhere.tsv", "nowhere.tsv: no such file"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(arguments, said, base, tmp_path, capsys) -> None:
    (tmp_path / "lines.txt").write_text("w1\nw2\n")
    meant = {"TRAIN": f"--train {base / 'train.tsv'}", "DEV": f"--dev {base / 'dev.tsv'}"}
    meant |= {"PAIR": "--text a --text b", "LINES": str(tmp_path / "lines.txt")}
    for word, text in meant.items():
        arguments = arguments.replace(word, text)
    out = tmp_path / "out"
    assert command.main(["train", "--model", str(base / "run"), "--output", str(out), *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not out.exists()


def test_a_tokenizer_that_cannot_be_saved_is_said_before_anything_is_trained(base, tmp_path, capsys) -> None:
    run = runs.make(tmp_path / "run", "nfkc")
    arguments = f"--train {base}/train.tsv --dev {base}/dev.tsv --text a --text b --max-length 16 --batch 8"
    out = tmp_path / "out"
    assert command.main(["train", "--model", str(run), "--output", str(out), *arguments.split()]) == USER_ERROR
    assert "normalization_rule_name=nfkc cannot be expressed in tokenizer.json" in capsys.readouterr().err
    assert not out.exists()


def test_a_saved_dataset_is_known_by_its_files(base, tmp_path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    feather.write_feather(pa.table({"a": ["w1", "w2"], "b": ["w3", "w4"]}), folder / "a.arrow")
    (folder / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    given = f"train --model m --output o --train {folder} --dev {base}/dev.tsv --text a --text b"
    args = command.parse(given.split())
    assert len(command.read(args).train) == 2
    facts = command.facts(args, pretrained.load(base / "run"))
    assert facts["train_sha256"] == sha256_of(folder / "a.arrow")


def test_a_plain_model_is_judged_by_its_mean(base, capsys) -> None:
    arguments = ["--test", str(base / "dev.tsv"), "--text", "a", "--text", "b", "--max-length", "16"]
    assert command.main(["evaluate", "--model", str(base / "run"), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pool"] == "mean" and found["pairs"] == 40 and 0 <= found["recall@10"] <= 1
