"""Batches of fine-tuning: the items of an update, a function of the seed and its number, packed into rows.

Batch sizes are in items (a text, or a window of one). A rank without items in an update still gets a batch with one token and no
labels, so that its losses are 0 and it takes part in every collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megabert.data.batch import Update
from megabert.distributed.ranks import World
from megabert.finetune.encoding import TaskItem
from megabert.finetune.settings import Settings
from megabert.hf.packing import Packed, pack, pack_line

# Smallest row length, unless `max_length` is smaller: few shapes, and short items share rows.
WIDTH = 128
NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class ItemLayout:
    """Properties of items as tensors: the task's kind, the longest item, whether attention is causal."""

    kind: str
    max_length: int
    causal: bool = False


@dataclass(frozen=True)
class TaskBatch:
    """N items in packed rows; P positions are read, in the items' order. `targets` are empty without labels."""

    packed: Packed
    # int64 [P], flat positions
    read: Tensor
    # of spans: how many of the P belong to each item
    sizes: list[int] | None
    # int64 [N] class | fp32 [N * labels] | fp32 [N] score | int64 [P] tag | int64 [N, 2] start and end
    targets: Tensor
    items: int
    # int64 [N] each, in training: indices of the items, and their epoch
    row_ids: np.ndarray = field(default_factory=lambda: NO_ROWS)
    epochs: np.ndarray = field(default_factory=lambda: NO_ROWS)

    def to(self, device: torch.device | str) -> TaskBatch:
        packed, read, targets = self.packed.to(device), self.read.to(device), self.targets.to(device)
        return replace(self, packed=packed, read=read, targets=targets)

    def inputs(self) -> dict[str, Any]:
        """Arguments of `Finetuner.forward`."""
        return {**self.packed.inputs(), "read": self.read, "sizes": self.sizes, "targets": self.targets}

    @property
    def tokens(self) -> int:
        return int(self.packed.lengths.sum()) if self.items else 0


def collate(items: Sequence[TaskItem], layout: ItemLayout, line: bool = False) -> TaskBatch:
    """One batch of `items`; without items an empty one, whose loss is 0. `line`: in one row without padding."""
    ids = [item.ids for item in items] or [np.zeros(1, np.int32)]
    seconds = [item.second for item in items] or [1]
    width = max(max(map(len, ids)), min(WIDTH, layout.max_length))
    packed = pack_line(ids, seconds, layout.causal) if line else pack(ids, seconds, width, layout.causal)
    read = [start + read_at(item, layout) for start, item in zip(packed.starts, items, strict=False)]
    sizes = [len(item.positions) for item in items] if layout.kind == "span" else None
    flat = torch.from_numpy(np.concatenate(read or [np.zeros(0, np.int64)]))
    return TaskBatch(packed, flat, sizes, _targets(items, layout.kind), len(items))


def read_at(item: TaskItem, layout: ItemLayout) -> np.ndarray:
    """int64 [p], positions at which an item is read: with a causal model the last token, which has the whole text as context,
    replaces [CLS]."""
    return np.where(item.positions == 0, len(item.ids) - 1, item.positions) if layout.causal else item.positions


def _targets(items: Sequence[TaskItem], kind: str) -> Tensor:
    dtype = np.float32 if kind in ("score", "multilabel") else np.int64
    arrays = [np.asarray(item.targets, dtype) for item in items if len(item.targets)]
    targets = torch.from_numpy(np.concatenate(arrays or [np.zeros(0, dtype)]))
    return targets.view(-1, 2) if kind == "span" else targets


def order(items: int, seed: int, epoch: int) -> np.ndarray:
    """int64 [items]: the permutation of an epoch, a function of (seed, epoch)."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(items)


def steps_per_epoch(items: int, batch: int) -> int:
    """Updates of an epoch; the last one may hold fewer items."""
    return -(-items // batch)


def updates(
    items: Sequence[TaskItem], layout: ItemLayout, settings: Settings, world: World, micro_steps: int, first: int = 0
) -> Iterator[Update]:
    """Endless updates of this rank, from number `first` on. Ranks and micro-steps split every global batch evenly."""
    per_epoch = steps_per_epoch(len(items), settings.batch)
    epoch, shuffled = -1, NO_ROWS
    for step in count(first):
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            shuffled = order(len(items), settings.seed, epoch)
        at = step % per_epoch * settings.batch
        parts = np.array_split(shuffled[at : at + settings.batch], world.size * micro_steps)[world.rank :: world.size]
        batches: list[Any] = [
            replace(collate([items[i] for i in part], layout), row_ids=part, epochs=np.full_like(part, epoch))
            for part in parts
        ]
        yield Update(step, epoch, batches, objective="task")
