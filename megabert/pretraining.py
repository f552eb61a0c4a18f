"""Pre-training and distillation as the Trainer's workload: shards in, held-out figures out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megabert import config as configuration
from megabert import distillation, evaluation
from megabert.checkpoint import Checkpoints, check_compatible, load_weights, start_engine
from megabert.common import environment, errors
from megabert.common.atomic_io import write_whole
from megabert.common.canonical_json import canonical
from megabert.common.logs import log
from megabert.common.run_files import STARTS
from megabert.common.text import duration
from megabert.config import Config
from megabert.data import mixture
from megabert.data.batch import Batch
from megabert.data.frequencies import token_counts
from megabert.data.loader import Loader
from megabert.data.mixture import AnyDataset
from megabert.data.objective import evaluated
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.distributed import run_lock
from megabert.distributed.preemption import Stop
from megabert.distributed.process_group import World
from megabert.distributed.together import agreed, refuse, together
from megabert.distributed.watchdog import Watchdog
from megabert.engine import Engine, precision
from megabert.engine.choice import choose_backends
from megabert.engine.profiler import Profiler
from megabert.evaluation import SAMPLE_ROWS, HeldOutSamples
from megabert.metrics import PretrainingMeter, Shown, check_packages, matmul_tflops, progress_line
from megabert.model import BertForPreTraining
from megabert.trainer import Trainer


class Pretraining:
    """Rows of a dataset in their order, metered in tokens and FLOPs, and its held-out split."""

    satisfied = False

    def __init__(self, config: Config, world: World, engine: Engine, dataset: AnyDataset, tokenizer: Tokenizer) -> None:
        self.config, self.world, self.engine = config, world, engine
        self.dataset, self.tokenizer = dataset, tokenizer
        peak = config.peak_tflops or matmul_tflops(world.device, engine.dtype)
        self.meter = PretrainingMeter(world, config.model, engine.terms, peak)
        self.shown = Shown()
        self._samples: HeldOutSamples | None = None  # read at the first evaluation

    def updates(self, first: int, share_used: Callable[[int], float]) -> Loader:
        place = {"rank": self.world.rank, "world": self.world.size, "start_step": first}
        return Loader.from_config(self.config, self.dataset, self.tokenizer, share_used=share_used, **place)

    def evaluation_due(self, step: int) -> bool:
        interval = self.config.eval.interval
        return step == 0 or bool(interval and step % interval == 0)

    def checkpoint_due(self, step: int) -> bool:
        return step % self.config.checkpoint.interval == 0

    @cached_property
    def held_out(self) -> Dataset | None:
        """The held-out split, which stays open from the first evaluation on; None where there is none."""
        path = self.dataset.held_out_path
        return None if path is None else Dataset(path, self.dataset.tolerant)

    def evaluate(self, step: int, progress: Callable[[], None]) -> dict[str, float]:
        """Held-out figures. A dataset without a held-out split is said once, at the start."""
        if self.held_out is None:
            if step == 0:
                log.info("this dataset has no held-out split: the run is not evaluated")
            return {}
        place = self.world.rank, self.world.size
        batches = evaluation.fixed_batches(self.held_out, self.tokenizer, self.config, *place)
        problems: list[Exception] = []
        sums = self.engine.eval_sums(_readable(batches, progress, problems))
        problem = (errors.describe(problems[0]), errors.exit_code(problems[0])) if problems else ("", errors.OK)
        refuse(self.world, *problem)
        found = evaluation.summary(sums)
        shown = "  ".join(f"{k.removeprefix('eval/')} {v:.4f}" for k, v in found.items() if v < 1e4)
        log.info(f"step {step:>7,}  held-out  {shown}")
        self.shown = Shown(self.look(self.held_out))
        return found

    def look(self, held_out: Dataset) -> list[dict[str, Any]]:
        """What the model says under a few held-out masks: rank 0 looks, and where weights are split all ranks with it."""
        if not self.world.is_main and self.config.zero.stage < 3:
            return []
        if self._samples is None:
            batches = evaluation.fixed_batches(held_out, self.tokenizer, self.config, rows=SAMPLE_ROWS)
            causal = evaluated(self.config).causal
            self._samples = HeldOutSamples(batches, self.tokenizer, causal)
        return self._samples.look(self.engine.module, self.world.device)

    def progress_line(self, values: Mapping[str, Any], eta_seconds: float) -> str:
        return progress_line(values, self.config.schedule.total_steps, eta_seconds)

    def state(self) -> dict[str, Any]:
        return {}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Everything is a function of the update's number."""


def _readable(batches: Iterable[Batch], progress: Callable[[], None], problems: list[Exception]) -> Iterator[Batch]:
    """`batches` until one cannot be had, which is kept for later: the other ranks are in the middle of a collective."""
    try:
        for batch in batches:
            yield batch
            progress()
    except (ValueError, OSError) as error:
        problems.append(error)


def open_run(
    run_dir: Path,
    config: Config,
    world: World,
    stop: Stop,
    watchdog: Watchdog,
    *,
    replay: int | None = None,
    stop_after: int | None = None,
    deepspeed_extra: Mapping[str, Any] | None = None,
    profile: tuple[int, int] = (0, 0),
) -> Trainer:
    """Opens data, model and engine, and goes on from the newest whole checkpoint of the run folder.

    With `replay` from the newest one before that update, and nothing is ever written. `profile`: the first and the last
    update to profile on this rank. A collective. Raises ValueError naming what does not fit.
    """
    check_packages(config)
    dataset = open_data(config, world)
    for problem in dataset.problems if world.is_main else ():
        log.warning(f"{problem}; its rows are left out")
    tokenizer = agreed(world, lambda: Tokenizer.load(dataset.tokenizer_path))
    config = fill_in(config, dataset, tokenizer)
    writes = replay is None
    if writes:
        run_lock.take(run_dir, world)
    checkpoints = Checkpoints(run_dir, world, config.checkpoint if writes else None)
    newest = checkpoints.latest() if replay is None else checkpoints.before(replay - 1)
    begun: dict[str, Any] = {}  # what the run said of itself before
    if newest is not None:
        begun = checkpoints.read_state(newest)
    elif replay is not None:
        begun = agreed(world, lambda: json.loads((run_dir / "config.json").read_bytes()))
    config = precision.with_precision(config, world, begun["config"]["precision"] if begun else "")
    settled = choose_backends(config, dataset.manifest, world, run_dir, writes)
    counts: list[int] = []
    if newest is None and config.model.frequency_bias and not (config.init_from or config.distill.teacher):
        counts = token_frequencies(config, dataset, tokenizer, world)
    torch.manual_seed(config.seed)

    def build() -> BertForPreTraining:
        model = agreed(world, lambda: distillation.build(settled, tokenizer.sha256, world.device))
        if counts:
            model.start_from_frequencies(torch.tensor(counts))
        return model

    engine = Engine(settled, build, world, deepspeed_extra)
    module: Any = engine.module
    backends = {role: choice.name for role, choice in module.backends._asdict().items()}
    backends["optimizer"] = engine.optimizer_kernels
    known: dict[str, Any] = {}  # of the data, where a checkpoint's is this one before something was added
    passed = begun.get("cursor", 0) * config.batch.global_size
    if newest is not None and mixture.resume(dataset, begun, passed):
        known = {"dataset": begun["dataset"]}
    provenance = describe(config, dataset, tokenizer, backends) | getattr(module, "provenance", {})
    saved = None
    if replay is not None and newest is None:
        mixture.resume(dataset, begun, 0)
        check_compatible(begun, provenance)
        log.info(f"no checkpoint before step {replay}: replaying from the run's beginning")
    if newest is not None:
        check_compatible(begun, provenance | known)
        saved = checkpoints.load(engine, newest)
        log.info(f"resuming from {newest} at step {saved['step']}, {duration(saved['seconds'])} trained")
    elif config.init_from and config.init_moments:
        origin = start_engine(engine, config.init_from, world)
        log.info(f"starting from weights and moments of {config.init_from} at step {origin['step']}")
    elif config.init_from:
        weights, origin = agreed(world, lambda: load_weights(config.init_from))
        engine.load_weights(weights)
        log.info(f"starting from the weights of {config.init_from} at step {origin['step']}")
    if writes and world.is_main:
        write_whole(run_dir / "config.json", canonical(provenance))
        # The run is complete without its dataset: exporting it or filling masks needs the tokenizer.
        for name, data in tokenizer.files().items():
            write_whole(run_dir / name, data)
        record_start(run_dir, provenance, world, saved["step"] if saved else 0)
    workload = Pretraining(config, world, engine, dataset, tokenizer)
    log.info(engine.describe() + f"; matrix-product ceiling {workload.meter.peak_tflops:.2f} TFLOP/s a device")
    return Trainer(
        config=config,
        world=world,
        engine=engine,
        workload=workload,
        checkpoints=checkpoints,
        stop=stop,
        watchdog=watchdog,
        run_dir=run_dir,
        provenance=provenance,
        saved=saved,
        stop_after=stop_after,
        writes=writes,
        profiler=Profiler(run_dir / "profile", world.rank, *profile),
    )


def open_data(config: Config, world: World) -> AnyDataset:
    """The run's dataset, or its mixture. The first rank of each node reads the manifests and looks whether its node has all
    shards; the others are told by rank 0. A collective. Raises Refused where a rank cannot open it, or opens another one.
    """
    data, tolerant = config.data, config.data.on_damage == "skip"
    dataset: AnyDataset | None = None
    problem, code = "", errors.OK
    if world.local_rank == 0:
        try:
            dataset = mixture.open_mixture(data.path, data.mix, tolerant)
        except (ValueError, OSError) as error:
            problem, code = errors.describe(error), errors.exit_code(error)
    refuse(world, problem, code)
    if world.size == 1:
        assert dataset is not None
        return dataset
    told = world.broadcast(mixture.told(dataset) if world.is_main and dataset is not None else None)
    theirs = mixture.open_told(told, data.mix, tolerant)
    if dataset is not None and dataset.manifest.fingerprint != theirs.manifest.fingerprint:
        problem, code = f"{dataset.place}: is not the dataset that rank 0 sees there", errors.USER_ERROR
    refuse(world, problem, code)
    return dataset or theirs


def token_frequencies(config: Config, dataset: AnyDataset, tokenizer: Tokenizer, world: World) -> list[int]:
    """How often each id that the run predicts occurs; counted by rank 0. A collective. Raises ValueError where rows cannot be
    read."""
    found: list[int] = []

    def count() -> None:
        predicted = np.ones(tokenizer.vocab_size, dtype=bool)
        predicted[list(tokenizer.special_ids.values())] = False
        predicted[tokenizer.special_ids["sep"]] = config.causal_updates
        found.extend(token_counts(dataset, predicted).tolist())

    together(world, count)
    return world.broadcast(found)


def fill_in(config: Config, dataset: AnyDataset, tokenizer: Tokenizer) -> Config:
    """The config with what the data decides; raises ValueError naming the field where the two disagree."""
    tree = config.model_dump()
    if config.model.vocab_size not in (0, tokenizer.vocab_size):
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size} but the tokenizer has {tokenizer.vocab_size}; remove it"
        )
    tree["model"]["vocab_size"] = tokenizer.vocab_size
    if dataset.manifest.seq_len > config.model.max_positions:
        raise ValueError(
            f"model.max_positions={config.model.max_positions} is below the dataset's seq_len={dataset.manifest.seq_len}"
        )
    if config.model.nsp and not dataset.manifest.options.get("nsp", True):
        raise ValueError("model.nsp=true but the dataset was built with --no-nsp; set model.nsp=false")
    return configuration.from_dict(tree)


def describe(config: Config, dataset: AnyDataset, tokenizer: Tokenizer, backends: Mapping[str, str]) -> dict[str, Any]:
    """Config and its hash, data and tokenizer fingerprints, the backends that run, versions, revision, command: the head
    of each checkpoint."""
    return {
        "config": config.model_dump(),
        "config_sha256": config.digest(),
        **mixture.described(dataset),
        "tokenizer": tokenizer.sha256,
        "backends": dict(backends),
        "versions": environment.versions(),
        "revision": environment.revision(),
        "command": environment.command(),
    }


def record_start(run_dir: Path, provenance: Mapping[str, Any], world: World, step: int) -> None:
    """One more line of `starts.jsonl`: at which step the run goes on, when, and on what."""
    cuda = world.device.type == "cuda"
    start = {
        "step": step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "ranks": world.size,
        "device": torch.cuda.get_device_name(world.device) if cuda else environment.cpu_model(),
        "cores": environment.cores(),
        "memory_gib": environment.memory_gib(),
        **{name: provenance[name] for name in ("revision", "versions", "command", "config_sha256")},
    }
    with open(run_dir / STARTS, "a") as file:
        file.write(json.dumps(start) + "\n")
