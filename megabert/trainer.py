"""The training loop: batch, step, meter, log, evaluate, agree to stop, save.

Pre-training, distillation and fine-tuning use the same `Trainer` with different `Workload`s. All ranks make the same calls in the
same order and the same decisions, which depend only on a `Sync` that was reduced over them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from megabert.agreement import REQUESTED, UNREAD, Agreement, Sync
from megabert.checkpoint import Checkpoints
from megabert.checkpoint.rate_record import RateRecord
from megabert.common import logs
from megabert.common.errors import FAILED, BadTraining
from megabert.common.logs import log
from megabert.common.run_files import BEST, SLOW_RANKS, TROUBLE
from megabert.config import Config, Phase, phase_at, phases_of
from megabert.data.batch import RowDigest
from megabert.distributed.ranks import RankRefused, World
from megabert.distributed.signals import REQUEUE, Stop
from megabert.distributed.watchdog import Watchdog
from megabert.engine import Engine, RankFigures, UpdateResult
from megabert.engine.profiler import Profiler
from megabert.inplace.copies import Copies
from megabert.metrics import Meter, Shown, Sinks, as_json, figures
from megabert.optim.schedule import limit_reached, phase_rate, share_used
from megabert.spikes import Decision, SpikePolicy, Trouble

# maximum number of updates whose results the host has not read from the device
MOST_UNREAD = 64

# -- the workload ----------------------------------------------------------------------------------------------------


class Workload(Protocol):
    """Data and evaluation of a run. All methods are called on every rank in the same order.

    An update has `step` (its number in the data, from 0), `epoch`, `batches` for the engine, `row_ids` and `epochs` (int64 [n]) of
    their rows, `tokens` (of this rank, without padding), `objective`, and `problem` with `problem_code`: see
    `megabert.data.batch.Update`.
    """

    shown: Shown

    @property
    def meter(self) -> Meter:
        """Metrics of the updates between two log lines."""

    def updates(self, first: int, phase_starts: Sequence[int]) -> Iterator[Any]:
        """Endless iterator over this rank's updates from number `first` of the data on; `close` ends its workers. `phase_starts`: the
        number of the first update of each phase so far; the updates are of the last of these phases."""

    def evaluation_due(self, step: int) -> bool:
        """Whether to evaluate after `step` updates (0: before the first). At the end of the schedule the Trainer always does."""

    def checkpoint_due(self, step: int) -> bool:
        """Whether to save after `step` updates. At the end of the run the Trainer always does."""

    def evaluate(self, step: int, progress: Callable[[], None]) -> dict[str, float]:
        """Evaluate the model after `step` updates, log the metrics and return them; {} without evaluation data. Samples go to
        `shown`. Calls `progress` from time to time, for the watchdog."""

    def progress_line(self, values: Mapping[str, Any], eta_seconds: float) -> str:
        """One line for the terminal from the values of a log line."""

    def state(self) -> dict[str, Any]:
        """JSON state of the workload, for a checkpoint."""

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state."""


# -- state and saves -------------------------------------------------------------------------------------------------


@dataclass
class TrainState:
    """Progress of a run; saved in every checkpoint."""

    # updates done
    step: int = 0
    # updates of the data consumed, including those skipped after a spike
    cursor: int = 0
    # training time, without evaluations and saves
    seconds: float = 0.0
    # consecutive updates that were not applied
    bad: int = 0
    # updates not applied, and spikes
    skipped: int = 0
    spiked: int = 0
    # tokens of all ranks, without padding
    tokens: int = 0
    # the cursor at the start of each phase so far
    phase_starts: list[int] = field(default_factory=lambda: [0])
    # with `eval.patience`: the step with the lowest held-out loss (-1: none yet), that loss, and evaluations since then
    best_step: int = -1
    best_loss: float = 0.0
    since_best: int = 0
    # an evaluation after `step` updates is due that a stop did not leave time for, and the longest one so far in seconds
    evaluation_owed: bool = False
    evaluation_seconds: float = 0.0
    # training times at the newest checkpoint and the newest log line
    saved_seconds: float = 0.0
    logged_seconds: float = 0.0

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> TrainState:
        """The state in a checkpoint; missing fields have their initial values."""
        return cls(**{f.name: saved[f.name] for f in fields(cls) if f.name in saved})


@dataclass(frozen=True)
class Unjudged:
    """An update whose result was not checked yet: step, cursor and rows (not the batches, whose memory the loader reuses),
    objective and result."""

    step: int
    cursor: int
    epoch: int
    row_ids: list[int]
    objective: str
    result: UpdateResult


class Saves:
    """The saves of one Trainer, reported to `stop` and `watchdog`. All ranks must call the same methods."""

    def __init__(self, checkpoints: Checkpoints, stop: Stop, watchdog: Watchdog) -> None:
        # step of the newest checkpoint; -1 without one
        self.step = -1
        # step and data cursor of the save in flight; None without one
        self.in_flight: tuple[int, int] | None = None
        self._checkpoints, self._stop, self._watchdog = checkpoints, stop, watchdog
        self._started = 0.0

    def start(self, engine: Engine, state: Callable[[], dict[str, Any]]) -> None:
        """Start saving the current state; it is committed at once if saving is not asynchronous."""
        self.finish()
        self._started, saved = time.perf_counter(), state()
        self.in_flight = saved["step"], saved["cursor"]
        self._checkpoints.save(engine, saved)
        self._update()
        self._watchdog.progress()

    def synced(self, status: int) -> None:
        """Advance the save in flight, if any, by the maximum `status` of all ranks."""
        if self._checkpoints.pending:
            self._checkpoints.advance(status)
            self._update()

    def finish(self) -> None:
        """Wait until the save in flight, if any, is committed."""
        if self._checkpoints.pending:
            self._checkpoints.finish()
            self._update()

    def complete(self, engine: Engine, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Save the current state unless its checkpoint exists, and wait until it is committed."""
        self.finish()
        if self.step != step:
            self.start(engine, state)
            self.finish()

    def _update(self) -> None:
        """Record the step and the duration of a save once it is committed."""
        if not self._checkpoints.pending and self.in_flight is not None:
            self.step, self.in_flight = self.in_flight[0], None
            self._stop.saved(time.perf_counter() - self._started)
            self._watchdog.progress()


# -- the Trainer -----------------------------------------------------------------------------------------------------


class Trainer:
    """Trains `engine` on `workload`, starting from the state `saved` (None: from scratch)."""

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
        cursor: int = 0,
        copies: Copies | None = None,
        stop_after: int | None = None,
        profile: tuple[int, int] = (0, 0),
    ) -> None:
        """`provenance` is saved in every checkpoint. `cursor`: the first update of the data if nothing was `saved`. `copies`: copies of
        the training state in memory, if ranks restart in place. `stop_after`: step at which to end before the schedule does.
        `profile`: the first and the last update to profile."""
        self.config, self.world, self.engine, self.workload = config, world, engine, workload
        self.phases = phases_of(config)
        self.checkpoints, self.copies, self.stop, self.watchdog = checkpoints, copies, stop, watchdog
        self.run_dir, self.provenance = run_dir, provenance
        engine.progress = checkpoints.progress = watchdog.progress
        self.stop_after = stop_after
        self.spike_policy = SpikePolicy(config.spikes, config.max_bad_steps)
        self.saves = Saves(checkpoints, stop, watchdog)
        self.agreement = Agreement(world)
        # the newest report of all ranks, and the largest `Sync.stop` so far
        self.known: Sync | None = None
        self.stopping = 0
        # whether a checkpoint and a log line are due after the newest update
        self.save_due = self.line_due = False
        self.state = TrainState(cursor=cursor)
        self.unjudged: list[Unjudged] = []
        self.newest: Unjudged | None = None
        # the update that requires a rollback
        self.spike: Unjudged | None = None
        self.rows = RowDigest()
        self.ranks = RankFigures(world, engine.own_time, watchdog, config.watchdog, run_dir / SLOW_RANKS)
        self.last_eval: dict[str, float] = {}
        if saved is not None:
            self.resume(saved)
        self.rates = None
        if config.schedule.unit == "minutes":
            self.rates = RateRecord(run_dir, config, world, self.state.step, fresh=saved is None)
        self.sinks = self.open_sinks()
        self.updates: Any = workload.updates(self.state.cursor, self.state.phase_starts)
        self.profiler = Profiler(run_dir / "profile", world.rank, *profile)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def train(self) -> bool:
        """Train until the schedule ends or `stop_after` is reached, or a stop is requested, and save; false if the same command has to
        resume. Raises Failed if the save fails, and RankRefused after it if nobody reads the output any more."""
        self.stopping = REQUESTED * self.world.agree_any(self.stop.requested)
        if self.stopping and not self.over and self.state.step <= max(self.saves.step, 0):
            log.info("stopped: nothing was trained since the start; the same command resumes")
            return False
        self.watchdog.opened()
        self.start()
        while not self.over and not self.stopping:
            started = time.perf_counter()
            update, lr, result = self.train_update()
            if self.account(update, result, started):
                self.judge()
            if self.spike is not None:
                self.roll_back(self.spike)
                continue
            if self.complete or self.line_due:
                self.log(lr)
            elif self.state.step == 1:
                seconds, interval = time.perf_counter() - started, self.config.log.interval
                loss = f"{update.objective} loss {float(result.host_loss):.4f}"
                log.info(f"step       1  {loss}  in {seconds:.1f} s; a line every {interval} updates")
            self.stop.updated(time.perf_counter() - started)
            if self.complete or self.workload.evaluation_due(self.state.step):
                self.evaluate_in_time()
            if not self.stopping and self.save_due:
                self.save()
            elif not self.stopping and self.copies is not None and self.copies.due(self.state.step):
                self.copies.take(self.engine, self.checkpoint_state(), self.saves.in_flight)
        self.saves.complete(self.engine, self.state.step, self.checkpoint_state)
        self.checkpoints.finish_mirror()
        if not self.over or self.state.evaluation_owed:
            saved = f"saved at step {self.state.step:,}; the same command resumes"
            if self.stopping == UNREAD:
                # keepers restart ranks after FAILED, with the same output
                raise RankRefused(f"Broken pipe: nobody reads the output; {saved}", REQUEUE if self.copies else FAILED)
            log.info(f"stopped: {saved}")
        return self.over and not self.state.evaluation_owed

    @property
    def limit(self) -> str:
        """The setting by which the run is complete: the schedule has ended, or the held-out loss has stopped improving; else "". An
        update with a recorded rate is repeated even if the time budget is used up."""
        state, patience = self.state, self.config.eval.patience
        if patience and state.since_best >= patience:
            return f"eval.patience={patience}"
        if self.rates is not None and self.rates.known(state.step, state.cursor):
            return ""
        return limit_reached(self.config.schedule, *self.used)

    @property
    def complete(self) -> bool:
        """Whether the run is complete."""
        return bool(self.limit)

    @property
    def over(self) -> bool:
        """Whether this process has no further update to do."""
        return self.complete or (self.stop_after is not None and self.state.step >= self.stop_after)

    def start(self) -> None:
        """Evaluate and save before the first update, where this is due."""
        if self.stopping:
            return
        begins = self.saves.step < 0 and not self.state.step
        if self.state.evaluation_owed or (begins and self.workload.evaluation_due(0)):
            self.evaluate_in_time()
        if self.saves.step >= 0 and not self.save_due:
            return
        if self.config.spikes.policy == "rollback" or self.save_due:
            # a checkpoint to roll back to, or the best one so far
            self.save()

    def train_update(self) -> tuple[Any, float, UpdateResult]:
        """Train on the next update of the data; returns it, its learning rate and its result. A collective."""
        self.profiler.update(self.state.step + 1)
        lr = self.rate()
        update = self.ranks.take(self.updates)
        return update, lr, self.engine.train_update(update, lr, self.spike_policy.veto(update.objective))

    def rate(self) -> float:
        """Enter the phase of the next update; returns its learning rate. With a time budget, a repeated update has the same phase and
        rate as before."""
        state = self.state
        recorded = self.rates.known(state.step, state.cursor) if self.rates is not None else None
        if recorded:
            state.seconds = recorded[0]
        self.enter_phase(phase_at(self.phases, share_used(self.config.schedule, *self.used)))
        if recorded:
            return recorded[1]
        lr = phase_rate(self.phase, self.config.schedule, *self.used)
        if self.rates is not None:
            self.rates.add(state.step, state.cursor, state.seconds, lr)
        return lr

    @property
    def used(self) -> tuple[int, float, int]:
        """Updates, minutes and tokens before the next update."""
        return self.state.step, self.state.seconds / 60, self.state.tokens

    @property
    def phase(self) -> Phase:
        """The phase of the newest update."""
        return self.phases[len(self.state.phase_starts) - 1]

    def enter_phase(self, number: int) -> None:
        """Switch to the updates of phase `number` (from 0), unless it is the current one. The spike policy forgets earlier losses."""
        state, entered = self.state, number + 1 - len(self.state.phase_starts)
        if entered <= 0:
            return
        self.agree()
        self.judge()
        if self.spike is not None:
            # a rollback follows
            return
        self.spike_policy.resume({}, state.bad)
        state.phase_starts = [*state.phase_starts, *[state.cursor] * entered]
        log.info(f"step {state.step + 1}: phase {number + 1} of {len(self.phases)}: {self.phase.changes}")
        self.updates.close()
        self.updates = self.workload.updates(state.cursor, state.phase_starts)
        if self.config.spikes.policy == "rollback":
            # a checkpoint to roll back to, in the same phase
            self.save()

    # -- after an update ---------------------------------------------------------------------------------------------

    def account(self, update: Any, result: UpdateResult, started: float) -> bool:
        """Meter an update and report it to the other ranks; whether results are read from the device now."""
        self.save_due = self.checkpoint_due(self.state.step + 1)
        self.line_due = self.log_due(self.state.step + 1)
        reading = self.save_due or self.reading_due(self.state.step + 1)
        if reading:
            # before the time is taken, so that it counts as training time
            result.wait()
        seconds = time.perf_counter() - started
        self.state.step += 1
        self.state.cursor = update.step + 1
        place = {"step": self.state.step, "cursor": update.step, "epoch": update.epoch}
        self.newest = Unjudged(**place, row_ids=update.row_ids.tolist(), objective=update.objective, result=result)
        self.unjudged.append(self.newest)
        self.workload.meter.add(result, update)
        self.rows.add(update)
        self.watchdog.progress(self.state.step)
        self.report(update, seconds)
        if reading or self.world.size == 1 or self.config.schedule.unit == "tokens":
            self.agree()
        if self.stopping or self.over:
            self.agree()
            return True
        return reading

    def reading_due(self, step: int) -> bool:
        """Whether results are read from the device after update `step`. In between the host only queues work, of at most MOST_UNREAD
        updates. A spike policy that acts immediately reads every update."""
        if step == 1 or self.spike_policy.immediate or self.log_due(step) or len(self.unjudged) + 1 >= MOST_UNREAD:
            return True
        last = step == self.config.schedule.total_steps or step == self.stop_after
        copied = self.copies is not None and self.copies.due(step)
        return last or copied or self.workload.evaluation_due(step)

    def log_due(self, step: int) -> bool:
        """Whether to log update `step` if it is not the last. All ranks decide the same, before the update."""
        minimum, elapsed = self.config.log.seconds, self.state.seconds - self.state.logged_seconds
        return step % self.config.log.interval == 0 and (not minimum or elapsed >= minimum)

    def checkpoint_due(self, step: int) -> bool:
        """Whether to save after update `step` if it is not the last. All ranks decide the same, before the update."""
        minutes = self.config.checkpoint.minutes
        return self.workload.checkpoint_due(step) or bool(
            minutes and self.state.seconds - self.state.saved_seconds >= 60 * minutes
        )

    def report(self, update: Any, seconds: float) -> None:
        """Process the reports of the previous update, and send this rank's report of `update`."""
        self.agree()
        report = Sync(
            nanoseconds=round(seconds * 1e9),
            stop=REQUESTED if self.stop.requested else UNREAD * isinstance(logs.lost, BrokenPipeError),
            saving=self.checkpoints.status,
            problem=update.problem_code,
            tokens=update.tokens,
            rows=self.rows.counts,
            counts=self.workload.meter.counts,
            ranks=self.ranks.counts,
        )
        self.agreement.start(report, update.problem)

    def agree(self) -> None:
        """Wait for the reports of all ranks, if one was sent, and process them. Raises RankRefused if a rank has no data."""
        sync = self.agreement.finish()
        if sync is None:
            return
        self.known = sync
        self.state.seconds += sync.nanoseconds / 1e9
        self.state.tokens += sync.tokens
        self.workload.meter.synced(sync.nanoseconds / 1e9, sync.counts)
        self.saves.synced(sync.saving)
        self.stopping = max(self.stopping, sync.stop)

    def log(self, lr: float) -> None:
        """Write an object to the sinks and a line to the terminal, from the reports of all ranks on this update."""
        assert self.known is not None
        state = self.state
        seconds, state.logged_seconds = state.seconds - state.logged_seconds, state.seconds
        values: dict[str, Any] = {"step": state.step, "time/train_seconds": round(state.seconds, 3)}
        values |= {"train/lr": lr} | self.workload.meter.drain()
        values |= {"train/skipped": state.skipped, "train/spikes": state.spiked, "data/cursor": state.cursor}
        values |= {"data/row_digest": f"{self.row_digest:016x}"}
        if self.config.schedule.unit == "tokens":
            values["data/tokens"] = state.tokens
        if len(self.phases) > 1:
            values["train/phase"] = len(state.phase_starts)
        values |= self.ranks.drain(self.known.ranks, seconds, state.step)
        self.sinks.write(values)
        if "train/loss" in values:
            log.info(self.workload.progress_line(values, self.eta_seconds))

    @property
    def row_digest(self) -> int:
        """Digest of the rows of all ranks, up to the newest update with reports of all ranks."""
        return self.rows.total({} if self.known is None else self.known.rows)

    @property
    def eta_seconds(self) -> float:
        """Remaining training time in seconds at the average speed."""
        schedule, state = self.config.schedule, self.state
        seconds = (schedule.total_steps - state.step) * state.seconds / state.step
        if schedule.unit == "minutes":
            seconds = min(seconds, schedule.budget_minutes * 60 - state.seconds)
        elif schedule.unit == "tokens":
            seconds = min(seconds, (schedule.budget_tokens / max(state.tokens, 1) - 1) * state.seconds)
        return max(seconds, 0.0)

    def evaluate_in_time(self) -> None:
        """Evaluate, unless a stop was requested or less time is left than the longest evaluation took: then the next start does. Before an
        evaluation of unknown length the run is saved, if there is a time limit. A collective."""
        state, left = self.state, self.stop.seconds_left
        self.stopping = self.stopping or REQUESTED * self.world.agree_any(left < state.evaluation_seconds)
        state.evaluation_owed = True
        if self.stopping:
            return
        if state.step and self.world.agree_any(not state.evaluation_seconds and left < math.inf):
            self.saves.complete(self.engine, state.step, self.checkpoint_state)
        self.evaluate()

    def evaluate(self) -> None:
        """Evaluate, and write the metrics to the sinks. A collective."""
        started = time.perf_counter()
        metrics = self.workload.evaluate(self.state.step, self.watchdog.progress)
        self.state.evaluation_owed = False
        self.state.evaluation_seconds = max(self.state.evaluation_seconds, time.perf_counter() - started)
        # a checkpoint of this step was saved without the evaluation
        self.save_due |= self.saves.step == self.state.step
        if metrics:
            self.last_eval = metrics
            place = {"step": self.state.step, "time/train_seconds": round(self.state.seconds, 3)}
            self.sinks.write(place | metrics)
            self.sinks.show(self.state.step, self.workload.shown)
            if self.config.eval.patience and len(self.state.phase_starts) == len(self.phases):
                self.compare(self.world.broadcast(metrics["eval/mlm_loss"]))

    def compare(self, loss: float) -> None:
        """Save if the held-out loss is the lowest, otherwise count the evaluation; NaN is none. `loss` is the same on all ranks."""
        state = self.state
        if math.isfinite(loss) and (state.best_step < 0 or not loss >= state.best_loss):
            state.best_step, state.best_loss, state.since_best = state.step, loss, 0
            self.save_due = True
            return
        state.since_best += 1
        if state.since_best == self.config.eval.patience:
            log.info(
                f"step {state.step:,}: the held-out loss did not improve in {state.since_best} evaluations, so training ends; "
                f"{self.run_dir / BEST} is step {state.best_step:,}, with {state.best_loss:.4f}"
            )

    # -- spikes and failed updates -----------------------------------------------------------------------------------

    def judge(self) -> None:
        """Check the results of the updates since the last call, up to the first `spike` that requires a rollback. Raises BadTraining
        if the run must end."""
        while self.unjudged and self.spike is None:
            done = self.unjudged.pop(0)
            if self.judge_one(done) is Decision.ROLLBACK:
                self.spike = done

    def judge_one(self, done: Unjudged) -> Decision:
        """Check whether an update was applied and its loss is normal, and record it if not; returns the decision."""
        result = done.result
        self.state.skipped += result.skipped
        flags = {"skipped": result.skipped, "vetoed": result.vetoed}
        judgement = self.spike_policy.judge(result.host_loss, done.objective, **flags)
        self.state.bad = self.spike_policy.bad
        for trouble in judgement.troubles:
            self.state.spiked += trouble.kind == "spike"
            self.record(done, trouble)
            log.info(f"step {done.step}: {trouble.text}")
        if judgement.decision is Decision.ABORT:
            raise BadTraining(f"{judgement.reason}; the rows are in {self.run_dir / TROUBLE}")
        return judgement.decision

    def record(self, done: Unjudged, trouble: Trouble) -> None:
        """Append step, data and figures of an update to `trouble.jsonl`. A collective."""
        rows_by_rank = self.world.gather([row for row in done.row_ids if row >= 0])
        if self.world.is_main:
            entry: dict[str, Any] = {"step": done.step, "cursor": done.cursor, "epoch": done.epoch}
            entry |= {"kind": trouble.kind, "action": trouble.action}
            entry |= figures(done.result, self.engine.terms)
            entry |= {"score": round(trouble.score, 3), "row_ids": [row for rows in rows_by_rank for row in rows]}
            with open(self.run_dir / TROUBLE, "a") as file:
                file.write(as_json(entry) + "\n")

    def roll_back(self, spike: Unjudged) -> None:
        """Resume from the newest checkpoint before `spike`, skipping the data up to and including it (PaLM, Chowdhery et al. 2022,
        section 5.1). Updates done after the spike are discarded. Raises BadTraining if there is no such checkpoint."""
        self.agree()
        self.saves.finish()
        path = self.checkpoints.latest(spike.step - 1)
        if path is None:
            raise BadTraining(f"a spike at step {spike.step} and no checkpoint before it to roll back to")
        self.watchdog.progress()
        self.spike, self.unjudged = None, []
        self.updates.close()
        self.sinks.close()
        spiked = self.state.spiked
        self.resume(self.checkpoints.load(self.engine, path))
        self.state.cursor, self.state.spiked = spike.cursor + 1, spiked
        self.sinks = self.open_sinks()
        self.updates = self.workload.updates(self.state.cursor, self.state.phase_starts)
        log.info(f"rolled back to step {self.state.step}; the data up to the spike is skipped")

    # -- saving and resuming -----------------------------------------------------------------------------------------

    def checkpoint_state(self) -> dict[str, Any]:
        """State of a checkpoint besides the engine's tensors."""
        assert not self.unjudged, "judge all updates first: their losses are part of the state"
        return {
            **self.provenance,
            **asdict(self.state),
            "row_digest": self.row_digest,
            "losses_by_objective": self.spike_policy.state(),
            "meter": self.workload.meter.state(),
            **self.workload.state(),
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        older = {"saved_seconds": saved["seconds"], "logged_seconds": saved["seconds"]}
        self.state = state = TrainState.of({**older, **saved})
        self.saves.step = self.checkpoints.step
        if state.best_step >= 0:
            steps = self.world.broadcast(self.checkpoints.steps() if self.world.is_main else None)
            if state.best_step not in steps:
                log.info(
                    f"the best checkpoint, of step {state.best_step:,}, is missing: the next evaluation counts as the best"
                )
                state.best_step, state.since_best = -1, 0
        self.rows, self.known = RowDigest(saved["row_digest"]), None
        self.spike_policy.resume(saved.get("losses_by_objective", {}), self.state.bad)
        self.workload.meter.resume(saved["meter"])
        self.workload.resume(saved)

    def save(self) -> None:
        """Start saving a checkpoint of the current state, and keep a copy of that in memory until it is committed."""
        self.state.saved_seconds = self.state.seconds
        self.saves.start(self.engine, self.checkpoint_state)
        if self.copies is not None:
            self.copies.take(self.engine, self.checkpoint_state(), self.saves.in_flight)

    def open_sinks(self) -> Sinks:
        """The run's sinks, which write on rank 0 only. Log lines after the current step are removed."""
        resumed = self.state.step > 0 or self.saves.step >= 0
        folder = self.run_dir if self.world.is_main else None
        return Sinks(folder, self.config, self.state.step if resumed else -1)

    def close(self) -> None:
        """End the loader's workers, close the sinks and write the profile, each even if another fails."""
        self.watchdog.closing()
        with ExitStack() as stack:
            for close in (self.profiler.close, self.sinks.close, self.updates.close):
                stack.callback(close)
