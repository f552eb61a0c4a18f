"""Progress of a run: its state, which every checkpoint has, and what is due before and after an update.

Everything here follows from configuration and state, which are the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from megabert.common.errors import USER_ERROR
from megabert.common.logs import log
from megabert.config import Config, Phase, list_phases, phase_at
from megabert.distributed.ranks import RankError
from megabert.optim.rate_record import RateRecord
from megabert.optim.schedule import limit_reached, phase_rate, share_used

if TYPE_CHECKING:
    from megabert.workload import Workload

POSTPONED = 2  # starts that may postpone one evaluation
MOST_UNREAD = 64  # maximum number of updates whose results the host has not read from the device


@dataclass
class TrainState:
    """Progress of a run; saved in every checkpoint."""

    step: int = 0  # updates done
    cursor: int = 0  # updates of the data consumed, including those skipped after a spike
    seconds: float = 0.0  # training time, without evaluations and saves
    bad: int = 0  # consecutive updates that were not applied
    # updates not applied, and spikes
    skipped: int = 0
    spiked: int = 0
    tokens: int = 0  # tokens of all ranks, without padding
    phase_starts: list[int] = field(default_factory=lambda: [0])  # the cursor at the start of each phase so far
    # with `eval.patience`: the step with the lowest held-out loss (-1: none yet), that loss, and evaluations since then
    best_step: int = -1
    best_loss: float = 0.0
    since_best: int = 0
    # starts at which an evaluation after `step` updates was due but not made, and the longest one so far in seconds
    evaluation_owed: int = 0
    evaluation_seconds: float = 0.0
    # training times at the newest checkpoint and the newest log line
    saved_seconds: float = 0.0
    logged_seconds: float = 0.0

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> TrainState:
        """The state in a checkpoint; missing fields have their initial values, clocks that of training."""
        saved = {**dict.fromkeys(("saved_seconds", "logged_seconds"), saved.get("seconds", 0.0)), **saved}
        return cls(**{f.name: saved[f.name] for f in fields(cls) if f.name in saved})

    def improved(self, loss: float) -> bool:
        """Count an evaluation after this step; whether its held-out loss is the lowest so far. NaN is not."""
        if math.isfinite(loss) and (self.best_step < 0 or not loss >= self.best_loss):
            self.best_step, self.best_loss, self.since_best = self.step, loss, 0
            return True
        self.since_best += 1
        return False

    @property
    def out_of_patience(self) -> str:
        """Why training ends, in words."""
        ends = f"the held-out loss did not improve in {self.since_best} evaluations, so training ends"
        return f"step {self.step:,}: {ends}; the lowest is {self.best_loss:.4f}"

    def postpone_evaluation(self, left: float) -> None:
        """Leave an evaluation to the next start, since `left` seconds do not suffice. Raises RankError where they did not at the last
        two starts either, without an update in between."""
        why = f"{left:.0f} s left, the longest took {self.evaluation_seconds:.0f} s"
        if self.evaluation_owed > POSTPONED:
            why = f"no start has time to evaluate: {why}; set fewer eval.rows, or a longer time limit"
            raise RankError(f"step {self.step:,}: {why}", USER_ERROR)
        log.info(f"step {self.step:,}: evaluation postponed to the next start: {why}")

    def forget_missing_best(self, steps: Sequence[int]) -> None:
        """Start the search for the best checkpoint again if it is not among the `steps` that have one."""
        if self.best_step not in steps:
            log.info(
                f"the best checkpoint, of step {self.best_step:,}, is missing: the next evaluation counts as the best"
            )
            self.best_step, self.since_best = -1, 0


class RunSchedule:
    """When a run logs, evaluates, saves, enters a phase and ends, and the learning rate of each update."""

    def __init__(self, config: Config, workload: Workload, stop_after: int | None) -> None:
        """`stop_after`: step at which this process ends before the schedule does."""
        self.config, self.workload, self.stop_after = config, workload, stop_after
        self.phases = list_phases(config)
        self.state = TrainState()
        self.rates: RateRecord | None = None  # recorded rates, where they depend on the training time

    @property
    def used(self) -> tuple[int, float, int]:
        """Updates, minutes and tokens before the next update."""
        return self.state.step, self.state.seconds / 60, self.state.tokens

    @property
    def updates_left(self) -> range:
        """The updates that this process may still do; a budget of minutes or tokens may end before."""
        last = self.config.schedule.total_steps
        return range(self.state.step + 1, 1 + (last if self.stop_after is None else min(last, self.stop_after)))

    @property
    def phase(self) -> Phase:
        """The phase of the newest update."""
        return self.phases[len(self.state.phase_starts) - 1]

    @property
    def next_phase(self) -> int:
        """Number of the next update's phase, from 0."""
        return phase_at(self.phases, share_used(self.config.schedule, *self.used))

    @property
    def limit(self) -> str:
        """The setting by which the run is complete: the schedule has ended, or the held-out loss has stopped improving; else "". An
        update with a recorded rate is repeated even if the time budget is used up."""
        patience = self.config.eval.patience
        if patience and self.state.since_best >= patience:
            return f"eval.patience={patience}"
        return "" if self.recorded() else limit_reached(self.config.schedule, *self.used)

    @property
    def over(self) -> bool:
        """Whether this process has no further update to do."""
        return bool(self.limit) or (self.stop_after is not None and self.state.step >= self.stop_after)

    def recorded(self) -> tuple[float, float] | None:
        """Training time in seconds and learning rate of the next update, if it is repeated and its rate depends on the time."""
        return self.rates.known(self.state.step, self.state.cursor) if self.rates is not None else None

    def rate(self) -> float:
        """Learning rate of the next update, which is in the current phase."""
        if recorded := self.recorded():
            return recorded[1]
        lr = phase_rate(self.phase, self.config.schedule, *self.used)
        if self.rates is not None:
            self.rates.add(self.state.step, self.state.cursor, self.state.seconds, lr)
        return lr

    def log_due(self, step: int) -> bool:
        """Whether to log update `step` if it is not the last. Asked before the update."""
        minimum, elapsed = self.config.log.seconds, self.state.seconds - self.state.logged_seconds
        return step % self.config.log.interval == 0 and (not minimum or elapsed >= minimum)

    def checkpoint_due(self, step: int, was_due: bool) -> bool:
        """Whether to save after update `step` if it is not the last. Asked before the update. While updates cannot be applied, a save that
        `was_due` waits: the weights may be what is wrong."""
        minutes, waited = self.config.checkpoint.minutes, self.state.seconds - self.state.saved_seconds
        late = bool(minutes) and waited >= 60 * minutes
        return self.workload.checkpoint_due(step) or late or (was_due and self.state.bad > 0)

    def reading_due(self, step: int, unread: int, copied: bool) -> bool:
        """Whether results are read from the device after update `step`, with `unread` updates before it. In between the host only queues
        work. `copied`: whether a copy of the training state is taken."""
        if step == 1 or self.config.spikes.policy == "skip" or self.log_due(step) or unread + 1 >= MOST_UNREAD:
            return True
        last = step == self.config.schedule.total_steps or step == self.stop_after
        return last or copied or self.workload.evaluation_due(step)

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
