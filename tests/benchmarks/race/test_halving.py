"""Successive halving finds the better half at a fake objective, is a function of its table, and says what is no range."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from benchmarks.race import halving
from benchmarks.race.halving import Job, Rung

RUNGS = (Rung(9, "1k-tokens"), Rung(3, "1k-tokens", 3), Rung(2, "4k-tokens", 2))
SPACE = {"lr": {"low": 1e-4, "high": 1e-2, "log": True}, "batch": [8, 16, 32]}


def objective(job: Job) -> float:
    """Best at trial 4; its first seed deceives, and no mean of seeds does."""
    return abs(job.trial - 4) + (1.2 if job.seed == 0 and job.trial == 4 else 0.0) + 0.01 * job.seed


def search(results: dict, upto: int = 1000) -> list[Job]:
    done = []
    while len(done) < upto and (job := halving.next_job(RUNGS, results)):
        results[job.key] = objective(job)
        done.append(job)
    return done


def test_the_best_trial_wins_and_each_rung_takes_the_best_of_the_one_before() -> None:
    results: dict = {}
    done = search(results)
    assert halving.winner(RUNGS, results) == 4
    assert halving.entrants(RUNGS, results, 1) == [3, 5, 4]
    assert [sorted({j.trial for j in done if j.rung == rung}) for rung in (0, 1, 2)] == [
        list(range(9)), [3, 4, 5], [3, 4],
    ]  # fmt: skip
    assert len(done) == len({j.key for j in done}) == halving.runs(RUNGS) == 9 + 3 * 2 + 2 * 2


def test_a_search_that_was_killed_anywhere_does_the_runs_that_are_left() -> None:
    whole = search({})
    for killed_at in range(len(whole)):
        results: dict = {}
        begun = search(results, upto=killed_at)
        assert halving.winner(RUNGS, results) is None
        assert begun + search(results) == whole


def test_what_diverges_is_last_and_no_winner() -> None:
    results: dict = {}
    while job := halving.next_job(RUNGS, results):
        results[job.key] = math.inf if job.trial != 7 else 5.0
    assert halving.winner(RUNGS, results) == 7
    results = dict.fromkeys(results, math.inf)
    while job := halving.next_job(RUNGS, results):
        results[job.key] = math.inf
    assert halving.winner(RUNGS, results) is None


def test_trial_0_is_the_recipe_and_the_others_are_drawn_in_their_ranges() -> None:
    assert halving.draw(SPACE, 0, seed=1) == {}
    trials = [halving.draw(SPACE, trial, seed=1) for trial in range(1, 200)]
    assert trials == [halving.draw(SPACE, trial, seed=1) for trial in range(1, 200)]
    assert trials[0] != halving.draw(SPACE, 1, seed=2)
    rates = [trial["lr"] for trial in trials]
    assert 1e-4 <= min(rates) < 1.2e-4 and 0.8e-2 < max(rates) <= 1e-2
    assert 0.4 < sum(rate < 1e-3 for rate in rates) / len(rates) < 0.6, "even in the logarithm"
    for batch in (8, 16, 32):
        with_it = [trial["lr"] < 1e-3 for trial in trials if trial["batch"] == batch]
        assert len(with_it) > 40 and 0.3 < sum(with_it) / len(with_it) < 0.7, "one key does not tell another"
    more = [halving.draw(SPACE | {"beta": [0.9, 0.99]}, trial, seed=1) for trial in range(1, 200)]
    assert [t["lr"] for t in more] == rates, "another key changes no drawn value"
    assert all(a["lr"] != b["lr"] for a, b in pairwise(trials))


@pytest.mark.parametrize(
    ("among", "said"),
    [
        (3, "a range is a list of values"),
        ([], "a range is a list of values"),
        ({"low": 1}, "a range is a list of values"),
        ({"low": 1, "high": 2, "step": 1}, "a range is a list of values"),
        ({"low": 2, "high": 1}, "low must be below high"),
        ({"low": 0, "high": 1, "log": True}, "above 0 where log"),
    ],
)
def test_what_is_no_range_is_refused_by_its_key(among: object, said: str) -> None:
    with pytest.raises(ValueError, match=f"lr: .*{said}"):
        halving.draw({"lr": among}, 1, seed=0)


@pytest.mark.parametrize(
    ("rungs", "said"),
    [
        ((), "needs a rung"),
        ((Rung(0, "1k-tokens"),), "rung 1: trials and seeds must be 1"),
        ((Rung(2, "1k-tokens"), Rung(3, "1k-tokens")), "rung 2: 3 trials, more than"),
    ],
)
def test_what_is_no_ladder_is_refused(rungs: tuple[Rung, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        halving.check(rungs)
