"""The training loop: batch, step, meter, log, evaluate, agree to stop, save.

Pre-training, distillation and fine-tuning use the same `Trainer` with different `Workload`s. All ranks make the same calls in the
same order and the same decisions, which depend only on a `Sync` that was reduced over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megabert.agreement import REQUESTED, UNREAD, SentReport, Sync
from megabert.checkpoint import Checkpoints, drop_incomparable, ends_early
from megabert.common import logs
from megabert.common.errors import FAILED, BadTraining
from megabert.common.logs import log
from megabert.common.run_files import BEST, SLOW_RANKS
from megabert.config import Config
from megabert.data.batch import RowDigest
from megabert.distributed.ranks import RankError, on_every_rank, on_main, raise_on_all_ranks
from megabert.distributed.signals import REQUEUE, Stop
from megabert.distributed.watchdog import Watchdog
from megabert.engine import Engine, RankMetrics, UpdateResult
from megabert.engine.profiler import Profiler
from megabert.inplace.copies import Copies
from megabert.metrics import first_line
from megabert.optim.rate_record import RateRecord
from megabert.progress import RunSchedule, TrainState
from megabert.sinks import Sinks
from megabert.spikes import PendingUpdate, SpikePolicy, UpdateJudge, check_finite

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
        checkpoints.saved = stop.record_save
        self.schedule = RunSchedule(config, workload, stop_after)
        self.spike_policy = SpikePolicy(config.spikes, config.max_bad_steps)
        self.judge = UpdateJudge(self.spike_policy, world, run_dir, engine.terms)
        self.sent: SentReport | None = None
        # the newest report of all ranks, and the largest `Sync.stop` so far
        self.last_report: Sync | None = None
        self.stopping, self.finished = 0, False  # finished: over, and saved
        self.save_due = self.line_due = False  # a checkpoint and a log line, after the newest update
        self.schedule.state.cursor = cursor
        self.newest: Any = None  # PendingUpdate
        self.row_digest = RowDigest()
        self.rank_stats = RankMetrics(world, engine.compute_time, watchdog, config.watchdog, run_dir / SLOW_RANKS)
        self.last_eval: dict[str, float] = {}
        self.fresh = saved is None
        if saved is not None:
            self.resume(saved)
            self.state.evaluation_owed = self.state.evaluation_owed or ends_early(saved, config)
        if config.schedule.unit == "minutes":
            self.schedule.rates = RateRecord(run_dir, config, world, self.state.step, fresh=saved is None)
        # sinks write on rank 0 only, and drop log lines after step `at`
        at, folder = self.state.step or min(checkpoints.saved_step, 0), run_dir if world.is_main else None
        self.sinks = on_every_rank(world, lambda: Sinks(folder, config, at, self.state.evaluation_owed > 0))
        self.updates: Any = workload.updates(self.state.cursor, self.state.phase_starts)
        self.profiler = Profiler(run_dir / "profile", world.rank, *profile, self.schedule.updates_left)

    @property
    def state(self) -> TrainState:
        return self.schedule.state

    # -- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Train until the schedule or `stop_after` ends the run or a stop is requested, and save; false if the same command has to resume.
        Raises Failed if the save fails, and RankError after the save if stdout or stderr was closed."""
        for _ in self:
            pass
        return self.finished

    def start(self) -> None:
        """Evaluate and save before the first update, where this is due."""
        if self.stopping:
            return
        new = self.checkpoints.saved_step < 0
        if self.state.evaluation_owed or (new and not self.state.step and self.workload.evaluation_due(0)):
            self.evaluate_if_time_allows()
        if self.save_due or (new and self.config.spikes.policy == "rollback"):
            self.save()  # a checkpoint to roll back to, or the best one so far

    def __iter__(self) -> Iterator[PendingUpdate]:
        """The loop of `train`: yields each update after its log line, evaluation and save. Where a caller stops iterating early, the run
        resumes from the newest checkpoint: the state reached is saved at the end of the loop."""
        self.stopping = REQUESTED * self.world.agree_any(self.stop.requested)
        if self.stopping and not self.schedule.over and self.state.step <= max(self.checkpoints.saved_step, 0):
            log.info("stopped: nothing was trained since the start; the same command resumes")
            self.checkpoints.finish_mirror()  # the previous job may have ended before its upload was complete
            return
        self.watchdog.training_started()
        self.start()
        while not self.schedule.over and not self.stopping:
            started = self.watchdog.clock()
            update, lr, result = self.train_update()
            if self.after_update(update, result, started):
                self.judge.judge(self.state)
            if self.judge.spike is not None:
                self.roll_back(self.judge.spike)
                continue
            if logged := bool(self.schedule.limit or self.line_due):
                self.write_log_line(lr)
            elif self.state.step == 1:
                log.info(first_line(update.objective, result, self.state.seconds, self.config.log.interval))
            self.stop.record_update(self.watchdog.clock() - started)
            if self.schedule.limit or self.workload.evaluation_due(self.state.step):
                self.evaluate_if_time_allows()
                if self.schedule.limit and not logged:  # out of patience
                    self.write_log_line(lr)
            if not self.stopping and self.save_due and (not self.state.bad or self.state.best_step == self.state.step):
                self.save()
            elif not self.stopping and self.copies is not None and self.copies.due(self.state.step):
                self.copies.take(self.engine, self.checkpoint_state(), self.checkpoints.in_flight)
            yield self.newest
        self.state.saved_seconds = self.state.seconds
        self.checkpoints.save_and_wait(self.engine, self.state.step, self.checkpoint_state)
        self.checkpoints.finish_mirror()
        self.finished = self.schedule.over and not self.state.evaluation_owed
        saved = f"saved at step {self.state.step:,}; the same command resumes"
        if not self.finished and self.stopping == UNREAD:
            # with --in-place FAILED would make the keepers restart the ranks, whose output is closed too
            raise RankError(f"Broken pipe: stdout or stderr is closed; {saved}", REQUEUE if self.copies else FAILED)
        if not self.finished:
            log.info(f"stopped: {saved}")

    def train_update(self) -> tuple[Any, float, UpdateResult]:
        """Train on the next update of the data; returns it, its learning rate and its result. A collective."""
        self.profiler.update(self.state.step + 1)
        if recorded := self.schedule.recorded():
            # with a time budget, a repeated update gets the phase and the learning rate that it had before
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
        place = f"phase {number + 1} of {len(self.schedule.phases)}"
        log.info(f"step {state.step + 1}: {place}: {self.schedule.phase.changes}")
        self.updates.close()
        self.updates = self.workload.updates(state.cursor, state.phase_starts)
        if self.config.spikes.policy == "rollback":
            self.save()  # a checkpoint to roll back to, in the same phase

    # -- after an update ---------------------------------------------------------------------------------------------

    def after_update(self, update: Any, result: UpdateResult, started: float) -> bool:
        """Meter an update and report it to all ranks; returns whether to judge results now, which reads them from the device."""
        step = self.state.step + 1
        copied = self.copies is not None and self.copies.due(step)
        self.save_due, self.line_due = self.schedule.checkpoint_due(step, self.save_due), self.schedule.log_due(step)
        reading = self.save_due or self.schedule.reading_due(step, len(self.judge.pending), copied)
        if reading:
            float(result.host_applied)  # synchronise, so that `seconds` includes the device's work on this update
        seconds = self.watchdog.clock() - started
        self.state.step, self.state.cursor = step, update.step + 1
        self.newest = PendingUpdate(step, update.step, update.epoch, update.row_ids.tolist(), update.objective, result)
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
            stop=REQUESTED if self.stop.requested else UNREAD * isinstance(logs.write_error, BrokenPipeError),
            saving=self.checkpoints.status,
            problem=update.problem_code,
            tokens=update.tokens,
            rows=self.row_digest.counts,
            counts=self.workload.meter.counts,
            ranks=self.rank_stats.counts,
        )
        self.sent = report, update.problem, self.world.start_gather(report.values())

    def receive_reports(self) -> None:
        """Wait for the reports of all ranks, if one was sent, and process them. Raises RankError if a rank has no data."""
        if self.sent is None:
            return
        (report, problem, gathered), self.sent = self.sent, None
        sync = report.reduce(gathered())
        if sync.problem:
            raise_on_all_ranks(self.world, problem, report.problem)
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
        values |= {"train/phase": len(state.phase_starts)} if len(self.schedule.phases) > 1 else {}
        values |= self.rank_stats.drain(self.last_report.ranks, seconds, state.step)
        self.sinks.write(values)
        if "train/loss" in values:
            log.info(self.workload.progress_line(values, self.schedule.eta_seconds))

    def evaluate_if_time_allows(self) -> None:
        """Evaluate, unless a stop was requested or the longest evaluation so far would exceed the time limit: then stop, and leave it to
        the next start. Under a time limit the run is saved before the first evaluation, of unknown duration. A collective."""
        state, left, longest = self.state, self.stop.seconds_left, self.state.evaluation_seconds
        state.evaluation_owed += 1
        if not self.stopping and self.world.agree_any(left < longest):
            self.stopping, self.save_due = REQUESTED, True
            state.postpone_evaluation(left)
        if self.stopping:
            return
        if state.step and self.world.agree_any(not longest and left < math.inf):
            state.saved_seconds = state.seconds
            self.checkpoints.save_and_wait(self.engine, state.step, self.checkpoint_state)
        self.evaluate()

    def evaluate(self) -> None:
        """Evaluate, and write the metrics to the sinks. A collective."""
        state, patience, started = self.state, self.config.eval.patience, self.watchdog.clock()
        metrics = self.workload.evaluate(state.step, self.watchdog.progress)
        state.evaluation_owed = 0
        state.evaluation_seconds = max(state.evaluation_seconds, self.watchdog.clock() - started)
        self.save_due |= self.checkpoints.saved_step == state.step  # was saved without the evaluation
        if not metrics:
            return
        self.last_eval = metrics
        reached = {"step": state.step, "time/train_seconds": round(state.seconds, 3), "data/tokens": state.tokens}
        self.sinks.write(reached | metrics)
        self.sinks.show(state.step, self.workload.samples)
        self.world.barrier()  # rank 0 wrote to the sinks alone: keep that out of the other ranks' training time
        if patience and len(state.phase_starts) >= len(self.schedule.phases):
            if state.improved(self.world.broadcast(metrics["eval/mlm_loss"])):
                self.save_due = True
            elif state.since_best == patience and state.best_step >= 0:
                log.info(f"{state.out_of_patience}; {self.run_dir / BEST} is step {state.best_step:,}")
        check_finite(metrics, state.step, self.schedule.limit)

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
        self.resume({**self.checkpoints.load(self.engine, path), "spiked": self.state.spiked})
        self.state.cursor, self.checkpoints.saved_step = spike.cursor + 1, -1  # the checkpoint has another cursor
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
        saved = drop_incomparable(saved, self.config, {**self.provenance, "world_size": self.world.size})
        self.schedule.state = state = TrainState.of(saved)
        if state.best_step >= 0:
            state.forget_missing_best(on_main(self.world, self.checkpoints.steps))
        self.row_digest, self.last_report = RowDigest(saved["row_digest"]), None
        self.spike_policy.resume(saved.get("losses_by_objective", {}), self.state.bad)
        self.workload.meter.resume(saved["meter"])
        self.workload.resume(saved)

    def save(self) -> None:
        """Start saving a checkpoint of the current state; with --in-place also take a copy of it in memory."""
        self.state.saved_seconds = self.state.seconds
        self.checkpoints.save(self.engine, self.checkpoint_state())
        # not of the state that was resumed: a keeper takes a copy for an update
        if self.copies is not None and (self.fresh or self.newest is not None):
            self.copies.take(self.engine, self.checkpoint_state(), self.checkpoints.in_flight)

    def close(self) -> None:
        """Stop the loader's workers, close the sinks and write the profile; an error in one does not skip the others."""
        self.watchdog.training_ended()
        with ExitStack() as stack:
            for close in (self.profiler.close, self.sinks.close, self.updates.close):
                stack.callback(close)
