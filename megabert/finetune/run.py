"""A fine-tuning run in its folder, whatever it learns: the Trainer's workload, its evaluations, the best weights kept.

A run's settings and files decide its weights bit for bit, however often interrupted. The learning rate warms up and falls
linearly; at every evaluation the weights that did best on the dev set are kept, and a checkpoint is begun.

    RUN/best/          the best weights, in the form that `Run.keep` gives them
    RUN/metrics.jsonl  and tensorboard/, as in pre-training
    RUN/result.json    written last: the run is finished
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from megabert import config as configuration
from megabert.checkpoint import Checkpoints
from megabert.common.files import write_whole
from megabert.common.logs import duration, log
from megabert.config import Config
from megabert.distributed.preemption import Stop
from megabert.distributed.process_group import World
from megabert.distributed.watchdog import Watchdog
from megabert.engine import Engine
from megabert.finetune.batches import Update, steps_per_epoch
from megabert.metrics import Meter, Shown
from megabert.trainer import Trainer

RESULT = "result.json"


@dataclass(frozen=True)
class RunSettings:
    """What is chosen for any run; the defaults are Devlin et al. 2019's (appendix A.3), lr and epochs from their ranges."""

    seed: int = 1
    lr: float = 5e-5
    batch: int = 32  # items an update
    epochs: int = 3
    dropout: float = 0.1
    warmup: float = 0.1  # share of the updates
    weight_decay: float = 0.01
    max_length: int = 128
    from_scratch: bool = False
    precision: str = "auto"  # settled before a run is made
    zero: int = 1
    micro_batch: int = 0  # items of one forward pass on one rank, 0: a rank's whole share
    evaluations: int = 1  # an epoch
    patience: int = 0  # evaluations without improvement, 0: all epochs


AT_LEAST = {
    **{"batch": 1, "micro_batch": 0, "epochs": 1, "max_length": 4, "stride": 1, "evaluations": 1},
    **{"patience": 0, "weight_decay": 0, "dropout": 0, "warmup": 0, "lr": 0},
}
BELOW = {"dropout": 1.0, "warmup": 1.0, "lr": 1.0}


def check(settings: RunSettings) -> None:
    """Raises ValueError naming an option that is out of range."""
    for name, least in AT_LEAST.items():
        if not hasattr(settings, name):
            continue
        value, option = getattr(settings, name), name.replace("_", "-")
        if not least <= value < BELOW.get(name, float("inf")) or (name == "lr" and not value):
            limit = f" and below {BELOW[name]:g}" if name in BELOW else ""
            raise ValueError(f"--{option} {value}: must be {'above' if name == 'lr' else 'at least'} {least}{limit}")


def check_counts(args: argparse.Namespace) -> None:
    """Raises ValueError naming an option of a command that is no setting and that is out of range."""
    for name, least in (("log_interval", 1), ("limit", 0)):
        if getattr(args, name, least) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")


def configure(model: Config, settings: RunSettings, items: int, world_size: int, log_interval: int = 20) -> Config:
    """The engine's config for `items` training items; backends are this device's own, whatever the model was trained with.

    Raises ValueError naming the option that does not fit.
    """
    if settings.max_length > model.model.max_positions:
        raise ValueError(f"--max-length {settings.max_length}: the model has {model.model.max_positions} positions")
    share = settings.batch // world_size
    if settings.batch % world_size:
        raise ValueError(f"--batch {settings.batch} cannot be split evenly over {world_size} ranks")
    micro = min(settings.micro_batch or share, share)
    if share % micro:
        raise ValueError(f"--micro-batch {micro} does not divide a rank's {share} items of --batch")
    total = settings.epochs * steps_per_epoch(items, settings.batch)
    dropout = {"dropout": settings.dropout, "attention_dropout": settings.dropout}
    return configuration.from_dict(
        {
            "seed": settings.seed,
            "precision": settings.precision,
            "model": model.model.model_dump() | dropout,
            "data": {"masking": model.data.masking.model_dump()},
            "batch": {"global_size": settings.batch, "micro_size": micro},
            "optimizer": {"lr": settings.lr, "weight_decay": settings.weight_decay},
            "schedule": {"total_steps": total, "warmup_steps": math.ceil(settings.warmup * total)},
            "zero": {"stage": settings.zero},
            "checkpoint": {"keep": 1},
            "log": {"interval": log_interval},
            "spikes": {"policy": "off"},  # losses of small batches of a task scatter too much for it
        }
    )


@dataclass
class Best:
    """The best evaluation so far: its step (-1: none yet), its scores on dev, and how many evaluations came after it."""

    step: int = -1
    scores: dict[str, float] = field(default_factory=dict)
    waited: int = 0


class TaskMeter(Meter):
    """Items and tokens a second, loss and accuracy, between two log lines."""

    def counts_of(self, update: Update) -> dict[str, int]:
        items = sum(batch.items for batch in update.batches)
        return {"perf/items_per_sec": items, "perf/tokens_per_sec": update.tokens}

    def drain(self) -> dict[str, float]:
        values = super().drain()
        (kind,) = self._terms
        accuracy = values.pop(f"train/{kind}_accuracy", None)
        # the loss itself
        values.pop(f"train/{kind}_loss", None)
        if accuracy is not None and kind != "score":
            values["train/accuracy"] = accuracy
        return values


class Run:
    """One run in its folder; `train` gives its result, or None where it was asked to stop and has saved."""

    def __init__(
        self,
        *,
        folder: Path,
        name: str,
        config: Config,
        settings: RunSettings,
        module: nn.Module,
        world: World,
        items: int,
        metric: str,
    ) -> None:
        """`items` to learn from an epoch; `metric`: the figure of the dev set that says which weights are best."""
        self.folder, self.name, self.config, self.settings = folder, name, config, settings
        self.module: Any = module
        self.world, self.items, self.metric = world, items, metric
        self.engine = Engine(config, module, world)
        self.meter = TaskMeter(self.engine.terms)
        self.best, self.shown = Best(), Shown()
        per_epoch = steps_per_epoch(items, settings.batch)
        parts = range(1, settings.epochs * settings.evaluations + 1)
        self.evaluate_at = {max(1, round(per_epoch * part / settings.evaluations)) for part in parts}

    def judged(self, progress: Callable[[], None]) -> dict[str, float]:
        """The module's figures on the dev set, on every rank. A collective."""
        raise NotImplementedError

    def keep(self, folder: Path, weights: Mapping[str, Tensor], results: Mapping[str, Any]) -> None:
        """Write the module with `weights` (fp32, by its names), in place of what was there; on rank 0."""
        raise NotImplementedError

    def scores(self, best: Path, progress: Callable[[], None]) -> dict[str, dict[str, float]]:
        """Figures of the weights kept in `best` on each split but "train", whose predictions are written. A collective."""
        raise NotImplementedError

    def train(self, stop: Stop, watchdog: Watchdog) -> dict[str, Any] | None:
        """Trains from the newest checkpoint on, or from the start. Raises BadTraining."""
        if self.world.is_main:
            self.folder.mkdir(exist_ok=True)
        checkpoints = Checkpoints(self.folder, self.world, self.config.checkpoint)
        path, saved = checkpoints.latest(), None
        if path is not None:
            saved = checkpoints.load(self.engine, path)
            log.info(f"{self.name}  resuming at step {saved['step']}")
        trainer = Trainer(
            config=self.config,
            world=self.world,
            engine=self.engine,
            workload=self,
            checkpoints=checkpoints,
            stop=stop,
            watchdog=watchdog,
            run_dir=self.folder,
            provenance={"config": self.config.model_dump()},
            saved=saved,
        )
        try:
            return self.conclude(trainer) if trainer.train() else None
        finally:
            trainer.close()

    def conclude(self, trainer: Trainer) -> dict[str, Any]:
        """Predictions and scores of the best weights; the run is finished. A collective."""
        self.world.barrier()  # rank 0 has written them
        found = self.scores(self.folder / "best", trainer.watchdog.progress)
        result = {
            "name": self.name,
            "settings": asdict(self.settings),
            "scores": found,
            "best_step": self.best.step,
            "steps": trainer.state.step,
            "items": self.items,
            "seconds": round(trainer.state.seconds, 3),
        }
        trainer.sinks.hparams({f"dev/{name}": value for name, value in found["dev"].items()})
        if self.world.is_main:
            write_json(self.folder / RESULT, result)
            shutil.rmtree(trainer.checkpoints.folder, ignore_errors=True)
        return result

    # -- the Trainer's workload --------------------------------------------------------------------------------------

    def updates(self, first: int, share_used: Callable[[int], float]) -> Iterator[Any]:
        """This rank's updates from number `first` on, without end."""
        raise NotImplementedError

    def evaluation_due(self, step: int) -> bool:
        return step in self.evaluate_at

    checkpoint_due = evaluation_due

    @property
    def satisfied(self) -> bool:
        """Patience has ended."""
        return bool(self.settings.patience) and self.best.waited >= self.settings.patience

    def evaluate(self, step: int, progress: Callable[[], None]) -> dict[str, float]:
        """Scores on the dev set; the best weights are kept. A collective."""
        found = self.judged(progress)
        value, best = found[self.metric], self.best.scores.get(self.metric, -math.inf)
        better = self.best.step < 0 or value > best or (math.isnan(best) and not math.isnan(value))
        shown = "  ".join(f"{name} {v:.4f}" for name, v in found.items())
        log.info(f"{self.name}  step {step:>6,}  dev  {shown}{'  (best so far)' if better else ''}")
        self.best.waited += 1
        if better:
            self.best = Best(step, found)
            weights = self.engine.consolidated_weights()
            if self.world.is_main:
                results = {"step": step, "dev": found, "settings": asdict(self.settings)}
                self.keep(self.folder / "best", weights, results)
        return {f"dev/{name}": v for name, v in found.items()}

    def progress_line(self, values: Mapping[str, Any], eta_seconds: float) -> str:
        right = f"  right {values['train/accuracy']:6.2%}" if "train/accuracy" in values else ""
        return (
            f"{self.name}  step {values['step']:>6,}/{self.config.schedule.total_steps:,}"
            f"  loss {values['train/loss']:7.4f}{right}  {values['perf/items_per_sec']:7,.1f} items/s"
            f"  {values['perf/tokens_per_sec']:8,.0f} tok/s  lr {values['train/lr']:.2e}  ETA {duration(eta_seconds)}"
        )

    def state(self) -> dict[str, Any]:
        return {"best": asdict(self.best)}

    def resume(self, saved: Mapping[str, Any]) -> None:
        self.best = Best(**saved["best"])


def write_json(path: Path, tree: Any) -> None:
    """The file appears whole."""
    write_whole(path, (json.dumps(tree, indent=1) + "\n").encode())
