"""The planner against MLPerf's published BERT-LARGE runs: a third of the rows at most calibrate, all are predicted.

    python benchmarks/bench_planner.py --fit
    python benchmarks/bench_planner.py --json FILE

The first fits the constants to the calibrating rows; the second predicts all rows with the committed constants. Both only compute:
they take a minute and a second on any machine.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware
from benchmarks.common.mlperf import FROZEN, OWN_SOFTWARE, Fit, blind, calibration, error, known, run_seconds, terms
from megabert.commands.plan.published import PublishedRun, published_runs
from megabert.commands.plan.quality import SUBMISSIONS, target_samples

Result = dict[str, Any]
# errors up to this size count as none
ENOUGH = 0.03


# ---- the fit


def loss(fit: Fit) -> float:
    """Mean absolute error of the calibrating rows, which weighs outliers less than squares."""
    return statistics.fmean(
        math.hypot(ENOUGH, math.log1p(error(run, fit))) for run in calibration() if run.submitter != OWN_SOFTWARE
    )


def moves(fit: Fit) -> list[Callable[[Fit, float], Fit]]:
    """A function for each constant that multiplies it by a factor."""

    def achieved(name: str, fit: Fit, factor: float) -> Fit:
        return replace(fit, achieved={**fit.achieved, name: min(1.0, fit.achieved[name] * factor)})

    def network(fit: Fit, factor: float) -> Fit:
        return replace(fit, constants=replace(fit.constants, network=min(1.0, fit.constants.network * factor)))

    def software(name: str, fit: Fit, factor: float) -> Fit:
        return replace(fit, rounds={**fit.rounds, name: fit.rounds[name] * factor})

    cards = dict.fromkeys(run.gpu for run in calibration())
    return [*(partial(achieved, name) for name in cards), network, *(partial(software, name) for name in fit.rounds)]


def fitted(fit: Fit) -> Fit:
    """The minimum of the loss by coordinate search, in steps from a third down to a thousandth."""
    least, step, changes = loss(fit), 1 / 3, moves(fit)
    while step > 1e-3:
        before = least
        for change in changes:
            for factor in (1 + step, 1 / (1 + step)):
                moved = change(fit, factor)
                if (value := loss(moved)) < least:
                    fit, least = moved, value
        if before - least < 1e-5:
            step /= 2
    return fit


def submissions() -> dict[int, float]:
    """Median over the calibrating rows of a year of samples relative to the reference's at the same batch."""
    ratios = defaultdict(list)
    for run in calibration():
        if run.samples:
            reference = target_samples(run.batch, run.year) / SUBMISSIONS[run.year]
            ratios[run.year].append(run.samples / reference)
    return {year: round(statistics.median(values), 3) for year, values in ratios.items()}


def report_fit() -> str:
    """The fitted constants, rounded, as lines for the sources."""
    fit = fitted(FROZEN)
    parts: dict[str, Mapping[Any, float]] = {"ACHIEVED": fit.achieved, "rounds": fit.rounds}
    parts["SUBMISSIONS"] = submissions()
    lines = [f"loss {loss(FROZEN):.4f} as committed, {loss(fit):.4f} fitted"]
    lines += [f"Constants.network {fit.constants.network:.4g}"]
    lines += [f"{name} { {key: round(value, 4) for key, value in values.items()} }" for name, values in parts.items()]
    return "\n".join([*lines, "", *(f"{error(run, fit):+7.1%}  {run.name}" for run in calibration())])


# ---- the score


def summary(sizes: Iterable[float]) -> Result:
    """Statistics of absolute errors; the 90th percentile is the smallest value that nine tenths of them do not exceed."""
    sizes = sorted(map(abs, sizes))
    nine_tenths = sizes[math.ceil(0.9 * len(sizes)) - 1]
    figures = {"rows": len(sizes), "median": statistics.median(sizes), "p90": nine_tenths, "worst": sizes[-1]}
    return {name: round(value, 4) for name, value in figures.items()}


def row(run: PublishedRun, side: str) -> Result:
    """Measured and predicted figures of a run; `samples_error` and `minutes_error` if the log has the number of samples."""
    samples = target_samples(run.batch, run.year)
    wrong = error(run, FROZEN)
    figures: Result = {"run": run.name, "side": side, "gpu": run.gpu, "gpus": run.gpus, "nodes": run.nodes}
    figures |= {"batch": run.batch, "rate": run.rate, "predicted": round(run.rate / (1 + wrong), 1)}
    figures |= {"error": round(wrong, 4)}
    if run.samples:
        minutes = run_seconds(run, samples, FROZEN) * run.rate / run.samples - 1
        figures |= {"samples_error": round(samples / run.samples - 1, 4), "minutes_error": round(minutes, 4)}
    milliseconds = {name: round(1e3 * value, 2) for name, value in terms(run, FROZEN).items() if value}
    return figures | {"milliseconds": milliseconds}


def others(run: PublishedRun) -> float | None:
    """Error in seconds of a prediction by other submitters: their median rate with as many GPUs of the kind in the round."""
    same = (run.gpu, run.gpus, run.round)
    rates = [
        other.rate
        for other in published_runs()
        if not other.left_out and other.submitter != run.submitter and (other.gpu, other.gpus, other.round) == same
    ]
    return run.rate / statistics.median(rates) - 1 if rates else None


def score() -> Result:
    sides = {"calibration": calibration(), "known": known(), "blind": blind()}
    by_others = {run.name: found for run in blind() if (found := others(run)) is not None}
    rows = [row(run, side) for side, runs in sides.items() for run in runs]
    judged = [one for one in rows if one["side"] == "blind"]
    kinds = dict.fromkeys(one["gpu"] for one in judged)
    groups = {kind: [one for one in judged if one["gpu"] == kind] for kind in kinds}
    groups |= {"one node": [one for one in judged if one["nodes"] == 1]}
    groups |= {"several nodes": [one for one in judged if one["nodes"] > 1], "all": judged}
    fit = {"achieved": FROZEN.achieved, "constants": vars(FROZEN.constants), "rounds": FROZEN.rounds}
    return {
        "constants": fit | {"submissions": SUBMISSIONS},
        "blind": {name: summary(one["error"] for one in group) for name, group in groups.items()},
        **{side: summary(one["error"] for one in rows if one["side"] == side) for side in ("calibration", "known")},
        "samples": summary(one["samples_error"] for one in judged if "samples_error" in one),
        "minutes": summary(one["minutes_error"] for one in judged if "minutes_error" in one),
        "where others measured the same": {
            "the planner": summary(one["error"] for one in judged if one["run"] in by_others),
            "their median": summary(by_others.values()),
        },
        "rows": rows,
        "left_out": {run.name: run.left_out for run in published_runs() if run.left_out},
    }


def table(result: Result) -> str:
    """Errors of the blind rows by kind of GPU, as Markdown."""
    names = ("median", "p90", "worst")
    rows = [
        (kind, str(group["rows"]), *(f"{group[name]:.1%}" for name in names)) for kind, group in result["blind"].items()
    ]
    return hardware.markdown(("blind rows", "rows", "median error", "90th percentile", "worst"), rows)


def main() -> None:
    parser = hardware.Parser(__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the constants to the calibrating rows and exit")
    args = parser.parse()
    if args.fit:
        print(report_fit())
        return
    result = score()
    print(table(result))
    for name in ("calibration", "known", "samples", "minutes", "where others measured the same"):
        print(f"{name}: {result[name]}")
    hardware.write_json(args.json, result)


if __name__ == "__main__":
    hardware.run(main)
