"""Held-out figures of each dataset of a mixture, in training and afterwards."""

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megabert import config as configuration
from megabert.commands import report
from megabert.commands.evaluate import evaluate_run
from megabert.data.mixture import distinct_names
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.distributed.ranks import World
from megabert.distributed.watchdog import Watchdog
from megabert.open_run import open_run
from tests.helpers.job import Job
from tests.helpers.loop import StopAt
from tests.helpers.rows import SPECIAL, make_dataset, make_rows

DATA = Path(__file__).parent / "data" / "golden" / "dataset"
SMALL = (
    *("model.layers=1", "model.hidden=32", "model.heads=2", "batch.global_size=8", "batch.micro_size=4"),
    *("schedule.total_steps=2", "schedule.warmup_steps=0", "eval.interval=0", "eval.rows=8", "peak_tflops=1.0"),
    *("log.interval=1", "log.tensorboard=false", "data.workers=0", "precision=fp32"),
)


def random_rows(folder: Path, rows: int, seed: int, **changes: Any) -> Path:
    """A dataset with the tokenizer and the row length of DATA."""
    tokenizer = Dataset(DATA).manifest.tokenizer
    ids, bounds, isnext = make_rows(rows, seq_len=64, slots=2, seed=seed)
    ordinary = ids > max(SPECIAL.values())
    ids[ordinary] = ids[ordinary] % (tokenizer["vocab_size"] - len(SPECIAL)) + len(SPECIAL)
    make_dataset(folder, rows, seq_len=64, slots=2, arrays=(ids, bounds, isnext), tokenizer=tokenizer, **changes)
    shutil.copy(DATA / tokenizer["file"], folder)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of random tokens, with a held-out split."""
    folder = tmp_path_factory.mktemp("more") / "other"
    held_out = random_rows(folder / "held_out", 12, seed=1)
    sha256 = hashlib.sha256((held_out / "manifest.json").read_bytes()).hexdigest()
    return random_rows(folder, 40, seed=0, held_out={"path": "held_out", "rows": 12, "manifest_sha256": sha256})


def trained(world: World, folder: Path, *overrides: str, **options: Any) -> dict[str, float]:
    """The last held-out figures of a run."""
    cfg = configuration.load("tiny", [*SMALL, f"data.path={DATA}", *overrides])
    trainer = open_run(folder, cfg, world, StopAt(), Watchdog(world, folder, 0.0), **options)
    assert trainer.train()
    trainer.close()
    return trainer.last_eval


def bytes_a_token(folder: Path) -> float:
    """Counted token by token."""
    dataset = Dataset(folder)
    tokens = Tokenizer.load(dataset.tokenizer_path).token_bytes()
    sizes = [len(tokens[i]) for i in dataset.read(np.arange(dataset.rows)).ids.ravel().tolist() if i > 4]
    return sum(sizes) / len(sizes)


@pytest.mark.parametrize("phases", [False, True])
def test_each_dataset_of_a_run_is_evaluated(world: World, tmp_path: Path, other: Path, phases: bool) -> None:
    mix = f'data.mix={{"{other}"=0.25}}'
    found = trained(world, tmp_path, f"phases=[{{share=1}},{{share=1,{mix}}}]" if phases else mix)
    alone = {"dataset": evaluate_run(tmp_path, str(DATA)), "other": evaluate_run(tmp_path, str(other))}
    assert found["eval/mlm_loss"] == found["eval/loss_by_dataset/dataset"]
    for name, folder in (("dataset", DATA), ("other", other)):
        loss = found[f"eval/loss_by_dataset/{name}"]
        assert loss == pytest.approx(alone[name]["eval/mlm_loss"], rel=1e-5)
        bits = loss / math.log(2) / bytes_a_token(folder / "held_out")
        assert found[f"eval/bits_per_byte_by_dataset/{name}"] == pytest.approx(bits)
    both = evaluate_run(tmp_path, [str(DATA), str(other)])
    assert both == {name: pytest.approx(value, rel=1e-5) for name, value in (found | {"step": 2}).items()}
    assert not any("by_dataset" in name for name in alone["other"])
    assert report.main([str(tmp_path)]) == 0
    assert "Loss, held out, other" in (tmp_path / "report.html").read_text()


def test_each_phase_evaluates_the_datasets_of_all(world: World, tmp_path: Path, other: Path) -> None:
    """Masked as the last phase is, with the rotary base of the phase the run is in."""
    second = f'data.path="{other}", model.rope_theta=50.0, data.masking.rate=0.4'
    overrides = (
        *("model.kind=modern", "model.norm=pre", "model.nsp=false", "eval.interval=1", "optimizer.lr=0.1"),
        *(f"phases=[{{share=0.5}},{{share=0.5,{second}}}]", "schedule.name=constant"),
    )
    for step in (1, 2):
        found = trained(world, tmp_path, *overrides, stop_after=step)
        assert 0.35 < found["eval/predictions"] / (8 * 64) < 0.4
        alone = evaluate_run(tmp_path, [str(DATA), str(other)])
        assert found == {name: pytest.approx(alone[name], rel=1e-6) for name in found}
        assert sum("loss_by_dataset" in name for name in found) == 2


def test_a_member_without_a_split_is_named(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = random_rows(tmp_path / "plain", 40, seed=2)
    found = trained(world, tmp_path / "run", f'data.mix={{"{plain}"=0.5}}')
    assert f"{plain} has no held-out split: the run is not evaluated on it" in caplog.text
    assert [name for name in found if "loss_by_dataset" in name] == ["eval/loss_by_dataset/dataset"]


def test_names_tell_folders_apart() -> None:
    assert distinct_names(["data/wiki", "/data/novels"]) == ["wiki", "novels"]
    assert distinct_names(["old/train", "new/train", "new/more"]) == ["old_train", "new_train", "new_more"]
    assert distinct_names(["a", "./a"]) == ["1_a", "2_a"]


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_evaluate_each_dataset(tmp_path: Path, other: Path) -> None:
    job = Job(DATA, tmp_path / "run", *SMALL, f'data.mix={{"{other}"=0.25}}', "zero.stage=3")
    assert job.codes() == [0, 0], job.output
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    alone = evaluate_run(tmp_path / "run", [str(DATA), str(other)])
    names = [name for name in alone if "by_dataset" in name]
    assert len(names) == 4 and {name: last[name] for name in names} == pytest.approx(
        {name: alone[name] for name in names}, rel=1e-5
    )
