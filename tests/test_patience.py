"""The end of a run whose held-out loss improves no more, and its best checkpoint."""

import math
import os
import shutil
import time
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from megabert import hf
from megabert.checkpoint import load_weights
from megabert.common import chain
from megabert.common.errors import BadTraining
from megabert.distributed.ranks import RankError
from megabert.progress import TrainState
from megabert.train import main
from tests.helpers import golden_runs
from tests.helpers.golden_runs import DATA, SMALL, random_rows
from tests.helpers.job import Job
from tests.helpers.refusal import refusal
from tests.integration.conftest import logged, metrics

TEN = ("schedule.total_steps=10", "eval.interval=2", "eval.patience=2", "checkpoint.interval=3", "checkpoint.keep=1")
# of evaluations by step: the best is that of step 4, and two later ones are not better
LOSSES = {0: 6.0, 2: 5.0, 4: 4.0, 6: 4.5, 8: 4.0, 10: 3.0}


def opened(world, folder, losses, *overrides, stop=None, **options):
    """A trainer whose evaluation gives these losses."""
    trainer = golden_runs.opened(world, folder, *TEN, *overrides, stop_after=stop, **options)
    trainer.workload.evaluate = lambda step, progress: {"eval/mlm_loss": losses[step]}
    return trainer


def trained(world, folder, losses, *overrides, stop=None):
    """The step at which a run ends."""
    trainer = opened(world, folder, losses, *overrides, stop=stop)
    assert trainer.train()
    trainer.close()
    return trainer.state.step


def same_state(ours, theirs):
    """Weights and history of the runs' checkpoints are equal."""
    (weights, state), (others, other) = map(load_weights, (ours, theirs))
    assert all(torch.equal(others[name], weight) for name, weight in weights.items())
    fields = ("step", "cursor", "best_step", "best_loss", "since_best", "evaluation_owed")
    assert [other[name] for name in fields] == [state[name] for name in fields]


def test_runs_end_when_the_loss_improves_no_more(world, tmp_path, caplog):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert trained(world, straight, LOSSES) == 8
    assert "step 8: the held-out loss did not improve in 2 evaluations, so training ends" in caplog.text
    assert "so training ends; the lowest is 4.0000; " in caplog.text and "best is step 4" in caplog.text
    kept = sorted(path.name for path in (straight / "checkpoints").glob("step-*"))
    assert kept == ["step-00000004", "step-00000008"]
    assert load_weights(straight / "best")[1]["step"] == 4
    again = opened(world, straight, {})
    assert again.schedule.limit and again.train() and again.state.step == 8
    again.close()
    for stop in (3, 5, 6):
        assert trained(world, broken, LOSSES, stop=stop) == stop
    assert trained(world, broken, LOSSES) == load_weights(broken)[1]["step"] == 8
    same_state(straight, broken)
    same_state(straight / "best", broken / "best")
    assert trained(world, straight, LOSSES, "eval.patience=3") == 10
    assert hf.load(straight / "best").step == 10


def test_an_evaluation_without_time_is_made_later(world, tmp_path, caplog):
    """By the next start."""
    trained(world, tmp_path / "straight", LOSSES)
    seconds = {"left": 100.0}
    trainer = opened(world, tmp_path / "run", LOSSES, left=lambda: seconds["left"])
    evaluate, steps = trainer.workload.evaluate, []

    def slow(step, progress):
        steps.append(step)
        time.sleep(0.2)
        seconds["left"] = 0.1 if step == 4 else 100.0  # before the evaluation of step 6, which takes longer
        return evaluate(step, progress)

    trainer.workload.evaluate = slow
    assert not trainer.train()
    trainer.close()
    assert steps == [0, 2, 4] and trainer.state.step == 6 and "stopped: saved at step 6" in caplog.text
    assert "step 6: evaluation postponed to the next start: 0 s left, the longest took " in caplog.text
    assert 6 not in logged(tmp_path / "run", "eval/mlm_loss")
    assert trained(world, tmp_path / "run", LOSSES) == 8
    same_state(tmp_path / "straight", tmp_path / "run")
    assert list(logged(tmp_path / "run", "eval/mlm_loss")) == [0, 2, 4, 6, 8]
    assert [entry["step"] for entry in chain.read(tmp_path / "run" / "checkpoints")] == [0, 2, 3, 4, 6, 8]


def test_an_evaluation_that_no_start_has_time_for_ends_the_run(world, tmp_path, caplog):
    """At the third start in a row; one with more time makes it."""
    trained(world, tmp_path, LOSSES, stop=3)
    for left, found in ((9.0, "postponed"), (9.0, "postponed"), (9.0, "no start"), (99.0, "reached")):
        trainer = opened(world, tmp_path, LOSSES, stop=6, left=lambda left=left: left)
        trainer.state.evaluation_seconds = 50.0
        with pytest.raises(RankError, match=r"9 s left.* 50 s") if found == "no start" else nullcontext():
            assert trainer.train() == (found == "reached")
        trainer.close()
        assert trainer.state.step == (6 if found == "reached" else 4)
    assert caplog.text.count("step 4: evaluation postponed to the next start: 9 s left") == 2
    assert list(logged(tmp_path, "eval/mlm_loss")) == [0, 2, 4, 6]


def test_a_stop_comes_before_the_last_evaluation(world, tmp_path):
    """The run is over but for that."""
    settings = ("eval.patience=9", "eval.interval=10", "schedule.total_steps=3")
    trainer = opened(world, tmp_path, {0: 3.0}, *settings, left=lambda: math.inf if trainer.state.step < 3 else 0.0)
    assert not trainer.train() and trainer.state.step == 3 and trainer.state.evaluation_owed
    trainer.close()
    again = opened(world, tmp_path, {3: 2.0}, *settings)
    again.copies = Mock()  # in place: no update, so no copy, by which keepers would restart without end
    assert again.train() and again.last_eval == {"eval/mlm_loss": 2.0} and hf.load(tmp_path / "best").step == 3
    assert not again.copies.take.called
    again.close()


def test_hardware_and_rows_decide_how_long_an_evaluation_takes(world, tmp_path):
    """The longest one of others, for which no time limit has time, postpones none."""
    trainer = opened(world, tmp_path, LOSSES, stop=3)
    trainer.state.evaluation_seconds = 1e4
    assert trainer.train()
    trainer.close()
    for settings, step in (((), 4), (("eval.rows=7",), 8)):
        trainer = opened(world, tmp_path, LOSSES, *settings, left=lambda: 100.0)
        assert trainer.train() == (step == 8) and trainer.state.step == step
        trainer.close()


def test_the_best_checkpoint_is_saved_at_an_update_that_was_not_applied(world, tmp_path):
    trainer = opened(world, tmp_path, LOSSES)
    train_update, weights = trainer.engine.train_update, trainer.engine._weights

    def failing(update, *rest):
        trainer.engine._weights = weights * (math.nan if update.step == 3 else 1.0)
        return train_update(update, *rest)

    trainer.engine.train_update = failing
    assert trainer.train() and trainer.state.skipped == 1 and trainer.state.best_step == 4
    trainer.close()
    assert hf.load(tmp_path / "best").step == 4


def test_the_best_checkpoint_stays_until_a_better_one(world, tmp_path):
    trained(world, tmp_path, LOSSES, stop=5)
    trainer = opened(world, tmp_path, LOSSES, "checkpoint.interval=1")
    trainer.state.best_step = 99  # of a save that was lost
    assert trainer.train()
    trainer.close()
    assert os.readlink(tmp_path / "best") == "checkpoints/step-00000004" and hf.load(tmp_path / "best").step == 4


def test_a_missing_best_checkpoint_starts_the_search_anew(world, tmp_path, caplog):
    trained(world, tmp_path, LOSSES, stop=5)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
    assert trained(world, tmp_path, LOSSES, "eval.patience=3") == 10
    assert "the best checkpoint, of step 4, is missing: the next evaluation counts as the best" in caplog.text
    assert hf.load(tmp_path / "best").step == 10


CAUSAL = ("objective.causal_share=0.5", "model.nsp=false")


@pytest.mark.parametrize(
    ("losses", "overrides", "end", "best"),
    [
        ({step: 5.0 + step for step in LOSSES}, (), 4, 0),
        # patience begins with the last phase
        ({0: 1.0, 2: 2.0, 4: 3.0, 6: 9.0, 8: 8.0, 10: 7.0}, CAUSAL, 10, 10),
        (LOSSES, ("eval.patience=0",), 10, None),
    ],
    ids=["a start that is never beaten", "phases", "no patience"],
)
def test_the_best_step_of_a_run(world, tmp_path, losses, overrides, end, best):
    assert trained(world, tmp_path, losses, *overrides) == end
    if best is None:
        assert not (tmp_path / "best").is_symlink()
    else:
        assert hf.load(tmp_path / "best").step == best


def test_the_last_update_has_a_line(world, tmp_path):
    """Also where patience ends the run, which is known after the evaluation."""
    assert trained(world, tmp_path, LOSSES, "log.interval=5") == 8
    assert list(logged(tmp_path, "train/loss")) == [5, 8]


def test_a_schedule_made_shorter_ends_with_an_evaluation(world, tmp_path):
    losses, never = dict.fromkeys(range(11), 5.0), ("eval.patience=0", "eval.interval=0")
    trained(world, tmp_path, losses, *never, stop=5)
    for _ in range(2):  # once
        assert trained(world, tmp_path, losses, *never, "schedule.total_steps=4") == 5
        assert list(logged(tmp_path, "eval/mlm_loss")) == [0, 5]


def test_evaluations_before_a_phase_that_is_added_count_for_nothing(world, tmp_path):
    """As in a run that had the phase from the start."""
    trained(world, tmp_path, {0: 6.0, 2: 3.0, 4: 4.0}, "schedule.total_steps=4")
    added = ("schedule.total_steps=8", "phases=[{share = 4}, {share = 4, optimizer.lr = 1e-5}]")
    trainer = opened(world, tmp_path, {6: 5.0, 8: 4.5}, *added, extend=True)
    assert trainer.train() and (trainer.state.step, trainer.state.best_step) == (8, 8)
    trainer.close()


def test_without_patience_no_step_is_the_best(world, tmp_path):
    assert trained(world, tmp_path, LOSSES, stop=7) == 7
    trainer = opened(world, tmp_path, LOSSES, "eval.patience=0", stop=8)
    assert trainer.train() and trainer.state.best_step == -1
    trainer.close()
    assert trained(world, tmp_path, LOSSES | {10: 9.0}, "eval.patience=2") == 10  # counted from here on


def test_a_run_that_ends_with_no_loss_has_failed(world, tmp_path):
    trainer = opened(world, tmp_path, LOSSES | {10: math.nan}, "eval.patience=0", "checkpoint.asynchronous=false")
    with pytest.raises(BadTraining, match=r"step 10, schedule.total_steps=10: the held-out loss is nan"):
        trainer.train()
    trainer.close()
    assert logged(tmp_path, "eval/mlm_loss")[10] == "nan"
    assert load_weights(tmp_path)[1]["step"] == 9
    trainer = opened(world, tmp_path / "patient", {0: 4.0, 2: math.nan, 4: math.nan})
    with pytest.raises(BadTraining, match=r"step 4, eval.patience=2: the held-out loss is nan"):
        trainer.train()
    trainer.close()


def test_patience_needs_a_held_out_split(tmp_path, capsys):
    plain = random_rows(tmp_path / "plain", 40, seed=2)
    said = refusal(capsys, main, "--config", "tiny", "--data", plain, "--run", tmp_path / "run", *SMALL, *TEN)
    assert f"eval.patience=2: {plain} has no held-out split" in said
    said = refusal(capsys, main, "--config", "tiny", "--data", plain, "--run", tmp_path / "run", *SMALL, "eval.pairs=x")
    assert f"eval.pairs=x: {plain} has no held-out split" in said
    phases = f'phases=[{{share = 0.5, data.path = "{plain}"}}, {{share = 0.5}}]'
    said = refusal(capsys, main, "--config", "tiny", "--data", DATA, "--run", tmp_path / "run", *SMALL, *TEN, phases)
    assert f"eval.patience=2: {plain} has no held-out split" in said
    data = shutil.copytree(DATA, tmp_path / "data")
    shutil.rmtree(data / "held_out")
    assert main(["--config", "tiny", "--data", str(data), "--run", str(tmp_path / "run"), *SMALL]) == 2
    assert "held_out/manifest.json" in capsys.readouterr().err and not (tmp_path / "run/config.json").exists()


def test_a_checkpoint_without_a_best_step_resumes():
    assert TrainState.of({"step": 3, "cursor": 4, "tokens": 5}) == TrainState(step=3, cursor=4, tokens=5)


# rank 1 has losses of its own, which count for nothing
DIFFERENT = f"""
from megabert.workload import Pretraining
def evaluate(self, step, progress, do=Pretraining.evaluate):
    return do(self, step, progress) | {{"eval/mlm_loss": -step if self.world.rank else {LOSSES}[step]}}
Pretraining.evaluate = evaluate
"""


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_end_at_one_step(tmp_path):
    job = Job(DATA, tmp_path / "run", *SMALL, *TEN, driver=DIFFERENT)
    assert job.codes() == [0, 0], job.output
    assert "so training ends" in job.output and f"megabert export   --model {tmp_path / 'run'}/best" in job.output
    assert metrics(tmp_path / "run")[-1]["step"] == 8 and hf.load(tmp_path / "run" / "best").step == 4
