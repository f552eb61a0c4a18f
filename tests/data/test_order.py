"""The order that stays in few shards: the documented bijection, few files opened an update."""

import numpy as np
import pytest

from megabert.data import order
from megabert.data.order import ACTIVE_SHARDS, RowOrder
from megabert.data.shards.dataset import OPEN_SHARDS
from tests.helpers import streams


def independent_order(shards, block_rows, seed, epoch):
    """Rows by plain lists and Python integers: shards dealt out in parts to slots, blocks, rows in windows of 16 blocks."""

    def shuffled(items, name, *stream):
        return streams.shuffled(items, int.from_bytes(name), seed, epoch, *stream)

    def flat(lists):
        return [item for items in lists for item in items]

    first, blocks = 0, []
    for rows in shards:
        end = first + rows
        blocks.append([list(range(i, min(i + block_rows, end))) for i in range(first, end, block_rows)])
        first = end
    together = min(len(shards), -(-64 // max(map(len, blocks))))
    blocks = shuffled(blocks, b"shard")
    groups = [flat(blocks[i : i + together]) for i in range(0, len(blocks), together)]
    parts = min(len(groups), max(1, 64 // together))
    slots = [[] for _ in groups]
    for number, group in enumerate(groups):
        group = shuffled(group, b"block", number)
        for part in range(parts):
            its = group[part * len(group) // parts : (part + 1) * len(group) // parts]
            slots[(number + part) % len(groups)].append((part, its))
    order = []
    for number, slot in enumerate(slots):
        dealt = shuffled(flat(its for _, its in sorted(slot)), b"slot", number)
        for w in range(0, len(dealt), 16):
            order += shuffled(flat(dealt[w : w + 16]), b"row", number, w // 16)
    return order


SHARDS = {
    "one row": (4, [1]),
    "one short block": (4, [3]),
    "one shard": (4, [203]),
    "small shards": (4, [32, 32, 32, 5]),
    "many small shards": (4, [16] * 70 + [3]),
    "parts of which each has a short end": (4, [24, 24, 7, 24, 1, 24, 24, 24]),
    "more shards than are open": (1, [64] * 67 + [33]),
    "shards that do not divide into parts": (4, [260, 260, 260, 41]),
}


@pytest.mark.parametrize(("block", "shards"), SHARDS.values(), ids=SHARDS)
def test_order_is_the_documented_bijection(block, shards):
    order = RowOrder(np.array(shards), block)
    for seed, epoch in ((0, 0), (9, 5)):
        want = independent_order(shards, block, seed, epoch)
        got = order.row_ids(seed, epoch, np.arange(order.rows))
        assert got.tolist() == want and sorted(want) == list(range(sum(shards)))
        pick = np.random.default_rng(0).integers(0, order.rows, 40)
        assert order.row_ids(seed, epoch, pick).tolist() == [want[p] for p in pick]


def test_an_update_of_a_rank_opens_few_files():
    """A thousand million rows, 512 ranks with two loader processes each: 100 updates of 65,536 rows, counted."""
    shards, shard_rows, ranks, batch, updates, workers, micro = 15_259, 65_536, 512, 65_536, 100, 2, 64
    order = RowOrder(np.full(shards, shard_rows), 256)
    seats = np.arange(batch).reshape(-1, ranks, micro).swapaxes(0, 1).ravel()  # by rank, as the loader deals them out
    rank = np.repeat(np.arange(ranks), batch // ranks)
    seen = np.zeros((workers, ranks, shards), bool)
    widest = 0
    for update in range(updates):
        shard = order.row_ids(1, 0, update * batch + seats) // shard_rows
        seen[update % workers, rank, shard] = True
        widest = max(widest, len(np.unique(shard)))
    each = seen.sum(2)  # files that a process has had to do with
    assert each.max() <= OPEN_SHARDS, "none was closed in between: each was opened once"
    assert each.sum() / ranks / updates <= 4
    assert ACTIVE_SHARDS - 8 <= widest <= ACTIVE_SHARDS, "a batch is of as many shards as are open"


def test_many_datasets_in_turn_draw_their_order_once(monkeypatch):
    """As in each update of a mixture of them."""
    orders = [RowOrder(np.array([64] * 3), 4) for _ in range(40)]
    first = [made.row_ids(1, 0, np.arange(50)) for made in orders]
    monkeypatch.setattr(order, "permutation", None)
    assert all((made.row_ids(1, 0, np.arange(50)) == ids).all() for made, ids in zip(orders, first, strict=True))
