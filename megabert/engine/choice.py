"""Choice of backends by measurement, for a run on CUDA with `auto`.

A candidate is measured as forward and backward of a model of one layer at the run's shapes. Without dropout the errors of its loss
and gradients against fp32 may be at most four times those of plain torch in the same type; then candidates are compared by their
median time with dropout. Attention is chosen first, then the layer, then the loss. Each candidate runs in a child process with a
time limit; one that crashes or does not end is recorded as broken in the cache and not started again on this machine. Rank 0
measures and broadcasts its choice; a resumed run uses the choice recorded in the run's folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megabert import ops
from megabert.common import environment, errors, user_cache
from megabert.common.files import canonical, compact, write_whole
from megabert.common.logs import log
from megabert.config import Config, ModelConfig, OpsConfig
from megabert.data.batch import BatchLayout, collate
from megabert.data.masking import Masked, largest_capacity
from megabert.data.mixture import AnyDataset
from megabert.data.shards import DamagedRow, Rows
from megabert.distributed.ranks import World, on_main, refuse_together
from megabert.engine.precision import DTYPES, repeat_bit_for_bit
from megabert.model import BertForPreTraining

# Candidates of each operation, and the backend used until one is chosen, or if none is usable.
CANDIDATES = {
    "attention": ("varlen", "cudnn", "native"),
    "layer": ("native", "compiled"),
    "mlm_loss": ("torch", "native"),
}
PLAIN = {"attention": "sdpa", "layer": "torch", "mlm_loss": "torch"}
# File in the run's folder.
RECORD = "backends.json"
# Folder from which `megabert` is imported.
ROOT = Path(__file__).resolve().parents[2]
# Time limit of a candidate in seconds; compilation takes longest.
TIME_LIMIT = 300.0
# Forward and backward passes, and number of the first ones that are not timed.
PASSES, WARM_UP = 25, 5
# Largest error of a candidate relative to plain torch's, and errors that always pass as rounding of the type.
MULTIPLE = 4.0
# Most token pairs in the rows of a check, since plain torch has a mask, or more, for each pair.
CHECKED_PAIRS = 1 << 24
# Beginning of the result of a candidate whose errors are larger.
WRONG = "wrong"
# Signals of a crash; others are sent from outside, as by the kernel where memory is short.
CRASHES = {signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV}
FLOOR = {torch.float32: 1e-5, torch.bfloat16: 4e-3}


def choose_backends(
    config: Config, dataset: AnyDataset, world: World, run_dir: Path, progress: Callable[[], None] = lambda: None
) -> Config:
    """`config` with a backend's name for every `auto` on CUDA; logged, cached and recorded. A collective.
    `progress` is called after each candidate.

    Raises ValueError on every rank if a rank cannot run the choice of rank 0.
    """
    roles = [role for role in CANDIDATES if getattr(config.ops, role) == "auto"]
    if world.device.type != "cuda" or not roles:
        return config
    chosen: dict[str, str] = {}
    if world.is_main and (problem := ops.missing_kernels("cuda")):
        log.warning(f"{problem}; training runs on torch's own kernels")

    def choose() -> None:
        place = describe_place(world.device, config.deterministic)
        recorded = user_cache.read(run_dir / RECORD)
        if recorded.get("place") == place and set(roles) <= recorded["chosen"].keys():
            chosen.update({role: recorded["chosen"][role] for role in roles})
            log.info(f"backends as recorded with this run: {chosen}")
        else:
            chosen.update(measure(roles, config, shapes_of(config, dataset, world.device), place, progress))
        write_whole(run_dir / RECORD, canonical({"place": place, "chosen": chosen}))

    on_main(world, choose)
    of_rank_0: dict[str, str] = world.broadcast(chosen)
    problems = [
        f"ops.{role}=auto is {name} on rank 0 and cannot run here: {reason}"
        for role, name in of_rank_0.items()
        if (reason := obstacles(role, config, world.device.type)[name])
    ]
    refuse_together(world, "; ".join(problems), errors.USER_ERROR if problems else errors.OK)
    return config.model_copy(update={"ops": config.ops.model_copy(update=of_rank_0)})


def obstacles(role: str, config: Config, device: str) -> dict[str, str]:
    """Why each backend of an operation cannot run; "" if it can."""
    model = config.model
    reasons = ops.obstacles(
        role, device, DTYPES[config.precision], config.causal_updates, model.hidden // model.heads, model.window
    )
    if role == "layer" and config.zero.stage == 3:
        reasons["compiled"] = reasons["compiled"] or "torch.compile cannot trace the hooks of zero.stage=3"
    return reasons


def shapes_of(config: Config, dataset: AnyDataset, device: torch.device) -> dict[str, Any]:
    """Shapes of a layer for a micro-batch of the run, as JSON; `lengths` of the sequences are those of fixed rows, so that runs with
    other seeds find the results in the cache."""
    lengths = []
    for row in dataset.order(0, np.arange(config.batch.micro_size))[0]:
        with contextlib.suppress(DamagedRow):  # the loader names it when the row is due
            lengths.append(dataset.read(np.array([row])).bounds[0, :, 0])
    return {
        "model": config.model.model_copy(update={"layers": 1}).model_dump(),
        "device": device.type,
        "precision": config.precision,
        "deterministic": config.deterministic,
        "rows": config.batch.micro_size,
        "seq_len": dataset.manifest.seq_len,
        "lengths": np.resize(lengths, (config.batch.micro_size, dataset.manifest.max_sequences)).tolist(),
        "predictions": largest_capacity(config, dataset.manifest.seq_len),
        "causal": config.causal_updates,
    }


def measure(
    roles: list[str],
    config: Config,
    shapes: Mapping[str, Any],
    place: Mapping[str, Any],
    progress: Callable[[], None] = lambda: None,
) -> dict[str, str]:
    """The fastest usable backend of each of `roles`, one role after another."""
    chosen = {role: name for role in PLAIN if (name := getattr(config.ops, role)) != "auto"}
    for role in roles:
        blocked, times, reasons = obstacles(role, config, shapes["device"]), {}, {}
        for name in CANDIDATES[role]:
            spec = {**shapes, "ops": PLAIN | chosen | {role: name}}
            result = blocked[name] or cached_result(f"{role}={name}", spec, place)
            progress()
            if isinstance(result, float):
                times[name] = result
            else:
                reasons[name] = result
        chosen[role] = min(times, key=lambda name: times[name]) if times else PLAIN[role]
        measured = ", ".join(f"{name} {ms:.3g} ms" for name, ms in sorted(times.items(), key=lambda item: item[1]))
        left_out = "".join(f"; not {name}: {reason}" for name, reason in reasons.items())
        log.info(f"ops.{role}=auto is {chosen[role]}: {measured or 'no candidate is usable'}{left_out}")
    return {role: chosen[role] for role in roles}


# -- the cache -------------------------------------------------------------------------------------------------------


def describe_place(device: torch.device, deterministic: bool = False) -> dict[str, Any]:
    """Key of the cache besides the shapes: device, driver, torch, the native library."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "driver": environment.nvidia_driver(),
        "torch": torch.__version__,
        "library": "" if ops.MISSING else hashlib.sha256(ops.LIBRARY.read_bytes()).hexdigest(),
        "deterministic": deterministic,
    }


def cache_file(place: Mapping[str, Any]) -> Path:
    """File of {"results": {"role=name shapes": milliseconds, or the error in its results}, "broken": {"role=name": reason}} of one
    place."""
    return user_cache.file_of("backends", place)


def cached_result(candidate: str, spec: Mapping[str, Any], place: Mapping[str, Any]) -> float | str:
    """Milliseconds of a candidate, or why it is unusable: from the cache, or measured in a child process. A failure, as of memory
    that another process used, is not cached."""
    file = cache_file(place)
    cache = {"results": {}, "broken": {}} | user_cache.read(file)
    results, broken = cache["results"], cache["broken"]
    key = f"{candidate} {hashlib.sha256(compact(spec)).hexdigest()[:16]}"
    if candidate in broken:
        return f"{broken[candidate]}; remove {file} to try it again"
    if _lasts(known := results.get(key)):
        return known
    try:
        result = results[key] = run_child(spec)
        if not _lasts(result):
            return f"{result}; the next run tries it again"
    except BrokenCandidate as error:
        result = broken[candidate] = str(error)
    try:
        user_cache.write(file, cache | {"place": place})
    except OSError as error:
        log.warning(f"{file}: {errors.describe(error)}; the next start measures again")
    return result


def _lasts(result: float | str | None) -> bool:
    """Whether a result is the same at every start: a time, or an error in its values."""
    return isinstance(result, float) or str(result).startswith(WRONG)


# -- a candidate, in a child process ---------------------------------------------------------------------------------


class BrokenCandidate(Exception):
    """The child process crashed or did not end."""


def run_child(spec: Mapping[str, Any], command: tuple[str, ...] = (sys.executable, "-m", __name__)) -> float | str:
    """Milliseconds of a forward and backward pass by `spec`, or why there are none. Raises BrokenCandidate."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, input=json.dumps(spec), capture_output=True, text=True, timeout=TIME_LIMIT
        )
    except subprocess.TimeoutExpired:
        raise BrokenCandidate(f"did not end within {TIME_LIMIT:g} s") from None
    if -done.returncode in CRASHES:
        raise BrokenCandidate(f"crashed with signal {-done.returncode}")
    if done.returncode < 0:
        return f"was killed by signal {-done.returncode}"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no output"]
    if done.returncode:  # the line of the exception, before those that torch adds
        return next(
            (line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception|Unsupported): ", line)), lines[-1]
        )
    result: float | str = json.loads(lines[-1])
    return result


def run_candidate(spec: Mapping[str, Any]) -> float | str:
    """Milliseconds of a forward and backward pass, or the error in its results."""
    if spec["deterministic"]:
        repeat_bit_for_bit()
    dtype, rows = DTYPES[spec["precision"]], max(1, min(spec["rows"], CHECKED_PAIRS // spec["seq_len"] ** 2))
    few = batch_of({**spec, "rows": rows})
    exact = _gradients(_model(spec, PLAIN, torch.float32, dropout=False), few)
    plain = _gradients(_model(spec, PLAIN, dtype, dropout=False), few)
    candidate = _gradients(_model(spec, spec["ops"], dtype, dropout=False), few)
    for name, truth in exact.items():
        error, allowed = _error(candidate[name], truth), MULTIPLE * _error(plain[name], truth) + FLOOR[dtype]
        if not error <= allowed:
            return f"{WRONG}: the error of {name} is {error:.2e}, allowed are {allowed:.2e}"
    del exact, plain, candidate
    return _milliseconds(_model(spec, spec["ops"], dtype, dropout=True), batch_of(spec))


def batch_of(spec: Mapping[str, Any]) -> dict[str, Tensor]:
    """A batch of random tokens in sequences of the given lengths, with every prediction slot used."""
    lengths = np.array(spec["lengths"], np.uint16)[: spec["rows"]]  # (B, S)
    rows, width, slots, entries = len(lengths), spec["seq_len"], spec["predictions"], spec["model"]["vocab_size"]
    draw = np.random.default_rng(0)
    ids, labels = (draw.integers(entries, size=(rows, columns)) for columns in (width, slots))
    places = np.arange(slots) * lengths.sum(1, keepdims=True) // slots
    layout = BatchLayout(rows, width, lengths.shape[1], slots, spec["causal"])
    narrow, wide = layout.empty()
    collate(
        Rows(ids, bounds=np.stack([lengths, lengths], -1), isnext=draw.integers(2, size=lengths.shape)),
        Masked(ids, places, labels, counts=np.full(rows, slots)),
        row_ids=np.arange(rows),
        row_start=np.arange(rows) * width,
        out=layout.views(narrow, wide),
        causal=spec["causal"],
    )
    (batch,) = layout.micro_batches(torch.from_numpy(narrow), torch.from_numpy(wide), rows)
    return batch.to(spec["device"]).inputs() | {"seed": torch.tensor([7, 0], device=spec["device"])}


def _model(
    spec: Mapping[str, Any], backends: Mapping[str, str], dtype: torch.dtype, dropout: bool
) -> BertForPreTraining:
    none = {} if dropout else {"dropout": 0.0, "attention_dropout": 0.0}
    torch.manual_seed(0)
    cfg = ModelConfig(**(spec["model"] | none))
    model = BertForPreTraining(cfg, OpsConfig.model_validate(dict(backends)), spec["device"], dtype, spec["causal"])
    with torch.no_grad():  # biases start at 0, which would hide errors in their use
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(spec["device"], dtype).train()


def _gradients(model: BertForPreTraining, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The loss and every parameter's gradient."""
    output: Any = model(**batch)
    loss = output.mlm_loss_sum / batch["mlm_labels"].numel() + output.nsp_loss_sum / batch["nsp_labels"].numel()
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _error(value: Tensor, exact: Tensor) -> float:
    """Largest error relative to the largest exact value; NaN if `value` has one."""
    scale = exact.double().abs().max().item() or 1.0
    return (value.double() - exact.double()).abs().max().item() / scale


def _milliseconds(model: BertForPreTraining, batch: Mapping[str, Tensor]) -> float:
    """Median of forward and backward passes, after some untimed ones."""
    times, wait = [], torch.cuda.synchronize if batch["input_ids"].is_cuda else lambda: None
    for _ in range(PASSES):
        model.zero_grad()
        wait()
        begin = time.perf_counter()
        _gradients(model, batch)
        wait()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[WARM_UP:])


if __name__ == "__main__":
    print(json.dumps(run_candidate(json.load(sys.stdin))))
