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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import SupportsFloat

from megabert.config import SpikesConfig

# third quartile of the normal distribution, so that scores are comparable to standard deviations
CONSISTENT = 0.6745
# share of the window that must be filled before scores are computed
ENOUGH = 0.25
# smallest MAD as a share of the median: where losses hardly differ, a small difference is not a spike
LEAST_SCATTER = 1e-3


class Spikes:
    """Scores of losses against the last `window` finite ones; above `threshold` is a spike."""

    def __init__(self, window: int, threshold: float, losses: Iterable[float] = ()) -> None:
        self.window, self.threshold = window, threshold
        self._losses: deque[float] = deque(losses, maxlen=window)

    def score(self, loss: float) -> float:
        """Modified z-score of `loss`; 0 while too few losses are known, and for a non-finite one."""
        if len(self._losses) < max(2, math.ceil(ENOUGH * self.window)) or not math.isfinite(loss):
            return 0.0
        median = statistics.median(self._losses)
        scatter = statistics.median(abs(known - median) for known in self._losses)
        return CONSISTENT * (loss - median) / max(scatter, LEAST_SCATTER * abs(median), 1e-12)

    def is_spike(self, loss: float) -> bool:
        return self.score(loss) > self.threshold

    def add(self, loss: float) -> None:
        """Add the loss of an update. Spikes are added too, so a new level becomes the median after half a window."""
        if math.isfinite(loss):
            self._losses.append(loss)

    def state(self) -> list[float]:
        """The known losses, oldest first: the state of a resumed run."""
        return list(self._losses)


class Decision(Enum):
    """What the run does after an update."""

    OK = "the update was applied"
    SKIP = "the update was not applied, and the run continues"
    ROLLBACK = "the run returns to before the update and leaves out its rows"
    ABORT = "the run ends"


@dataclass(frozen=True)
class Trouble:
    """A suspect update: `kind` is "non-finite" or "spike", `action` the reaction to it."""

    kind: str
    action: str
    score: float
    text: str


@dataclass(frozen=True)
class Judgement:
    """A decision, the troubles that led to it, and for ABORT the reason."""

    decision: Decision
    troubles: tuple[Trouble, ...] = ()
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
        window, threshold = self.settings.window, self.settings.threshold
        self._spikes = {objective: Spikes(window, threshold, known) for objective, known in losses.items()}
        self.bad = bad

    def state(self) -> dict[str, list[float]]:
        """The known losses of each objective."""
        return {objective: spikes.state() for objective, spikes in self._spikes.items()}

    def spikes(self, objective: str) -> Spikes:
        """The scores of an objective."""
        return self._spikes.setdefault(objective, Spikes(self.settings.window, self.settings.threshold))

    def veto(self, objective: str) -> Callable[[float], bool] | None:
        """Passed to the engine, which does not apply an update if this is true for its loss."""
        return self.spikes(objective).is_spike if self.settings.policy == "skip" else None

    @property
    def immediate(self) -> bool:
        """Whether each update has to be judged before the next one. Under the other policies it may be later, since a rollback
        discards the updates after the spike."""
        return self.settings.policy == "skip"

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
        judged = tuple(troubles)
        if self.bad >= self.max_bad_steps:
            reason = f"{self.bad} updates in a row were not applied, the last ones for non-finite numbers or a spike"
            return Judgement(Decision.ABORT, judged, reason)
        if spike and policy == "rollback":
            self.rollbacks += 1
            if self.rollbacks > self.settings.max_rollbacks:
                reason = f"a spike after {self.settings.max_rollbacks} rollbacks (spikes.max_rollbacks)"
                return Judgement(Decision.ABORT, judged, reason)
            return Judgement(Decision.ROLLBACK, judged)
        return Judgement(Decision.SKIP if skipped else Decision.OK, judged)
