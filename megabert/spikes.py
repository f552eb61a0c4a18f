"""Spike policy: reactions to a loss far above the recent ones and to updates that could not be applied.

The score of a loss is the modified z-score of Iglewicz and Hoaglin (1993, "How to Detect and Handle Outliers", section
3.3): 0.6745 (loss - median) / MAD, MAD being the median absolute deviation. Spikes hardly change median
and MAD, so one does not hide the next. The MAD of falling losses includes the trend, so scores are below those of a flat curve. The
arithmetic is on host floats and the same on every rank.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat

from megabert.common.errors import BadTraining
from megabert.common.logs import log
from megabert.common.run_files import TROUBLE, append_line, as_json
from megabert.config import SpikesConfig

if TYPE_CHECKING:
    from megabert.distributed.ranks import World
    from megabert.engine import UpdateResult
    from megabert.progress import TrainState

CONSISTENT = 0.6745  # third quartile of the normal distribution, so that scores are comparable to standard deviations
ENOUGH = 0.25  # share of the window that must be filled before scores are computed
# smallest MAD as a share of the median: where losses hardly differ, a small difference is not a spike
LEAST_SCATTER = 1e-3


def check_finite(metrics: Mapping[str, float], step: int, limit: str) -> None:
    """Raises BadTraining if the last evaluation of a run, which ended by `limit`, has a loss that is not finite."""
    if limit and not math.isfinite(loss := metrics.get("eval/mlm_loss", 0.0)):
        raise BadTraining(
            f"step {step:,}, {limit}: the held-out loss is {loss}; with a lower optimizer.lr the same command resumes"
        )


class Spikes:
    """Scores of losses against the last `window` finite ones."""

    def __init__(self, window: int, losses: Iterable[float] = ()) -> None:
        self.window = window
        self._losses: deque[float] = deque(losses, maxlen=window)

    def score(self, loss: float) -> float:
        """Modified z-score of `loss`; 0 while too few losses are known, and for a non-finite one."""
        if len(self._losses) < max(2, math.ceil(ENOUGH * self.window)) or not math.isfinite(loss):
            return 0.0
        median = statistics.median(self._losses)
        scatter = statistics.median(abs(known - median) for known in self._losses)
        return CONSISTENT * (loss - median) / max(scatter, LEAST_SCATTER * abs(median), 1e-12)

    def add(self, loss: float) -> None:
        """Add the loss of an update. Spikes are added too, so a new level becomes the median after half a window."""
        if math.isfinite(loss):
            self._losses.append(loss)

    def state(self) -> list[float]:
        """The known losses, oldest first: the state of a resumed run."""
        return list(self._losses)


@dataclass(frozen=True)
class Trouble:
    """A suspect update: `kind` is "non-finite" or "spike", `action` the reaction to it."""

    kind: str
    action: str
    score: float
    text: str


@dataclass(frozen=True)
class Judgement:
    """The troubles of an update; whether the run returns to before it and leaves out its rows; and why the run must end, or ""."""

    troubles: tuple[Trouble, ...] = ()
    rollback: bool = False
    reason: str = ""


class SpikePolicy:
    """Judges updates by their loss, compared with those of the same objective, and by whether they were applied; `bad` counts
    consecutive updates that were not."""

    def __init__(self, settings: SpikesConfig, max_bad_steps: int) -> None:
        self.settings, self.max_bad_steps = settings, max_bad_steps
        self._spikes: dict[str, Spikes] = {}
        self.bad = self.rollbacks = 0

    def resume(self, losses: Mapping[str, Iterable[float]], bad: int) -> None:
        """Restore the losses of each objective. The number of rollbacks is that of this process and is kept."""
        self._spikes = {objective: Spikes(self.settings.window, known) for objective, known in losses.items()}
        self.bad = bad

    def state(self) -> dict[str, list[float]]:
        """The known losses of each objective."""
        return {objective: spikes.state() for objective, spikes in self._spikes.items()}

    def spikes(self, objective: str) -> Spikes:
        """The scores of an objective."""
        return self._spikes.setdefault(objective, Spikes(self.settings.window))

    def veto(self, objective: str) -> Callable[[float], bool] | None:
        """Passed to the engine, which does not apply an update if this is true for its loss."""
        if self.settings.policy != "skip":
            return None
        spikes, threshold = self.spikes(objective), self.settings.threshold
        return lambda loss: spikes.score(loss) > threshold

    def judge(self, loss: SupportsFloat, objective: str, *, skipped: bool, vetoed: bool) -> Judgement:
        """The reaction to an update. The flags are those of `megabert.engine.UpdateResult`. Reads `loss`, which waits for the
        device, unless the policy is "off"."""
        policy, troubles = self.settings.policy, []
        if skipped and not vetoed:
            text = "non-finite loss or gradient; the update is skipped on every rank"
            troubles.append(Trouble("non-finite", "skip", 0.0, text))
        self.bad = self.bad + 1 if skipped else 0
        spike = False
        if policy != "off":
            value, spikes = float(loss), self.spikes(objective)
            score = spikes.score(value)
            spikes.add(value)
            if spike := score > self.settings.threshold:
                then = {"warn": "", "skip": "; the update is skipped on every rank", "rollback": "; rolling back"}
                text = f"loss {value:.4f} is a spike (score {score:.1f}){then[policy]}"
                troubles.append(Trouble("spike", policy, score, text))
        rollback, reason = spike and policy == "rollback", ""
        self.rollbacks += rollback
        if rollback and self.rollbacks > self.settings.max_rollbacks:
            reason = f"a spike after {self.settings.max_rollbacks} rollbacks (spikes.max_rollbacks)"
        if self.bad >= self.max_bad_steps:
            reason = f"{self.bad} updates in a row were not applied, the last ones for non-finite numbers or a spike"
        return Judgement(tuple(troubles), rollback, reason)


@dataclass(frozen=True)
class PendingUpdate:
    """An update whose result was not checked yet: step, cursor and rows (not the batches, whose memory the loader reuses),
    objective and result."""

    step: int
    cursor: int
    epoch: int
    row_ids: list[int]
    objective: str
    result: UpdateResult


class UpdateJudge:
    """Checks the updates of a run in their order, and records those that were not applied or whose loss is a spike.

    Under "skip" each update is judged before the next one. Under the other policies it may be later, since a rollback discards the
    updates after the spike.
    """

    def __init__(self, policy: SpikePolicy, world: World, run_dir: Path, terms: Sequence[str]) -> None:
        """`terms`: names of the losses in the record."""
        self.policy, self._world, self._run_dir, self._terms = policy, world, run_dir, terms
        self.pending: list[PendingUpdate] = []
        self.spike: PendingUpdate | None = None  # the update that requires a rollback

    def judge(self, state: TrainState) -> None:
        """Check the results of the updates since the last call, up to the first spike that requires a rollback, and count them in
        `state`. A collective. Raises BadTraining if the run must end."""
        while self.pending and self.spike is None:
            done = self.pending.pop(0)
            result = done.result
            state.skipped += result.skipped
            judgement = self.policy.judge(
                result.host_loss, done.objective, skipped=result.skipped, vetoed=result.vetoed
            )
            state.bad = self.policy.bad
            for trouble in judgement.troubles:
                state.spiked += trouble.kind == "spike"
                self._record(done, trouble)
                log.info(f"step {done.step}: {trouble.text}")
            if judgement.reason:
                raise BadTraining(f"{judgement.reason}; the rows are in {self._run_dir / TROUBLE}")
            if judgement.rollback:
                self.spike = done

    def forget(self) -> None:
        """Drop all updates that were not judged, and the spike."""
        self.spike, self.pending = None, []

    def _record(self, done: PendingUpdate, trouble: Trouble) -> None:
        """Append step, data and metrics of an update to `trouble.jsonl`. A collective."""
        from megabert.metrics import update_metrics  # imports torch

        rows_by_rank = self._world.gather([row for row in done.row_ids if row >= 0])
        if self._world.is_main:
            entry: dict[str, object] = {"step": done.step, "cursor": done.cursor, "epoch": done.epoch}
            entry |= {"kind": trouble.kind, "action": trouble.action}
            entry |= update_metrics(done.result, self._terms)
            entry |= {"score": round(trouble.score, 3), "row_ids": [row for rows in rows_by_rank for row in rows]}
            append_line(self._run_dir / TROUBLE, as_json(entry))
