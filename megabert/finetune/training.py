"""Fine-tuning on a task: what a run learns from, and what it leaves besides what every `Run` leaves.

An epoch is every item once, in an order that is a function of (seed, epoch).

    RUN/best/             the best weights (`save`)
    RUN/predictions-dev.* and predictions-test.*, of the best weights
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megabert.common.errors import BadTraining
from megabert.distributed.process_group import World
from megabert.engine import DTYPES
from megabert.finetune import heads, metrics, save
from megabert.finetune.batches import Update, updates
from megabert.finetune.curves import curves
from megabert.finetune.encoding import Item
from megabert.finetune.examples import Example
from megabert.finetune.heads import KINDS, Shape
from megabert.finetune.prediction import logits_of, reshape
from megabert.finetune.run import Run, RunSettings, configure
from megabert.finetune.save import Described
from megabert.finetune.tasks import Task
from megabert.hf import Pretrained
from megabert.metrics import Shown

SUFFIXES = dict.fromkeys(KINDS, "tsv") | {"tag": "conll", "span": "json"}  # of predictions


@dataclass(frozen=True)
class Settings(RunSettings):
    """What is chosen for a run on a task."""

    stride: int = 64
    long: str = "truncate"
    head: str = "linear"
    width: int = 768
    freeze: bool = False


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


def outputs_of(task: Task, labels: Sequence[str]) -> int:
    """How wide the added layer is."""
    widths = {"score": 1, "span": 2, "choose": 1, "rank": 1, "ordinal": len(labels) - 1}
    return widths.get(task.kind, len(labels))


def describe(data: Data, start: Pretrained, settings: Settings, world_size: int, log_interval: int = 20) -> Described:
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


class FineTuning(Run):
    """A run on a task."""

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
        self.data, self.start = data, start
        self.described = describe(data, start, settings, world.size, log_interval)
        config, shape = self.described.config, self.described.shape
        torch.manual_seed(settings.seed)
        weights = None if settings.from_scratch else start.weights
        module = heads.build(config, shape, weights, world.device, DTYPES[config.precision])
        self.frozen: dict[str, Tensor] = {}  # fp32, under the names of a saved model
        if shape.frozen:
            self.frozen = heads.frozen_weights(module, weights)
        super().__init__(
            folder=folder,
            name=name,
            config=config,
            settings=settings,
            module=module,
            world=world,
            items=len(data.splits["train"].items),
            metric=data.task.metrics[0],
        )

    def judged(self, progress: Callable[[], None]) -> dict[str, float]:
        found, _, logits = self.judge(self.module, "dev", progress)
        part = self.data.splits["dev"]
        self.shown = Shown(curves=curves(self.data.task, part.examples, part.items, logits, self.data.labels))
        return found

    def keep(self, folder: Path, weights: Mapping[str, Tensor], results: Mapping[str, Any]) -> None:
        save.save(folder, self.described, {**weights, **self.frozen}, self.start.tokenizer, results)

    def scores(self, best: Path, progress: Callable[[], None]) -> dict[str, dict[str, float]]:
        module = save.load(best, self.world.device).module
        found: dict[str, dict[str, float]] = {}
        for split in sorted(self.data.splits.keys() - {"train"}):
            found[split], predictions, _ = self.judge(module, split, progress)
            if self.world.is_main:
                path = self.folder / f"predictions-{split}.{SUFFIXES[self.data.task.kind]}"
                metrics.write(self.data.task, self.data.splits[split].examples, predictions, path)
        return found

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

    def updates(self, first: int, share_used: Callable[[int], float]) -> Generator[Update, None, None]:
        return updates(
            self.data.splits["train"].items,
            self.described.layout,
            self.settings.seed,
            self.settings.batch,
            first,
            self.engine.accumulation,
            self.world.rank,
            self.world.size,
        )
