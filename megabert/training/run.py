"""A run is its folder: what is opened here decides, with the newest checkpoint, everything that follows.

`build` opens data, model, engine and sinks and puts the run where its checkpoint says; `Run.state` and `Run.restore` are
the two sides of what a checkpoint holds besides the engine's tensors.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megabert import config as configuration
from megabert.checkpoint import Checkpoints, check_compatible, load_weights
from megabert.common import environment
from megabert.common.atomic_io import write_whole
from megabert.common.text import duration
from megabert.config import Config
from megabert.data.loader import Loader
from megabert.data.row_digest import RowDigest
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.distributed import run_lock
from megabert.distributed.preemption import Stop
from megabert.distributed.process_group import World
from megabert.distributed.watchdog import Watchdog
from megabert.engine.deepspeed_engine import Engine
from megabert.training import distillation
from megabert.training.metrics import Meter, matmul_tflops
from megabert.training.sinks import JsonLines, TensorBoard
from megabert.training.spike_policy import Spikes

COUNTERS = ("step", "cursor", "seconds", "bad", "skipped", "spiked")


@dataclass
class Run:
    """Everything a training loop needs, and how far it is.

    `step`: updates done. `cursor`: updates of data consumed, those passed over after a spike included. `seconds` of
    training. `bad`: updates in a row that were not applied; `skipped` and `spiked`: updates not applied, and spikes.
    """

    config: Config
    world: World
    run_dir: Path
    dataset: Dataset
    tokenizer: Tokenizer
    engine: Engine
    checkpoints: Checkpoints
    peak_tflops: float
    provenance: dict[str, Any]
    stop: Stop
    watchdog: Watchdog
    writes: bool
    stop_after: int = sys.maxsize
    step: int = 0
    cursor: int = 0
    seconds: float = 0.0
    bad: int = 0
    skipped: int = 0
    spiked: int = 0
    rollbacks: int = 0
    saved_step: int = -1
    saving_since: float = 0.0
    last_eval: dict[str, float] = field(default_factory=dict)
    sinks: list[Any] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds besides the engine's own tensors. A collective."""
        counters = {name: getattr(self, name) for name in COUNTERS}
        return self.provenance | counters | self.ledger.totals() | {"losses": self.spikes.state()}

    def restore(self, state: dict[str, Any] | None, cursor: int | None = None) -> None:
        """Go on from `state` (None: from the beginning); `cursor` passes over data. Opens loader, meters and sinks."""
        saved = state or {"row_digest": 0, "damaged_rows": 0, "losses": []}
        for name in COUNTERS if state else ():
            setattr(self, name, saved[name])
        self.cursor = self.cursor if cursor is None else cursor
        self.saved_step = self.step if state else -1
        self.close()
        options = {"rank": self.world.rank, "world": self.world.size, "start_step": self.cursor}
        self.loader = Loader.from_config(self.config, self.dataset, self.tokenizer, **options)
        causal = self.config.data.masking.causal
        self.meter = Meter(self.world, self.config.model, self.engine.terms, self.peak_tflops, causal)
        self.ledger = RowDigest(self.world, saved["row_digest"], saved["damaged_rows"])
        settings = self.config.spikes
        self.spikes = Spikes(settings.window, settings.threshold, saved["losses"])
        if self.writes and self.world.is_main:
            self.sinks = [JsonLines(self.run_dir / "metrics.jsonl", self.saved_step)]
            if self.config.log.tensorboard:
                self.sinks.append(TensorBoard(self.run_dir / "tensorboard", self.config, self.step))

    def emit(self, values: dict[str, Any]) -> None:
        """One object for `metrics.jsonl` and TensorBoard; rank 0 has them."""
        for sink in self.sinks:
            sink.write(values)

    def close(self) -> None:
        """End the loader's workers and close the sinks."""
        if hasattr(self, "loader"):
            self.loader.close()
        for sink in self.sinks:
            sink.close()
        self.sinks = []


def build(args: argparse.Namespace, config: Config, world: World, stop: Stop, watchdog: Watchdog) -> Run:
    """Opens data, model and engine, and goes on from the newest whole checkpoint of the run folder.

    With `args.replay` from the newest one before that update, and nothing is ever written.
    """
    dataset = Dataset(config.data.path, tolerant=config.data.on_damage == "skip")
    for problem in dataset.problems:
        say(world, f"warning: {problem}; its rows are left out")
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    config = fill_in(config, dataset, tokenizer)
    run_dir, writes = Path(args.run), args.replay is None
    if writes:
        run_lock.take(run_dir, world)
    checkpoints = Checkpoints(run_dir, world, config.checkpoint if writes else None)
    torch.manual_seed(config.seed)
    extra = json.loads(Path(args.deepspeed_config).read_text()) if args.deepspeed_config else None
    engine = Engine(config, lambda: distillation.build(config, tokenizer.sha256, world.device), world, extra)
    provenance = describe(config, dataset, tokenizer) | getattr(engine.module, "provenance", {})
    newest = checkpoints.latest() if writes else checkpoints.before(args.replay - 1)
    state = resume(checkpoints, newest, engine, provenance)
    if state is None and config.init_from:
        weights, origin = load_weights(config.init_from)
        engine.load_weights(weights)
        say(world, f"starting from the weights of {config.init_from} at step {origin['step']}")
    peak = config.peak_tflops or matmul_tflops(world.device, engine.dtype)
    if writes and world.is_main:
        (run_dir / "config.json").write_text(json.dumps(provenance, indent=1, sort_keys=True) + "\n")
        # The run is complete without its dataset: exporting it or filling masks needs the tokenizer.
        write_whole(run_dir / dataset.tokenizer_path.name, tokenizer.data)
    run = Run(
        *(config, world, run_dir, dataset, tokenizer, engine, checkpoints, peak, provenance),
        *(stop, watchdog, writes),
    )
    run.restore(state)
    if args.stop_after is not None:
        run.stop_after = args.stop_after
    say(world, engine.describe() + f"; matrix-product ceiling {peak:.2f} TFLOP/s a device")
    return run


def fill_in(config: Config, dataset: Dataset, tokenizer: Tokenizer) -> Config:
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


def resume(
    checkpoints: Checkpoints, path: Path | None, engine: Engine, provenance: dict[str, Any]
) -> dict[str, Any] | None:
    """State of the checkpoint `path`, loaded into the engine; None without one. Raises ValueError naming what differs."""
    if path is None:
        return None
    check_compatible(checkpoints.read_state(path), provenance)
    state = checkpoints.load(engine, path)
    trained = duration(state["seconds"])
    say(checkpoints.world, f"resuming from {path} at step {state['step']}, {trained} trained")
    return state


def describe(config: Config, dataset: Dataset, tokenizer: Tokenizer) -> dict[str, Any]:
    """Where a checkpoint comes from: config and its hash, data and tokenizer fingerprints, versions, revision, command."""
    return {
        "config": config.model_dump(),
        "config_sha256": config.digest(),
        "dataset": dataset.manifest.fingerprint,
        "tokenizer": tokenizer.sha256,
        "versions": environment.versions(),
        "revision": environment.revision(),
        "command": environment.command(),
    }


def say(world: World, text: str) -> None:
    """One line for whoever watches, from rank 0."""
    if world.is_main:
        print(text, flush=True)
