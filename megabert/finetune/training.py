"""One fine-tuning run: its settings and its files decide its weights bit for bit, however often it was interrupted.

An epoch is every item once, in an order that is a function of (seed, epoch); the learning rate warms up and falls
linearly; at every evaluation the weights that did best on the dev set are kept, and a checkpoint is begun.

    RUN/best/             the best weights (`saved`)
    RUN/metrics.jsonl     and tensorboard/, as in pre-training
    RUN/predictions-dev.* and predictions-test.*, of the best weights
    RUN/result.json       written last: the run is finished
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Sequence
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
from megabert.common.text import duration
from megabert.config import Config
from megabert.distributed.preemption import Stop
from megabert.distributed.process_group import World
from megabert.engine import lr_schedule
from megabert.engine.deepspeed_engine import DTYPES, Engine
from megabert.finetune import heads
from megabert.finetune import metrics as scores
from megabert.finetune import save as saved
from megabert.finetune.batches import Update, steps_per_epoch, updates
from megabert.finetune.datasets import Example
from megabert.finetune.encoding import Item
from megabert.finetune.heads import Shape
from megabert.finetune.prediction import logits_of, reshape
from megabert.finetune.save import Described
from megabert.finetune.tasks import Task
from megabert.pretrained import Pretrained
from megabert.training import metrics
from megabert.training.sinks import JsonLines, TensorBoard

RESULT = "result.json"
SUFFIXES = {"classify": "tsv", "score": "tsv", "tag": "conll", "span": "json"}  # of predictions


class Diverged(BadTraining):
    """Updates that could not be applied, again and again; the same on every rank."""


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
    """A task with its encoded files. `splits` has "train", "dev" and perhaps "test"."""

    task: Task
    labels: tuple[str, ...]
    splits: dict[str, Split]


@dataclass
class Progress:
    """How far a run is; what a checkpoint holds besides the engine's state."""

    step: int = 0
    seconds: float = 0.0  # of training, evaluations not counted
    waited: int = 0  # evaluations since the best one
    best_step: int = -1
    best: dict[str, float] = field(default_factory=dict)  # its scores on dev
    skipped: int = 0  # updates in a row that were not applied


def configure(model: Config, settings: Settings, items: int, world_size: int) -> Config:
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
        }
    )


def outputs_of(task: Task, labels: Sequence[str]) -> int:
    """How wide the added layer is."""
    return {"score": 1, "span": 2}.get(task.kind, len(labels))


def describe(data: Data, start: Pretrained, settings: Settings, world_size: int) -> Described:
    """The model that a run will train. Raises ValueError naming the option that does not fit."""
    config = configure(start.config, settings, len(data.splits["train"].items), world_size)
    shape = Shape(
        *(data.task.kind, outputs_of(data.task, data.labels), settings.head, settings.width, settings.freeze)
    )
    shape.check(config.model.layers)
    lengths = (settings.max_length, settings.stride, settings.long)
    return Described(data.task, data.labels, shape, *lengths, config)


class Run:
    """One run in its folder; `train` gives its result, or None where it was asked to stop and has saved."""

    def __init__(
        self,
        folder: Path,
        name: str,
        data: Data,
        start: Pretrained,
        settings: Settings,
        world: World,
        log: int,
    ) -> None:
        """`start`: model, weights (unless from scratch) and tokenizer. `log`: updates between two lines."""
        self.folder, self.name, self.data, self.start = folder, name, data, start
        self.settings, self.world, self.log_interval = settings, world, log
        self.items = data.splits["train"].items
        self.described = describe(data, start, settings, world.size)
        self.config, shape = self.described.config, self.described.shape
        torch.manual_seed(settings.seed)
        scratch = settings.from_scratch
        device, dtype = world.device, DTYPES[self.config.precision]
        module = heads.build(self.config, shape, None if scratch else start.weights, device, dtype)
        self.frozen: dict[str, Tensor] = {}  # fp32, under the names of a saved model
        if shape.frozen:
            self.frozen = heads.frozen_weights(module, None if scratch else start.weights)
        self.engine = Engine(self.config, module, world)
        self.module = module
        self.checkpoints = Checkpoints(folder, world, self.config.checkpoint)
        self.progress = Progress()
        self.total = self.config.schedule.total_steps
        per_epoch = steps_per_epoch(len(self.items), settings.batch)
        parts = range(1, settings.epochs * settings.evaluations + 1)
        self.evaluate_at = {max(1, round(per_epoch * part / settings.evaluations)) for part in parts}
        self.sums: Tensor | None = None
        self.window = [
            0.0,
            0,
            0,
            0,
        ]  # seconds, updates applied, items and tokens of this rank since the last line
        self.sinks: list[Any] = []

    def train(self, stop: Stop) -> dict[str, Any] | None:
        """Trains from the newest checkpoint on, or from the start. Raises Diverged."""
        path = self.checkpoints.latest()
        if path is not None:
            self.progress = Progress(**self.checkpoints.load(self.engine, path)["progress"])
            self.say(f"resuming at step {self.progress.step}")
        self.open_sinks(path is not None)
        try:
            if not self.loop(stop):
                return None
            self.checkpoints.finish()
            return self.conclude()
        finally:
            for sink in self.sinks:
                sink.close()

    def loop(self, stop: Stop) -> bool:
        """Updates until the last one or until patience ends; False when it stopped before, with everything saved."""
        progress, world, settings = self.progress, self.world, self.settings
        coming = updates(
            *(self.items, self.described.layout, settings.seed, settings.batch, progress.step),
            *(self.engine.accumulation, world.rank, world.size),
        )
        while not self.finished():
            if world.agree_any(stop.requested):
                self.save()
                self.checkpoints.finish()
                return False
            started = time.perf_counter()
            update = next(coming)
            lr = lr_schedule.learning_rate(self.config.schedule, settings.lr, progress.step)
            result = self.engine.train_update(update, lr)
            seconds = world.max_float(time.perf_counter() - started)
            progress.step += 1
            progress.seconds += seconds
            self.account(update, result, seconds)
            if progress.step % self.log_interval == 0 or progress.step == self.total:
                self.log(lr)
            if progress.step in self.evaluate_at:
                self.evaluate()
                if not self.finished():
                    self.save()
        return True

    def finished(self) -> bool:
        patience = self.settings.patience
        return self.progress.step >= self.total or bool(patience and self.progress.waited >= patience)

    def account(self, update: Update, result: Any, seconds: float) -> None:
        """Keep an update's figures, on the device, until the next line."""
        self.window[0] += seconds
        self.window[2] += sum(batch.items for batch in update.batches)
        self.window[3] += sum(batch.tokens for batch in update.batches)
        self.progress.skipped = self.progress.skipped + 1 if result.skipped else 0
        if result.skipped:
            if self.progress.skipped >= self.config.max_bad_steps:
                raise Diverged(
                    f"{self.folder}: {self.progress.skipped} updates in a row with a loss or gradient that is not "
                    f"finite, at step {self.progress.step}; lower --lr"
                )
            return
        self.window[1] += 1
        row = metrics.measured(result)
        self.sums = row if self.sums is None else self.sums + row

    def log(self, lr: float) -> None:
        """A line for the terminal and an object for the sinks; a collective."""
        seconds, applied, *counted = self.window
        items, tokens = self.world.sum_ints([int(n) for n in counted])
        values: dict[str, Any] = {"step": self.progress.step, "train/lr": lr}
        if self.sums is not None:
            values |= metrics.figures(self.sums / applied, self.engine.terms)
        accuracy = values.pop(f"train/{self.data.task.kind}_accuracy", 0.0)
        values.pop(f"train/{self.data.task.kind}_loss", None)
        if self.data.task.kind != "score":
            values["train/accuracy"] = accuracy
        values |= {"perf/items_per_sec": items / seconds, "perf/tokens_per_sec": tokens / seconds}
        values["time/train_seconds"] = round(self.progress.seconds, 3)
        self.emit(values)
        left = (self.total - self.progress.step) * self.progress.seconds / self.progress.step
        self.say(
            f"step {self.progress.step:>6,}/{self.total:,}  loss {values.get('train/loss', math.nan):7.4f}"
            f"  right {accuracy:6.2%}  {items / seconds:7,.1f} items/s  {tokens / seconds:8,.0f} tok/s"
            f"  lr {lr:.2e}  ETA {duration(left)}"
        )
        self.sums, self.window = None, [0.0, 0, 0, 0]

    def evaluate(self) -> None:
        """Scores on the dev set; the best weights are kept. A collective."""
        found, _ = self.judge(self.module, "dev")
        main = self.data.task.metrics[0]
        value, best = found[main], self.progress.best.get(main, -math.inf)
        better = self.progress.best_step < 0 or value > best or (math.isnan(best) and not math.isnan(value))
        self.emit({"step": self.progress.step} | {f"dev/{name}": v for name, v in found.items()})
        shown = "  ".join(f"{name} {v:.4f}" for name, v in found.items())
        self.say(f"step {self.progress.step:>6,}  dev  {shown}{'  (best so far)' if better else ''}")
        self.progress.waited = 0 if better else self.progress.waited + 1
        if better:
            self.progress.best, self.progress.best_step = found, self.progress.step
            weights = self.engine.consolidated_weights() | self.frozen
            if self.world.is_main:
                results = {"step": self.progress.step, "dev": found, "settings": asdict(self.settings)}
                saved.save(self.folder / "best", self.described, weights, self.start.tokenizer, results)

    def judge(self, module: heads.Finetuner, split: str) -> tuple[dict[str, float], list[Any]]:
        """A split's scores and predictions, on every rank. A collective."""
        task, labels, part = self.data.task, self.data.labels, self.data.splits[split]
        logits = logits_of(module, part.items, self.described.layout, self.world)
        if not all(np.isfinite(values).all() for values in logits):
            raise Diverged(f"{self.folder}: the model's output is not finite; lower --lr")
        shaped = [reshape(values, task.kind) for values in logits]
        predictions = list(scores.decode(task, part.examples, part.items, shaped, labels))
        return scores.score(task, part.examples, predictions, labels), predictions

    def conclude(self) -> dict[str, Any]:
        """Predictions and scores of the best weights; the run is finished. A collective."""
        self.world.barrier()  # rank 0 has written them
        best = saved.load(self.folder / "best", self.world.device)
        found: dict[str, dict[str, float]] = {}
        for split in self.data.splits.keys() - {"train"}:
            found[split], predictions = self.judge(best.module, split)
            if self.world.is_main:
                path = self.folder / f"predictions-{split}.{SUFFIXES[self.data.task.kind]}"
                scores.write(self.data.task, self.data.splits[split].examples, predictions, path)
        result = {
            "name": self.name,
            "settings": asdict(self.settings),
            "scores": {split: found[split] for split in sorted(found)},
            "best_step": self.progress.best_step,
            "steps": self.progress.step,
            "items": len(self.items),
            "seconds": round(self.progress.seconds, 3),
        }
        if self.world.is_main:
            for sink in self.sinks:
                if isinstance(sink, TensorBoard):
                    sink.hparams({f"dev/{name}": v for name, v in found["dev"].items()})
            write_json(self.folder / RESULT, result)
            shutil.rmtree(self.checkpoints.folder, ignore_errors=True)
        return result

    def save(self) -> None:
        """Begin a checkpoint, and commit the one before. A collective."""
        state = {"step": self.progress.step, "config": self.config.model_dump()}
        self.checkpoints.save(self.engine, state | {"progress": asdict(self.progress)})

    def open_sinks(self, resumed: bool) -> None:
        if self.world.is_main:
            step = self.progress.step
            self.folder.mkdir(exist_ok=True)
            self.sinks = [
                JsonLines(self.folder / "metrics.jsonl", step if resumed else -1),
                TensorBoard(self.folder / "tensorboard", self.config, step),
            ]

    def emit(self, values: dict[str, Any]) -> None:
        for sink in self.sinks:
            sink.write(values)

    def say(self, text: str) -> None:
        if self.world.is_main:
            print(f"{self.name}  {text}", flush=True)


def write_json(path: Path, tree: Any) -> None:
    """The file appears whole."""
    write_whole(path, (json.dumps(tree, indent=1) + "\n").encode())
