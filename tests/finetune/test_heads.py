"""Items in batches, and heads on them: losses by their definitions, packing, learning under the engine."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from megabert.data.batch import Update
from megabert.distributed.ranks import World, discover
from megabert.engine import Engine
from megabert.finetune import batches, heads
from megabert.finetune.batches import ItemLayout, TaskBatch, collate, order, updates
from megabert.finetune.encoding import TaskItem
from megabert.finetune.heads import Finetuner
from megabert.finetune.settings import Settings
from tests.helpers import finetune_items

CPU = torch.device("cpu")
OUTPUTS = {"classify": 3, "multilabel": 3, "score": 1, "tag": 2, "span": 2}


def build(kind: str, **overrides: object) -> Finetuner:
    cfg = finetune_items.config(**overrides)
    start = finetune_items.weights(cfg)
    torch.manual_seed(3)
    return heads.build(cfg, kind, OUTPUTS[kind], start, CPU, torch.float32)


def batch_of(items: list[TaskItem], kind: str, causal: bool = False) -> TaskBatch:
    return collate(items, ItemLayout(kind, 16, causal))


def compute_logits(module: Finetuner, batch: TaskBatch) -> torch.Tensor:
    return module.logits(batch.read, **batch.packed.inputs())


def items_of(kind: str, count: int = 5) -> list[TaskItem]:
    """Of the kinds with labels, 3 of them."""
    if kind not in ("classify", "multilabel"):
        return finetune_items.items(kind, count)
    draw, items = np.random.default_rng(5), finetune_items.items("classify", count)
    if kind == "classify":
        return [replace(item, targets=draw.integers(0, 3, 1)) for item in items]
    return [replace(item, targets=draw.integers(0, 2, 3).astype(np.float32)) for item in items]


@pytest.mark.parametrize("kind", ["classify", "score", "tag", "span"])
def test_read_positions_and_targets_are_the_items(kind: str) -> None:
    items = finetune_items.items(kind, 20)
    batch = batch_of(items, kind)
    flat = batch.packed.input_ids.flatten()
    assert flat[batch.read].tolist() == np.concatenate([item.ids[item.positions] for item in items]).tolist()
    assert batch.tokens == sum(len(item.ids) for item in items) and batch.items == 20
    wide = collate(items, ItemLayout(kind, 512)).packed.input_ids
    assert flat.shape[0] % 16 == 0 and wide.shape == (-(-batch.tokens // batches.WIDTH), batches.WIDTH)  # hardly a pad
    empty = batch_of([], kind)
    assert empty.items == len(empty.read) == len(empty.targets) == 0 and empty.packed.input_ids.shape == (1, 16)
    assert batch.targets.flatten().tolist() == np.concatenate([item.targets for item in items]).tolist()
    assert str(batch.targets.dtype) == ("torch.float32" if kind == "score" else "torch.int64")


def test_causal_model_is_read_at_last_token() -> None:
    batch = batch_of(finetune_items.items("classify", 6), "classify", causal=True)
    assert batch.packed.input_ids.flatten()[batch.read].tolist() == [finetune_items.SEP] * 6
    ends, positions = batch.packed.key_end, batch.packed.position_ids
    seen = ends - batch.packed.key_start
    assert (seen[ends > 0] == positions[ends > 0] + 1).all()
    spans = finetune_items.items("span", 6)
    read = [batches.read_at(item, ItemLayout("span", 16, True)) for item in spans]
    assert [r[0] for r in read] == [len(item.ids) - 1 for item in spans]
    assert all((r[1:] == item.positions[1:]).all() for r, item in zip(read, spans, strict=True))


@pytest.mark.parametrize("ranks, micro_steps", [(1, 1), (2, 2), (3, 1)])
def test_ranks_and_micro_steps_split_global_batches(ranks: int, micro_steps: int) -> None:
    items, layout = finetune_items.items("classify", 29), ItemLayout("classify", 16, False)
    orders = [order(29, seed, epoch).tolist() for seed, epoch in ((5, 0), (5, 1), (6, 0))]
    assert all(sorted(o) == list(range(29)) for o in orders) and len(set(map(tuple, orders))) == 3
    settings, worlds = Settings(seed=5, batch=12), [replace(discover({}), rank=r, size=ranks) for r in range(ranks)]
    streams = [updates(items, layout, settings, world, micro_steps) for world in worlds]
    for step in range(7):  # epochs of 3 updates, the last one of each holds 5 items
        parts = [next(stream) for stream in streams]
        found = [b for part in parts for b in part.batches]
        assert all(part.step == step and len(part.batches) == micro_steps for part in parts)
        at = step % 3 * 12
        want = [items[i] for i in order(29, 5, step // 3)[at : at + 12]]
        assert sum(b.items for b in found) == len(want) == (5 if step % 3 == 2 else 12)
        assert sorted(t for b in found for t in b.targets.tolist()) == sorted(int(i.targets[0]) for i in want)
        assert sum(b.tokens for b in found) == sum(len(item.ids) for item in want)


@pytest.mark.parametrize("kind", ["classify", "multilabel", "score", "span"])
def test_loss_is_its_definition(kind: str) -> None:
    module, items = build(kind).eval(), items_of(kind)
    nn.init.normal_(module.head.output.weight, 0.0, 1.0)
    batch = batch_of(items, kind)
    loss, correct = module(**batch.inputs())
    if kind == "classify":
        assert module.head.pooler.weight.equal(finetune_items.weights(finetune_items.config())["pooler.weight"])
    want, count, logits = 0.0, 0, compute_logits(module, batch).detach().double()
    for item, rows in zip(items, logits.split([len(item.positions) for item in items]), strict=True):
        if kind == "score":
            want += float((rows[0, 0] - item.targets[0]) ** 2)
        elif kind == "multilabel":
            for value, target in zip(rows[0].tolist(), item.targets.tolist(), strict=True):
                p = 1 / (1 + math.exp(-value))
                want -= math.log(p) if target else math.log(1 - p)
                count += (value > 0) == bool(target)
        elif kind == "classify":
            (label,) = item.targets.tolist()
            want -= float(torch.log_softmax(rows[0], 0)[label])
            count += int(rows[0].argmax()) == label
        else:
            (start, end), shares = item.targets.tolist(), rows.log_softmax(0)
            want -= float(shares[start, 0] + shares[end, 1]) / 2
            count += rows.argmax(0).tolist() == [start, end]
    assert float(loss.detach()) == pytest.approx(want, rel=1e-5) and int(correct) == count
    assert module.counts(batch) == (15 if kind == "multilabel" else 5,)


@pytest.mark.parametrize("layers", ["last", "3", "1,2,3,4", "1+2+3+4"])
@torch.no_grad()
def test_layers_are_concatenated_or_summed(layers: str) -> None:
    cfg = finetune_items.config()
    module = heads.build(cfg, "tag", 2, finetune_items.weights(cfg), CPU, torch.float32, layers).eval()
    (item,) = finetune_items.items("tag", 1)
    batch, output = batch_of([item], "tag"), module.head.output
    states = [state[0, item.positions] for state in module.encoder.hidden_states(**batch.packed.inputs())]
    together = torch.cat(states[1:], -1), sum(states[1:])
    want = dict(zip(("last", "3", "1,2,3,4", "1+2+3+4"), (states[4], states[3], *together), strict=True))[layers]
    assert output.weight.shape == (2, 128 if layers == "1,2,3,4" else 32)
    assert (compute_logits(module, batch) - (want @ output.weight.T + output.bias)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["bert", "modern"])
def test_added_layer_starts_as_in_modernbert(kind: str) -> None:
    """At 1/sqrt(hidden); the normal cut at two deviations has 0.8796 of its deviation."""
    made = {"model__kind": "modern", "model__norm": "pre", "model__nsp": False} if kind == "modern" else {}
    torch.manual_seed(2)
    module = heads.build(finetune_items.config(**made), "tag", 2_000, None, CPU, torch.float32)
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
    module(**batch.inputs())[0].backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())
    assert all(parameter.grad is None for parameter in module.encoder.parameters())


@pytest.mark.parametrize("kind", OUTPUTS)
def test_empty_batch_gives_zero_gradients(kind: str) -> None:
    module, batch = build(kind, model__dropout=0.1).train(), batch_of([], kind)
    loss, correct = module(**batch.inputs())
    assert float(loss.detach()) == 0 and float(correct) == 0 and module.counts(batch) == (0,)
    loss.backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("kind", ["score", "span"])
def test_heads_overfit_under_the_engine(kind: str, world: World) -> None:
    cfg = finetune_items.config(batch__global_size=16, batch__micro_size=16)
    engine = Engine(cfg, build(kind), world)
    batch = batch_of(finetune_items.items(kind, 16), kind)
    losses = [float(engine.train_update(Update(step, 0, [batch]), 3e-3).losses[0]) for step in range(25)]
    assert np.mean(losses[-3:]) < 0.7 * np.mean(losses[:3])
