"""The training loop: batch, step, meter, log, evaluate, agree to stop, save.

Pre-training, distillation and fine-tuning run through the one `Trainer`; what differs between them is a `Workload`. All
ranks make the same calls in the same order and come to the same decisions: what they decide by is in a `Sync`, which was
reduced over them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Protocol, get_type_hints

from megabert.checkpoint import Checkpoints, Copies
from megabert.checkpoint.rate_record import RateRecord
from megabert.common.errors import BadTraining
from megabert.common.logs import log
from megabert.common.run_files import BEST, SLOW_RANKS, TROUBLE
from megabert.config import Config, Phase, phase_at, phases_of
from megabert.data.batch import RowDigest
from megabert.distributed.ranks import World, refuse_together
from megabert.distributed.signals import Stop
from megabert.distributed.watchdog import Watchdog
from megabert.engine import Engine, RankFigures, UpdateResult
from megabert.engine.profiler import Profiler
from megabert.metrics import Meter, Shown, Sinks, as_json, figures
from megabert.optim.schedule import finished, phase_rate, share_used
from megabert.spikes import Decision, SpikePolicy, Trouble

# updates that the host may be ahead of what it has read of the device
MOST_UNREAD = 64

# -- what is trained -------------------------------------------------------------------------------------------------


class Workload(Protocol):
    """What is trained on and judged by. All methods are called on every rank at the same moment.

    An update has `step` (its number in the data, from 0), `epoch`, `batches` for the engine, `row_ids` and `epochs` (int64
    [n]) of the rows they hold, `tokens` (real ones of this rank), `objective`, and `problem` with its `problem_code`, as
    `megabert.data.batch.Update` says.
    """

    shown: Shown

    @property
    def meter(self) -> Meter:
        """Figures of the updates between two log lines."""

    def updates(self, first: int, phase_starts: Sequence[int]) -> Iterator[Any]:
        """This rank's updates from number `first` of the data on, without end; `close` ends its workers. `phase_starts`: the
        number of the first update of each phase so far; the updates are those of the last one."""

    def evaluation_due(self, step: int) -> bool:
        """Whether to evaluate after `step` updates, the end of the schedule aside; step 0 is before the first one."""

    def checkpoint_due(self, step: int) -> bool:
        """Whether to save after `step` updates, the end aside."""

    def evaluate(self, step: int, progress: Callable[[], None]) -> dict[str, float]:
        """Figures of the model after `step` updates, logged and given; {} where there is nothing to evaluate on. What was
        looked at besides is left in `shown`. `progress` is called now and then, for the watchdog."""

    def progress_line(self, values: Mapping[str, Any], eta_seconds: float) -> str:
        """One line for the terminal from the values of a log line."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the workload, as JSON."""

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state."""


# -- what ranks agree on ---------------------------------------------------------------------------------------------


# How a field of `Sync` is reduced from the ranks' values, in rank order; a dict is reduced value by value.
Max = Annotated[int, max]
Sum = Annotated[int, sum]
Sums = Annotated[dict[str, int], sum]
ByRank = Annotated[dict[str, Any], list]


@dataclass(frozen=True)
class Sync:
    """What a rank reports after an update and, reduced over the ranks field by field, what all of them know then."""

    # of the update, on the slowest rank
    nanoseconds: Max
    # asked to stop
    stop: Max
    # `Checkpoints.status` of the save in flight
    saving: Max
    # the data could not be had: an exit code
    problem: Max
    # of the update, without padding
    tokens: Sum
    # of all updates of this process: `RowDigest.counts`
    rows: Sums
    # since the last log line: `Meter.counts` and `RankFigures.counts`
    counts: Sums
    ranks: ByRank

    def values(self) -> list[int]:
        """All numbers, in the order of the fields and of the names in them."""
        found: list[int] = []
        for name in REDUCTIONS:
            value = getattr(self, name)
            found += [value[key] for key in sorted(value)] if isinstance(value, dict) else [int(value)]
        return found

    def reduce(self, rows: list[list[int]]) -> Sync:
        """The record of all ranks from the `values` of each."""
        columns = zip(*rows, strict=True)
        found: dict[str, Any] = {}
        for name, by in REDUCTIONS.items():
            value = getattr(self, name)
            of_all = {key: by(next(columns)) for key in sorted(value)} if isinstance(value, dict) else by(next(columns))
            found[name] = of_all
        return Sync(**found)


REDUCTIONS = {name: hint.__metadata__[0] for name, hint in get_type_hints(Sync, include_extras=True).items()}


class Agreement:
    """The ranks' reports on the newest update: one collective an update, on its way while the next one is trained."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sent: tuple[Sync, str, Callable[[], list[list[int]]]] | None = None

    def start(self, own: Sync, problem: str) -> None:
        """Send this rank's report on an update, and the text of its problem."""
        assert self._sent is None, "finish the report before"
        self._sent = own, problem, self._world.start_gather(own.values())

    def finish(self) -> Sync | None:
        """What all ranks reported; None where nothing was sent since. Waits. Raises RankRefused where a rank has a problem."""
        if self._sent is None:
            return None
        (own, problem, gathered), self._sent = self._sent, None
        sync = own.reduce(gathered())
        if sync.problem:
            refuse_together(self._world, problem, own.problem)
        return sync


# -- state and saves -------------------------------------------------------------------------------------------------


@dataclass
class TrainState:
    """How far a run is; all of it is in a checkpoint."""

    # updates done
    step: int = 0
    # updates of the data consumed, those left out after a spike included
    cursor: int = 0
    # of training; evaluations and saves are not counted
    seconds: float = 0.0
    # updates in a row that were not applied
    bad: int = 0
    # updates not applied, and spikes
    skipped: int = 0
    spiked: int = 0
    # real ones of all ranks
    tokens: int = 0
    # the cursor at the beginning of each phase so far
    phase_starts: list[int] = field(default_factory=lambda: [0])
    # with `eval.patience`: the step with the lowest held-out loss (-1: none yet), that loss, and evaluations since
    best_step: int = -1
    best_loss: float = 0.0
    since_best: int = 0

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> TrainState:
        """That of a checkpoint; a field that it does not have is as at the start."""
        return cls(**{one.name: saved[one.name] for one in fields(cls) if one.name in saved})


@dataclass(frozen=True)
class Unjudged:
    """An update that was done and not looked at: its step, its place and rows in the data (not its batches, whose memory
    the loader uses again), its objective and its result."""

    step: int
    cursor: int
    epoch: int
    row_ids: list[int]
    objective: str
    result: UpdateResult


class Saves:
    """The saves of one Trainer. All methods are called by all ranks alike; `stop` and `watchdog` are notified of each save."""

    def __init__(self, checkpoints: Checkpoints, stop: Stop, watchdog: Watchdog) -> None:
        # of the newest checkpoint; -1 where there is none
        self.step = -1
        self._checkpoints, self._stop, self._watchdog = checkpoints, stop, watchdog
        self._started, self._saving = 0.0, -1

    def start(self, engine: Engine, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Start a checkpoint of this moment; it is committed by `finish`, or at once where saving is not asynchronous."""
        self.finish()
        self._started, self._saving = time.perf_counter(), step
        self._checkpoints.save(engine, state())
        self._note()
        self._watchdog.progress()

    def synced(self, status: int) -> None:
        """`status` is what all ranks reported of the save in flight, if there is one."""
        if self._checkpoints.pending:
            self._checkpoints.advance(status)
            self._note()

    def finish(self) -> None:
        """Commit the checkpoint that is being written, if there is one; waits for it."""
        if self._checkpoints.pending:
            self._checkpoints.finish()
            self._note()

    def complete(self, engine: Engine, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Commit a checkpoint of this moment, unless it is committed."""
        self.finish()
        if self.step != step:
            self.start(engine, step, state)
            self.finish()

    def _note(self) -> None:
        """Take down a save's step and how long it took, once it is committed."""
        if not self._checkpoints.pending:
            self.step = self._saving
            self._stop.saved(time.perf_counter() - self._started)
            self._watchdog.progress()


# -- the Trainer -----------------------------------------------------------------------------------------------------


class Trainer:
    """Trains `engine` on `workload`, from the state `saved` on (None: from the start)."""

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
        """`provenance` goes into every checkpoint. `cursor`: the update of the data to start at where nothing was `saved`.
        `copies`: of the training state in memory, where ranks restart in place. `stop_after`: the step to end at, within the schedule. `profile`: the first and the last update to profile."""
        self.config, self.world, self.engine, self.workload = config, world, engine, workload
        self.phases = phases_of(config)
        self.checkpoints, self.copies, self.stop, self.watchdog = checkpoints, copies, stop, watchdog
        self.run_dir, self.provenance = run_dir, provenance
        engine.progress = checkpoints.progress = watchdog.progress
        self.stop_after = stop_after
        self.spike_policy = SpikePolicy(config.spikes, config.max_bad_steps)
        self.saves = Saves(checkpoints, stop, watchdog)
        self.agreement = Agreement(world)
        # what the ranks agreed on last, and whether any of them has been asked to stop
        self.known: Sync | None = None
        self.stopping = False
        # whether a checkpoint and a log line are due after the newest update, and the training time of the newest ones
        self.save_due = self.line_due = False
        self.saved_seconds = self.logged_seconds = 0.0
        self.state = TrainState(cursor=cursor)
        self.unjudged: list[Unjudged] = []
        self.newest: Unjudged | None = None
        # the update to roll back to before
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
        """Trains until the schedule ends or `stop_after` is reached; false when the ranks were asked to stop before. Either
        way everything is saved; raises Failed where it cannot be."""
        if self.world.agree_any(self.stop.requested):
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
                took, lines = time.perf_counter() - started, f"a line every {self.config.log.interval} updates"
                log.info(
                    f"step       1  {update.objective} loss {float(result.host_loss):.4f}  in {took:.1f} s; {lines}"
                )
            if self.complete or self.workload.evaluation_due(self.state.step):
                self.evaluate()
            self.stop.updated(time.perf_counter() - started)
            if not self.stopping and self.save_due:
                self.save()
            if not self.stopping and self.copies is not None and self.copies.due(self.state.step):
                self.copies.take(self.engine, self.checkpoint_state())
        self.saves.complete(self.engine, self.state.step, self.checkpoint_state)
        if not self.over:
            log.info(f"stopped: saved at step {self.state.step:,}; the same command resumes")
        return self.over

    @property
    def complete(self) -> bool:
        """No update of the schedule is left, or the held-out loss improves no more; an update that was done before is left,
        whatever the clock says now."""
        state, patience = self.state, self.config.eval.patience
        if patience and state.since_best >= patience:
            return True
        if self.rates is not None and self.rates.known(state.step, state.cursor):
            return False
        return finished(self.config.schedule, *self.used)

    @property
    def over(self) -> bool:
        """No update is left for this process."""
        return self.complete or (self.stop_after is not None and self.state.step >= self.stop_after)

    def start(self) -> None:
        """What comes before the first update of a run."""
        if self.saves.step >= 0:
            return
        if not self.state.step and self.workload.evaluation_due(0):
            self.evaluate()
        if self.config.spikes.policy == "rollback" or self.save_due:
            # a checkpoint to roll back to, or the best one so far
            self.save()

    def train_update(self) -> tuple[Any, float, UpdateResult]:
        """Train on the next update of the data: it, its learning rate, and its result. A collective."""
        self.profiler.update(self.state.step + 1)
        lr = self.rate()
        update = self.ranks.take(self.updates)
        return update, lr, self.engine.train_update(update, lr, self.spike_policy.veto(update.objective))

    def rate(self) -> float:
        """The next update's learning rate, in its phase; where both follow the clock, as the first time the update was done."""
        state = self.state
        known = self.rates.known(state.step, state.cursor) if self.rates is not None else None
        if known:
            state.seconds = known[0]
        self.enter_phase(phase_at(self.phases, share_used(self.config.schedule, *self.used)))
        if known:
            return known[1]
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
        """That of the newest update."""
        return self.phases[len(self.state.phase_starts) - 1]

    def enter_phase(self, number: int) -> None:
        """Take updates from phase `number` (from 0) on; losses are not compared with those before it."""
        state, later = self.state, number + 1 - len(self.state.phase_starts)
        if later <= 0:
            return
        self.agree()
        self.judge()
        if self.spike is not None:
            # a rollback follows
            return
        self.spike_policy.resume({}, state.bad)
        state.phase_starts = [*state.phase_starts, *[state.cursor] * later]
        log.info(f"step {state.step + 1}: phase {number + 1} of {len(self.phases)}: {self.phase.changes}")
        self.updates.close()
        self.updates = self.workload.updates(state.cursor, state.phase_starts)
        if self.config.spikes.policy == "rollback":
            # a checkpoint to roll back to, in the same phase
            self.save()

    # -- after an update ---------------------------------------------------------------------------------------------

    def account(self, update: Any, result: UpdateResult, started: float) -> bool:
        """Meter an update and report it to the other ranks; whether results are read back now, and all reports are known."""
        self.save_due = self.checkpoint_due(self.state.step + 1)
        self.line_due = self.log_due(self.state.step + 1)
        reading = self.save_due or self.reading_due(self.state.step + 1)
        if reading:
            # here, where it is training time
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
        """Whether something is read back from the device after update `step`. Between two such updates the host only gives
        it work, of MOST_UNREAD updates at most; a policy that acts on the very update reads each."""
        if step == 1 or self.spike_policy.immediate or self.log_due(step) or len(self.unjudged) + 1 >= MOST_UNREAD:
            return True
        last = step == self.config.schedule.total_steps or step == self.stop_after
        copied = self.copies is not None and self.copies.due(step)
        return last or copied or self.workload.evaluation_due(step)

    def log_due(self, step: int) -> bool:
        """Whether to log update `step`, the end aside; known to all ranks alike before the update."""
        least, passed = self.config.log.seconds, self.state.seconds - self.logged_seconds
        return step % self.config.log.interval == 0 and (not least or passed >= least)

    def checkpoint_due(self, step: int) -> bool:
        """Whether to save after update `step`, the end aside; known to all ranks alike before the update."""
        minutes = self.config.checkpoint.minutes
        return self.workload.checkpoint_due(step) or bool(
            minutes and self.state.seconds - self.saved_seconds >= 60 * minutes
        )

    def report(self, update: Any, seconds: float) -> None:
        """Send the other ranks this one's report of an update, and take in those of the update before."""
        self.agree()
        own = Sync(
            nanoseconds=round(seconds * 1e9),
            stop=self.stop.requested,
            saving=self.checkpoints.status,
            problem=update.problem_code,
            tokens=update.tokens,
            rows=self.rows.counts,
            counts=self.workload.meter.counts,
            ranks=self.ranks.counts,
        )
        self.agreement.start(own, update.problem)

    def agree(self) -> None:
        """Take in what all ranks reported, if a report was sent. Waits. Raises RankRefused where a rank has no data."""
        sync = self.agreement.finish()
        if sync is None:
            return
        self.known = sync
        self.state.seconds += sync.nanoseconds / 1e9
        self.state.tokens += sync.tokens
        self.workload.meter.synced(sync.nanoseconds / 1e9, sync.counts)
        self.saves.synced(sync.saving)
        self.stopping |= bool(sync.stop)

    def log(self, lr: float) -> None:
        """An object for the sinks and a line for the terminal, from the ranks' reports of this update."""
        assert self.known is not None
        state = self.state
        seconds, self.logged_seconds = state.seconds - self.logged_seconds, state.seconds
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
        """Of the rows of all ranks, after the newest update that was agreed on."""
        return self.rows.total({} if self.known is None else self.known.rows)

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
            if self.config.eval.patience and len(self.state.phase_starts) == len(self.phases):
                self.compare(self.world.broadcast(found["eval/mlm_loss"]))

    def compare(self, loss: float) -> None:
        """Count evaluations without a lower held-out loss; one with the lowest is saved. All ranks have the same `loss`."""
        state = self.state
        if state.best_step < 0 or loss < state.best_loss:
            state.best_step, state.best_loss, state.since_best = state.step, loss, 0
            self.save_due = True
            return
        state.since_best += 1
        if state.since_best == self.config.eval.patience:
            log.info(
                f"step {state.step:,}: the held-out loss did not improve in {state.since_best} evaluations, so training ends; "
                f"{self.run_dir / BEST} is step {state.best_step:,}, with {state.best_loss:.4f}"
            )

    # -- trouble -----------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Look at the updates since the last call and act on them, up to the first `spike` to roll back from. Raises BadTraining
        where the run ends."""
        while self.unjudged and self.spike is None:
            done = self.unjudged.pop(0)
            if self.judge_one(done) is Decision.ROLLBACK:
                self.spike = done

    def judge_one(self, done: Unjudged) -> Decision:
        """Look at one update's loss and whether it was applied, act on it; the decision."""
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
        """Append to `trouble.jsonl` what is needed to look into an update: `cursor` is its number in the data. A collective."""
        rows_by_rank = self.world.gather([row for row in done.row_ids if row >= 0])
        if self.world.is_main:
            entry: dict[str, Any] = {"step": done.step, "cursor": done.cursor, "epoch": done.epoch}
            entry |= {"kind": trouble.kind, "action": trouble.action}
            entry |= figures(done.result, self.engine.terms)
            entry |= {"score": round(trouble.score, 3), "row_ids": [row for rows in rows_by_rank for row in rows]}
            with open(self.run_dir / TROUBLE, "a") as file:
                file.write(as_json(entry) + "\n")

    def roll_back(self, spike: Unjudged) -> None:
        """Return to the newest checkpoint before `spike`, leaving out the data from there through it (PaLM's recipe,
        Chowdhery et al. 2022, section 5.1). Where it is seen updates later, they are forgotten. Raises BadTraining when there
        is no such checkpoint."""
        self.agree()
        self.saves.finish()
        path = self.checkpoints.latest(spike.step - 1)
        if path is None:
            raise BadTraining(f"a spike at step {spike.step} and no checkpoint before it to roll back to")
        self.watchdog.progress()
        self.spike, self.unjudged = None, []
        self.updates.close()
        self.sinks.close()
        self.resume(self.checkpoints.load(self.engine, path))
        self.state.cursor = spike.cursor + 1
        self.sinks = self.open_sinks()
        self.updates = self.workload.updates(self.state.cursor, self.state.phase_starts)
        log.info(f"rolled back to step {self.state.step}; the data up to the spike is left out")

    # -- saving and resuming -----------------------------------------------------------------------------------------

    def checkpoint_state(self) -> dict[str, Any]:
        """What a checkpoint holds besides the engine's own tensors."""
        assert not self.unjudged, "its losses belong to the state"
        own = asdict(self.state) | {"row_digest": self.row_digest, "losses_by_objective": self.spike_policy.state()}
        own |= {"meter": self.workload.meter.state()}
        return dict(self.provenance) | own | self.workload.state()

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Take over the state of a checkpoint."""
        self.state = TrainState.of(saved)
        self.saves.step = self.checkpoints.step
        self.saved_seconds = self.logged_seconds = self.state.seconds
        self.rows, self.known = RowDigest(saved["row_digest"]), None
        self.spike_policy.resume(saved.get("losses_by_objective", {}), self.state.bad)
        self.workload.meter.resume(saved["meter"])
        self.workload.resume(saved)

    def save(self) -> None:
        """Start a checkpoint of this moment."""
        self.saved_seconds = self.state.seconds
        self.saves.start(self.engine, self.state.step, self.checkpoint_state)

    def open_sinks(self) -> Sinks:
        """The run's sinks on rank 0, with what was logged after the state that training continues from cut off."""
        resumed = self.state.step > 0 or self.saves.step >= 0
        folder = self.run_dir if self.world.is_main else None
        return Sinks(folder, self.config, self.state.step, self.state.step if resumed else -1)

    def close(self) -> None:
        """End the loader's workers, close the sinks, write what was profiled; each also where another one fails."""
        with ExitStack() as last_first:
            for close in (self.profiler.close, self.sinks.close, self.updates.close):
                last_first.callback(close)
