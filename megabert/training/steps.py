"""What a loop does between two updates: log, evaluate, save, and deal with bad data and bad losses.

All ranks call these in the same order and come to the same decisions: what they decide by was reduced over the ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from megabert.common.errors import BadTraining
from megabert.data.batch import Batch, Update
from megabert.engine import lr_schedule
from megabert.engine.result import UpdateResult
from megabert.training import evaluation, metrics
from megabert.training.run import Run, say
from megabert.training.sinks import as_json


class Refused(ValueError):
    """The data cannot be used; the same on every rank."""


def complete(run: Run) -> bool:
    """True when the schedule has no update left."""
    return lr_schedule.finished(run.config.schedule, run.step, run.seconds / 60)


def over(run: Run) -> bool:
    """True when this process has no update left to do."""
    return complete(run) or run.step >= run.stop_after


def next_update(run: Run) -> tuple[Update, float, UpdateResult]:
    """Train on the next update of the data: it, its learning rate, and what came of it. A collective."""
    config, update = run.config, next(run.loader)
    lr = lr_schedule.learning_rate(config.schedule, config.optimizer.lr, run.step, run.seconds / 60)
    veto = run.spikes.is_spike if config.spikes.policy == "skip" else None
    return update, lr, run.engine.train_update(update, lr, veto)


def account(run: Run, update: Update, result: UpdateResult, seconds: float) -> None:
    """An update that took `seconds` on the slowest rank is done."""
    run.step += 1
    run.cursor = update.step + 1
    run.seconds += seconds
    run.skipped += result.skipped
    run.meter.add(result, update, seconds)
    for text in run.ledger.add(update):
        print(f"rank {run.world.rank}: left out: {text}", file=sys.stderr, flush=True)
    run.watchdog.progress(run.step)


def log(run: Run, lr: float) -> None:
    values: dict[str, Any] = {"step": run.step, "time/train_seconds": round(run.seconds, 3), "train/lr": lr}
    seen = run.ledger.totals()
    values |= run.meter.drain() | {"train/skipped": run.skipped, "train/spikes": run.spiked}
    values |= {"data/cursor": run.cursor, "data/row_digest": f"{seen['row_digest']:016x}"}
    values |= {"data/damaged_rows": seen["damaged_rows"]}
    run.emit(values)
    if "train/loss" in values:
        left = run.config.schedule.total_steps - run.step
        eta = left * run.seconds / run.step
        if run.config.schedule.name == "budget":
            eta = min(eta, run.config.schedule.budget_minutes * 60 - run.seconds)
        say(run.world, metrics.progress_line(values, run.config.schedule.total_steps, max(eta, 0)))


def validate(run: Run) -> None:
    """Held-out figures, outside the training time. A dataset without a held-out split is said once, at the start."""
    if run.dataset.manifest.held_out is None:
        if run.step == 0:
            say(run.world, "this dataset has no held-out split: the run is not evaluated")
        return
    held_out = evaluation.held_out(run.config.data.path, run.config)
    batches = evaluation.fixed_batches(held_out, run.tokenizer, run.config, run.world.rank, run.world.size)
    problems: list[str] = []
    sums = run.engine.eval_sums(_readable(run, batches, problems))
    refuse(run, "".join(problems))
    run.last_eval = evaluation.summary(sums)
    run.emit({"step": run.step, "time/train_seconds": round(run.seconds, 3)} | run.last_eval)
    shown = "  ".join(f"{k.removeprefix('eval/')} {v:.4f}" for k, v in run.last_eval.items() if v < 1e4)
    say(run.world, f"step {run.step:>7,}  held-out  {shown}")


def _readable(run: Run, batches: Iterable[Batch], problems: list[str]) -> Iterator[Batch]:
    """`batches` until one cannot be had, which is kept for later: the other ranks are in the middle of a collective."""
    try:
        for batch in batches:
            yield batch
            run.watchdog.progress()
    except (ValueError, OSError) as error:
        problems.append(str(error))


def refuse(run: Run, problem: str) -> None:
    """Raises Refused on every rank when any has a problem ("": none), naming the first. A collective."""
    found = run.world.gather(problem)
    for rank, text in enumerate(found):
        if text:
            raise Refused(text if run.world.size == 1 else f"rank {rank}: {text}")


def save(run: Run) -> None:
    """Begin a checkpoint of this moment; it is committed by `finish`, or at once where saving is not asynchronous."""
    finish(run)
    run.saving_since = time.perf_counter()
    run.checkpoints.save(run.engine, run.state())
    run.saved_step = run.step
    if not run.checkpoints.pending:
        run.stop.saved(time.perf_counter() - run.saving_since)
    run.watchdog.progress()


def finish(run: Run) -> None:
    """Commit the checkpoint that is being written, if there is one; waits for it."""
    if run.checkpoints.pending:
        run.checkpoints.finish()
        run.stop.saved(time.perf_counter() - run.saving_since)
        run.watchdog.progress()


def judge(run: Run, update: Update, result: UpdateResult) -> bool:
    """Looks at the update's loss; true when the run went back to before it.

    Raises BadTraining when too many updates in a row were not applied, or after too many goings-back.
    """
    settings = run.config.spikes
    if result.overflow:
        say(run.world, f"step {run.step}: fp16 overflow; the update is skipped and the loss scale halved")
        return False
    if result.skipped and not result.vetoed:
        record(run, update, result, "non-finite", "skip", 0.0)
        say(run.world, f"step {run.step}: non-finite loss or gradient; the update is skipped on every rank")
    run.bad = run.bad + 1 if result.skipped else 0
    spike = False
    if settings.policy != "off":
        loss = float(result.host_loss)
        score = run.spikes.score(loss)
        run.spikes.add(loss)
        if spike := score > settings.threshold:
            run.spiked += 1
            record(run, update, result, "spike", settings.policy, score)
            what = {"warn": "", "skip": "; the update is skipped on every rank", "rollback": "; going back"}
            say(
                run.world,
                f"step {run.step}: loss {loss:.4f} is a spike (score {score:.1f}){what[settings.policy]}",
            )
    if run.bad >= run.config.max_bad_steps:
        raise BadTraining(
            f"{run.bad} updates in a row were not applied, the last ones for non-finite numbers or a spike; "
            f"their rows are in {run.run_dir / 'trouble.jsonl'}"
        )
    if spike and settings.policy == "rollback":
        go_back(run, update)
        return True
    return False


def record(run: Run, update: Update, result: UpdateResult, kind: str, action: str, score: float) -> None:
    """Append to `trouble.jsonl` what is needed to look into an update: `cursor` is its number in the data. A collective."""
    row_ids = run.world.gather_ints(update.row_ids.tolist())
    if run.writes and run.world.is_main:
        entry = {
            "step": run.step,
            "cursor": update.step,
            "epoch": update.epoch,
            "kind": kind,
            "action": action,
        }
        entry |= metrics.figures(metrics.measured(result), run.engine.terms)
        line = as_json(entry | {"score": round(score, 3), "row_ids": row_ids})
        with open(run.run_dir / "trouble.jsonl", "a") as file:
            file.write(line + "\n")


def go_back(run: Run, update: Update) -> None:
    """To the newest checkpoint before `update`, with the data from there through `update` passed over (PaLM's recipe,
    Chowdhery et al. 2022, section 5.1). Raises BadTraining when there is none, or it happened too often."""
    run.rollbacks += 1
    if run.rollbacks > run.config.spikes.max_rollbacks:
        raise BadTraining(
            f"a spike after {run.config.spikes.max_rollbacks} goings-back (spikes.max_rollbacks); look at "
            f"{run.run_dir / 'trouble.jsonl'}"
        )
    finish(run)
    path = run.checkpoints.before(run.step - 1)
    if path is None:
        raise BadTraining(f"a spike at step {run.step} and no checkpoint before it to go back to")
    run.restore(run.checkpoints.load(run.engine, path), cursor=update.step + 1)
    say(run.world, f"back at step {run.step}; the data up to the spike is passed over")


def replay(run: Run, step: int) -> None:
    """Runs forward to update `step` and prints its figures as one JSON line; writes nothing."""
    assert run.step < step
    while run.step < step:
        started = time.perf_counter()
        update, lr, result = next_update(run)
        account(run, update, result, run.world.max_float(time.perf_counter() - started))
        refuse(run, update.problem)
        if run.config.spikes.policy != "off":
            run.spikes.add(float(result.host_loss))
    figures = metrics.figures(metrics.measured(result), run.engine.terms)
    place = {"step": run.step, "cursor": update.step, "epoch": update.epoch, "train/lr": lr}
    say(run.world, as_json(place | figures | {"skipped": result.skipped}))
