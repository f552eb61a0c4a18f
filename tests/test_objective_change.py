"""Runs that change from causal to masked LM: interrupted anywhere, they are the same run."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megabert import config as configuration
from megabert.checkpoint import load_weights, write_start
from megabert.config import Config
from megabert.distributed.ranks import World
from megabert.distributed.watchdog import Watchdog
from megabert.evaluation import evaluate_run
from megabert.pretraining import open_run
from megabert.trainer import Trainer
from tests.helpers.forked import Forked
from tests.helpers.loop import StopAt

DATA = Path(__file__).parent / "data" / "golden" / "dataset"
STEPS = 10
SMALL = [
    *("model.layers=1", "model.hidden=32", "model.heads=2", "model.nsp=false", f"data.path={DATA}"),
    *("batch.global_size=8", "batch.micro_size=4", f"schedule.total_steps={STEPS}", "schedule.warmup_steps=2"),
    *("schedule.name=wsd", "eval.interval=0", "eval.rows=8", "peak_tflops=1.0", "log.interval=1"),
    *("log.tensorboard=false", "optimizer.lr=3e-3", "data.workers=0"),
]
SLOW = """
from megabert.trainer import Trainer
def report(self, update, seconds, do=Trainer.report):
    do(self, update, 60.0)
Trainer.report = report
"""
# causal for the first 4 of 10 updates, then masked LM at 30%
RECIPE = [*("objective.causal_share=0.4", "data.masking.rate=0.3", "eval.rate=0.15")]


def config(*overrides: str) -> Config:
    return configuration.load("tiny", [*SMALL, *RECIPE, *overrides])


def opened(world: World, folder: Path, *overrides: str, **options: Any) -> Trainer:
    cfg = config(*overrides)
    return open_run(folder, cfg, world, StopAt(), Watchdog(world, folder, 0.0), **options)  # type: ignore[arg-type]


def trained(
    world: World, folder: Path, *overrides: str, stops: tuple[int | None, ...] = (None,)
) -> tuple[dict[int, dict[str, Any]], dict[str, torch.Tensor]]:
    """Log lines by step, and the weights, of a run that was stopped at `stops`."""
    for stop_after in stops:
        trainer = opened(world, folder, *overrides, stop_after=stop_after)
        assert trainer.train()
        weights = trainer.engine.consolidated_weights()
        trainer.close()
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if "train/loss" in line}, weights


def same(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> None:
    assert list(ours[0]) == list(theirs[0]) == list(range(1, STEPS + 1))
    for step, line in theirs[0].items():
        for name in ("train/loss", "train/grad_norm", "train/lr", "train/objective", "data/row_digest"):
            assert ours[0][step][name] == line[name], (step, name)
    for name, weight in theirs[1].items():
        assert torch.equal(ours[1][name], weight), name


TOKENS = 4900  # of full rows of 64 nearly 10 updates of 8


BY_TOKENS = ("schedule.by=tokens", f"schedule.budget_tokens={TOKENS}")


@pytest.mark.parametrize(
    ("budget", "stops"), [((), (4, None)), pytest.param(BY_TOKENS, (3, 4, 5, None), marks=pytest.mark.slow)], ids=str
)
def test_a_run_stopped_around_the_change_is_the_same(
    world: World, tmp_path: Path, budget: tuple[str, ...], stops: tuple[int | None, ...]
) -> None:
    straight = trained(world, tmp_path / "straight", *budget)
    objectives = [line["train/objective"] for line in straight[0].values()]
    assert objectives == ["causal"] * 4 + ["masked"] * 6
    assert [line["train/mlm_loss"] > 0 for line in straight[0].values()] == [True] * STEPS
    rates = [line["train/lr"] for line in straight[0].values()]
    assert max(rates) == 3e-3 and rates[-1] < 1.7e-3 and rates[3:7] == [3e-3] * 4
    same(trained(world, tmp_path / "broken", *budget, "data.workers=2", stops=stops), straight)
    whole, broken = (folder / "samples.jsonl" for folder in (tmp_path / "straight", tmp_path / "broken"))
    assert whole.read_bytes() == broken.read_bytes() and whole.read_text().count('"step"') == 2  # start and end
    starts = [json.loads(line) for line in (tmp_path / "broken" / "starts.jsonl").read_text().splitlines()]
    assert [start["step"] for start in starts] == [0, *(stop for stop in stops if stop is not None)]
    assert {start["ranks"] for start in starts} == {1}
    if budget:
        tokens = [line["data/tokens"] for line in straight[0].values()]
        assert tokens[-2] < TOKENS <= tokens[-1]


def test_held_out_figures_are_of_masked_lm_throughout(world: World, tmp_path: Path) -> None:
    trainer = opened(world, tmp_path, stop_after=2)  # before the change
    assert trainer.train()
    trainer.evaluate()
    during = trainer.last_eval
    trainer.close()
    assert 0.14 < during["eval/predictions"] / (8 * 64) < 0.16
    found = evaluate_run(str(tmp_path), str(DATA))
    assert found["eval/mlm_loss"] == pytest.approx(during["eval/mlm_loss"], rel=2e-3)
    assert found["eval/predictions"] == during["eval/predictions"]
    weights, state = load_weights(tmp_path)
    # as of a masked run that was trained on a GPU, whose attention this machine has not
    state["config"]["ops"]["attention"], state["config"]["objective"]["causal_share"] = "cudnn", 0.0
    write_start(tmp_path / "elsewhere", weights, state)
    elsewhere = evaluate_run(str(tmp_path / "elsewhere"), str(DATA))
    assert elsewhere["eval/mlm_loss"] == pytest.approx(found["eval/mlm_loss"], rel=1e-5)
    shutil.rmtree(tmp_path / "elsewhere")
    converted = {"config": state["config"], "tokenizer": state["tokenizer"], "dataset": "none, converted from hf"}
    write_start(tmp_path / "elsewhere", weights, converted)  # as `convert` writes it
    with pytest.raises(ValueError, match="converted from hf"):
        opened(world, tmp_path / "elsewhere")


def test_a_start_with_another_tokenizer_is_refused(world: World, tmp_path: Path) -> None:
    """Also where it has as many tokens."""
    trainer = opened(world, tmp_path / "first", stop_after=1)
    assert trainer.train()
    trainer.close()
    weights, state = load_weights(tmp_path / "first")
    opened(world, tmp_path / "same", f"init_from={tmp_path / 'first'}").close()
    write_start(tmp_path / "other", weights, state | {"tokenizer": "0" * 64})
    with pytest.raises(
        ValueError, match=r"other was trained with another tokenizer than .*dataset has; build the data"
    ):
        opened(world, tmp_path / "run", f"init_from={tmp_path / 'other'}")


@pytest.mark.slow
def test_by_minutes_the_change_follows_the_clock(world: World, tmp_path: Path) -> None:
    """Seconds of training of an update are set here: 0.06 of 0.5 minutes each, from the third on 9."""
    budget = ("schedule.by=minutes", "schedule.budget_minutes=0.5", "data.workers=2")
    for stop_after in (4, 7):
        trainer = opened(world, tmp_path, *budget, stop_after=stop_after)
        report = trainer.report
        trainer.report = lambda update, seconds, report=report, trainer=trainer: report(  # type: ignore[method-assign]
            update, 0.06 if trainer.state.step <= 2 else 9.0
        )
        assert trainer.train()
        trainer.close()
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    found = [(m["time/train_seconds"], m["train/objective"]) for m in lines if "train/loss" in m]
    kinds = ["causal"] * 4 + ["masked"] * 2  # 12 s are 40% of 30 s
    assert found == list(zip((0.06, 0.12, 9.12, 18.12, 27.12, 36.12), kinds, strict=True))
    # by a clock of its own, which is at the end of the budget after the first update
    (tmp_path.parent / "slow.py").write_text(SLOW)
    output = tmp_path.parent / "output"
    again = Forked(
        ["replay", str(tmp_path), "--from", "4"], os.environ, output, driver=str(tmp_path.parent / "slow.py")
    )
    assert again.wait(60) == 0 and "of steps 5 to 6 are equal bit for bit" in output.read_text(), output.read_text()


def test_the_jump_of_the_loss_at_the_change_is_no_spike(world: World, tmp_path: Path) -> None:
    """Causal at a loss that hardly moves any more, then masked LM, whose loss is another."""
    guard = ("spikes.policy=skip", "spikes.window=8", "spikes.threshold=3.0", "schedule.total_steps=40")
    overrides = [*SMALL, *guard, "objective.causal_share=0.9", "optimizer.lr=1e-8", "data.masking.rate=0.02"]
    cfg = configuration.load("tiny", overrides)
    trainer = open_run(tmp_path, cfg, world, StopAt(), Watchdog(world, tmp_path, 0.0))  # type: ignore[arg-type]
    assert trainer.train()
    before, after = trainer.spike_policy.spikes, trainer.state
    trainer.close()
    assert len(before.state()) == 4 and after.objective == "masked"


@pytest.mark.slow
def test_a_start_from_frequencies_survives_a_resume(world: World, tmp_path: Path) -> None:
    frequencies = ("model.frequency_bias=true", "model.zero_init=true")
    straight = trained(world, tmp_path / "straight", *frequencies)
    first = json.loads((tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 0 and first["eval/mlm_loss"] < 6.0 < math.log(800) - 0.6
    same(trained(world, tmp_path / "broken", *frequencies, stops=(5, None)), straight)
