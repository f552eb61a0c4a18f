"""Runs: resumed bit for bit, seeds, ranks; several runs in one folder and their summary."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megabert import hf as pretrained
from megabert.common.errors import BadTraining
from megabert.distributed.ranks import World
from megabert.distributed.watchdog import Watchdog
from megabert.finetune import datasets, run, save, tasks
from megabert.finetune.run import Data, FineTuning
from megabert.finetune.scores import SUFFIXES
from megabert.finetune.settings import Settings
from megabert.hf import Pretrained
from tests.helpers import finetune_problem
from tests.helpers.loop import StopAt
from tests.helpers.ranks import run_ranks

TASKS = {
    "classify": tasks.custom("classify", text=["text"], label="label"),
    "tag": tasks.custom("tag", metrics=["f1", "accuracy"]),
    "span": tasks.preset("squad1.1"),
}
WRITERS = {
    "classify": finetune_problem.write_texts,
    "tag": finetune_problem.write_tags,
    "span": finetune_problem.write_questions,
}
SETTINGS = Settings(lr=3e-3, batch=8, epochs=2, max_length=32, precision="fp32", zero=0)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    finetune_problem.write_run(folder / "run")
    for kind, write in WRITERS.items():
        write(folder / f"{kind}.train", 60, 1)
        write(folder / f"{kind}.dev", 30, 2)
    return folder


def data_of(base: Path, kind: str, start: Pretrained, settings: Settings = SETTINGS) -> Data:
    task = TASKS[kind]
    examples = {name: datasets.read(task, base / f"{kind}.{name}") for name in ("train", "dev")}
    return run.encode_splits(task, examples, start.tokenizer, settings)


def fine_tune(base: Path, kind: str, folder: Path, world: World, settings: Settings, stop: Any = None) -> Any:
    start = pretrained.load(base / "run")
    data = data_of(base, kind, start, settings)
    return FineTuning(folder, "name", data, start, settings, world, 2).train(stop or StopAt(), unwatched(world))


def unwatched(world: World) -> Watchdog:
    """A watchdog that was never started."""
    return Watchdog(world, "", 0)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "best" / save.WEIGHTS)


def change(**values: Any) -> Settings:
    return replace(SETTINGS, **values)


@pytest.mark.parametrize("kind", TASKS)
def test_run_leaves_model_scores_and_predictions(kind, base, tmp_path, world) -> None:
    settings = change(epochs=4 if kind == "tag" else 2)
    result = fine_tune(base, kind, tmp_path, world, settings)
    per_epoch = -(-len(data_of(base, kind, pretrained.load(base / "run")).items["train"]) // 8)
    assert result["steps"] == settings.epochs * per_epoch
    assert json.loads((tmp_path / "result.json").read_text()) == result
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    main = TASKS[kind].metrics[0]
    dev = [line[f"dev/{main}"] for line in lines if f"dev/{main}" in line]
    assert len(dev) == settings.epochs
    assert result["scores"]["dev"][main] == max(dev)  # the best weights, as they were saved
    assert [line["step"] for line in lines if "train/loss" in line][-1] == result["steps"]
    assert not (tmp_path / "checkpoints").exists()
    assert (tmp_path / f"predictions-dev.{SUFFIXES.get(kind, 'tsv')}").stat().st_size > 100
    found = save.load(tmp_path, world.device)
    assert (
        found.results["dev"] == result["scores"]["dev"]
        and found.described.labels == ({"classify": ("even", "odd"), "tag": ("B-A", "B-B", "O"), "span": ()}[kind])
    )
    if kind == "tag":
        assert result["scores"]["dev"]["f1"] > 0.8  # a word's tag is a function of the word


def test_runs_leave_a_summary_and_are_not_repeated(base, tmp_path, world, monkeypatch) -> None:
    """The best rate first; a finished run is freed before the next one."""
    start, settings = pretrained.load(base / "run"), change(epochs=1, batch=60)
    data = data_of(base, "classify", start)
    modules: list[weakref.ref[Any]] = []

    def created(*given: Any) -> FineTuning:
        assert not any(module() for module in modules)
        made = FineTuning(*given)
        modules.append(weakref.ref(made.module))
        return made

    monkeypatch.setattr(run, "FineTuning", created)

    def train(stop: Any, *rates: float) -> dict[str, Any] | None:
        runs = {f"lr{lr:g}-seed{seed}": replace(settings, lr=lr, seed=seed) for lr in rates for seed in (1, 2)}
        common = {"task": "custom"}
        return run.train_missing(tmp_path, common, data, start, runs, world, stop, unwatched(world), 2)

    assert train(StopAt(1), 3e-3) is None
    first = train(StopAt(), 3e-3)
    again = train(StopAt(), 3e-3, 1e-12)
    assert first is not None and again is not None and len(modules) == 1 + 2 + 2
    assert again["runs"][:2] == first["runs"] and [run["settings"]["seed"] for run in again["runs"]] == [1, 2] * 2
    assert json.loads((tmp_path / "summary.json").read_text()) == again and again["settings"] == {"task": "custom"}
    best, other = (point["scores"]["dev"]["accuracy"]["mean"] for point in again["points"])
    assert best >= other


def test_stopped_run_ends_with_the_same_weights(base, tmp_path, world) -> None:
    settings = change(epochs=4, dropout=0.1)
    whole = fine_tune(base, "classify", tmp_path / "whole", world, settings)
    for ask in (1, 4, 12, 6):  # before the first update, inside a window, after an evaluation, inside a window
        stopped = fine_tune(base, "classify", tmp_path / "parts", world, settings, StopAt(ask))
        assert stopped is None
    parts = fine_tune(base, "classify", tmp_path / "parts", world, settings)
    assert {**parts, "seconds": 0} == {**whole, "seconds": 0}
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

    def figures(folder: Path) -> list[dict[str, Any]]:
        """Each is the mean over its window, whatever happened in between."""
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [{k: v for k, v in line.items() if k.startswith("train/")} for line in lines if "train/loss" in line]

    assert len(figures(tmp_path / "parts")) > 3 and figures(tmp_path / "parts") == figures(tmp_path / "whole")

    def dev_lines(folder: Path) -> list[dict[str, Any]]:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) | {"time/train_seconds": 0} for line in lines if "dev/" in line]

    assert dev_lines(tmp_path / "whole") == dev_lines(tmp_path / "parts")


def test_seed_decides_the_weights(base, tmp_path, world) -> None:
    found = []
    for number, seed in enumerate((1, 1, 2)):
        fine_tune(base, "classify", tmp_path / str(number), world, change(epochs=1, seed=seed, dropout=0.1))
        found.append(weights(tmp_path / str(number)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not torch.equal(found[0]["head.output.weight"], found[2]["head.output.weight"])


def test_from_scratch_starts_with_random_weights(base, tmp_path, world) -> None:
    start = pretrained.load(base / "run")
    data = data_of(base, "classify", start)
    name = "embeddings.position"
    kept = FineTuning(tmp_path / "a", "a", data, start, SETTINGS, world, 5)
    assert torch.equal(kept.module.encoder.state_dict()[name], start.weights[name])
    new = FineTuning(tmp_path / "b", "b", data, start, change(from_scratch=True), world, 5)
    assert not torch.equal(new.module.encoder.state_dict()[name], start.weights[name])


def test_nonfinite_loss_ends_the_run(base, tmp_path, world) -> None:
    start = pretrained.load(base / "run")
    start.weights["embeddings.norm_weight"][0] = float("nan")
    data = data_of(base, "classify", start)
    with pytest.raises(BadTraining, match="10 updates in a row"):
        FineTuning(tmp_path, "name", data, start, change(batch=4), world, 5).train(StopAt(), unwatched(world))


@pytest.mark.parametrize(
    "settings, word",
    [
        (change(max_length=64), "--max-length 64: the model has 32 positions"),
        (change(batch=9, micro_batch=2), "--micro-batch 2"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings, word, base) -> None:
    start = pretrained.load(base / "run")
    data = data_of(base, "classify", start)
    with pytest.raises(ValueError, match=word):
        run.describe(data, start, settings, 1)


def train_on_ranks(world: World, base: str, folder: str, settings: Settings) -> dict[str, Any]:
    return fine_tune(Path(base), "classify", Path(folder), world, settings)


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_and_micro_steps_train_the_same_model(base, tmp_path, world) -> None:
    # 60 items in batches of 8: the last update of an epoch holds 4, fewer than there are ranks x micro-steps
    alone, settings = tmp_path / "alone", change(zero=1, dropout=0.0)
    fine_tune(base, "classify", alone, world, settings)
    results = run_ranks(2, train_on_ranks, str(base), str(tmp_path / "ranks"), replace(settings, micro_batch=1))
    assert results[0] == results[1]
    one, other = weights(alone), weights(tmp_path / "ranks")
    worst = max(float((one[name] - other[name]).abs().max()) for name in one)
    assert worst < 2e-4, worst
