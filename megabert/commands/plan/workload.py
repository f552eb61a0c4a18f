"""The needs of a run, computed from its config and its dataset's manifest: batches, work, memory, time.

Memory of one GPU: the states as DeepSpeed allocates them (compared with real engines by a test), and activations tensor by tensor
(compared with autograd's on the CPU). Fragmentation of the allocator, communication buffers and CUDA, about 1-2 GB, are not
counted; the proposed micro-batch leaves a tenth of the memory for them. Not measured on GPUs.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megabert.checkpoint import refuse_other_vocabulary
from megabert.common import environment
from megabert.config import (
    Config,
    ModelConfig,
    accumulation,
    fit_micro_size,
    list_phases,
    merge_deepspeed,
    replace,
    shares,
    to_deepspeed,
)
from megabert.data.mixture import check_data_fits, open_mixture
from megabert.data.shards import Manifest
from megabert.engine import DTYPES, precision
from megabert.engine.ceiling import kept_ceiling
from megabert.metrics import attending_pairs, training_flops
from megabert.model import meta_model
from megabert.optim.muon import Matrix, find_matrices

# vocabulary size of data_prep by default
DEFAULT_VOCABULARY = 30_000
GIB = 2**30
# elements; DeepSpeed's default reduce_bucket_size
BUCKET = 500_000_000
# bytes of a gradient in a collective: fp32 (`communication_data_type`)
GRADIENT_BYTES = 4
# share of a GPU's memory for uncounted parts
SPARE = 0.1
# share of a CPU's large matrix products that training reaches, without AMX (measured: 0.61 to 0.81) and in its bf16 (0.2 to 0.31);
# benchmarks/results/step_*.json
CPU_SHARE, AMX_SHARE = 0.65, 0.25


@dataclass(frozen=True)
class Work:
    """Mean contents of an update: rows, real tokens, pairs of a query and a key in all layers, predictions, sequences."""

    rows: int
    seq_len: int
    tokens: float
    pairs: float
    predictions: float
    sequences: float

    def flops(self, config: Config) -> float:
        """FLOPs of forward and backward of the update, without padding."""
        counts = (self.tokens, self.pairs, self.predictions, self.sequences)
        return training_flops(config.model, *map(round, counts))


def work(config: Config, manifest: Manifest | None) -> Work:
    """One update's work; without a manifest full rows of one sequence of `data.seq_len` tokens, or (0) of `model.max_positions`. A
    dataset's sequences are assumed to be equally long, which underestimates attention by a few percent."""
    rows, masking = config.batch.global_size, config.data.masking
    length = config.data.seq_len or config.model.max_positions
    tokens, sequences = float(rows * length), float(rows)
    if manifest is not None:
        share, length = rows / manifest.rows, manifest.seq_len
        tokens, sequences = (manifest.statistics[name] * share for name in ("tokens", "sequences"))
    causal, mean = masking.causal_part, np.array([tokens / sequences])
    both, one = (sequences * attending_pairs(config.model, mean, of_causal) for of_causal in (False, True))
    pairs = (1 - causal) * both + causal * one
    predictions = (1 - causal) * tokens * masking.rate + causal * (tokens - sequences)
    return Work(rows, length, tokens, pairs, predictions, sequences)


def assumed_rows(phase: Config, number: int) -> str:
    """A line about the assumed rows of a phase without a dataset; "" with one. `number`: of the phase, 0 in a run without phases."""
    if phase.data.path:
        return ""
    if length := phase.data.seq_len:
        return f"no dataset named: full rows of {length} tokens assumed (data.seq_len)"
    key = f"phases.{number}.data.seq_len" if number else "data.seq_len"
    return f"no dataset named: full rows of {phase.model.max_positions} tokens assumed (model.max_positions); or give {key}=N"


def count_steps(config: Config, share: float, update: Work, before: int) -> int:
    """Updates of a phase with this share of the budget, after `before` of the run, which `schedule.total_steps` limits as a whole;
    with a budget of minutes the most that it may have."""
    schedule = config.schedule
    steps = round(share * schedule.total_steps)
    if schedule.unit == "tokens":
        steps = min(schedule.total_steps - before, math.ceil(share * schedule.budget_tokens / update.tokens))
    return steps


def read_manifest_or_none(config: Config) -> Manifest | None:
    """The manifest of the run's dataset or mixture, if it names one. Raises ValueError naming a folder that is none or does not fit."""
    data = config.data
    return open_mixture(data.path, data.mix, shards=False).manifest if data.path else None


def with_vocabulary(config: Config, manifest: Manifest | None) -> Config:
    """The config with the vocabulary size of the data, or the default. Raises ValueError if a run on this data would be refused."""
    if manifest is not None:
        refuse_other_vocabulary(config, manifest)
        check_data_fits(config, manifest)
        return replace(config, "model.vocab_size", manifest.vocab_size)
    return config if config.model.vocab_size else replace(config, "model.vocab_size", DEFAULT_VOCABULARY)


def planned_precision(config: Config) -> str:
    """The precision to plan for: `auto` is bf16, as on every GPU since Ampere."""
    return "bf16" if config.precision == precision.AUTO else config.precision


def states(parameters: int, precision: str, stage: int, world: int, one_moment: int = 0) -> dict[str, float]:
    """Bytes of weights, gradients, fp32 masters and moments on one of `world` GPUs just before an update is applied.

    `one_moment` of the parameters, Muon's matrices, have one moment, the others two.

    Rajbhandari et al. 2020, "ZeRO: Memory Optimizations", section 3.1 and figure 1: 2 bytes of weights, 2 of gradients, 12
    of optimizer a parameter, divided by `world` from stage 1 (optimizer), 2 (gradients), 3 (weights) on. DeepSpeed 0.19 as
    configured here keeps gradients in fp32, twice for a moment from stage 2 on (sums and their flat copy). Stage 0 in fp32
    has no masters beside its weights.
    """
    mixed = precision != "fp32"
    share = parameters / world
    return {
        "weights": (2 if mixed else 4) * (share if stage == 3 else parameters),
        "gradients": 8 * share if stage > 1 else 4.0 * parameters,
        "masters": 4 * share if stage else 4.0 * mixed * parameters,
        "moments": (8.0 * parameters - 4.0 * one_moment) / (world if stage else 1),
    }


def largest_capacity(config: Config, seq_len: int) -> int:
    """The largest number of prediction slots of a row in any update."""
    if config.causal_updates:
        return seq_len
    return max(phase.config.data.masking.capacity(seq_len) for phase in list_phases(config))


def activations(config: Config, seq_len: int) -> float:
    """Bytes kept for the backward pass of one micro-batch of full rows, tensor by tensor.

    For each token a layer keeps the inputs of its products (two norms' outputs, the context, the activation's output), queries, keys
    and values, both sums before norms and the feed-forward layer's first product; in fp32 the log-sum-exp of each head and the
    norms' statistics. That is Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
    4.1, equation 1 (34 bytes a token and hidden unit in 16 bits) without attention matrices, which grow with the row's square:
    `fused_softmax` keeps probabilities, `sdpa` its masks, the others neither. Native operations recompute dropout masks. After its
    attention the last layer computes only predicted positions. With recomputation a layer keeps its input and the stream, and
    one layer at a time has all its activations. Heads: logits of the predicted positions in the compute type; native operations
    keep the gradient of the vocabulary's weights instead.
    """
    model, ops, rows, d = config.model, config.ops, config.batch.micro_size, config.model.hidden
    width, tokens = DTYPES[planned_precision(config)].itemsize, rows * seq_len
    read = rows * min(seq_len, largest_capacity(config, seq_len) + model.nsp)
    native = ops.layer == "native"
    mask = d * (model.dropout > 0 and not native)
    gate = model.ffn * (model.gated and (model.activation == "silu" or not native))
    matrices = {"fused_softmax": model.heads * (1 + (model.attention_dropout > 0)), "sdpa": 1}
    pairs = rows * seq_len**2 * matrices.get(ops.attention, 0)
    attention = tokens * (5 * width * d + 4 * model.heads) + width * pairs
    rest = width * (3 * d + model.ffn_inputs + model.ffn + gate) + 2 * mask + 16
    layer = attention + tokens * rest
    kinds = {(model.layer_window(index), model.layer_theta(index)) for index in range(model.layers)}
    shared = tokens * (8 + 4 * d // model.heads * model.gated) * len(kinds)
    embeddings = tokens * (width * d + mask + 20)
    if model.activation_checkpointing:
        layers = (model.layers - 1) * 2 * width * tokens * d + layer
    else:
        layers = (model.layers - 1) * layer + attention + read * rest
    heads = read * width * d * (4 if model.transform else 1)
    if ops.mlm_loss == "native":
        heads += width * d * (read + model.padded_vocab)
    else:
        heads += 2 * width * read * model.padded_vocab
    return layers + shared + embeddings + heads


def report(
    config: Config,
    world_size: int,
    memory_gib: float | None = None,
    deepspeed_extra: Mapping[str, Any] | None = None,
    this_cpu: bool = False,
) -> str:
    """The plan as text, phase by phase, with the largest memory of a phase; with `memory_gib` also the largest micro-batch that fits,
    with `this_cpu` the time on this machine. Raises ValueError naming a value that contradicts another."""
    phases, lines, largest, named = list_phases(config), [], (0.0, config, 0), bool(config.phases)
    planned = replace(fit_micro_size(config, world_size), "precision", planned_precision(config))
    merged = merge_deepspeed(to_deepspeed(planned, world_size), dict(deepspeed_extra or {}), "--deepspeed_config")
    given = merged["zero_optimization"].get("reduce_bucket_size")
    before, bucket = 0, given if isinstance(given, int | float) else BUCKET
    for number, phase in enumerate(phases, 1):
        manifest = read_manifest_or_none(phase.config)
        config = with_vocabulary(fit_micro_size(phase.config, world_size), manifest)
        update = work(config, manifest)
        lines += [f"phase {number} of {len(phases)}: {phase.changes}"] if len(phases) > 1 else []
        share = phase.end - phase.begin
        steps = count_steps(config, share, update, before)
        before += steps
        lines += _work_lines(config, manifest=manifest, update=update, share=share, steps=steps, world_size=world_size)
        if assumed := assumed_rows(config, number * named):
            lines.append(f"rows     {assumed}")
        if this_cpu:
            lines.append(f"time     {cpu_time(config, update.flops(config), steps, share)}")
        memory = needed(config, update.seq_len, world_size, bucket)
        largest = max(largest, (memory, config, update.seq_len), key=lambda of: of[0])
    _, config, seq_len = largest
    lines += ["", *_memory(config, seq_len, world_size, memory_gib, bucket)]
    return "\n".join([*lines, "", "DeepSpeed's configuration", json.dumps(merged, indent=2)])


def _work_lines(
    config: Config, manifest: Manifest | None, update: Work, share: float, steps: int, world_size: int
) -> list[str]:
    """Batch, updates and work of a phase with this share of the budget."""
    flops, schedule, masking = update.flops(config), config.schedule, config.data.masking
    mean = f" (a mean: 1 of {masking.causal_every} updates is causal)" if 0 < masking.causal_part < 1 else ""
    data = f", {steps * update.rows / manifest.rows:.2f} epochs of {manifest.rows:,} rows" if manifest else ""
    run = f"{steps:,} updates, {steps * update.rows:,} rows, {steps * update.tokens:.4g} tokens{data}"
    whole = f", {steps * flops:.4g} the run"
    if schedule.unit == "minutes":  # the number of updates depends on the machine
        minutes = f"{share * schedule.budget_minutes:g} minutes of training"
        run, whole = f"{minutes}, in as many updates as fit; --this-cpu or --gpus NAME predicts how many", ""
    return [
        f"batch    {config.batch.global_size:,} rows = {shares(config, world_size)},"
        f" {update.seq_len} tokens a row; an update has {update.tokens:,.0f} tokens, {update.sequences:,.0f} sequences,"
        f" {update.predictions:,.0f} predictions{mean}",
        f"run      {run}",
        f"work     {flops:.4g} FLOPs an update{whole}",
    ]


def cpu_time(config: Config, flops: float, steps: int, part: float) -> str:
    """Seconds of an update on this machine's CPU, and hours of a phase of `steps`, or how many fit into its `part` of the minutes."""
    cpu = torch.device("cpu")
    name = precision.usual(cpu) if config.precision == precision.AUTO else config.precision
    rate = kept_ceiling(cpu, DTYPES[name]).tflops
    share = AMX_SHARE if name == "bf16" and "amx_bf16" in environment.cpu_flags() else CPU_SHARE
    seconds = flops / (share * rate * 1e12)
    phase = f"{seconds * steps / 3600:.3g} hours"
    if config.schedule.unit == "minutes":
        phase = f"{60 * part * config.schedule.budget_minutes / seconds:,.0f} updates"
    return (
        f"{seconds:.3g} s an update, {phase} on this CPU ({environment.cpu_model()}, {torch.get_num_threads()} threads): its large "
        f"products reach {1e3 * rate:,.0f} GFLOP/s in {name} (measured), training {share:.0%} of that (assumed)"
    )


@functools.cache
def padded_parameters(model: ModelConfig) -> int:
    """Parameters including the padding rows of the vocabulary and their biases."""
    return sum(parameter.numel() for parameter in meta_model(model).parameters())


@functools.cache
def matrices(model: ModelConfig) -> tuple[Matrix, ...]:
    """The matrices of a model that Muon updates."""
    return tuple(matrix for of in find_matrices(meta_model(model)).values() for matrix in of)


def resident(config: Config, stage: int, world_size: int) -> dict[str, float]:
    """`states` of this run at a ZeRO stage."""
    muon = config.optimizer.name == "muon"
    one_moment = sum(matrix.size for matrix in matrices(config.model)) if muon else 0
    return states(padded_parameters(config.model), planned_precision(config), stage, world_size, one_moment)


def bucket_bytes(config: Config, bucket: float = BUCKET) -> float:
    """Buffers of `bucket` elements of stages 1 to 3 while gradients are reduced; stage 1 in bf16 reduces in place."""
    if config.zero.stage == 0 or (config.zero.stage == 1 and config.precision != "fp32"):
        return 0.0
    return bucket * GRADIENT_BYTES


def needed(config: Config, seq_len: int, world_size: int, bucket: float = BUCKET) -> float:
    """Bytes on one GPU."""
    on_gpu = sum(resident(config, config.zero.stage, world_size).values())
    return on_gpu + bucket_bytes(config, bucket) + activations(config, seq_len)


def largest_micro_size(config: Config, seq_len: int, world_size: int, memory_gib: float, bucket: float = BUCKET) -> int:
    """The largest `batch.micro_size` that fits a GPU, 0 if none does; it divides a rank's share if the shares are equal."""
    share, uneven = -(-config.batch.global_size // world_size), config.batch.global_size % world_size
    sizes = [n for n in range(1, share + 1) if uneven or share % n == 0]
    room = (1 - SPARE) * memory_gib * GIB
    used = functools.partial(needed, seq_len=seq_len, world_size=world_size, bucket=bucket)
    fitting = bisect.bisect_right(sizes, room, key=lambda n: used(replace(config, "batch.micro_size", n)))
    return sizes[fitting - 1] if fitting else 0


def _memory(config: Config, seq_len: int, world_size: int, memory_gib: float | None, bucket: float) -> list[str]:
    kept = activations(config, seq_len)
    lines = [
        f"memory a GPU, GiB: {padded_parameters(config.model) / 1e6:.1f} M parameters in {planned_precision(config)},"
        f" {config.optimizer.name}; activations of {config.batch.micro_size} rows"
        + (", recomputed by layer" if config.model.activation_checkpointing else ""),
        "ZeRO   weights  gradients  fp32 masters  moments  activations    total",
    ]
    for stage in range(4):
        cells = [size / GIB for size in (*resident(config, stage, world_size).values(), kept)]
        numbers = "".join(f"{size:{width}.2f}" for size, width in zip(cells, (10, 11, 14, 9, 13), strict=True))
        mark = "  <- this run" if stage == config.zero.stage else ""
        lines.append(f"{stage:>4}{numbers}{sum(cells):>9.2f}{mark}")
    lines.append(
        f"stages 1 to 3 need {bucket * GRADIENT_BYTES / GIB:.2f} more while gradients are reduced (DeepSpeed's reduce_bucket_size),"
        " stage 1 in bf16 nothing"
    )
    if memory_gib is None:
        return lines
    micro = largest_micro_size(config, seq_len, world_size, memory_gib, bucket)
    if not micro:
        advice = "take zero.stage 2 or 3 or model.activation_checkpointing"
        return [*lines, f"no micro-batch fits {memory_gib:g} GiB; {advice}"]
    best = replace(config, "batch.micro_size", micro)
    largest = f"largest micro-batch for {memory_gib:g} GiB, {SPARE:.0%} left free: batch.micro_size={micro}"
    takes = f"{needed(best, seq_len, world_size, bucket) / GIB:.1f} GiB"
    return [*lines, f"{largest}, {takes}, {accumulation(best, world_size)} micro-steps an update"]
