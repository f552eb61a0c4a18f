"""The planner's blind test: MLPerf's published BERT-LARGE runs, split into calibrating and blind rows, models of their software, and
errors of the committed constants."""

from __future__ import annotations

import functools
import hashlib
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.common.hardware import markdown
from megabert.commands.plan.forecast import NATIVE, SCORES, TORCH
from megabert.commands.plan.published import LARGE, PREDICTED, SQUARES, PublishedRun, published_runs
from megabert.commands.plan.quality import SAMPLE_TOKENS, SUBMISSIONS, target_samples
from megabert.commands.plan.step_time import (
    DEVICES,
    Constants,
    Fabric,
    GpuShare,
    MicroBatch,
    Software,
    System,
    pass_seconds,
    step_seconds,
)


@functools.cache
def calibration() -> tuple[PublishedRun, ...]:
    """A third of all rows at most, from the first table, chosen independently of their figures.

    Rows of one submitter are a group within a stratum: a kind of GPU, a network, and 64 nodes or more or fewer. Of each stratum the
    first group in the order of SHA-256 of "submitter/gpu", and further ones that fit into half of its rows and into five.
    """
    strata: dict[tuple[str, str, bool], dict[str, list[PublishedRun]]] = defaultdict(lambda: defaultdict(list))
    for run in published_runs():
        if not run.left_out and run.table == 1:
            strata[run.gpu, run.network, run.nodes >= MANY][f"{run.submitter}/{run.gpu}"].append(run)
    chosen: list[PublishedRun] = []
    for groups in strata.values():
        room = min(ROOM, sum(map(len, groups.values())) // 2)
        first, *rest = sorted(groups, key=lambda name: hashlib.sha256(name.encode()).digest())
        taken = list(groups[first])
        for name in rest:
            if len(taken) + len(groups[name]) <= room:
                taken += groups[name]
        chosen += taken
    return tuple(chosen)


def known() -> tuple[PublishedRun, ...]:
    """Rows to which no constant was fitted, but which were seen when the form of the model was chosen."""
    calibrating = set(calibration())
    return tuple(run for run in published_runs() if not run.left_out and run.table == 1 and run not in calibrating)


def blind() -> tuple[PublishedRun, ...]:
    """The rows of the second table, which were not known when the constants were fitted."""
    return tuple(run for run in published_runs() if not run.left_out and run.table == 2)


# calibrating rows of a stratum, unless its first group has more
ROOM = 5
# nodes of a large system, a stratum of its own
MANY = 64
# samples of an evaluation
EVALUATED = 10_000
# samples a GPU up to which a submission after 0.7 uses static shapes, for CUDA graphs of whole iterations
STATIC = 8
# FusedLayerNorm and bias + GELU only: half way (assumed)
PARTLY = (TORCH[0] + NATIVE[0]) / 2
# seconds before the first update (assumed: MLPerf's clock starts when the model is initialised and warm)
START = 1.0
# 4.0 and 4.1 name the containers of 3.1 (23.09); one calibrating row of 5.0 is of a generation with rows in other rounds
SAME_SOFTWARE = {"4.0": "3.1", "4.1": "3.1", "5.0": "3.1"}
# errors up to this size count as none in the fit
ENOUGH = 0.03
# calibrating rows with other code than NVIDIA's (FusedAdam, lengths balanced over 8 GPUs), not used in the fit
OWN_SOFTWARE = "Samsung"

REAL_SAMPLE = MicroBatch(SAMPLE_TOKENS, LARGE.layers * SQUARES * SAMPLE_TOKENS**2, PREDICTED * SAMPLE_TOKENS, 1.0)
# the vocabulary's product is computed for all positions
PACKED_SAMPLE = replace(REAL_SAMPLE, predictions=SAMPLE_TOKENS)
PADDED_SAMPLE = MicroBatch(512, LARGE.layers * 512**2, 512, 1.0)


@dataclass(frozen=True)
class Fit:
    """Fitted constants."""

    # share of the peak that products reach, by GPU
    achieved: Mapping[str, float]
    constants: Constants
    # speed of a round's software relative to 2.0
    rounds: Mapping[str, float]


def submission(run: PublishedRun) -> tuple[Software, MicroBatch]:
    """Software and samples of a round's submissions, by NVIDIA's configurations of the round (mlcommons/training_results_v*,
    `config_*.sh`), which other submitters on GPUs used too.

    Static shapes are padded to 512 in 1.x and packed since 2.0; their heads compute all positions, and their gradients are sent during
    the backward pass. Others have no padding. 0.7 writes scores to memory; FP8 since Hopper, but not in static shapes of a few samples.
    """
    static = run.year > 2020 and run.batch <= STATIC * run.gpus
    if run.year <= 2021:
        scores = SCORES["fused_softmax"] if run.year == 2020 else 0.0
        software = Software(PARTLY, attention=scores, kernels=40, overlap=static)
        unpadded = PACKED_SAMPLE if run.year == 2020 else REAL_SAMPLE
        return software, PADDED_SAMPLE if static else unpadded
    fp8 = DEVICES[run.gpu].generation not in ("volta", "ampere") and not static
    software = Software(NATIVE[0], attention=0.0, kernels=NATIVE[1], fp8=fp8, overlap=static)
    return software, PACKED_SAMPLE if static else REAL_SAMPLE


def terms(run: PublishedRun, fit: Fit) -> dict[str, float]:
    """Seconds of an update by term, with its part of the evaluations.

    Evaluations: 10,000 samples forward every 0.05 (230.23 batch + 3,000,000) samples, rounded down to 25,000
    (mlcommons/training_policies).
    """
    software, sample = submission(run)
    known, factor = DEVICES[run.gpu].linked(run.link), fit.rounds.get(SAME_SOFTWARE.get(run.round, run.round), 1.0)
    device = replace(known, achieved=fit.achieved[run.gpu] * factor, memory=known.memory * factor)
    system = System(device, Fabric.of(run.gpus // run.nodes, run.network), software, fit.constants)
    step = step_seconds(LARGE, GpuShare(sample.times(run.batch / run.gpus)), run.gpus, system)
    every = max(1.0, 0.05 * (230.23 * run.batch + 3_000_000) // 25_000) * 25_000
    forward = pass_seconds(LARGE, REAL_SAMPLE.times(math.ceil(EVALUATED / run.gpus)), system).seconds / 3
    return vars(step) | {"evaluations": forward * run.batch / every}


def run_seconds(run: PublishedRun, samples: float, fit: Fit) -> float:
    """Predicted seconds of a run over this many samples."""
    return samples / run.batch * math.fsum(terms(run, fit).values()) + START


def error(run: PublishedRun, fit: Fit) -> float:
    """Predicted over measured time for the samples of the run, minus 1."""
    samples = run.samples or target_samples(run.batch, run.year)
    return run_seconds(run, samples, fit) * run.rate / samples - 1


# result of `python benchmarks/bench_planner.py --fit` at revision ec453082
FROZEN = Fit(
    {name: device.achieved for name, device in DEVICES.items()},
    Constants(),
    rounds={"0.7": 0.5066, "1.0": 0.9015, "1.1": 1.0515, "2.1": 1.023, "3.0": 1.0342, "3.1": 1.0028},
)


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


def summary(sizes: Iterable[float]) -> dict[str, float]:
    """Statistics of absolute errors; the 90th percentile is the smallest value that nine tenths of them do not exceed."""
    sizes = sorted(map(abs, sizes))
    nine_tenths = sizes[math.ceil(0.9 * len(sizes)) - 1]
    figures = {"rows": len(sizes), "median": statistics.median(sizes), "p90": nine_tenths, "worst": sizes[-1]}
    return {name: round(value, 4) for name, value in figures.items()}


def row(run: PublishedRun, side: str) -> dict[str, Any]:
    """Measured and predicted figures of a run; `samples_error` and `minutes_error` if the log has the number of samples."""
    samples, wrong = target_samples(run.batch, run.year), error(run, FROZEN)
    figures = {"run": run.name, "side": side, "gpu": run.gpu, "nodes": run.nodes, "rate": run.rate}
    figures |= {"predicted": round(run.rate / (1 + wrong), 1), "error": round(wrong, 4)}
    if run.samples:
        minutes = run_seconds(run, samples, FROZEN) * run.rate / run.samples - 1
        figures |= {"samples_error": round(samples / run.samples - 1, 4), "minutes_error": round(minutes, 4)}
    return figures


def score() -> dict[str, Any]:
    """The committed constants, errors by group, and every row."""
    sides = {"calibration": calibration(), "known": known(), "blind": blind()}
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
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """Errors of the blind rows by kind of GPU, as Markdown."""
    names = ("median", "p90", "worst")
    rows = [
        (kind, str(group["rows"]), *(f"{group[name]:.1%}" for name in names)) for kind, group in result["blind"].items()
    ]
    return markdown(("blind rows", "rows", "median error", "90th percentile", "worst"), rows)
