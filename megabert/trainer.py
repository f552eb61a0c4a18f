"""The training loop: batch, step, meter, log, evaluate, agree to stop, save.

Pre-training, distillation and fine-tuning use the same `Trainer` with different `Workload`s. All ranks make the same calls in the
same order and the same decisions, which depend only on a `Sync` that was reduced over them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megabert.agreement import REQUESTED, UNREAD, StepReports, Sync
from megabert.checkpoint import Checkpoints
from megabert.common import logs
from megabert.common.errors import FAILED, BadTraining
from megabert.common.logs import log
from megabert.common.run_files import BEST, SLOW_RANKS
from megabert.config import Config
from megabert.data.batch import RowDigest
from megabert.distributed.ranks import RankRefused, on_every_rank, on_main
from megabert.distributed.signals import REQUEUE, Stop
from megabert.distributed.watchdog import Watchdog
from megabert.engine import Engine, RankMetrics, UpdateResult
from megabert.engine.profiler import Profiler
from megabert.inplace.copies import Copies
from megabert.optim.rate_record import RateRecord
from megabert.progress import RunSchedule, TrainState, first_line
from megabert.sinks import Sinks
from megabert.spikes import PendingUpdate, SpikePolicy, UpdateJudge

if TYPE_CHECKING:
    from megabert.workload import Workload


class Trainer:
    """Trains `engine` on `workload`, starting from the state `saved` (None: from scratch)."""

    def __init__(
        self,
        *,
        config: Config,
        engine: Engine,
        workload: Workload,
        checkpoints: Checkpoints,
        stop: Stop,
        watchdog: Watchdog,
        provenance: Mapping[str, Any],
        saved: Mapping[str, Any] | None = None,
        cursor: int = 0,
        copies: Copies | None = None,
        stop_after: int | None = None,
        profile: tuple[int, int] = (0, 0),
    ) -> None:
        """`provenance` is saved in every checkpoint. `cursor`: the first update of the data if nothing was `saved`. `copies`: copies of
        the training state in memory, if ranks restart in place. `stop_after`: step at which to end before the schedule does.
        `profile`: the first and the last update to profile."""
        world, run_dir = engine.world, checkpoints.run_dir
        self.config, self.world, self.engine, self.workload = config, world, engine, workload
        self.checkpoints, self.copies, self.stop, self.watchdog = checkpoints, copies, stop, watchdog
        self.run_dir, self.provenance = run_dir, provenance
        engine.progress = checkpoints.progress = watchdog.progress
        checkpoints.saved = stop.saved
        self.schedule = RunSchedule(config, workload, stop_after)
        self.spike_policy = SpikePolicy(config.spikes, config.max_bad_steps)
        self.judge = UpdateJudge(self.spike_policy, world, run_dir, engine.terms)
        self.reports = StepReports(world)
        # the newest report of all ranks, and the largest `Sync.stop` so far
        self.last_report: Sync | None = None
        self.stopping = 0
        self.finished = False  # over, and saved
        self.save_due = self.line_due = False  # a checkpoint and a log line, after the newest update
        self.schedule.state.cursor = cursor
        self.newest: Any = None  # PendingUpdate
        self.row_digest = RowDigest()
        self.rank_stats = RankMetrics(world, engine.own_time, watchdog, config.watchdog, run_dir / SLOW_RANKS)
        self.last_eval: dict[str, float] = {}
        if saved is not None:
            self.resume(saved)
        if config.schedule.unit == "minutes":
            self.schedule.rates = RateRecord(run_dir, config, world, self.state.step, fresh=saved is None)
        # on rank 0 only; log lines after the current step are removed
        at, folder = self.state.step or min(checkpoints.saved_step, 0), run_dir if world.is_main else None
        self.sinks = on_every_rank(world, lambda: Sinks(folder, config, at, self.state.evaluation_owed))
        self.updates: Any = workload.updates(self.state.cursor, self.state.phase_starts)
        self.profiler = Profiler(run_dir / "profile", world.rank, *profile)

    @property
    def state(self) -> TrainState:
        return self.schedule.state

    # -- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Train until the schedule ends or `stop_after` is reached, or a stop is requested, and save; false if the same command has to
        resume. Raises Failed if the save fails, and RankRefused after it if nobody reads the output any more."""
        for _ in self:
            pass
        return self.finished

    def start(self) -> None:
        """Evaluate and save before the first update, where this is due."""
        if self.stopping:
            return
        new = self.checkpoints.saved_step < 0
        if self.state.evaluation_owed or (new and not self.state.step and self.workload.evaluation_due(0)):
            self.evaluate_in_time()
        if self.save_due or (new and self.config.spikes.policy == "rollback"):
            self.save()  # a checkpoint to roll back to, or the best one so far

    def __iter__(self) -> Iterator[PendingUpdate]:
        """The loop of `train`: gives each update, after its log line, evaluation and save. Whoever leaves it before its end leaves the run
        at the newest checkpoint."""
        self.stopping = REQUESTED * self.world.agree_any(self.stop.requested)
        if self.stopping and not self.schedule.over and self.state.step <= max(self.checkpoints.saved_step, 0):
            log.info("stopped: nothing was trained since the start; the same command resumes")
            self.checkpoints.finish_mirror()  # the last job may have ended before
            return
        self.watchdog.opened()
        self.start()
        while not self.schedule.over and not self.stopping:
            started = time.perf_counter()
            update, lr, result = self.train_update()
            if self.after_update(update, result, started):
                self.judge.judge(self.state)
            if self.judge.spike is not None:
                self.roll_back(self.judge.spike)
                continue
            if self.schedule.complete or self.line_due:
                self.write_log_line(lr)
            elif self.state.step == 1:
                log.info(first_line(self.newest, time.perf_counter() - started, self.config.log.interval))
            self.stop.updated(time.perf_counter() - started)
            if self.schedule.complete or self.workload.evaluation_due(self.state.step):
                self.evaluate_in_time()
            if not self.stopping and self.save_due:
                self.save()
            elif not self.stopping and self.copies is not None and self.copies.due(self.state.step):
                self.copies.take(self.engine, self.checkpoint_state(), self.checkpoints.in_flight)
            yield self.newest
        self.checkpoints.complete(self.engine, self.state.step, self.checkpoint_state)
        self.checkpoints.finish_mirror()
        self.finished = self.schedule.over and not self.state.evaluation_owed
        saved = f"saved at step {self.state.step:,}; the same command resumes"
        if not self.finished and self.stopping == UNREAD:
            # keepers restart ranks after FAILED, with the same output
            raise RankRefused(f"Broken pipe: nobody reads the output; {saved}", REQUEUE if self.copies else FAILED)
        if not self.finished:
            log.info(f"stopped: {saved}")

    def train_update(self) -> tuple[Any, float, UpdateResult]:
        """Train on the next update of the data; returns it, its learning rate and its result. A collective."""
        self.profiler.update(self.state.step + 1)
        if recorded := self.schedule.recorded():
            # with a time budget, a repeated update has the same phase and rate as before
            self.state.seconds = recorded[0]
        self.enter_phase(self.schedule.next_phase)
        lr = self.schedule.rate()
        update = self.rank_stats.take(self.updates)
        return update, lr, self.engine.train_update(update, lr, self.spike_policy.veto(update.objective))

    def enter_phase(self, number: int) -> None:
        """Switch to the updates of phase `number` (from 0), unless it is the current one. The spike policy forgets earlier losses."""
        state, entered = self.state, number + 1 - len(self.state.phase_starts)
        if entered <= 0:
            return
        self.receive_reports()
        self.judge.judge(state)
        if self.judge.spike is not None:
            return  # a rollback follows
        self.spike_policy.resume({}, state.bad)
        state.phase_starts = [*state.phase_starts, *[state.cursor] * entered]
        log.info(
            f"step {state.step + 1}: phase {number + 1} of {len(self.schedule.phases)}: {self.schedule.phase.changes}"
        )
        self.updates.close()
        self.updates = self.workload.updates(state.cursor, state.phase_starts)
        if self.config.spikes.policy == "rollback":
            self.save()  # a checkpoint to roll back to, in the same phase

    # -- after an update ---------------------------------------------------------------------------------------------

    def after_update(self, update: Any, result: UpdateResult, started: float) -> bool:
        """Meter an update and report it to the other ranks; whether results are read from the device now."""
        step = self.state.step + 1
        copied = self.copies is not None and self.copies.due(step)
        self.save_due, self.line_due = self.schedule.checkpoint_due(step), self.schedule.log_due(step)
        reading = self.save_due or self.schedule.reading_due(step, len(self.judge.pending), copied)
        if reading:
            result.wait()  # before the time is taken, so that it counts as training time
        seconds = time.perf_counter() - started
        self.state.step, self.state.cursor = step, update.step + 1
        self.newest = PendingUpdate(
            step=step,
            cursor=update.step,
            epoch=update.epoch,
            row_ids=update.row_ids.tolist(),
            objective=update.objective,
            result=result,
        )
        self.judge.pending.append(self.newest)
        self.workload.meter.add(result, update)
        self.row_digest.add(update)
        self.watchdog.progress(self.state.step)
        self.send_report(update, seconds)
        if reading or self.world.size == 1 or self.config.schedule.unit == "tokens":
            self.receive_reports()
        if self.stopping or self.schedule.over:
            self.receive_reports()
            return True
        return reading

    def send_report(self, update: Any, seconds: float) -> None:
        """Process the reports of the previous update, and send this rank's report of `update`."""
        self.receive_reports()
        report = Sync(
            nanoseconds=round(seconds * 1e9),
            stop=REQUESTED if self.stop.requested else UNREAD * isinstance(logs.lost, BrokenPipeError),
            saving=self.checkpoints.status,
            problem=update.problem_code,
            tokens=update.tokens,
            rows=self.row_digest.counts,
            counts=self.workload.meter.counts,
            ranks=self.rank_stats.counts,
        )
        self.reports.send(report, update.problem)

    def receive_reports(self) -> None:
        """Wait for the reports of all ranks, if one was sent, and process them. Raises RankRefused if a rank has no data."""
        if (sync := self.reports.receive()) is None:
            return
        self.last_report = sync
        self.state.seconds += sync.nanoseconds / 1e9
        self.state.tokens += sync.tokens
        self.workload.meter.synced(sync.nanoseconds / 1e9, sync.counts)
        self.checkpoints.advance(sync.saving)
        self.stopping = max(self.stopping, sync.stop)

    def write_log_line(self, lr: float) -> None:
        """Write an object to the sinks and a line to the terminal, from the reports of all ranks on this update."""
        assert self.last_report is not None
        state = self.state
        seconds, state.logged_seconds = state.seconds - state.logged_seconds, state.seconds
        values: dict[str, Any] = {"step": state.step, "time/train_seconds": round(state.seconds, 3)}
        values |= {"train/lr": lr} | self.workload.meter.drain()
        values |= {"train/skipped": state.skipped, "train/spikes": state.spiked, "data/cursor": state.cursor}
        digest = self.row_digest.total(self.last_report.rows)
        values |= {"data/row_digest": f"{digest:016x}", "data/tokens": state.tokens}
        if len(self.schedule.phases) > 1:
            values["train/phase"] = len(state.phase_starts)
        values |= self.rank_stats.drain(self.last_report.ranks, seconds, state.step)
        self.sinks.write(values)
        if "train/loss" in values:
            log.info(self.workload.progress_line(values, self.schedule.eta_seconds))

    def evaluate_in_time(self) -> None:
        """Evaluate, unless a stop was requested or less time is left than the longest evaluation took: then the next start does. Before an
        evaluation of unknown length the run is saved, if there is a time limit. A collective."""
        state, left, longest = self.state, self.stop.seconds_left, self.state.evaluation_seconds
        state.evaluation_owed = True
        if not self.stopping and self.world.agree_any(left < longest):
            self.stopping = REQUESTED
            log.info(f"step {state.step:,}: the next start evaluates: {left:.0f} s are left, it took {longest:.0f} s")
        if self.stopping:
            return
        if state.step and self.world.agree_any(not longest and left < math.inf):
            self.checkpoints.complete(self.engine, state.step, self.checkpoint_state)
        self.evaluate()

    def evaluate(self) -> None:
        """Evaluate, and write the metrics to the sinks. A collective."""
        state, patience, started = self.state, self.config.eval.patience, time.perf_counter()
        metrics = self.workload.evaluate(state.step, self.watchdog.progress)
        state.evaluation_owed = False
        state.evaluation_seconds = max(state.evaluation_seconds, time.perf_counter() - started)
        self.save_due |= self.checkpoints.saved_step == state.step  # was saved without the evaluation
        if not metrics:
            return
        self.last_eval = metrics
        self.sinks.write({"step": state.step, "time/train_seconds": round(state.seconds, 3)} | metrics)
        self.sinks.show(state.step, self.workload.samples)
        if not patience or len(state.phase_starts) < len(self.schedule.phases):
            return
        if state.improved(self.world.broadcast(metrics["eval/mlm_loss"])):
            self.save_due = True
        elif state.since_best == patience:
            best = f"{self.run_dir / BEST} is step {state.best_step:,}, with {state.best_loss:.4f}"
            log.info(
                f"step {state.step:,}: the held-out loss did not improve in {patience} evaluations, so training ends; {best}"
            )

    def roll_back(self, spike: PendingUpdate) -> None:
        """Resume from the newest checkpoint before `spike`, skipping the data up to and including it (PaLM, Chowdhery et al. 2022,
        section 5.1). Updates done after the spike are discarded. Raises BadTraining if there is no such checkpoint."""
        self.receive_reports()
        self.checkpoints.finish()
        path = self.checkpoints.latest(spike.step - 1)
        if path is None:
            raise BadTraining(f"a spike at step {spike.step} and no checkpoint before it to roll back to")
        self.watchdog.progress()
        self.judge.forget()
        self.updates.close()
        spiked = self.state.spiked
        self.resume(self.checkpoints.load(self.engine, path))
        self.state.cursor, self.state.spiked = spike.cursor + 1, spiked
        self.sinks.resume(self.state.step)
        self.updates = self.workload.updates(self.state.cursor, self.state.phase_starts)
        log.info(f"rolled back to step {self.state.step}; the data up to the spike is skipped")

    # -- saving and resuming -----------------------------------------------------------------------------------------

    def checkpoint_state(self) -> dict[str, Any]:
        """State of a checkpoint besides the engine's tensors."""
        assert not self.judge.pending, "judge all updates first: their losses are part of the state"
        return {
            **self.provenance,
            **asdict(self.state),
            "row_digest": self.row_digest.total(self.last_report.rows if self.last_report else {}),
            "losses_by_objective": self.spike_policy.state(),
            "meter": self.workload.meter.state(),
            **self.workload.state(),
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        self.schedule.state = state = TrainState.of(saved)
        self.checkpoints.saved_step = self.checkpoints.step
        if state.best_step >= 0:
            state.forget_missing_best(on_main(self.world, self.checkpoints.steps))
        self.row_digest, self.last_report = RowDigest(saved["row_digest"]), None
        self.spike_policy.resume(saved.get("losses_by_objective", {}), self.state.bad)
        self.workload.meter.resume(saved["meter"])
        self.workload.resume(saved)

    def save(self) -> None:
        """Start saving a checkpoint of the current state, and keep a copy of that in memory until it is committed."""
        self.state.saved_seconds = self.state.seconds
        self.checkpoints.save(self.engine, self.checkpoint_state())
        if self.copies is not None:
            self.copies.take(self.engine, self.checkpoint_state(), self.checkpoints.in_flight)

    def close(self) -> None:
        """End the loader's workers, close the sinks and write the profile, each even if another fails."""
        self.watchdog.closing()
        with ExitStack() as stack:
            for close in (self.profiler.close, self.sinks.close, self.updates.close):
                stack.callback(close)
