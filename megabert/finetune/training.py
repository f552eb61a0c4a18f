"""Fine-tuning as the Trainer's workload: a run's settings and files decide its weights bit for bit, however often interrupted.

An epoch is every item once, in an order that is a function of (seed, epoch); the learning rate warms up and falls
linearly; at every evaluation the weights that did best on the dev set are kept, and a checkpoint is begun. The loop is
the Trainer's (`megabert.training.trainer`), of which `FineTuning` is a workload.

    RUN/best/             the best weights (`save`)
    RUN/metrics.jsonl     and tensorboard/, as in pre-training
    RUN/predictions-dev.* and predictions-test.*, of the best weights
    RUN/result.json       written last: the run is finished
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megabert import config as configuration
from megabert.checkpoint import Checkpoints
from megabert.common.atomic_io import write_whole
from megabert.common.errors import BadTraining
from megabert.common.logs import log
from megabert.common.text import duration
from megabert.config import Config
from megabert.distributed.preemption import Stop
from megabert.distributed.process_group import World
from megabert.distributed.watchdog import Watchdog
from megabert.engine import DTYPES, Engine, UpdateResult
from megabert.finetune import heads, metrics, save
from megabert.finetune.batches import Update, steps_per_epoch, updates
from megabert.finetune.curves import curves
from megabert.finetune.encoding import Item
from megabert.finetune.examples import Example
from megabert.finetune.heads import KINDS, Shape
from megabert.finetune.prediction import logits_of, reshape
from megabert.finetune.save import Described
from megabert.finetune.tasks import Task
from megabert.pretrained import Pretrained
from megabert.training.metrics import Window
from megabert.training.sinks import Shown
from megabert.training.trainer import Trainer

RESULT = "result.json"
SUFFIXES = dict.fromkeys(KINDS, "tsv") | {"tag": "conll", "span": "json"}  # of predictions


@dataclass(frozen=True)
class Settings:
    """What is chosen for a run; the defaults are Devlin et al. 2019's (appendix A.3), lr and epochs from their ranges."""

    seed: int = 1
    lr: float = 5e-5
    batch: int = 32  # items an update
    epochs: int = 3
    dropout: float = 0.1
    warmup: float = 0.1  # share of the updates
    weight_decay: float = 0.01
    max_length: int = 128
    stride: int = 64
    long: str = "truncate"
    head: str = "linear"
    width: int = 768
    freeze: bool = False
    from_scratch: bool = False
    precision: str = "bf16"
    zero: int = 1
    micro_batch: int = 0  # items of one forward pass on one rank, 0: a rank's whole share
    evaluations: int = 1  # an epoch
    patience: int = 0  # evaluations without improvement, 0: all epochs


@dataclass(frozen=True)
class Split:
    examples: Sequence[Example]
    items: Sequence[Item]


@dataclass(frozen=True)
class Data:
    """A task with its encoded files. `splits` has "train", "dev" and perhaps "test"; `class_weights` as
    `class_weights.weights_of` gives them."""

    task: Task
    labels: tuple[str, ...]
    splits: dict[str, Split]
    class_weights: tuple[float, ...] = ()


def configure(
    model: Config, settings: Settings, items: int, world_size: int, log_interval: int = 20
) -> Config:
    """The engine's config for `items` training items. Raises ValueError naming the option that does not fit."""
    if settings.max_length > model.model.max_positions:
        raise ValueError(
            f"--max-length {settings.max_length}: the model has {model.model.max_positions} positions"
        )
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
            "ops": model.ops.model_dump(),
            "batch": {"global_size": settings.batch, "micro_size": micro},
            "optimizer": {"lr": settings.lr, "weight_decay": settings.weight_decay},
            "schedule": {"total_steps": total, "warmup_steps": math.ceil(settings.warmup * total)},
            "zero": {"stage": settings.zero},
            "checkpoint": {"keep": 1},
            "log": {"interval": log_interval},
            "spikes": {"policy": "off"},  # losses of small batches of a task scatter too much for it
        }
    )


def outputs_of(task: Task, labels: Sequence[str]) -> int:
    """How wide the added layer is."""
    widths = {"score": 1, "span": 2, "choose": 1, "rank": 1, "ordinal": len(labels) - 1}
    return widths.get(task.kind, len(labels))


def describe(
    data: Data, start: Pretrained, settings: Settings, world_size: int, log_interval: int = 20
) -> Described:
    """The model that a run will train. Raises ValueError naming the option that does not fit."""
    items = len(data.splits["train"].items)
    config = configure(start.config, settings, items, world_size, log_interval)
    shape = Shape(
        data.task.kind,
        outputs_of(data.task, data.labels),
        settings.head,
        settings.width,
        settings.freeze,
        data.class_weights,
    )
    shape.check(config.model.layers)
    lengths = (settings.max_length, settings.stride, settings.long)
    return Described(data.task, data.labels, shape, *lengths, config)


@dataclass
class Best:
    """The best evaluation so far: its step (-1: none yet), its scores on dev, and how many evaluations came after it."""

    step: int = -1
    scores: dict[str, float] = field(default_factory=dict)
    waited: int = 0


class TaskMeter(Window):
    """Items and tokens a second, loss and accuracy, between two log lines."""

    def __init__(self, world: World, task: Task, terms: Sequence[str]) -> None:
        super().__init__(world, counts=2)  # items, tokens
        self._task, self._terms = task, terms

    def add(self, result: UpdateResult, update: Update) -> None:
        """One update. The figures of a skipped update are not averaged in, its counts are."""
        self._counts[0] += sum(batch.items for batch in update.batches)
        self._counts[1] += sum(batch.tokens for batch in update.batches)
        self._means.add(result)

    def drain(self, counts: Sequence[int]) -> dict[str, float]:
        """Means since the last call; `counts` are summed over all ranks."""
        items, tokens = counts
        seconds = max(self._seconds, 1e-9)
        values = self._means.figures(self._terms)
        if values:
            accuracy = values.pop(f"train/{self._task.kind}_accuracy")
            del values[f"train/{self._task.kind}_loss"]  # the loss itself
            if self._task.kind != "score":
                values["train/accuracy"] = accuracy
        self.reset()
        return values | {"perf/items_per_sec": items / seconds, "perf/tokens_per_sec": tokens / seconds}


class FineTuning:
    """One run in its folder; `train` gives its result, or None where it was asked to stop and has saved."""

    def __init__(
        self,
        folder: Path,
        name: str,
        data: Data,
        start: Pretrained,
        settings: Settings,
        world: World,
        log_interval: int = 20,
    ) -> None:
        """`start`: model, weights (unless from scratch) and tokenizer. `log_interval`: updates between two lines."""
        self.folder, self.name, self.data, self.start = folder, name, data, start
        self.settings, self.world = settings, world
        self.items = data.splits["train"].items
        self.described = describe(data, start, settings, world.size, log_interval)
        self.config, shape = self.described.config, self.described.shape
        torch.manual_seed(settings.seed)
        weights = None if settings.from_scratch else start.weights
        self.module = heads.build(self.config, shape, weights, world.device, DTYPES[self.config.precision])
        self.frozen: dict[str, Tensor] = {}  # fp32, under the names of a saved model
        if shape.frozen:
            self.frozen = heads.frozen_weights(self.module, weights)
        self.engine = Engine(self.config, self.module, world)
        self.meter = TaskMeter(world, data.task, self.engine.terms)
        self.best, self.shown = Best(), Shown()
        per_epoch = steps_per_epoch(len(self.items), settings.batch)
        parts = range(1, settings.epochs * settings.evaluations + 1)
        self.evaluate_at = {max(1, round(per_epoch * part / settings.evaluations)) for part in parts}

    def train(self, stop: Stop, watchdog: Watchdog) -> dict[str, Any] | None:
        """Trains from the newest checkpoint on, or from the start. Raises BadTraining."""
        if self.world.is_main:
            self.folder.mkdir(exist_ok=True)
        checkpoints = Checkpoints(self.folder, self.world, self.config.checkpoint)
        path, saved = checkpoints.latest(), None
        if path is not None:
            saved = upgraded(checkpoints.load(self.engine, path))
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
        best = save.load(self.folder / "best", self.world.device)
        found: dict[str, dict[str, float]] = {}
        for split in sorted(self.data.splits.keys() - {"train"}):
            found[split], predictions, _ = self.judge(best.module, split, trainer.watchdog.progress)
            if self.world.is_main:
                path = self.folder / f"predictions-{split}.{SUFFIXES[self.data.task.kind]}"
                metrics.write(self.data.task, self.data.splits[split].examples, predictions, path)
        result = {
            "name": self.name,
            "settings": asdict(self.settings),
            "scores": found,
            "best_step": self.best.step,
            "steps": trainer.state.step,
            "items": len(self.items),
            "seconds": round(trainer.state.seconds, 3),
        }
        trainer.sinks.hparams({f"dev/{name}": value for name, value in found["dev"].items()})
        if self.world.is_main:
            write_json(self.folder / RESULT, result)
            shutil.rmtree(trainer.checkpoints.folder, ignore_errors=True)
        return result

    def judge(
        self, module: heads.Finetuner, split: str, progress: Callable[[], None]
    ) -> tuple[dict[str, float], list[Any], list[np.ndarray]]:
        """A split's scores, predictions and logits of its items, on every rank. A collective."""
        task, labels, part = self.data.task, self.data.labels, self.data.splits[split]
        logits = logits_of(module, part.items, self.described.layout, self.world, progress=progress)
        if not all(np.isfinite(values).all() for values in logits):
            raise BadTraining(f"{self.folder}: the model's output is not finite; lower --lr")
        shaped = [reshape(values, task.kind) for values in logits]
        predictions = list(metrics.decode(task, part.examples, part.items, shaped, labels))
        return metrics.score(task, part.examples, predictions, labels), predictions, shaped

    # -- the Trainer's workload --------------------------------------------------------------------------------------

    def updates(self, first: int, share_used: Callable[[int], float]) -> Generator[Update, None, None]:
        return updates(
            self.items,
            self.described.layout,
            self.settings.seed,
            self.settings.batch,
            first,
            self.engine.accumulation,
            self.world.rank,
            self.world.size,
        )

    def evaluation_due(self, step: int) -> bool:
        return step in self.evaluate_at

    checkpoint_due = evaluation_due

    @property
    def satisfied(self) -> bool:
        """Patience has ended."""
        return bool(self.settings.patience) and self.best.waited >= self.settings.patience

    def evaluate(self, step: int, progress: Callable[[], None]) -> dict[str, float]:
        """Scores on the dev set; the best weights are kept. A collective."""
        main = self.data.task.metrics[0]
        found, _, logits = self.judge(self.module, "dev", progress)
        part = self.data.splits["dev"]
        self.shown = Shown(curves=curves(self.data.task, part.examples, part.items, logits, self.data.labels))
        value, best = found[main], self.best.scores.get(main, -math.inf)
        better = self.best.step < 0 or value > best or (math.isnan(best) and not math.isnan(value))
        shown = "  ".join(f"{name} {v:.4f}" for name, v in found.items())
        log.info(f"{self.name}  step {step:>6,}  dev  {shown}{'  (best so far)' if better else ''}")
        self.best.waited += 1
        if better:
            self.best = Best(step, found)
            weights = self.engine.consolidated_weights() | self.frozen
            if self.world.is_main:
                results = {"step": step, "dev": found, "settings": asdict(self.settings)}
                save.save(self.folder / "best", self.described, weights, self.start.tokenizer, results)
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


def upgraded(saved: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's state as the Trainer writes it, also from one of version 0.1.0, which kept `progress` apart."""
    if "progress" not in saved:
        return saved
    old = saved["progress"]
    best = {"step": old["best_step"], "scores": old["best"], "waited": old["waited"]}
    rows = {"row_digest": 0, "damaged_rows": 0, "losses": []}
    counters = {
        "cursor": old["step"],
        "seconds": old["seconds"],
        "bad": old["skipped"],
        "skipped": 0,
        "spiked": 0,
    }
    return {"step": old["step"], "config": saved["config"], "best": best} | counters | rows


def write_json(path: Path, tree: Any) -> None:
    """The file appears whole."""
    write_whole(path, (json.dumps(tree, indent=1) + "\n").encode())
