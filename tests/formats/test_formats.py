"""What each release wrote is read, continued and exported by this version, in copies; a newer format is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import megabert
from data_prep.report import inspect_dataset
from megabert.commands import export, verify
from megabert.common.run_files import METRICS
from megabert.data.shards import Dataset
from megabert.finetune.__main__ import main as finetune
from tests.formats import make
from tests.helpers.refusal import refusal

HERE = Path(__file__).parent
RELEASES = sorted(path.parent.name for path in HERE.glob("*/expected.json"))


@pytest.fixture(params=RELEASES)
def folder(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a release's files, in which the test runs."""
    shutil.copytree(HERE / request.param, tmp_path / "files")
    monkeypatch.chdir(tmp_path / "files")
    return tmp_path / "files"


def test_this_version_has_its_files() -> None:
    assert megabert.__version__ in RELEASES


def expected(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "expected.json").read_text())


def test_the_dataset_has_the_same_rows(folder: Path) -> None:
    assert list(inspect_dataset.verify("data", 1, False)) == []
    assert make.rows_digest(Path("data")) == expected(folder)["rows"]


def test_the_run_goes_on(folder: Path) -> None:
    assert make.weights_digest(Path("run")) == expected(folder)["weights"]
    make.run(folder, "train", "--config", "run.toml", "--data", "data", "--run", "run")
    lines = [json.loads(line) for line in Path("run", METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines if "train/loss" in line] == [*range(2, make.STEPS + 1, 2)]
    assert lines[-1]["step"] == expected(folder)["step"]
    # sums in other kernels, rounded elsewhere
    assert lines[-1]["eval/mlm_loss"] == pytest.approx(expected(folder)["eval/mlm_loss"], rel=1e-3)
    assert verify.main(["run"]) == 0


def test_the_fine_tuned_model_predicts_the_same(folder: Path) -> None:
    assert finetune(["--model", "finetuned", "--predict", make.TASK, "--output", "again.tsv"]) == 0
    assert Path("again.tsv").read_bytes() == Path("predictions.tsv").read_bytes()


def test_the_export_is_read_and_made_again(folder: Path) -> None:
    assert make.weights_digest(Path("export")) == expected(folder)["weights"]
    assert export.main(["--model", "run", "--output", "again"]) == 0
    before, after = (load_file(Path(name, "model.safetensors")) for name in ("export", "again"))
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
    texts = Path(make.TEXTS).read_text().splitlines()
    of_run, of_export = (megabert.load(name).tokenizer(texts) for name in ("run", "export"))
    assert of_run.equal(of_export)


def test_a_newer_dataset_is_refused(folder: Path) -> None:
    file = Path("data/manifest.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema": 2}))
    with pytest.raises(
        ValueError, match=r"manifest\.json: has format 2 of a later MegaBERT; .* reads up to 1: update MegaBERT"
    ):
        Dataset("data")


def test_a_newer_fine_tuned_model_is_refused(folder: Path, capsys) -> None:
    file = Path("finetuned/task.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    said = refusal(capsys, finetune, "--model", "finetuned", "--predict", make.TASK, "--output", "again.tsv")
    assert "task.json" in said and "later MegaBERT" in said
