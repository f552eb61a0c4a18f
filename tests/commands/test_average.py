"""The mean of checkpoints: its tensors, who reads it, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megabert import hf
from megabert.checkpoint import load_weights
from megabert.commands import average, export, fill
from megabert.commands.evaluate import evaluate_run
from megabert.distributed.ranks import World
from tests.commands.test_convert import one_line
from tests.test_held_out_by_dataset import DATA, trained

THREE = ("schedule.total_steps=3", "checkpoint.interval=1", "checkpoint.keep=3", "optimizer.lr=1e-2")


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints of its three updates."""
    folder = tmp_path_factory.mktemp("average") / "run"
    trained(world, folder, *THREE)
    return folder


@pytest.mark.parametrize(
    ("options", "steps"), [((), (1, 2, 3)), (("--last", "2"), (2, 3)), (("--steps", "3", "1"), (1, 3))]
)
def test_tensors_are_the_mean_to_the_last_bit(
    run: Path, tmp_path: Path, options: tuple[str, ...], steps: tuple[int, ...]
) -> None:
    assert average.main(["--run", str(run), "--output", str(tmp_path / "mean"), *options]) == 0
    ours, state = load_weights(tmp_path / "mean")
    each = [load_weights(run / f"checkpoints/step-{step:08d}")[0] for step in steps]
    assert state["step"] == 0 and ours.keys() == each[0].keys()
    for name, weight in ours.items():
        mean = np.mean([weights[name].numpy() for weights in each], axis=0, dtype=np.float64).astype(np.float32)
        assert weight.numpy().tobytes() == mean.tobytes(), name
    assert not np.array_equal(ours["layers.0.qkv.weight"], each[-1]["layers.0.qkv.weight"])


def test_every_reader_takes_the_mean(
    world: World, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mean, parts = tmp_path / "mean", [evaluate_run(run / f"checkpoints/step-{n:08d}", str(DATA)) for n in (1, 2, 3)]
    assert average.average(run, mean) == [1, 2, 3]
    found = evaluate_run(mean, str(DATA))
    assert found["step"] == 0 and found["eval/mlm_loss"] < max(part["eval/mlm_loss"] for part in parts)
    assert export.main(["--model", str(mean), "--output", str(tmp_path / "hf")]) == 0
    assert hf.load(tmp_path / "hf").weights.keys() == hf.load(mean).weights.keys()
    assert fill.main(["--model", str(mean), "one [MASK] two"]) == 0
    capsys.readouterr()
    start = trained(world, tmp_path / "next", f"init_from={mean}", "schedule.total_steps=1", "eval.interval=1")
    lines = [json.loads(line) for line in (tmp_path / "next/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["eval/mlm_loss"] == pytest.approx(found["eval/mlm_loss"], rel=1e-5) and start
    with pytest.raises(ValueError, match="the mean of steps"):
        trained(world, mean, *THREE)


def test_what_cannot_be_averaged_is_named(
    world: World, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(folder: Path, *options: str) -> str:
        assert average.main(["--run", str(folder), "--output", str(tmp_path / "mean"), *options]) == 2
        assert not (tmp_path / "mean").exists()
        return one_line(capsys)

    assert "--steps 7: " in (text := refused(run, "--steps", "1", "7")) and "it has 1, 2, 3" in text
    assert "3 checkpoints to average, of 4; checkpoint.keep" in refused(run, "--last", "4")
    assert "--last 1: give at least 2" in refused(run, "--last", "1")
    assert "--steps 3: give at least 2" in refused(run, "--steps", "3")
    other = Path(shutil.copytree(run, tmp_path / "other"))
    trained(world, tmp_path / "wider", "model.hidden=64", "schedule.total_steps=1")
    shutil.rmtree(other / "checkpoints/step-00000001")
    shutil.copytree(tmp_path / "wider/checkpoints/step-00000001", other / "checkpoints/step-00000001")
    capsys.readouterr()
    assert "its hidden is 64, the newest one's 32" in refused(other)
