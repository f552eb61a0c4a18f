"""MLPerf's quality target by batch size: samples until a masked-LM accuracy of 0.72, and from these minutes, energy and cost.

The task is phase 2 of BERT-LARGE: rows of 512 places, LAMB, from MLPerf's checkpoint after phase 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megabert.commands.plan.forecast import ForecastJob, ForecastPoint
from megabert.commands.plan.step_time import Device
from megabert.common.logs import aligned

# real tokens of a sample of MLPerf's data set
SAMPLE_TOKENS = 254.5
# batch: samples to the target, the mean of the 20 runs of MLPerf's reference implementation (mlcommons/logging,
# rcp_checker/training_2.0.0/rcps_bert.json; its list for 8,192 repeats that for 4,096 and is omitted)
REFERENCE = {
    256: 2_553_000, 448: 2_625_000, 1_536: 2_778_000, 3_072: 2_768_000, 4_096: 2_843_000, 4_608: 2_795_000,
    6_144: 3_321_000, 6_912: 3_596_000, 8_704: 4_278_000, 12_288: 4_470_000, 13_056: 4_633_000, 14_336: 4_777_000,
}  # fmt: skip
# year: samples of submissions relative to the reference, the median of the calibrating rows (tests/commands/plan/mlperf.py)
SUBMISSIONS = {2020: 1.324, 2021: 1.206, 2022: 1.064, 2023: 0.991, 2024: 0.903}

# 90th percentile of the absolute errors in minutes of the second blind test (docs/planner.md)
BAND = 0.22


def target_samples(batch: float, year: int = 2024) -> float:
    """Samples to the target: interpolated between the reference's batches by a power of the batch, constant beyond them."""
    batches = sorted(REFERENCE)
    inside = min(max(batch, batches[0]), batches[-1])
    upper = next(n for n in batches[1:] if inside <= n)
    lower = batches[batches.index(upper) - 1]
    power = math.log(inside / lower) / math.log(upper / lower)
    reference = REFERENCE[lower] * (REFERENCE[upper] / REFERENCE[lower]) ** power
    return reference * SUBMISSIONS[min(year, max(SUBMISSIONS))]


def applies(job: ForecastJob) -> bool:
    """Whether the run is MLPerf's task: BERT-LARGE with LAMB over rows of 512."""
    model = job.config.model
    shape = model.layers, model.hidden, job.update.seq_len, job.config.optimizer.name
    return shape == (24, 1_024, 512, "lamb")


def table(job: ForecastJob, points: Sequence[ForecastPoint], device: Device, price: float | None) -> str:
    """Minutes, energy at the GPUs' power limit and, with a `price` of a GPU-hour, cost until the target, by number of GPUs; no
    table for batches outside the reference's range."""
    batch = job.update.tokens / SAMPLE_TOKENS
    head = "to MLPerf's target, 0.72 masked-LM accuracy from its phase-1 checkpoint"
    head = f"{head}: batch of {batch:,.0f} of its samples"
    if not min(REFERENCE) <= batch <= max(REFERENCE):
        return f"{head}; published are {min(REFERENCE):,} to {max(REFERENCE):,}, set batch.global_size"
    samples = target_samples(batch)
    lines = [["GPUs", "minutes", "low", "high", "GPU-hours", "kWh", *(["cost"] if price else [])]]
    for point in points:
        minutes = samples / batch * point.step.seconds / 60
        hours = point.size * minutes / 60
        range_of_minutes = (minutes, minutes * (1 / (1 + BAND)), minutes * (1 / (1 - BAND)))
        figures = (*range_of_minutes, hours, hours * device.power / 1_000)
        cost = [f"{hours * price:,.2f}"] if price else []
        lines.append([f"{point.size:,}", *(f"{figure:,.1f}" for figure in figures), *cost])
    reached = f"{samples / 1e6:.2f} M samples, {samples / batch:,.0f} updates; low and high as nine of ten published runs lay about their prediction"
    return f"{head}\n{reached}\n{aligned(lines)}"
