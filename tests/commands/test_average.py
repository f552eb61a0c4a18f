"""Of the checkpoints of a run: their mean, who reads it, what is refused; and updates repeated."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megabert import hf, train
from megabert.checkpoint import load_weights
from megabert.commands import average, export, fill, replay
from megabert.commands.evaluate import evaluate_run
from megabert.distributed.ranks import World
from tests.helpers.refusal import refusal
from tests.test_held_out_by_dataset import DATA, SMALL, random_rows, trained

THREE = ("schedule.total_steps=3", "checkpoint.interval=1", "checkpoint.keep=3", "optimizer.lr=1e-2")


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints of its three updates."""
    folder = tmp_path_factory.mktemp("average") / "run"
    trained(world, folder, *THREE)
    return folder


@pytest.mark.parametrize(("options", "steps"), [("", (1, 2, 3)), ("--last 2", (2, 3)), ("--steps 3 1", (1, 3))])
def test_tensors_are_the_mean_to_the_last_bit(run, tmp_path, options: str, steps: tuple[int, ...]) -> None:
    assert average.main(["--run", str(run), "--output", str(tmp_path / "mean"), *options.split()]) == 0
    ours, state = load_weights(tmp_path / "mean")
    each = [load_weights(run / f"checkpoints/step-{step:08d}")[0] for step in steps]
    assert state["step"] == 0 and ours.keys() == each[0].keys()
    for name, weight in ours.items():
        mean = np.mean([weights[name].numpy() for weights in each], axis=0, dtype=np.float64).astype(np.float32)
        assert weight.numpy().tobytes() == mean.tobytes(), name
    assert not np.array_equal(ours["layers.0.qkv.weight"], each[-1]["layers.0.qkv.weight"])


def test_every_reader_takes_the_mean(world: World, run: Path, tmp_path: Path) -> None:
    mean, parts = tmp_path / "mean", [evaluate_run(run / f"checkpoints/step-{n:08d}", str(DATA)) for n in (1, 2, 3)]
    assert average.average(run, mean) == [1, 2, 3]
    found = evaluate_run(mean, str(DATA))
    assert found["step"] == 0 and found["eval/mlm_loss"] < max(part["eval/mlm_loss"] for part in parts)
    assert export.main(["--model", str(mean), "--output", str(tmp_path / "hf")]) == 0
    assert hf.load(tmp_path / "hf").weights.keys() == hf.load(mean).weights.keys()
    assert fill.main(["--model", str(mean), "one [MASK] two"]) == 0
    start = trained(world, tmp_path / "next", f"init_from={mean}", "schedule.total_steps=1", "eval.interval=1")
    lines = [json.loads(line) for line in (tmp_path / "next/metrics.jsonl").read_text().splitlines()]
    assert lines[0]["eval/mlm_loss"] == pytest.approx(found["eval/mlm_loss"], rel=1e-5) and start
    with pytest.raises(ValueError, match="the mean of steps"):
        trained(world, mean, *THREE)


def test_other_models_cannot_be_averaged(world: World, run: Path, tmp_path: Path, capsys) -> None:
    other, first = Path(shutil.copytree(run, tmp_path / "other")), "checkpoints/step-00000001"
    trained(world, tmp_path / "wider", "model.hidden=64", "schedule.total_steps=1")
    shutil.rmtree(other / first)
    shutil.copytree(tmp_path / "wider" / first, other / first)
    said = refusal(capsys, average.main, "--run", other, "--output", tmp_path / "mean")
    assert "its hidden is 64, the newest one's 32" in said and not (tmp_path / "mean").exists()


def test_an_extended_run_is_replayed(tmp_path: Path, capsys, own_signals: None) -> None:
    data, run = str(random_rows(tmp_path / "data", 40, seed=1)), str(tmp_path / "run")
    words = ["--config", "tiny", "--data", data, "--run", run, *SMALL, "checkpoint.interval=1", "checkpoint.keep=5"]
    assert train.main(words) == 0
    assert train.main([*words, "--extend", "schedule.total_steps=3"]) == 0
    assert replay.main([run, "--from", "2", "--to", "3"]) == 0
    assert "digests of weights of steps 3 to 3 are equal bit for bit" in capsys.readouterr().out
    assert replay.main([run, "--from", "1", "--to", "3"]) == 2
    assert "--from 1 --to 3: the configuration changed at step 2; replay up to it" in capsys.readouterr().err
