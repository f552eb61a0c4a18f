"""Successive halving over recipes' keys and seeds, as functions of the table of finished trials.

A search is a list of rungs: so many trials, each trained on a track with so many seeds. All trials enter the first rung;
the best of a rung, by the mean over its seeds, enter the next (Jamieson & Talwalkar 2016). Trial 0 is the recipe as it
is, the others draw each key from its range. What is done next follows from what is in the table, so a search that was
killed goes on where it was.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Results = Mapping[tuple[int, str, int], float]  # (trial, track, seed) -> score, less is better; inf: it diverged


@dataclass(frozen=True)
class Rung:
    """How many trials train on which track, with how many seeds each."""

    trials: int
    track: str
    seeds: int = 1


@dataclass(frozen=True)
class Job:
    """One run of a search; `seed` counts from 0."""

    rung: int
    trial: int
    track: str
    seed: int

    @property
    def key(self) -> tuple[int, str, int]:
        return self.trial, self.track, self.seed


def draw(space: Mapping[str, Any], trial: int, seed: int) -> dict[str, Any]:
    """The keys of a trial, a function of (seed, trial) alone; {} for trial 0.

    A range is a list of values, or {low, high} with `log` for a draw that is even in the logarithm. Raises ValueError for
    what is neither.
    """
    if trial == 0:
        return {}
    return {key: drawn(key, among, random.Random(f"{seed}/{trial}/{key}")) for key, among in space.items()}


def drawn(key: str, among: Any, source: random.Random) -> Any:
    """One value of a range, a number rounded to three digits. Raises ValueError."""
    if isinstance(among, list) and among:
        return source.choice(among)
    if not isinstance(among, dict) or set(among) - {"low", "high", "log"} or not {"low", "high"} <= set(among):
        raise ValueError(f"{key}: a range is a list of values, or {{low = …, high = …, log = true}}")
    low, high = among["low"], among["high"]
    if not low < high or (among.get("log") and low <= 0):
        raise ValueError(f"{key}: low must be below high, and above 0 where log is set")
    if among.get("log"):
        value = math.exp(source.uniform(math.log(low), math.log(high)))
    else:
        value = source.uniform(low, high)
    return float(f"{value:.3g}")


def check(rungs: Sequence[Rung]) -> None:
    """Raises ValueError for rungs of which one is empty or takes more trials than the one before."""
    if not rungs:
        raise ValueError("a search needs a rung")
    for number, rung in enumerate(rungs):
        if rung.trials < 1 or rung.seeds < 1:
            raise ValueError(f"rung {number + 1}: trials and seeds must be 1 or more")
        if number and rung.trials > rungs[number - 1].trials:
            raise ValueError(f"rung {number + 1}: {rung.trials} trials, more than the rung before has")


def entrants(rungs: Sequence[Rung], results: Results, number: int) -> list[int] | None:
    """The trials of rung `number`, the best first; None while the rung before has runs to do."""
    if number == 0:
        return list(range(rungs[0].trials))
    ranked = ranking(rungs, results, number - 1)
    return None if ranked is None else ranked[: rungs[number].trials]


def ranking(rungs: Sequence[Rung], results: Results, number: int) -> list[int] | None:
    """The trials of a finished rung by their mean over its seeds, the best first, ties by number; None: not finished."""
    trials = entrants(rungs, results, number)
    if trials is None or any(job.key not in results for job in jobs(rungs, trials, number)):
        return None
    rung = rungs[number]
    means = {t: statistics.fmean(results[t, rung.track, seed] for seed in range(rung.seeds)) for t in trials}
    return sorted(trials, key=lambda trial: (means[trial], trial))


def jobs(rungs: Sequence[Rung], trials: Sequence[int], number: int) -> list[Job]:
    """Every run of a rung, done or not."""
    rung = rungs[number]
    return [Job(number, trial, rung.track, seed) for trial in trials for seed in range(rung.seeds)]


def next_job(rungs: Sequence[Rung], results: Results) -> Job | None:
    """The first run that is not in the table; None when the search is over."""
    for number in range(len(rungs)):
        trials = entrants(rungs, results, number)
        assert trials is not None, "the rung before has no run left"
        for job in jobs(rungs, trials, number):
            if job.key not in results:
                return job
    return None


def winner(rungs: Sequence[Rung], results: Results) -> int | None:
    """The best trial of the last rung; None while there are runs to do, or where all of it diverged."""
    ranked = ranking(rungs, results, len(rungs) - 1)
    if ranked is None:
        return None
    last = rungs[-1]
    best = [results[ranked[0], last.track, seed] for seed in range(last.seeds)]
    return ranked[0] if all(map(math.isfinite, best)) else None


def runs(rungs: Sequence[Rung]) -> int:
    """Runs of a whole search; a rung takes over those of earlier rungs on its track."""
    total, done = 0, dict.fromkeys((rung.track for rung in rungs), 0)
    for rung in rungs:
        total += rung.trials * max(0, rung.seeds - done[rung.track])
        done[rung.track] = max(done[rung.track], rung.seeds)
    return total
