"""The training loop: batch, step, meter, log, evaluate, agree to stop, save.

Pre-training, distillation and fine-tuning run through the one `Trainer`; what differs between them is a `Workload`. All
ranks make the same calls in the same order and come to the same decisions: what they decide by was reduced over them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megabert.checkpoint import Checkpoints
from megabert.common.errors import BadTraining
from megabert.common.logs import log
from megabert.config import Config
from megabert.data.batch import VACANT
from megabert.data.row_digest import RowDigest
from megabert.distributed.preemption import Stop
from megabert.distributed.process_group import World
from megabert.distributed.watchdog import Watchdog
from megabert.engine import Engine, UpdateResult
from megabert.metrics import figures, measured
from megabert.optim.lr_schedule import finished, learning_rate, share_used
from megabert.spikes import Decision, SpikePolicy, Trouble
from megabert.training.exchange import Exchange, Report
from megabert.training.profiling import Profiler
from megabert.training.rank_figures import RankFigures
from megabert.training.rate_record import RateRecord
from megabert.training.saves import Saves
from megabert.training.sinks import Sinks, as_json
from megabert.training.state import TrainState, Unjudged
from megabert.training.workload import Update, Workload

OBJECTIVES = {"causal": "left to right", "masked": "masked LM"}  # what the log calls them


class Trainer:
    """Trains `engine` on `workload`, from the state `saved` on (None: from the beginning)."""

    def __init__(
        self,
        *,
        config: Config,
        world: World,
        engine: Engine,
        workload: Workload,
        checkpoints: Checkpoints,
        stop: Stop,
        watchdog: Watchdog,
        run_dir: Path,
        provenance: Mapping[str, Any],
        saved: Mapping[str, Any] | None = None,
        stop_after: int | None = None,
        writes: bool = True,
        profiler: Profiler | None = None,
    ) -> None:
        """`provenance` goes into every checkpoint. `stop_after`: the step to end at, within the schedule. `writes`: false
        for a replay, which leaves the run folder as it is."""
        self.config, self.world, self.engine, self.workload = config, world, engine, workload
        self.checkpoints, self.stop, self.watchdog = checkpoints, stop, watchdog
        self.run_dir, self.provenance = run_dir, provenance
        self.stop_after, self.writes = stop_after, writes
        self.profiler = profiler or Profiler(run_dir / "profile")
        self.spike_policy = SpikePolicy(config.spikes, config.max_bad_steps)
        self.last_eval: dict[str, float] = {}
        self.saves = Saves(checkpoints, stop, watchdog)
        self.state = TrainState()
        self.unjudged: list[Unjudged] = []
        self.hosts = Exchange(world)
        self.sums: list[int] | None = None  # of `log_counts` over the ranks, after the newest update
        self.rows = RowDigest(world)
        self.ranks = RankFigures(world, engine)
        if saved is not None:
            self.resume(saved)
        self.rates = None
        if config.schedule.unit == "minutes":
            self.rates = RateRecord(run_dir, config, world, self.state.step, writes)
        self.sinks = self.open_sinks()
        self.updates = workload.updates(self.state.cursor, self.share_used)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Trains until the schedule ends or `stop_after` is reached; false when the ranks were asked to stop before. Either
        way everything is saved; raises Failed where it cannot be."""
        if self.world.agree_any(self.stop.requested):
            return False
        self.begin()
        clock = time.perf_counter()  # waiting for data is training time, evaluating and saving are not
        while not self.over:
            update, lr, result = self.train_update()
            if due := self.reading_due(self.state.step + 1):
                result.wait()  # here, where it is training time
            seconds = time.perf_counter() - clock
            self.account(update, result)
            stop = self.exchange(seconds, update, now=due or self.by_tokens)
            if stop or self.over:
                self.hear(self.hosts.outstanding())
            decision = self.judge() if due or stop or self.over else Decision.OK
            if decision is Decision.ROLLBACK:
                self.roll_back(update)
            else:
                self.log_and_evaluate(lr)
            self.stop.updated(time.perf_counter() - clock)
            if stop and not self.over:
                self.save_all()
                return False
            if decision is not Decision.ROLLBACK and self.workload.checkpoint_due(self.state.step):
                self.save()
            clock = time.perf_counter()
        self.save_all()
        return True

    @property
    def by_tokens(self) -> bool:
        """Whether the next update depends on how many tokens all ranks have had."""
        return self.config.schedule.unit == "tokens"

    @property
    def complete(self) -> bool:
        """No update of the schedule is left, or the workload is satisfied."""
        done = finished(self.config.schedule, self.state.step, self.state.seconds / 60, self.state.tokens)
        return done or self.workload.satisfied

    @property
    def over(self) -> bool:
        """No update is left for this process."""
        return self.complete or (self.stop_after is not None and self.state.step >= self.stop_after)

    def begin(self) -> None:
        """What comes before the first update of a run."""
        if self.saves.step >= 0:
            return
        if self.workload.evaluation_due(0):
            self.evaluate()
        if self.config.spikes.policy == "rollback":
            self.save()  # somewhere to go back to

    def train_update(self) -> tuple[Any, float, UpdateResult]:
        """Train on the next update of the data: it, its learning rate, and what came of it. A collective."""
        self.profiler.update(self.state.step + 1)
        lr = self.rate()
        update = self.ranks.take(self.updates)
        if update.objective != self.state.objective:
            self.change_objective(update.objective)
        return update, lr, self.engine.train_update(update, lr, self.spike_policy.veto)

    def rate(self) -> float:
        """The next update's learning rate; where it follows the clock, that of the first time the update was done."""
        state, schedule = self.state, self.config.schedule
        if self.rates is not None and (known := self.rates.known(state.step, state.cursor)):
            state.seconds, lr = known
            return lr
        lr = learning_rate(schedule, self.config.optimizer.lr, state.step, state.seconds / 60, state.tokens)
        if self.rates is not None:
            self.rates.add(state.step, state.cursor, state.seconds, lr)
        return lr

    def share_used(self, cursor: int) -> float:
        """How much of the run's budget is used before update `cursor` of the data, from 0 to 1: exactly for the next update;
        for later ones only under schedule.by=steps, otherwise as much as now."""
        state = self.state
        step = state.step + cursor - state.cursor
        return share_used(self.config.schedule, step, state.seconds / 60, state.tokens)

    def change_objective(self, objective: str) -> None:
        """The next update trains something else: its loss is not compared with those before it."""
        if self.state.objective:
            self.judge()
            self.spike_policy.resume([], self.state.bad)
            log.info(f"step {self.state.step + 1}: {OBJECTIVES[objective]} from here on")
        self.state.objective = objective

    def exchange(self, seconds: float, update: Update, now: bool) -> bool:
        """Tell the other ranks of an update; whether any is known to have been asked to stop. They are heard of while the
        next update is trained, or `now`, and then with the sums of a log line. Raises Refused."""
        saving = self.checkpoints.status
        own = Report(round(seconds * 1e9), self.stop.requested, saving, update.problem_code)
        counts = [update.tokens, *self.log_counts()] if now else None
        reports, sums = self.hosts.tell(own, update.problem, counts)
        self.sums = None
        if sums is not None:
            tokens, *self.sums = sums
            self.state.tokens += tokens * self.by_tokens
        return self.hear(reports)

    def hear(self, reports: Iterable[Report]) -> bool:
        """What all ranks said of updates; whether any was asked to stop."""
        stop = False
        for report in reports:
            self.state.seconds += report.nanoseconds / 1e9
            self.workload.meter.passed(report.nanoseconds / 1e9)
            self.saves.hear(report.saving)
            stop |= bool(report.stop)
        return stop

    def log_counts(self) -> list[int]:
        """This rank's numbers that a log line sums over the ranks."""
        return [*self.rows.own, *self.ranks.counts, *self.workload.meter.counts]

    def account(self, update: Any, result: UpdateResult) -> None:
        """An update is done."""
        self.state.step += 1
        self.state.cursor = update.step + 1
        place = {"step": self.state.step, "cursor": update.step, "epoch": update.epoch}
        self.unjudged.append(Unjudged(**place, row_ids=update.row_ids.tolist(), result=result))
        self.workload.meter.add(result, update)
        for text in self.rows.add(update):
            log.warning(f"left out: {text}")
        self.watchdog.progress(self.state.step)

    def log_and_evaluate(self, lr: float) -> None:
        """A log line and an evaluation, where they are due."""
        step, complete = self.state.step, self.complete
        if step % self.config.log.interval == 0 or complete:
            self.log(lr)
        if complete or self.workload.evaluation_due(step):
            self.evaluate()

    def log(self, lr: float) -> None:
        """An object for the sinks and a line for the terminal. A collective where none of this update had the sums."""
        sums = self.world.sum_ints(self.log_counts()) if self.sums is None else self.sums
        seen, end = self.rows.of_sums(sums[:3]), 3 + 3 * self.world.size
        state = self.state
        values: dict[str, Any] = {"step": state.step, "time/train_seconds": round(state.seconds, 3)}
        values |= {"train/lr": lr} | self.workload.meter.drain(sums[end:])
        values |= {"train/skipped": state.skipped, "train/spikes": state.spiked, "data/cursor": state.cursor}
        values |= {"data/row_digest": f"{seen['row_digest']:016x}", "data/damaged_rows": seen["damaged_rows"]}
        if self.by_tokens:
            values["data/tokens"] = state.tokens
        if self.config.objective.causal_share:
            values["train/objective"] = state.objective
        values |= self.ranks.drain(sums[3:end])
        self.sinks.write(values)
        if "train/loss" in values:
            log.info(self.workload.progress_line(values, self.eta_seconds))

    @property
    def eta_seconds(self) -> float:
        """Seconds of training left at the mean speed so far."""
        schedule, state = self.config.schedule, self.state
        left = (schedule.total_steps - state.step) * state.seconds / state.step
        if schedule.unit == "minutes":
            left = min(left, schedule.budget_minutes * 60 - state.seconds)
        elif schedule.unit == "tokens":
            left = min(left, (schedule.budget_tokens / max(state.tokens, 1) - 1) * state.seconds)
        return max(left, 0.0)

    def evaluate(self) -> None:
        """The workload's figures, for the sinks. A collective."""
        if found := self.workload.evaluate(self.state.step, self.watchdog.progress):
            self.last_eval = found
            place = {"step": self.state.step, "time/train_seconds": round(self.state.seconds, 3)}
            self.sinks.write(place | found)
            self.sinks.show(self.state.step, self.workload.shown)

    # -- trouble -----------------------------------------------------------------------------------------------------

    def reading_due(self, step: int) -> bool:
        """Whether something is read back from the device after update `step`. Between two such updates the host only gives
        it work; a policy that acts on the very update reads each."""
        if self.spike_policy.immediate or step % self.config.log.interval == 0:
            return True
        last = step == self.config.schedule.total_steps or step == self.stop_after
        return last or self.workload.evaluation_due(step) or self.workload.checkpoint_due(step)

    def judge(self) -> Decision:
        """Look at the updates since the last call and act on them; the decision about the newest. Raises BadTraining where
        the run ends."""
        decision = Decision.OK
        unjudged, self.unjudged = self.unjudged, []
        for done in unjudged:
            decision = self.judge_one(done)
        return decision

    def judge_one(self, done: Unjudged) -> Decision:
        """Look at one update's loss and whether it was applied, act on it; the decision."""
        result = done.result
        self.state.skipped += result.skipped
        if result.overflow:
            log.info(f"step {done.step}: fp16 overflow; the update is skipped and the loss scale halved")
        judgement = self.spike_policy.judge(
            result.host_loss, skipped=result.skipped, overflow=result.overflow, vetoed=result.vetoed
        )
        self.state.bad = self.spike_policy.bad
        for trouble in judgement.troubles:
            self.state.spiked += trouble.kind == "spike"
            self.record(done, trouble)
            log.info(f"step {done.step}: {trouble.text}")
        if judgement.decision is Decision.ABORT:
            raise BadTraining(f"{judgement.reason}; the rows are in {self.run_dir / 'trouble.jsonl'}")
        return judgement.decision

    def record(self, done: Unjudged, trouble: Trouble) -> None:
        """Append to `trouble.jsonl` what is needed to look into an update: `cursor` is its number in the data. A collective."""
        row_ids = self.world.gather_ints([row for row in done.row_ids if row != VACANT])
        if self.writes and self.world.is_main:
            entry: dict[str, Any] = {"step": done.step, "cursor": done.cursor, "epoch": done.epoch}
            entry |= {"kind": trouble.kind, "action": trouble.action}
            entry |= figures(measured(done.result), self.engine.terms)
            entry |= {"score": round(trouble.score, 3), "row_ids": row_ids}
            with open(self.run_dir / "trouble.jsonl", "a") as file:
                file.write(as_json(entry) + "\n")

    def roll_back(self, update: Update) -> None:
        """To the newest checkpoint before `update`, with the data from there through `update` passed over (PaLM's recipe,
        Chowdhery et al. 2022, section 5.1). Raises BadTraining when there is none."""
        self.saves.finish()
        path = self.checkpoints.before(self.state.step - 1)
        if path is None:
            raise BadTraining(f"a spike at step {self.state.step} and no checkpoint before it to go back to")
        self.updates.close()
        self.sinks.close()
        self.resume(self.checkpoints.load(self.engine, path))
        self.state.cursor = update.step + 1
        self.sinks = self.open_sinks()
        self.updates = self.workload.updates(self.state.cursor, self.share_used)
        log.info(f"rolled back to step {self.state.step}; the data up to the spike is passed over")

    # -- saving and resuming -----------------------------------------------------------------------------------------

    def checkpoint_state(self) -> dict[str, Any]:
        """What a checkpoint holds besides the engine's own tensors. A collective."""
        assert not self.unjudged, "its losses belong to the state"
        own = asdict(self.state) | self.rows.totals() | {"losses": self.spike_policy.spikes.state()}
        own |= {"meter": self.workload.meter.state()}
        return dict(self.provenance) | own | self.workload.state()

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Take over the state of a checkpoint."""
        self.state = TrainState.of(saved)
        if self.by_tokens and self.state.step and not self.state.tokens:
            raise ValueError(
                "cannot resume: schedule.by=tokens, but the checkpoint's tokens were not counted; set schedule.by back"
            )
        self.saves.step = self.state.step
        self.rows = RowDigest(self.world, saved["row_digest"], saved["damaged_rows"])
        self.spike_policy.resume(saved["losses"], self.state.bad)
        self.workload.meter.resume(saved.get("meter"))
        self.workload.resume(saved)

    def save(self) -> None:
        """Begin a checkpoint of this moment."""
        self.saves.begin(self.engine, self.state.step, self.checkpoint_state)

    def save_all(self) -> None:
        """Commit a checkpoint of this moment. Raises Failed where it cannot be written."""
        self.saves.complete(self.engine, self.state.step, self.checkpoint_state)

    def open_sinks(self) -> Sinks:
        """The run's sinks on rank 0, with what was logged after the newest checkpoint cut off."""
        writes = self.writes and self.world.is_main
        return Sinks(self.run_dir if writes else None, self.config, self.state.step, self.saves.step)

    def close(self) -> None:
        """End the loader's workers, close the sinks, write what was profiled; each also where another one fails."""
        with ExitStack() as last_first:
            for close in (self.profiler.close, self.sinks.close, self.updates.close):
                last_first.callback(close)

    # -- replay ------------------------------------------------------------------------------------------------------

    def replay(self, step: int) -> str:
        """Trains forward to update `step`, by itself and writing nothing; its figures as one JSON line."""
        assert self.state.step < step and not self.writes
        while self.state.step < step:
            started = time.perf_counter()
            update, lr, result = self.train_update()
            self.account(update, result)
            self.exchange(time.perf_counter() - started, update, now=True)
            self.unjudged.clear()  # they were judged when the run did them
            self.spike_policy.expect(result.host_loss)
        place = {"step": self.state.step, "cursor": update.step, "epoch": update.epoch, "train/lr": lr}
        return as_json(place | figures(measured(result), self.engine.terms) | {"skipped": result.skipped})
