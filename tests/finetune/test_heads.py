"""Heads: losses by their definitions, packing, learning under the engine."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from megabert.distributed.ranks import World
from megabert.engine import Engine
from megabert.finetune import heads
from megabert.finetune.batches import ItemLayout, TaskBatch, TaskUpdate, collate
from megabert.finetune.encoding import TaskItem
from megabert.finetune.heads import Finetuner
from tests.helpers import finetune_items

CPU = torch.device("cpu")
OUTPUTS = {"classify": 3, "multilabel": 3, "score": 1, "tag": 2, "span": 2}


def build(kind: str, **overrides: object) -> Finetuner:
    cfg = finetune_items.config(**overrides)
    start = finetune_items.weights(cfg)
    torch.manual_seed(3)
    return heads.build(cfg, kind, OUTPUTS[kind], start, CPU, torch.float32)


def batch_of(items: list[TaskItem], kind: str) -> TaskBatch:
    return collate(items, ItemLayout(kind, 16))


def compute_logits(module: Finetuner, batch: TaskBatch) -> torch.Tensor:
    return module.logits(batch.read, **batch.packed.inputs())


@pytest.mark.parametrize("kind", OUTPUTS)
@torch.no_grad()
def test_packed_items_have_the_logits_of_single_ones(kind: str) -> None:
    module = build(kind).eval()
    items = label_items(kind) if kind == "multilabel" else finetune_items.items(kind, 9)
    together = compute_logits(module, batch_of(items, kind))
    alone = torch.cat([compute_logits(module, batch_of([item], kind)) for item in items])
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
    if kind == "classify":
        assert module.head.pooler.weight.equal(finetune_items.weights(finetune_items.config())["pooler.weight"])
    want, count = 0.0, 0
    for row, item in zip(compute_logits(module, batch).detach().double(), items, strict=True):
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


@pytest.mark.parametrize("layers", ["last", "3", "1,2,3,4", "1+2+3+4"])
@torch.no_grad()
def test_layers_are_concatenated_or_summed(layers: str) -> None:
    cfg = finetune_items.config()
    module = heads.build(cfg, "tag", 2, finetune_items.weights(cfg), CPU, torch.float32, layers).eval()
    (item,) = finetune_items.items("tag", 1)
    batch = batch_of([item], "tag")
    states = [state[0, item.positions] for state in module.encoder.hidden_states(**batch.packed.inputs())]
    want = {
        "last": states[4],
        "3": states[3],
        "1,2,3,4": torch.cat(states[1:], -1),
        "1+2+3+4": states[1] + states[2] + states[3] + states[4],
    }[layers]
    assert module.head.output.weight.shape == (2, 128 if layers == "1,2,3,4" else 32)
    assert (
        compute_logits(module, batch) - (want @ module.head.output.weight.T + module.head.output.bias)
    ).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["bert", "modern"])
def test_added_layer_starts_as_in_modernbert(kind: str) -> None:
    """At 1/sqrt(hidden); the normal cut at two deviations has 0.8796 of its deviation."""
    made = {"model__kind": "modern", "model__norm": "pre", "model__nsp": False} if kind == "modern" else {}
    cfg = finetune_items.config(**made)
    torch.manual_seed(2)
    module = heads.build(cfg, "tag", 2_000, None, CPU, torch.float32)
    assert cfg.model.hidden == 32
    assert module.head.output.weight.std().item() == pytest.approx(0.8796 * 32**-0.5, rel=0.01)


@pytest.mark.parametrize("nsp", [True, False])
@pytest.mark.parametrize("kind", ["classify", "tag"])
def test_frozen_parts_have_no_dropout_and_no_gradients(kind: str, nsp: bool) -> None:
    module = build(kind, model__dropout=0.5, model__attention_dropout=0.5, model__nsp=nsp)
    whole = module.state_dict()
    frozen = module.freeze(CPU, torch.float32)
    # A pooler that was not pre-trained is trained.
    trained = ["head.output.bias", "head.output.weight"]
    trained += ["head.pooler.bias", "head.pooler.weight"] if kind == "classify" and not nsp else []
    assert sorted(name for name, _ in module.named_parameters()) == trained
    assert {**frozen, **module.state_dict()}.keys() == whole.keys()
    module.train()
    assert module.head.dropout.training and not module.encoder.training
    module.head.dropout.p = 0.0
    batch = batch_of(finetune_items.items(kind, 5), kind)
    assert torch.equal(compute_logits(module, batch), compute_logits(module, batch))
    loss, _ = module(**batch.inputs())
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())
    assert all(parameter.grad is None for parameter in module.encoder.parameters())


def test_span_loss_is_over_each_items_positions() -> None:
    items = finetune_items.items("span", 8)
    module = build("span").eval()
    batch = batch_of(items, "span")
    loss, correct = module(**batch.inputs())
    logits = compute_logits(module, batch).detach()
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


@pytest.mark.parametrize("kind", ["score", "span"])
def test_heads_overfit_under_the_engine(kind: str, world: World) -> None:
    cfg = finetune_items.config(batch__global_size=16, batch__micro_size=16)
    engine = Engine(cfg, build(kind), world)
    batch = batch_of(finetune_items.items(kind, 16), kind)
    losses = [float(engine.train_update(TaskUpdate(step, [batch]), 3e-3).losses[0]) for step in range(25)]
    assert np.mean(losses[-3:]) < 0.7 * np.mean(losses[:3])
