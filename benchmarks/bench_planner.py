"""The planner's step-time model against published BERT-LARGE runs: one constant a generation fitted, all else predicted.

    python benchmarks/bench_planner.py --json FILE

Fitted is the share of the peak that matrix products reach, on the smallest published system of each generation; every
other row is predicted. The one global constant that was chosen on these rows, the network's share, is also chosen
without each generation in turn and tried on that generation's rows. Nothing is run: it takes a few seconds anywhere.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware
from benchmarks.common.published_runs import DEVICES, LARGE, REAL_SAMPLE, RUNS, Part, Run
from megabert.commands.plan.step_time import (
    Constants,
    Device,
    Fabric,
    GpuShare,
    StepTime,
    System,
    pass_seconds,
    step_seconds,
)

Result = dict[str, Any]
NETWORK_SHARES = (0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8)
# samples of an MLPerf evaluation
EVALUATED = 10_000


def system_of(run: Run, devices: Mapping[str, Device], constants: Constants) -> System:
    cluster = run.cluster
    return System(devices[cluster.device], Fabric.of(cluster.node, cluster.network), run.software, constants)


def update(run: Run, part: Part, system: System) -> StepTime:
    share = part.batch / run.gpus
    steps = math.ceil(share / (part.micro or share))
    return step_seconds(LARGE, GpuShare(part.sample.times(share / steps), steps), run.gpus, system)


def evaluations(run: Run, part: Part, system: System) -> float:
    """Seconds of MLPerf's evaluations an update: 10,000 samples forward, as often as its rules say for the batch.

    Every 0.05 (230.23 batch + 3,000,000) samples, rounded down to 25,000 (mlcommons/training_policies).
    """
    if not run.evaluated:
        return 0.0
    samples = 0.05 * (230.23 * part.batch + 3_000_000) // 25_000 * 25_000
    a_gpu = REAL_SAMPLE.times(math.ceil(EVALUATED / run.gpus))
    return pass_seconds(LARGE, a_gpu, system).seconds / 3 * part.batch / samples


def rate(run: Run, devices: Mapping[str, Device], constants: Constants) -> float:
    """Predicted, as `Run.rate` is published."""
    system = system_of(run, devices, constants)
    seconds = (
        part.samples / part.batch * (update(run, part, system).seconds + evaluations(run, part, system))
        for part in run.parts
    )
    return 1 / sum(seconds)


def fit(constants: Constants) -> dict[str, Device]:
    """The devices with what their generation's fitted run says of `achieved`: time is linear in its reciprocal."""
    devices = dict(DEVICES)
    for run in (run for run in RUNS if run.fitted):
        name, generation = run.cluster.device, DEVICES[run.cluster.device].generation
        at_1, at_half = (
            1 / rate(run, {name: replace(DEVICES[name], achieved=share)}, constants) for share in (1.0, 0.5)
        )
        achieved = round(1 / (1 + (1 / run.rate - at_1) / (at_half - at_1)), 4)
        devices |= {
            name: replace(device, achieved=achieved)
            for name, device in DEVICES.items()
            if device.generation == generation
        }
    return devices


def errors(devices: Mapping[str, Device], constants: Constants) -> dict[str, float]:
    """Predicted over published rate, less 1, of every row that was not fitted."""
    return {run.name: rate(run, devices, constants) / run.rate - 1 for run in RUNS if not run.fitted}


def rms(values: Iterable[float]) -> float:
    """Of logarithms of the ratios, so that twice and half are as wrong."""
    return math.sqrt(statistics.fmean(math.log1p(value) ** 2 for value in values))


def summary(values: Iterable[float]) -> Result:
    sizes = sorted(abs(value) for value in values)
    return {"rows": len(sizes), "median": round(statistics.median(sizes), 4), "worst": round(sizes[-1], 4)}


def cross_validation() -> Result:
    """The network's share by all generations but one, and the errors of that one's rows with it; and its sensitivity."""
    by_share = {}
    for share in NETWORK_SHARES:
        constants = replace(Constants(), network=share)
        by_share[share] = errors(fit(constants), constants)
    generation = {run.name: DEVICES[run.cluster.device].generation for run in RUNS}
    left_out = {}
    for left in dict.fromkeys(generation.values()):
        chosen = min(
            NETWORK_SHARES, key=lambda share: rms(e for name, e in by_share[share].items() if generation[name] != left)
        )
        own = [error for name, error in by_share[chosen].items() if generation[name] == left]
        left_out[left] = {"network": chosen, **summary(own)}
    return {
        "shares": {
            str(share): {"rms": round(rms(found.values()), 4), **summary(found.values())}
            for share, found in by_share.items()
        },
        "left_out": left_out,
    }


def sensitivity() -> Result:
    """Errors with each global constant a quarter smaller and larger, fitted again."""
    found = {}
    for name, value in vars(Constants()).items():
        for factor in (0.75, 1.25):
            constants = replace(Constants(), **{name: min(1.0, factor * value) if value < 1 else factor * value})
            found[f"{name} x {factor}"] = summary(errors(fit(constants), constants).values())
    return found


def groups(found: Mapping[str, float]) -> Result:
    """Errors of the rows by who published them; MLPerf's have many systems, the tables few."""
    sources = {"MLPerf": [run for run in RUNS if run.evaluated]}
    for name in ("DeepLearningExamples", "DeepSpeed", "LAMB paper"):
        sources[name] = [run for run in RUNS if name in run.name]
    return {name: summary(found[run.name] for run in runs if not run.fitted) for name, runs in sources.items()}


def row(run: Run, devices: Mapping[str, Device], constants: Constants) -> Result:
    predicted, system = rate(run, devices, constants), system_of(run, devices, constants)
    part = run.parts[0]
    terms = {name: round(1_000 * value, 2) for name, value in vars(update(run, part, system)).items() if value}
    if run.evaluated:
        terms["evaluations"] = round(1_000 * evaluations(run, part, system), 2)
    hours = len(run.parts) > 1
    missing = 1_000 * part.batch * (1 / run.rate - 1 / predicted)
    return {
        "name": run.name,
        "how": run.how,
        "batch": part.batch,
        "unit": "hours" if hours else "samples/s",
        "published": round(1 / run.rate / 3_600, 3) if hours else run.rate,
        "predicted": round(1 / predicted / 3_600, 3) if hours else round(predicted, 1),
        "error": None if run.fitted else round(predicted / run.rate - 1, 4),
        "milliseconds": terms,
        "missing_milliseconds": None if hours or run.fitted else round(missing, 2),
    }


def report() -> Result:
    constants = Constants()
    devices = fit(constants)
    found = errors(devices, constants)
    return {
        "fitted": {device.generation: device.achieved for device in devices.values()},
        "constants": vars(constants),
        "summary": summary(found.values()),
        "groups": groups(found),
        "cross_validation": cross_validation(),
        "sensitivity": sensitivity(),
        "rows": [row(run, devices, constants) for run in RUNS],
    }


def table(result: Result) -> str:
    """The rows as a table of Markdown; error: predicted over published speed."""
    lines = ["| run | how | published | predicted | error |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        hours = row["unit"] == "hours"
        published, predicted = (f"{row[s]:,.2f} h" if hours else f"{row[s]:,.0f}" for s in ("published", "predicted"))
        error = "fitted" if row["error"] is None else f"{100 * row['error']:+.1f}%"
        lines.append(f"| {row['name']} | {row['how']} | {published} | {predicted} | {error} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    hardware.add_json(parser)
    args = parser.parse_args(argv)
    hardware.refuse_dirty(parser, args)
    result = report()
    print(table(result))
    found = result["summary"]
    print(
        f"\n{found['rows']} rows predicted: median error {found['median']:.1%}, worst {found['worst']:.1%}; "
        f"fitted, one a generation: {result['fitted']}"
    )
    for name, group in result["groups"].items():
        print(f"{name}: {group['rows']} rows, median {group['median']:.1%}, worst {group['worst']:.1%}")
    if args.json:
        hardware.write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
