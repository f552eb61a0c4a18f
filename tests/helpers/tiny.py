"""A tiny BERT and synthetic updates for the distributed tests: row i of step s is a pure function of (s, i)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megabert import config as configuration
from megabert.config import Config
from megabert.data.batch import Batch, Update
from megabert.distributed.ranks import World
from megabert.engine import Engine
from megabert.model import BertForPreTraining

VOCAB, LENGTH, SLOTS, ROWS = 512, 16, 4, 8  # ids, row length, prediction slots a row, rows an update


def config(**overrides: Any) -> Config:
    """2 layers of 32; keys with `__` for the dot. The word embedding (512 x 32) is above ZeRO-3's persistence limit."""
    values: dict[str, Any] = {
        "precision": "fp32",
        "model.layers": 2,
        "model.hidden": 32,
        "model.heads": 2,
        "model.vocab_size": VOCAB,
        "model.max_positions": LENGTH,
        "model.dropout": 0.0,
        "model.attention_dropout": 0.0,
        "batch.global_size": ROWS,
        "batch.micro_size": 2,
        "optimizer.lr": 0.003,
        "ops.attention": "sdpa",
        "ops.mlm_loss": "torch",
        "ops.layer": "torch",
    } | {key.replace("__", "."): value for key, value in overrides.items()}
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, leaf = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return configuration.from_dict(tree)


def model(cfg: Config, seed: int = 7) -> BertForPreTraining:
    torch.manual_seed(seed)
    return BertForPreTraining(cfg.model, cfg.ops)


def engine(cfg: Config, world: World, seed: int = 7) -> Engine:
    built = Engine(cfg, model(cfg, seed), world)
    torch.manual_seed(1000 + world.rank)  # dropout differs between ranks
    return built


def batch(step: int, rows: Sequence[int], limit: int = 1 << 30) -> Batch:
    """Row i of step s: one sequence, 1 + (s + i) % 4 predictions, so that micro-batches hold unequal counts. From row `limit`
    on they are fillers, which have no labels."""
    size = len(rows)
    ids = torch.zeros(size, LENGTH, dtype=torch.int32)
    positions = torch.zeros(size, SLOTS, dtype=torch.int32)
    labels = torch.full((size, SLOTS), -100)
    nsp = torch.zeros(size, 1, dtype=torch.int64)
    for i, row in enumerate(rows):
        draw = torch.Generator().manual_seed(step * 1000 + row)
        ids[i] = torch.randint(5, 40, (LENGTH,), generator=draw)
        count = 1 + (step + row) % SLOTS
        positions[i] = i * LENGTH
        positions[i, :count] = i * LENGTH + 1 + torch.arange(count)
        labels[i, :count] = (ids[i, 1 : 1 + count] * 7 % 40).long()
        nsp[i, 0] = -100 if row % 3 == 0 else row % 2
        if row >= limit:
            labels[i], nsp[i, 0] = -100, -100
    full = torch.full((size, LENGTH), LENGTH, dtype=torch.int32)
    return Batch(
        input_ids=ids,
        segment_ids=(torch.arange(LENGTH) >= LENGTH // 2).int().expand(size, -1).contiguous(),
        position_ids=torch.arange(LENGTH, dtype=torch.int32).expand(size, -1).contiguous(),
        key_start=torch.zeros_like(full),
        key_end=full,
        lengths=torch.full((size, 1), LENGTH, dtype=torch.int32),
        cls_positions=(torch.arange(size, dtype=torch.int32) * LENGTH).view(size, 1),
        nsp_labels=nsp,
        mlm_positions=positions,
        mlm_labels=labels,
        predictions=int((labels >= 0).sum()),
        nsp_pairs=int((nsp >= 0).sum()),
        tokens=size * LENGTH,
        sequences=size,
        row_ids=np.array([row if row < limit else -1 for row in rows]),
        epochs=np.zeros(size, np.int64),
    )


def update(step: int, cfg: Config, world: World) -> Update:
    """This rank's part of update `step`: micro-step a of rank r takes rows [(a x W + r) x m, ...)."""
    m, rows = cfg.batch.micro_size, cfg.batch.global_size
    firsts = [(a * world.size + world.rank) * m for a in range(configuration.accumulation(cfg, world.size))]
    micro = [batch(step, range(first, first + m), rows) for first in firsts]
    return Update(step, 0, micro)


def train(engine: Engine, steps: range, lr: float = 0.003) -> list[tuple[float, float]]:
    """(MLM loss, NSP loss) of each update."""
    results = [engine.train_update(update(s, engine.config, engine.world), lr) for s in steps]
    return [tuple(r.losses.tolist()) for r in results]


def backward(model: BertForPreTraining, step: int) -> tuple[float, float]:
    """Gradients of the whole update `step` without DeepSpeed; gives its MLM loss and NSP loss."""
    whole = batch(step, range(ROWS))
    out = model(**whole.inputs())
    mlm, nsp = out.mlm_loss_sum / whole.predictions, out.nsp_loss_sum / whole.nsp_pairs
    (mlm + nsp).backward()
    return float(mlm.detach()), float(nsp.detach())


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Largest relative distance |a - b| / |b| of any parameter."""
    return max(float((ours[n] - w).norm() / w.norm().clamp(min=1e-12)) for n, w in theirs.items())
