"""Goodput of a job whose nodes fail: Young's and Daly's formulas, and a discrete-event simulation beside them.

Times are in one unit. Failures of a node are exponential, so those of a job come `nodes` times as often. A save blocks
for `save`; a failure costs what was not saved and `restart`, which a further failure begins anew.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

HOPELESS = 1_000


@dataclass(frozen=True)
class Failures:
    """Mean time between failures of the whole job, what a save blocks for, and from a failure to the first new update."""

    mean_between: float
    save: float
    restart: float

    def __post_init__(self) -> None:
        """Raises ValueError naming the time that cannot be."""
        for name, value, least in (
            ("mean time between failures", self.mean_between, math.ulp(0.0)),
            ("time of a save", self.save, math.ulp(0.0)),
            ("time of a restart", self.restart, 0.0),
        ):
            if not (least <= value < math.inf):
                raise ValueError(f"{name} {value:g}: give a number {'of at least' if not least else 'above'} 0")


@dataclass(frozen=True)
class Outcome:
    """A simulated job: time it took, how often it failed, work that was done again, time spent saving."""

    wall: float
    failures: int
    lost: float
    saving: float


def young(failures: Failures) -> float:
    """Work between saves that loses least, to first order (Young 1974): sqrt(2 save MTBF)."""
    return math.sqrt(2 * failures.save * failures.mean_between)


def daly(failures: Failures) -> float:
    """The same to higher order (Daly 2006, "A higher order estimate of the optimum checkpoint interval", equation 37)."""
    if failures.save >= 2 * failures.mean_between:
        return failures.mean_between
    ratio = failures.save / (2 * failures.mean_between)
    return young(failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - failures.save


def goodput(failures: Failures, interval: float) -> float:
    """Share of the time that is work kept, saving after each `interval` of work (Daly 2006, equation 13): exact here.

    Expected time of a stretch: MTBF exp(restart / MTBF) (exp((interval + save) / MTBF) - 1).
    """
    mean = failures.mean_between
    try:
        expected = mean * math.exp(failures.restart / mean) * math.expm1((interval + failures.save) / mean)
    except OverflowError:
        return 0.0
    return interval / expected


def simulate(failures: Failures, work: float, interval: float, seed: int) -> Outcome:
    """A job of `work` in equal stretches of at most `interval`, each saved at its end, from failure to failure.

    One that is not done after HOPELESS times its work never will be: its time is infinite. Nor is one simulated of which the
    formula says so.
    """
    draw, rate = random.Random(seed), 1 / failures.mean_between
    needed = math.ceil(work / interval)
    each = work / needed
    if goodput(failures, each) * HOPELESS < 1:
        return Outcome(math.inf, 0, 0.0, 0.0)
    stretch = each + failures.save
    clock, lost, failed, saves = 0.0, 0.0, 0, 0
    fails_at = draw.expovariate(rate)
    while clock <= HOPELESS * work:
        before = min(int((fails_at - clock) // stretch), needed - saves)  # stretches, saved before the next failure
        clock, saves = clock + before * stretch, saves + before
        if saves == needed:
            return Outcome(clock, failed, lost, saves * failures.save)
        lost += min(each, fails_at - clock)
        clock, fails_at, failed = fails_at, fails_at + draw.expovariate(rate), failed + 1
        while clock + failures.restart > fails_at:
            clock, fails_at, failed = fails_at, fails_at + draw.expovariate(rate), failed + 1
        clock += failures.restart
    return Outcome(math.inf, failed, lost, saves * failures.save)


def best_interval(failures: Failures, work: float, seed: int, steps: int = 25) -> tuple[float, float]:
    """(interval, goodput) of the best of `steps` simulated intervals between a fifth of Young's and five times it."""
    tried = (young(failures) * 5 ** (2 * step / (steps - 1) - 1) for step in range(steps))
    found = ((interval, work / simulate(failures, work, interval, seed).wall) for interval in tried)
    return max(found, key=lambda pair: pair[1])
