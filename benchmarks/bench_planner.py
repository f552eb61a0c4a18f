"""The planner against MLPerf's published BERT-LARGE runs: a third of the rows at most calibrate, all are predicted.

    python benchmarks/bench_planner.py --fit
    python benchmarks/bench_planner.py --json FILE --plot FILE

The first fits the constants to the calibrating rows; the second predicts all rows with the committed constants. Both only compute:
they take a minute and a second on any machine.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware
from benchmarks.common.mlperf import FROZEN, OWN_SOFTWARE, Fit, blind, calibration, error, known, run_seconds, terms
from megabert.commands.plan.published import PublishedRun, published_runs
from megabert.commands.plan.quality import SUBMISSIONS, target_samples
from megabert.commands.plan.step_time import DEVICES

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

    def achieved(name: str) -> Callable[[Fit, float], Fit]:
        return lambda fit, factor: replace(fit, achieved={**fit.achieved, name: min(1.0, fit.achieved[name] * factor)})

    def network(fit: Fit, factor: float) -> Fit:
        return replace(fit, constants=replace(fit.constants, network=min(1.0, fit.constants.network * factor)))

    def software(name: str) -> Callable[[Fit, float], Fit]:
        return lambda fit, factor: replace(fit, rounds={**fit.rounds, name: fit.rounds[name] * factor})

    cards = dict.fromkeys(run.gpu for run in calibration())
    return [*map(achieved, cards), network, *map(software, fit.rounds)]


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
    parts: dict[str, Mapping[Any, float]] = {
        "ACHIEVED": fit.achieved,
        "rounds": fit.rounds,
        "SUBMISSIONS": submissions(),
    }
    lines = [
        f"loss {loss(FROZEN):.4f} as committed, {loss(fit):.4f} fitted",
        f"Constants.network {fit.constants.network:.4g}",
    ]
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
    figures |= {
        "batch": run.batch,
        "rate": run.rate,
        "predicted": round(run.rate / (1 + wrong), 1),
        "error": round(wrong, 4),
    }
    if run.samples:
        minutes = run_seconds(run, samples, FROZEN) * run.rate / run.samples - 1
        figures |= {"samples_error": round(samples / run.samples - 1, 4), "minutes_error": round(minutes, 4)}
    return figures | {
        "milliseconds": {name: round(1e3 * value, 2) for name, value in terms(run, FROZEN).items() if value}
    }


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
    lines = ["| blind rows | rows | median error | 90th percentile | worst |", "|---|---|---|---|---|"]
    for name, group in result["blind"].items():
        cells = (f"{group[size]:.1%}" for size in ("median", "p90", "worst"))
        lines.append(f"| {name} | {group['rows']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(result: Result, path: Path) -> None:
    """Plot of predicted against measured samples a second of all rows: filled marks are blind, hollow ones were known."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "planner"}
    import matplotlib.pyplot as plt

    kinds = [name for name in DEVICES if any(point["gpu"] == name for point in result["rows"])]
    figure, axes = plt.subplots(figsize=(8, 7), layout="constrained")
    ends = [min(point["rate"] for point in result["rows"]) / 1.5, max(point["rate"] for point in result["rows"]) * 1.5]
    for band in (1.0, 0.8, 1.2):
        axes.plot(ends, [band * end for end in ends], color="0.6", linewidth=0.8, linestyle="-" if band == 1 else ":")
    for number, kind in enumerate(kinds):
        look: Result = {"color": f"C{number % 10}", "marker": "os"[number // 10], "linestyle": "", "markersize": 5}
        axes.plot([], [], label=kind, **look)
        for side, fill in (("calibration", "none"), ("known", "none"), ("blind", "full")):
            rows = [point for point in result["rows"] if (point["gpu"], point["side"]) == (kind, side)]
            axes.plot([point["rate"] for point in rows], [point["predicted"] for point in rows], fillstyle=fill, **look)
    axes.set(xscale="log", yscale="log", xlabel="measured samples/s", ylabel="predicted samples/s")
    axes.set_title(
        "BERT-LARGE, MLPerf 0.7 to 5.0: full marks blind, hollow ones calibrating or known; dotted: 20% off", fontsize=9
    )
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    hardware.add_json(parser)
    parser.add_argument("--fit", action="store_true", help="fit the constants to the calibrating rows and exit")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot of predicted against measured, .svg or .png")
    args = parser.parse_args(argv)
    hardware.refuse_dirty(parser, args)
    if args.fit:
        print(report_fit())
        return 0
    result = score()
    print(table(result))
    for name in ("calibration", "known", "samples", "minutes", "where others measured the same"):
        print(f"{name}: {result[name]}")
    if args.plot:
        plot(result, args.plot)
    if args.json:
        hardware.write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
