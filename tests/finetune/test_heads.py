"""Heads: losses by their definitions, packing, frozen encoders, learning under the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from megabert.engine import Engine
from megabert.finetune import heads
from megabert.finetune.batches import ItemLayout, TaskUpdate, collate
from megabert.finetune.encoding import NO_SPANS, TaskItem
from megabert.finetune.heads import Finetuner, HeadShape
from tests.helpers import finetune_items, tiny
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
SHAPES = {
    "classify": HeadShape("classify", 2),
    "score": HeadShape("score", 1),
    "tag": HeadShape("tag", 2),
    "span": HeadShape("span", 2),
    "frozen": HeadShape("tag", 2, frozen=True),
    "bilstm": HeadShape("tag", 2, head="bilstm", width=16, frozen=True),
}


def layout(shape: HeadShape) -> ItemLayout:
    return ItemLayout(shape.kind, 16, sequences=shape.head == "bilstm")


def build(shape: HeadShape, seed: int = 3, dtype: torch.dtype = torch.float32, **overrides: object) -> Finetuner:
    cfg = finetune_items.config(**overrides)
    start = finetune_items.weights(cfg)
    torch.manual_seed(seed)
    return heads.build(cfg, shape, start, CPU, dtype)


@pytest.mark.parametrize("name", SHAPES)
def test_packed_items_have_the_logits_of_single_ones(name: str) -> None:
    shape = SHAPES[name]
    module = build(shape).eval()
    items = finetune_items.items(shape.kind, 9)
    with torch.no_grad():
        together = module.logits(**collate(items, layout(shape)).reading())
        alone = torch.cat([module.logits(**collate([item], layout(shape)).reading()) for item in items])
    assert together.shape == (sum(len(item.positions) for item in items), shape.outputs)
    assert together.dtype == torch.float32
    assert (together - alone).abs().max() < 1e-6


def label_items(kind: str) -> list[TaskItem]:
    """Five of 3 labels, or of 3 sequences each."""
    made = finetune_items.items("classify", 15)
    draw, found = np.random.default_rng(5), []
    for i in range(5):
        first, *rest = made[3 * i : 3 * i + 3] if kind == "choose" else made[i : i + 1]
        targets = draw.integers(0, 2, 3).astype(np.float32) if kind == "multilabel" else draw.integers(0, 3, 1)
        others = tuple((item.ids, item.second) for item in rest)
        found.append(TaskItem(i, first.ids, first.second, np.zeros(1 + len(rest), np.int64), targets, NO_SPANS, others))
    return found


def defined_loss(kind: str, logits: torch.Tensor, items: list[TaskItem], weights: Sequence[float]) -> tuple[float, int]:
    """The loss and the correct answers by their definitions, one item after the other."""
    total, correct = 0.0, 0
    for row, item in zip(logits.view(len(items), -1).double(), items, strict=True):
        if kind == "multilabel":
            for value, target, weight in zip(row.tolist(), item.targets.tolist(), weights, strict=True):
                p = 1 / (1 + math.exp(-value))
                total -= weight * math.log(p) if target else math.log(1 - p)
                correct += (value > 0) == bool(target)
        else:
            (label,) = item.targets.tolist()
            total -= weights[label] * float(torch.log_softmax(row, 0)[label])
            correct += int(row.argmax()) == label
    return total, correct


@pytest.mark.parametrize(
    "kind, outputs, weights",
    [
        ("classify", 3, ()),
        ("classify", 3, (0.5, 1.0, 4.0)),
        ("multilabel", 3, ()),
        ("multilabel", 3, (0.5, 1.0, 4.0)),
        ("choose", 1, ()),
    ],
)
def test_loss_is_its_definition(kind: str, outputs: int, weights: tuple[float, ...]) -> None:
    module = build(HeadShape(kind, outputs, class_weights=weights)).eval()
    nn.init.normal_(module.head.output.weight, 0.0, 1.0)
    items = label_items(kind)
    batch = collate(items, ItemLayout(kind, 16))
    logits = module.logits(**batch.reading())
    loss, correct = module(**batch.inputs())
    want, count = defined_loss(kind, logits.detach(), items, weights or (1.0,) * 3)
    assert float(loss.detach()) == pytest.approx(want, rel=1e-5) and int(correct) == count
    assert module.counts(batch) == (15 if kind == "multilabel" else 5,)


def test_text_head_uses_the_pretrained_pooler() -> None:
    cfg = finetune_items.config()
    start = finetune_items.weights(cfg)
    item = finetune_items.items("classify", 1)[0]
    module = build(SHAPES["classify"]).eval()
    assert torch.equal(module.head.pooler.weight, start["pooler.weight"])
    ids = torch.from_numpy(item.ids)[None]
    n = ids.shape[1]
    full = torch.full((1, n), n, dtype=torch.int32)
    model = tiny.model(cfg)
    model.load_state_dict(start)
    positions = torch.arange(n, dtype=torch.int32)[None]
    hidden = model.eval().encode(ids, torch.zeros_like(ids), positions, torch.zeros_like(full), full, full[:, :1])
    pooled = torch.tanh(model.pooler(hidden[0, 0]))
    want = module.head.output.weight @ pooled + module.head.output.bias
    found = module.logits(**collate([item], layout(SHAPES["classify"])).reading())[0]
    assert (found - want).abs().max() < 1e-6


def test_model_without_pooler_gets_a_new_one() -> None:
    module = build(SHAPES["score"], model__nsp=False)
    assert module.head.pooler.weight.std() > 0.01
    assert module.logits(**collate(finetune_items.items("score", 2), layout(SHAPES["score"])).reading()).shape == (2, 1)


def test_score_has_a_squared_loss() -> None:
    items = finetune_items.items("score", 7)
    module = build(SHAPES["score"]).eval()
    batch = collate(items, layout(SHAPES["score"]))
    loss, correct = module(**batch.inputs())
    predicted = module.logits(**batch.reading())[:, 0].detach().numpy()
    want = sum((p - item.targets[0]) ** 2 for p, item in zip(predicted, items, strict=True))
    assert abs(float(loss.detach()) - want) < 1e-5 and float(correct) == 0


def test_span_loss_is_over_each_items_positions() -> None:
    items = finetune_items.items("span", 8)
    module = build(SHAPES["span"]).eval()
    batch = collate(items, layout(SHAPES["span"]))
    loss, correct = module(**batch.inputs())
    logits = module.logits(**batch.reading()).detach()
    want, hits, at = 0.0, 0, 0
    for item in items:
        own = logits[at : at + len(item.positions)].log_softmax(0)
        start, end = item.targets.tolist()
        want -= float(own[start, 0] + own[end, 1]) / 2
        hits += own[:, 0].argmax() == start and own[:, 1].argmax() == end
        at += len(item.positions)
    assert abs(float(loss.detach()) - want) < 1e-4 and int(correct) == hits


def test_bilstm_reads_one_item_both_ways() -> None:
    shape = SHAPES["bilstm"]
    module = build(shape).eval()
    item = finetune_items.items("tag", 1, seed=4)[0]
    assert len(item.positions) > 2
    with torch.no_grad():
        found = module.logits(**collate([item], layout(shape)).reading())
        encoder = module.fixed[0]
        packed = collate([item], layout(shape)).packed
        states = encoder.hidden_states(**packed.inputs())[-4:]
        features = torch.cat([s[0, item.positions] for s in states], -1)[None]
        want = module.head.output(module.head.lstm(features)[0])[0]
    assert features.shape[-1] == 4 * 32
    assert (found - want).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["frozen", "bilstm"])
def test_frozen_encoder_neither_learns_nor_drops(name: str) -> None:
    shape = SHAPES[name]
    module = build(shape, model__dropout=0.3, model__attention_dropout=0.3).train()
    encoder = module.fixed[0]
    assert not encoder.training and not any(p.requires_grad for p in encoder.parameters())
    assert all(key.startswith("head.") for key in module.state_dict())
    batch = collate(finetune_items.items(shape.kind, 6), layout(shape))
    module.head.eval()  # the head's own dropout aside
    first, second = (module(**batch.inputs())[0] for _ in range(2))
    assert torch.equal(first, second)
    first.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in module.head.parameters())
    assert all(p.grad is None for p in encoder.parameters())


@pytest.mark.parametrize("name", SHAPES)
def test_empty_batch_gives_zero_gradients(name: str) -> None:
    shape = SHAPES[name]
    module = build(shape, model__dropout=0.1).train()
    batch = collate([], layout(shape))
    loss, correct = module(**batch.inputs())
    assert float(loss.detach()) == 0 and float(correct) == 0 and module.counts(batch) == (0,)
    loss.backward()
    for parameter_name, parameter in module.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), parameter_name


@pytest.mark.parametrize("name", SHAPES)
def test_saved_weights_are_the_whole_model(name: str) -> None:
    shape = SHAPES[name]
    cfg = finetune_items.config()
    module = build(shape).eval()
    trained = dict(module.state_dict())
    frozen = heads.frozen_weights(module, finetune_items.weights(cfg)) if shape.frozen else {}
    other = heads.build(cfg, shape, None, CPU, torch.float32).eval()
    heads.load(other, trained | frozen)
    batch = collate(finetune_items.items(shape.kind, 5), layout(shape))
    with torch.no_grad():
        assert torch.equal(module.logits(**batch.reading()), other.logits(**batch.reading()))


@pytest.mark.parametrize(
    "shape, layers, word",
    [
        (HeadShape("tag", 3, head="bilstm"), 4, "--freeze"),
        (HeadShape("classify", 3, head="bilstm", frozen=True), 4, "tagging"),
        (HeadShape("tag", 3, head="bilstm", frozen=True), 2, "4 layers"),
        (HeadShape("tag", 3, width=7), 4, "--width 7"),
    ],
)
def test_impossible_heads_are_refused(shape: HeadShape, layers: int, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        shape.check(layers)


def learn(world, name: str, precision: str, stage: int) -> tuple[float, float]:
    """Mean loss of the first and the last three updates over the same items."""
    shape = SHAPES[name]
    overrides = {"precision": precision, "zero__stage": stage, "batch__micro_size": 16 // world.size}
    cfg = finetune_items.config(batch__global_size=16, **overrides)
    torch.manual_seed(3)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    engine = Engine(cfg, heads.build(cfg, shape, finetune_items.weights(cfg), CPU, dtype), world)
    items = finetune_items.items(shape.kind, 16)
    share = np.array_split(np.arange(16), world.size)[world.rank]
    batch = collate([items[i] for i in share], layout(shape))
    lr = 2e-2 if shape.frozen else 3e-3
    losses = [float(engine.train_update(TaskUpdate(s, [batch]), lr).losses[0]) for s in range(25)]
    return float(np.mean(losses[:3])), float(np.mean(losses[-3:]))


@pytest.mark.dist
@pytest.mark.parametrize(
    "ranks, precision, stage, names",
    [
        (1, "fp32", 0, ("score", "span", "bilstm")),
        pytest.param(2, "bf16", 2, ("span", "bilstm"), marks=pytest.mark.slow),
    ],
)
def test_heads_overfit_under_the_engine(ranks: int, precision: str, stage: int, names: tuple[str, ...]) -> None:
    for first, last in run_ranks(ranks, learn_all, precision, stage, names):
        assert (np.array(last) < 0.7 * np.array(first)).all(), (first, last)


def learn_all(world, precision: str, stage: int, names: tuple[str, ...]) -> tuple[list[float], list[float]]:
    first, last = zip(*(learn(world, name, precision, stage) for name in names), strict=True)
    return list(first), list(last)
