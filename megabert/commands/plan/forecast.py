"""Forecast of a run at several numbers of GPUs: seconds an update and days, as tables.

The costs of this trainer's kernels are counted from the model; none of them has been timed on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megabert.commands.plan import step_time, workload
from megabert.commands.plan.step_time import Device, Fabric, GpuShare, MicroBatch, Software, StepTime, System
from megabert.commands.plan.workload import Work
from megabert.common.logs import aligned
from megabert.config import Config, accumulation, fit_micro_size
from megabert.engine.deepspeed_step import LEAST

# tokens/s of a loader process: rows of 128 in batches of 32 on one core, by bench_data.py (docs/measurements.md)
LOADER = 45_812 * 128
# seconds of the host a kernel: 25-30 ms for a pass of BERT-LARGE in plain torch, 60 kernels a layer
PYTHON = 19e-6
# counted for BERT-LARGE of 16,384 tokens: 67 GB outside products and attention with plain torch, 26 GB with fused operations:
# bytes a token, layer and hidden unit; kernels a layer
TORCH, NATIVE = (166.0, 60), (65.0, 28)
# kernels a layer that sum gradients, one for each of its parameters
GRADIENTS = 12
# share of a micro-step's time above which its launches lead to a warning: GPUs may well be twice as fast as predicted
LAUNCHING = 0.5
# bytes a parameter: gradients in 16 bits added to fp32 sums, which are zeroed once
ACCUMULATE = 27.0
# bytes a parameter: norm, clip, update, copies; Muon's products and traffic are counted separately. stable_adamw: lamb's with the
# pass for the RMS of the update (counted, 12 reads and writes).
OPTIMIZER = {"adamw": 67.0, "lamb": 164.0, "muon": 122.0, "stable_adamw": 212.0}
# seconds an update in which the device waits for Python (assumed)
HOST = 2e-3
# bytes a pair and head; other backends do not write scores
SCORES = {"fused_softmax": 22.0}
# backends that compute all pairs of a row and mask some
EVERY_PAIR = ("sdpa", "fused_softmax")


@dataclass(frozen=True)
class ForecastJob:
    """An update's work over all ranks: `counts` as computed, including padding; real tokens and operations without it."""

    # phase of the run, its share of the budget, and its updates
    config: Config
    part: float
    steps: int
    counts: MicroBatch
    update: Work
    operations: float

    def share(self, size: int) -> GpuShare:
        """The part of one of `size` GPUs, the largest if they differ."""
        config = fit_micro_size(self.config, size)
        micro, steps = config.batch.micro_size, accumulation(config, size)
        loading = micro * steps * self.update.seq_len / (LOADER * max(1, config.data.workers))
        return GpuShare(self.counts.times(micro / self.update.rows), steps, loading)


@dataclass(frozen=True)
class ForecastPoint:
    """A phase of the run at one number of GPUs."""

    size: int
    micro_size: int
    micro_steps: int
    step: StepTime
    # of the phase
    seconds: float


def build_job(config: Config, part: float = 1.0, before: int = 0) -> ForecastJob:
    """The work of a phase after `before` updates of the run, by the manifests of its data if it names any, including padding."""
    manifest = workload.read_manifest_or_none(config)
    config = workload.with_vocabulary(config, manifest)
    update = workload.work(config, manifest)
    every = float(config.model.layers * update.rows * update.seq_len**2)
    pairs = every if config.ops.attention in EVERY_PAIR else update.pairs
    counts = MicroBatch(float(update.rows * update.seq_len), pairs, update.predictions, update.sequences)
    steps = workload.count_steps(config, part, update, before)
    return ForecastJob(config, part, steps=steps, counts=counts, update=update, operations=update.flops(config))


def describe_software(config: Config) -> Software:
    """This trainer under a configuration. Raises ValueError for settings that the model does not cover."""
    if config.precision == "fp32":
        raise ValueError(f"precision={config.precision}: --gpus forecasts 16-bit training alone; set precision=bf16")
    own_gradients = config.zero.stage == 1
    elementwise, kernels = NATIVE if config.ops.layer == "native" else TORCH
    return Software(
        elementwise=elementwise,
        kernels=kernels + GRADIENTS,
        attention=SCORES.get(config.ops.attention, 0.0),
        launch=PYTHON,
        accumulate=ACCUMULATE,
        optimizer=OPTIMIZER[config.optimizer.name],
        orthogonal=workload.matrices(config.model) if config.optimizer.name == "muon" else (),
        zero=config.zero.stage,
        # stage 1 in bf16 is `megabert.engine.deepspeed_step`
        gradient_bytes=workload.GRADIENT_BYTES,
        least_share=LEAST if own_gradients else math.inf,
        overlap=own_gradients or config.zero.stage == 3,
        recompute=config.model.activation_checkpointing,
        host=HOST,
    )


def forecast(job: ForecastJob, sizes: Sequence[int], device: Device, fabric: Fabric) -> list[ForecastPoint]:
    """A point for each of `sizes`, which must be whole nodes beyond one node. Raises ValueError naming an invalid value."""
    system = System(device, fabric, describe_software(job.config))
    points = []
    for size in sizes:
        share = job.share(size)
        step = step_time.step_seconds(job.config.model, share, size, system)
        schedule, seconds = job.config.schedule, step.seconds * job.steps
        if schedule.unit == "minutes":
            seconds = job.part * schedule.budget_minutes * 60
        micro_size = fit_micro_size(job.config, size).batch.micro_size
        points.append(ForecastPoint(size, micro_size, share.micro_steps, step, seconds))
    return points


def table(job: ForecastJob, points: Sequence[ForecastPoint], device: Device) -> str:
    """Speed, efficiency relative to the first line, days and GPU-hours, by number of GPUs; then the terms in milliseconds."""
    heads = "GPUs,rows x steps,s/update,rows/s,tokens/s,MFU,efficiency,updates,days,GPU-hours"
    lines = [heads.split(",")]
    first = points[0].size * points[0].step.seconds
    for point in points:
        seconds = point.step.seconds
        mfu, efficiency = job.operations / (seconds * point.size * device.peak), first / (point.size * seconds)
        cells = [f"{point.size:,}", f"{point.micro_size} x {point.micro_steps}", f"{seconds:.4g}"]
        cells += [f"{count / seconds:,.0f}" for count in (job.update.rows, job.update.tokens)]
        cells += [f"{mfu:.1%}", f"{efficiency:.1%}", f"{point.seconds / seconds:,.0f}"]
        lines.append([*cells, f"{point.seconds / 86_400:.3g}", f"{point.size * point.seconds / 3_600:,.0f}"])
    terms = [["GPUs", *vars(points[0].step)]]
    terms += [[f"{p.size:,}", *(f"{1_000 * value:.4g}" for value in vars(p.step).values())] for p in points]
    return f"{aligned(lines)}\n\nmilliseconds of an update\n{aligned(terms)}{host_bound(job, points)}"


def host_bound(job: ForecastJob, points: Sequence[ForecastPoint]) -> str:
    """A warning about the first point whose micro-steps may be bound by Python's launches; "" without one."""
    launching = step_time.launch_seconds(job.config.model, describe_software(job.config))
    for point in points:
        terms = (point.step.products, point.step.attention, point.step.elementwise, point.step.kernels)
        running = math.fsum(terms) / point.micro_steps
        if launching > LAUNCHING * running:
            return (
                f"\n\nwarning: at {point.size:,} GPUs the host may be the limit: a micro-step of {point.micro_size} rows runs"
                f" {1e3 * running:.0f} ms, and launching its kernels takes {1e3 * launching:.0f} ms of Python;"
                " take a larger batch.micro_size, or fewer GPUs where that is their whole share"
            )
    return ""
