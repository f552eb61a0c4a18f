"""The training loop: batch, step, meter, log, evaluate, agree to stop, save.

Pre-training, distillation and fine-tuning run through the one `Trainer`; what differs between them is a `Workload`. All
ranks make the same calls in the same order and come to the same decisions: what they decide by was reduced over them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from megabert.checkpoint import Checkpoints
from megabert.checkpoint.rate_record import RateRecord
from megabert.common.errors import BadTraining, Failed
from megabert.common.logs import log
from megabert.config import Config
from megabert.data.batch import VACANT
from megabert.data.row_digest import RowDigest
from megabert.distributed.preemption import Stop
from megabert.distributed.process_group import Pending, World
from megabert.distributed.together import refuse
from megabert.distributed.watchdog import Watchdog
from megabert.engine import Engine, UpdateResult
from megabert.engine.profiler import Profiler
from megabert.metrics import RankFigures, Shown, Sinks, as_json, figures, measured
from megabert.optim.schedule import finished, learning_rate, share_used
from megabert.spikes import Decision, SpikePolicy, Trouble

# what the log calls them
OBJECTIVES = {"causal": "causal LM", "masked": "masked LM"}


class Update(Protocol):
    """This rank's part of one update: micro-batches for the engine, and which rows of the data they hold."""

    step: int  # its number in the data, from 0
    epoch: int
    batches: list[Any]
    objective: str  # what it trains; losses of different ones are not compared
    row_ids: np.ndarray
    epochs: np.ndarray
    tokens: int  # real ones of this rank, without padding
    damage: dict[int, str]
    problem: str
    problem_code: int  # the exit code that goes with it


class Updates(Protocol):
    """An endless iterator over updates that lets go of its workers when closed."""

    def __next__(self) -> Any: ...
    def close(self) -> None: ...


class Meter(Protocol):
    """Figures of the updates between two log lines."""

    @property
    def counts(self) -> list[int]: ...
    def add(self, result: UpdateResult, update: Any) -> None: ...
    def passed(self, seconds: float) -> None: ...
    def drain(self, counts: Sequence[int]) -> dict[str, float]: ...
    def state(self) -> dict[str, Any]: ...
    def resume(self, saved: Mapping[str, Any] | None) -> None: ...


class Workload(Protocol):
    """What is trained on and judged by. All methods are called on every rank at the same moment."""

    @property
    def meter(self) -> Meter:
        """Figures of the updates between two log lines."""

    def updates(self, first: int, share_used: Callable[[int], float]) -> Updates:
        """This rank's updates from number `first` of the data on. `share_used(number)`: how much of the run's budget is used
        before an update, exactly for the next one and as far as is known for those behind it."""

    def evaluation_due(self, step: int) -> bool:
        """Whether to evaluate after `step` updates, the end of the schedule aside; step 0 is before the first one."""

    def checkpoint_due(self, step: int) -> bool:
        """Whether to save after `step` updates, the end aside."""

    def evaluate(self, step: int, progress: Callable[[], None]) -> dict[str, float]:
        """Figures of the model after `step` updates, logged and given; {} where there is nothing to evaluate on. `progress` is
        called now and then, for the watchdog."""

    @property
    def shown(self) -> Shown:
        """What the newest evaluation looked at besides its figures."""

    def progress_line(self, values: Mapping[str, Any], eta_seconds: float) -> str:
        """One line for the terminal from the values of a log line."""

    @property
    def satisfied(self) -> bool:
        """Whether to end before the schedule does."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of the workload, as JSON."""

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state."""


@dataclass
class TrainState:
    """How far a run is.

    `step`: updates done. `cursor`: updates of the data consumed, those passed over after a spike included. `seconds` of
    training, evaluations and saves not counted. `bad`: updates in a row that were not applied; `skipped` and `spiked`:
    updates not applied, and spikes. `tokens`: real ones of all ranks, counted where the schedule goes by them.
    `objective`: what the newest update trained ("": there was none).
    """

    step: int = 0
    cursor: int = 0
    seconds: float = 0.0
    bad: int = 0
    skipped: int = 0
    spiked: int = 0
    tokens: int = 0
    objective: str = ""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> TrainState:
        """That of a checkpoint; those of earlier versions have neither tokens nor objective."""
        known: dict[str, Any] = {"tokens": 0, "objective": ""} | dict(saved)
        return cls(**{field.name: known[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Unjudged:
    """An update that was done and not looked at: its step, its place and rows in the data (not its batches, whose memory
    the loader uses again), and what came of it."""

    step: int
    cursor: int
    epoch: int
    row_ids: list[int]
    result: UpdateResult


class Report(NamedTuple):
    """What the ranks have to know of each other after an update, as integers: the maximum counts."""

    nanoseconds: int  # of the update
    stop: int  # asked to stop
    saving: int  # `Checkpoints.status` of the save in flight
    problem: int  # the data could not be had: an exit code


@dataclass(frozen=True)
class Asked:
    """A report on its way between the ranks, and this rank's own problem with the update (text and exit code)."""

    pending: Pending
    problem: str
    code: int


class Exchange:
    """Reports of all ranks. Its methods are collectives and raise Refused where a rank has a problem."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._asked: list[Asked] = []

    def tell(self, own: Report, problem: str, counts: Sequence[int] | None) -> tuple[list[Report], list[int] | None]:
        """Send this rank's report on an update; what is known now, oldest first: the reports of the updates before and,
        with `counts` or on a lone rank, this one's. `counts` are given back summed over the ranks."""
        known, size = self.outstanding(), self._world.size
        if counts is None and size > 1:
            self._asked.append(Asked(self._world.start_max_ints(own), problem, own.problem))
            return known, None
        slots = [slot for value in own for slot in self._world.slots(int(value))]
        sums = self._world.sum_ints([*slots, *(counts or ())])
        found = Report(*(max(sums[first : first + size]) for first in range(0, len(slots), size)))
        self._refuse(found, problem, own.problem)
        return [*known, found], None if counts is None else sums[len(slots) :]

    def outstanding(self) -> list[Report]:
        """The reports that are on their way, waited for."""
        asked, self._asked = self._asked, []
        found = []
        for one in asked:
            found.append(Report(*one.pending.result()))
            self._refuse(found[-1], one.problem, one.code)
        return found

    def _refuse(self, report: Report, problem: str, code: int) -> None:
        if report.problem:
            refuse(self._world, problem, code)


class Saves:
    """What is saved by one Trainer. All methods are called by all ranks alike; `stop` and `watchdog` hear of each save."""

    def __init__(self, checkpoints: Checkpoints, stop: Stop, watchdog: Watchdog) -> None:
        self.step = -1  # of the newest checkpoint; -1 where there is none
        self._checkpoints, self._stop, self._watchdog = checkpoints, stop, watchdog
        self._since, self._begun = 0.0, -1  # of the newest save that was begun

    def begin(self, engine: Engine, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Begin a checkpoint of this moment; it is committed by `finish`, or at once where saving is not asynchronous."""
        self.finish()
        self._since, self._begun = time.perf_counter(), step
        self._ended(self._checkpoints.save(engine, state()) is not None)
        self._watchdog.progress()

    def hear(self, status: int) -> None:
        """What all ranks reported of the save in flight, if there is one."""
        if self._checkpoints.pending:
            self._ended(self._checkpoints.advance(status) is not None)

    def finish(self) -> None:
        """Commit the checkpoint that is being written, if there is one; waits for it."""
        if self._checkpoints.pending:
            self._ended(self._checkpoints.finish() is not None)

    def complete(self, engine: Engine, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Commit a checkpoint of this moment, at the second try if the first fails. Raises Failed where there is none then,
        whatever `checkpoint.on_error` says: nothing comes after it that could save these updates."""
        self.finish()
        for _ in range(2):
            if self.step != step:
                self.begin(engine, step, state)
                self.finish()
        if self.step != step:
            raise Failed(
                f"{self._checkpoints.folder}: step {step} is where this run ends and it could not be saved, twice; "
                "the same command goes on from the checkpoint before"
            )

    def _ended(self, committed: bool) -> None:
        """Note what came of a save and how long it took, where none is in flight any more."""
        if not self._checkpoints.pending:
            if committed:
                self.step = self._begun
            self._stop.saved(time.perf_counter() - self._since)
            self._watchdog.progress()


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
