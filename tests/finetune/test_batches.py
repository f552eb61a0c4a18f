from __future__ import annotations

import numpy as np
import pytest

from megabert.finetune import batches
from megabert.finetune.batches import ItemLayout, collate, order, updates
from tests.helpers import finetune_items


def layout(kind: str, causal: bool = False) -> ItemLayout:
    return ItemLayout(kind, 16, causal)


@pytest.mark.parametrize("kind", ["classify", "score", "tag", "span"])
def test_read_positions_and_targets_are_the_items(kind: str) -> None:
    items = finetune_items.items(kind, 20)
    batch = collate(items, layout(kind))
    flat = batch.packed.input_ids.flatten()
    want = np.concatenate([item.ids[item.positions] for item in items])
    assert flat[batch.read].tolist() == want.tolist()
    assert batch.tokens == sum(len(item.ids) for item in items) and batch.items == 20
    wide = collate(items, ItemLayout(kind, 512)).packed.input_ids
    assert flat.shape[0] % 16 == 0 and wide.shape == (-(-batch.tokens // batches.WIDTH), batches.WIDTH)  # hardly a pad
    empty = collate([], layout(kind))
    assert empty.items == len(empty.read) == len(empty.targets) == 0 and empty.packed.input_ids.shape == (1, 16)
    targets = np.concatenate([item.targets for item in items])
    assert batch.targets.flatten().tolist() == targets.tolist()
    assert str(batch.targets.dtype) == ("torch.float32" if kind == "score" else "torch.int64")


def test_causal_model_is_read_at_last_token() -> None:
    items = finetune_items.items("classify", 6)
    batch = collate(items, layout("classify", causal=True))
    assert batch.packed.input_ids.flatten()[batch.read].tolist() == [finetune_items.SEP] * 6
    ends, positions = batch.packed.key_end, batch.packed.position_ids
    seen = ends - batch.packed.key_start
    assert (seen[ends > 0] == positions[ends > 0] + 1).all()
    spans = finetune_items.items("span", 6)
    read = [batches.read_at(item, layout("span", causal=True)) for item in spans]
    assert [r[0] for r in read] == [len(item.ids) - 1 for item in spans]
    assert all((r[1:] == item.positions[1:]).all() for r, item in zip(read, spans, strict=True))


@pytest.mark.parametrize("ranks, micro_steps", [(1, 1), (2, 2), (3, 1)])
def test_ranks_and_micro_steps_split_global_batches(ranks: int, micro_steps: int) -> None:
    items = finetune_items.items("classify", 29)
    orders = [order(29, seed, epoch).tolist() for seed, epoch in ((5, 0), (5, 1), (6, 0))]
    assert all(sorted(o) == list(range(29)) for o in orders) and len(set(map(tuple, orders))) == 3
    streams = [updates(items, layout("classify"), 5, 12, 0, micro_steps, r, ranks) for r in range(ranks)]
    for step in range(7):  # epochs of 3 updates, the last one of each holds 5 items
        parts = [next(stream) for stream in streams]
        found = [b for part in parts for b in part.batches]
        assert all(part.step == step and len(part.batches) == micro_steps for part in parts)
        at = step % 3 * 12
        want = [items[i] for i in order(29, 5, step // 3)[at : at + 12]]
        assert sum(b.items for b in found) == len(want) == (5 if step % 3 == 2 else 12)
        assert sorted(t for b in found for t in b.targets.tolist()) == sorted(int(i.targets[0]) for i in want)
        assert sum(b.tokens for b in found if b.items) == sum(len(item.ids) for item in want)
