from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from megabert.engine import Engine
from megabert.finetune import heads
from megabert.finetune.batches import Layout, Update, collate
from megabert.finetune.heads import Finetuner, Shape
from tests.helpers import finetune_items, tiny
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
SHAPES = {
    "classify": Shape("classify", 2),
    "score": Shape("score", 1),
    "tag": Shape("tag", 2),
    "span": Shape("span", 2),
    "frozen": Shape("tag", 2, frozen=True),
    "bilstm": Shape("tag", 2, head="bilstm", width=16, frozen=True),
}


def layout(shape: Shape) -> Layout:
    return Layout(shape.kind, 16, sequences=shape.head == "bilstm")


def build(shape: Shape, seed: int = 3, dtype: torch.dtype = torch.float32, **overrides: object) -> Finetuner:
    cfg = finetune_items.config(**overrides)
    start = finetune_items.weights(cfg)
    torch.manual_seed(seed)
    return heads.build(cfg, shape, start, CPU, dtype)


@pytest.mark.parametrize("name", SHAPES)
def test_items_packed_together_get_the_logits_they_get_alone(name: str) -> None:
    shape = SHAPES[name]
    module = build(shape).eval()
    items = finetune_items.items(shape.kind, 9)
    with torch.no_grad():
        together = module.logits(**collate(items, layout(shape)).reading())
        alone = torch.cat([module.logits(**collate([item], layout(shape)).reading()) for item in items])
    assert together.shape == (sum(len(item.positions) for item in items), shape.outputs)
    assert together.dtype == torch.float32
    assert (together - alone).abs().max() < 1e-6


def test_the_loss_of_classes_is_what_plain_torch_says() -> None:
    items = finetune_items.items("classify", 9)
    module = build(SHAPES["classify"]).eval()
    batch = collate(items, layout(SHAPES["classify"]))
    loss, right = module(**batch.inputs())
    labels = torch.tensor([int(item.targets[0]) for item in items])
    logits = module.logits(**batch.reading())
    assert torch.isclose(loss, nn.functional.cross_entropy(logits, labels, reduction="sum"))
    assert int(right) == int((logits.argmax(1) == labels).sum())
    assert module.counts(batch) == (9,)


def test_a_text_goes_through_the_pretrained_pooler() -> None:
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


def test_a_model_without_pooler_gets_a_new_one() -> None:
    module = build(SHAPES["score"], model__nsp=False)
    assert module.head.pooler.weight.std() > 0.01
    assert module.logits(**collate(finetune_items.items("score", 2), layout(SHAPES["score"])).reading()).shape == (2, 1)


def test_scores_have_a_squared_loss_and_no_right_answers() -> None:
    items = finetune_items.items("score", 7)
    module = build(SHAPES["score"]).eval()
    batch = collate(items, layout(SHAPES["score"]))
    loss, right = module(**batch.inputs())
    predicted = module.logits(**batch.reading())[:, 0].detach().numpy()
    want = sum((p - item.targets[0]) ** 2 for p, item in zip(predicted, items, strict=True))
    assert abs(float(loss.detach()) - want) < 1e-5 and float(right) == 0


def test_the_loss_of_spans_is_over_the_positions_of_each_item_alone() -> None:
    items = finetune_items.items("span", 8)
    module = build(SHAPES["span"]).eval()
    batch = collate(items, layout(SHAPES["span"]))
    loss, right = module(**batch.inputs())
    logits = module.logits(**batch.reading()).detach()
    want, hits, at = 0.0, 0, 0
    for item in items:
        own = logits[at : at + len(item.positions)].log_softmax(0)
        start, end = item.targets.tolist()
        want -= float(own[start, 0] + own[end, 1]) / 2
        hits += own[:, 0].argmax() == start and own[:, 1].argmax() == end
        at += len(item.positions)
    assert abs(float(loss.detach()) - want) < 1e-4 and int(right) == hits


def test_the_bilstm_reads_both_ways_and_only_its_own_item() -> None:
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
def test_a_frozen_encoder_neither_learns_nor_drops(name: str) -> None:
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
def test_an_empty_batch_adds_nothing_but_gives_every_parameter_a_gradient(name: str) -> None:
    shape = SHAPES[name]
    module = build(shape, model__dropout=0.1).train()
    batch = collate([], layout(shape))
    loss, right = module(**batch.inputs())
    assert float(loss.detach()) == 0 and float(right) == 0 and module.counts(batch) == (0,)
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
        (Shape("tag", 3, head="bilstm"), 4, "--freeze"),
        (Shape("classify", 3, head="bilstm", frozen=True), 4, "tagging"),
        (Shape("tag", 3, head="bilstm", frozen=True), 2, "4 layers"),
        (Shape("tag", 3, width=7), 4, "--width 7"),
    ],
)
def test_heads_that_cannot_be(shape: Shape, layers: int, word: str) -> None:
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
    lr = 2e-2 if shape.frozen else 3e-3  # random features say less
    losses = [float(engine.train_update(Update(s, [batch]), lr).losses[0]) for s in range(25)]
    return float(np.mean(losses[:3])), float(np.mean(losses[-3:]))


@pytest.mark.dist
@pytest.mark.parametrize(
    "ranks, precision, stage, names",
    [
        (1, "fp32", 0, ("score", "span", "bilstm")),
        pytest.param(2, "bf16", 2, ("span", "bilstm"), marks=pytest.mark.slow),
    ],
)
def test_heads_learn_their_items_by_heart_under_the_engine(
    ranks: int, precision: str, stage: int, names: tuple[str, ...]
) -> None:
    for first, last in run_ranks(ranks, learn_all, precision, stage, names):
        assert (np.array(last) < 0.7 * np.array(first)).all(), (first, last)


def learn_all(world, precision: str, stage: int, names: tuple[str, ...]) -> tuple[list[float], list[float]]:
    first, last = zip(*(learn(world, name, precision, stage) for name in names), strict=True)
    return list(first), list(last)
