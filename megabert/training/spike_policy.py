"""A loss is a spike when it stands far above the median of those before it, measured by their own scatter.

The score is the modified z-score of Iglewicz and Hoaglin (1993, "How to Detect and Handle Outliers", section 3.3):
0.6745 (loss - median) / MAD, MAD being the median absolute deviation. Median and MAD hardly move for the spikes
themselves, so that one does not hide the next. A run's losses fall, so the scatter also holds the trend: the score
is below what it would be for a flat curve, never above. Pure arithmetic on host floats, the same on every rank.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

CONSISTENT = 0.6745  # the normal distribution's third quartile: scores then read as standard deviations
ENOUGH = 0.25  # share of the window that must be filled before anything is judged
LEAST_SCATTER = 1e-3  # of the median: losses that hardly differ must not make a spike of nothing


class Spikes:
    """Scores of losses against the last `window` finite ones; above `threshold` is a spike."""

    def __init__(self, window: int, threshold: float, losses: Iterable[float] = ()) -> None:
        self.window, self.threshold = window, threshold
        self._losses: deque[float] = deque(losses, maxlen=window)

    def score(self, loss: float) -> float:
        """Modified z-score of `loss`; 0 while too few losses are known, and for one that is not finite."""
        if len(self._losses) < max(2, math.ceil(ENOUGH * self.window)) or not math.isfinite(loss):
            return 0.0
        median = statistics.median(self._losses)
        scatter = statistics.median(abs(known - median) for known in self._losses)
        return CONSISTENT * (loss - median) / max(scatter, LEAST_SCATTER * abs(median), 1e-12)

    def is_spike(self, loss: float) -> bool:
        return self.score(loss) > self.threshold

    def add(self, loss: float) -> None:
        """One more update's loss. Spikes count too: a new level becomes the normal one after half a window."""
        if math.isfinite(loss):
            self._losses.append(loss)

    def state(self) -> list[float]:
        """The losses known, oldest first: what a resumed run needs to judge the same way."""
        return list(self._losses)
