"""Order of rows that stays in few shards at a time; as in `order` a function of the seed, the epoch and the manifest alone.

The shards of an epoch are permuted. Each is dealt out in `ACTIVE` parts to as many slots that follow each other: slot t holds
part 0 of shard t, part 1 of shard t - 1 and so on, around the end of the epoch. From slot to slot one shard ends and one
begins: who keeps the shards of a slot open opens one more for each shard's number of rows. Inside a slot blocks are permuted,
and rows inside windows of 16 permuted blocks. Shards of few blocks are taken together, as if they were one.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from megabert.data.order import BLOCK_STREAM, ROW_STREAM, WINDOW, permutation

ACTIVE = 64  # shards that the rows of a slot come from
GROUP_BLOCKS = 64  # shards of fewer blocks are taken together, so that windows find 16 blocks
SHARD_STREAM, SLOT_STREAM = 0x7368617264, 0x736C6F74


class ShardOrder:
    """Order of the rows of shards of `shard_rows` rows (int64 [N]), in blocks of `block_rows`; a shard's last may be short."""

    def __init__(self, shard_rows: np.ndarray, block_rows: int) -> None:
        self.rows, self.block_rows = int(shard_rows.sum()), block_rows
        self.first_row = np.cumsum(shard_rows) - shard_rows
        self.blocks = -(-shard_rows // block_rows)  # of each shard
        self.missing = self.blocks * block_rows - shard_rows  # rows its last block falls short by
        self.group = min(len(shard_rows), -(-GROUP_BLOCKS // int(self.blocks.max())))  # shards taken together
        self.groups = -(-len(shard_rows) // self.group)
        self.active = min(self.groups, max(1, ACTIVE // self.group))  # groups that a slot's rows come from

    def row_ids(self, seed: int, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Row ids at `positions` (int64 [n], in 0..rows - 1) of an epoch: a bijection of its positions to the rows."""
        starts = _slot_starts(self, seed, epoch)
        slots = np.searchsorted(starts, positions, side="right") - 1
        row_ids = np.empty_like(positions)
        for slot in np.unique(slots).tolist():
            here = np.flatnonzero(slots == slot)
            at = positions[here] - starts[slot]
            edges = _slot(self, seed, epoch, slot)[2]
            windows = np.searchsorted(edges, at, side="right") - 1
            for window in np.unique(windows).tolist():
                inside = windows == window
                rows = _window(self, seed, epoch, slot, window)
                row_ids[here[inside]] = rows[at[inside] - edges[window]]
        return row_ids


def _parts(blocks: np.ndarray, parts: int) -> np.ndarray:
    """Where each of `parts` equal parts of `blocks` blocks begins and the last one ends, int64 [..., parts + 1]."""
    return blocks[..., None] * np.arange(parts + 1) // parts


@lru_cache(maxsize=8)
def _shards(order: ShardOrder, seed: int, epoch: int) -> np.ndarray:
    """The shards in the epoch's order, int64 [N]."""
    return permutation(len(order.blocks), SHARD_STREAM, seed, epoch)


@lru_cache(maxsize=8)
def _slot_starts(order: ShardOrder, seed: int, epoch: int) -> np.ndarray:
    """The position at which each slot begins, int64 [groups]."""
    shards = _shards(order, seed, epoch)
    blocks = np.add.reduceat(order.blocks[shards], np.arange(0, len(shards), order.group))
    parts = np.diff(_parts(blocks, order.active))
    rows = np.zeros(order.groups, np.int64)
    for part in range(order.active):
        rows += order.block_rows * np.roll(parts[:, part], part)
    for group in np.unique(np.flatnonzero(order.missing[shards]) // order.group).tolist():
        edges = _parts(blocks[group], order.active)
        missing = order.block_rows - _group(order, seed, epoch, group)[1]
        for place in np.flatnonzero(missing).tolist():
            part = int(np.searchsorted(edges, place, side="right")) - 1
            rows[(group + part) % order.groups] -= missing[place]
    return np.cumsum(rows) - rows


@lru_cache(maxsize=4 * ACTIVE)
def _group(order: ShardOrder, seed: int, epoch: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """The permuted blocks of shards that are taken together: first row and number of rows of each, both int64 [b]."""
    shards = _shards(order, seed, epoch)[group * order.group : (group + 1) * order.group]
    blocks = order.blocks[shards]
    last = np.cumsum(blocks) - 1
    block = np.arange(last[-1] + 1) - np.repeat(last - blocks + 1, blocks)
    first = np.repeat(order.first_row[shards], blocks) + block * order.block_rows
    rows = np.full(len(first), order.block_rows)
    rows[last] -= order.missing[shards]
    chosen = permutation(len(first), BLOCK_STREAM, seed, epoch, group)
    return first[chosen], rows[chosen]


@lru_cache(maxsize=16)
def _slot(order: ShardOrder, seed: int, epoch: int, slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The permuted blocks of a slot: first row and number of rows of each, int64 [b], and where each window begins."""
    first, rows = [], []
    for part in range(order.active):
        its_first, its_rows = _group(order, seed, epoch, (slot - part) % order.groups)
        begin, end = _parts(np.array(len(its_rows)), order.active)[part : part + 2]
        first.append(its_first[begin:end])
        rows.append(its_rows[begin:end])
    chosen = permutation(sum(map(len, rows)), SLOT_STREAM, seed, epoch, slot)
    size = np.concatenate(rows)[chosen]
    return np.concatenate(first)[chosen], size, (np.cumsum(size) - size)[::WINDOW]


@lru_cache(maxsize=64)
def _window(order: ShardOrder, seed: int, epoch: int, slot: int, window: int) -> np.ndarray:
    """The permuted rows of a window of a slot, int64 [r]."""
    here = slice(window * WINDOW, (window + 1) * WINDOW)
    first, rows = (blocks[here] for blocks in _slot(order, seed, epoch, slot)[:2])
    within = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
    return (np.repeat(first, rows) + within)[permutation(len(within), ROW_STREAM, seed, epoch, slot, window)]
