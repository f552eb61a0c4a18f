"""Heads: losses by their definitions, packing, learning under the engine."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from megabert.engine import Engine
from megabert.finetune import heads
from megabert.finetune.batches import ItemLayout, TaskBatch, TaskUpdate, collate
from megabert.finetune.encoding import TaskItem
from megabert.finetune.heads import Finetuner
from tests.helpers import finetune_items, tiny
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
OUTPUTS = {"classify": 3, "multilabel": 3, "score": 1, "tag": 2, "span": 2}


def build(kind: str, **overrides: object) -> Finetuner:
    cfg = finetune_items.config(**overrides)
    start = finetune_items.weights(cfg)
    torch.manual_seed(3)
    return heads.build(cfg, kind, OUTPUTS[kind], start, CPU, torch.float32)


def batch_of(items: list[TaskItem], kind: str) -> TaskBatch:
    return collate(items, ItemLayout(kind, 16))


def logits_of(module: Finetuner, batch: TaskBatch) -> torch.Tensor:
    return module.logits(batch.read, **batch.packed.inputs())


@pytest.mark.parametrize("kind", OUTPUTS)
@torch.no_grad()
def test_packed_items_have_the_logits_of_single_ones(kind: str) -> None:
    module = build(kind).eval()
    items = label_items(kind) if kind == "multilabel" else finetune_items.items(kind, 9)
    together = logits_of(module, batch_of(items, kind))
    alone = torch.cat([logits_of(module, batch_of([item], kind)) for item in items])
    assert together.shape == (sum(len(item.positions) for item in items), OUTPUTS[kind])
    assert together.dtype == torch.float32
    assert (together - alone).abs().max() < 1e-6


def label_items(kind: str) -> list[TaskItem]:
    """Five texts of 3 labels."""
    draw = np.random.default_rng(5)
    targets = [draw.integers(0, 2, 3).astype(np.float32) if kind == "multilabel" else draw.integers(0, 3, 1)
               for _ in range(5)]  # fmt: skip
    return [replace(item, targets=t) for item, t in zip(finetune_items.items("classify", 5), targets, strict=True)]


@pytest.mark.parametrize("kind", ["classify", "multilabel", "score"])
def test_loss_is_its_definition(kind: str) -> None:
    """One item after the other."""
    module = build(kind).eval()
    nn.init.normal_(module.head.output.weight, 0.0, 1.0)
    items = finetune_items.items(kind, 5) if kind == "score" else label_items(kind)
    batch = batch_of(items, kind)
    loss, correct = module(**batch.inputs())
    want, count = 0.0, 0
    for row, item in zip(logits_of(module, batch).detach().double(), items, strict=True):
        if kind == "score":
            want += float((row[0] - item.targets[0]) ** 2)
        elif kind == "multilabel":
            for value, target in zip(row.tolist(), item.targets.tolist(), strict=True):
                p = 1 / (1 + math.exp(-value))
                want -= math.log(p) if target else math.log(1 - p)
                count += (value > 0) == bool(target)
        else:
            (label,) = item.targets.tolist()
            want -= float(torch.log_softmax(row, 0)[label])
            count += int(row.argmax()) == label
    assert float(loss.detach()) == pytest.approx(want, rel=1e-5) and int(correct) == count
    assert module.counts(batch) == (15 if kind == "multilabel" else 5,)


def test_text_head_uses_the_pretrained_pooler() -> None:
    cfg = finetune_items.config()
    start = finetune_items.weights(cfg)
    item = finetune_items.items("classify", 1)[0]
    module = build("classify").eval()
    ids = torch.from_numpy(item.ids)[None]
    n = ids.shape[1]
    full = torch.full((1, n), n, dtype=torch.int32)
    model = tiny.model(cfg)
    model.load_state_dict(start)
    positions = torch.arange(n, dtype=torch.int32)[None]
    hidden = model.eval().encode(ids, torch.zeros_like(ids), positions, torch.zeros_like(full), full, full[:, :1])
    pooled = torch.tanh(model.pooler(hidden[0, 0]))
    want = module.head.output.weight @ pooled + module.head.output.bias
    assert (logits_of(module, batch_of([item], "classify"))[0] - want).abs().max() < 1e-6
    new = build("score", model__nsp=False)
    assert new.head.pooler is not None and new.head.pooler.weight.std() > 0.01


def test_span_loss_is_over_each_items_positions() -> None:
    items = finetune_items.items("span", 8)
    module = build("span").eval()
    batch = batch_of(items, "span")
    loss, correct = module(**batch.inputs())
    logits = logits_of(module, batch).detach()
    want, hits, at = 0.0, 0, 0
    for item in items:
        own = logits[at : at + len(item.positions)].log_softmax(0)
        start, end = item.targets.tolist()
        want -= float(own[start, 0] + own[end, 1]) / 2
        hits += own[:, 0].argmax() == start and own[:, 1].argmax() == end
        at += len(item.positions)
    assert abs(float(loss.detach()) - want) < 1e-4 and int(correct) == hits


@pytest.mark.parametrize("kind", OUTPUTS)
def test_empty_batch_gives_zero_gradients(kind: str) -> None:
    module = build(kind, model__dropout=0.1).train()
    batch = batch_of([], kind)
    loss, correct = module(**batch.inputs())
    assert float(loss.detach()) == 0 and float(correct) == 0 and module.counts(batch) == (0,)
    loss.backward()
    for parameter_name, parameter in module.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), parameter_name


def learn_all(world, precision: str, stage: int, kinds: tuple[str, ...]) -> list[tuple[float, float]]:
    """Mean loss of the first and the last three of 25 updates over the same items, of each kind."""
    found = []
    for kind in kinds:
        overrides = {"precision": precision, "zero__stage": stage, "batch__micro_size": 16 // world.size}
        cfg = finetune_items.config(batch__global_size=16, **overrides)
        torch.manual_seed(3)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        module = heads.build(cfg, kind, OUTPUTS[kind], finetune_items.weights(cfg), CPU, dtype)
        engine = Engine(cfg, module, world)
        items = finetune_items.items(kind, 16)
        share = np.array_split(np.arange(16), world.size)[world.rank]
        batch = batch_of([items[i] for i in share], kind)
        losses = [float(engine.train_update(TaskUpdate(s, [batch]), 3e-3).losses[0]) for s in range(25)]
        found.append((float(np.mean(losses[:3])), float(np.mean(losses[-3:]))))
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    "ranks, precision, stage, kinds",
    [(1, "fp32", 0, ("score", "span")), pytest.param(2, "bf16", 2, ("span", "tag"), marks=pytest.mark.slow)],
)
def test_heads_overfit_under_the_engine(ranks: int, precision: str, stage: int, kinds: tuple[str, ...]) -> None:
    for found in run_ranks(ranks, learn_all, precision, stage, kinds):
        assert all(last < 0.7 * first for first, last in found), found
