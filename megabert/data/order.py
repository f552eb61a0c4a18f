"""Order of rows: position -> row id of an epoch, a function of the seed and the manifest alone, not a state.

An epoch reads from few shards at a time. The shards are permuted. Each is cut into `ACTIVE_SHARDS` parts for as many consecutive
slots: slot t has part 0 of shard t, part 1 of shard t - 1 and so on, around the end of the epoch. From one slot to the next one shard
ends and one begins, so a reader that keeps the shards of a slot open opens one shard a slot. Within a slot blocks are permuted, and
rows within windows of 16 permuted blocks. Shards of few blocks are grouped and treated as one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from megabert.common.random_numbers import stream_keys

# shards that the rows of a slot come from
ACTIVE_SHARDS = 64
# shards of fewer blocks are grouped, so that windows find 16 blocks
GROUP_BLOCKS = 64
# blocks whose rows are shuffled together: 16 reads near each other serve 4,096 rows
WINDOW_BLOCKS = 16
# results kept of each step, for all datasets of a mixture: recomputed in turn they would take most of an update
KEPT = 256
# keys of the random streams, so that permutations and masks are independent of each other
BLOCK_STREAM, ROW_STREAM, MIX_STREAM = 0x626C6F636B, 0x726F77, 0x6D6978
SHARD_STREAM, SLOT_STREAM = 0x7368617264, 0x736C6F74


def permutation(n: int, *key: int) -> np.ndarray:
    """Permutation of range(n), int64 [n], a function of `key` alone, independent of any library's generator."""
    low = np.uint64((1 << n.bit_length()) - 1)
    drawn = stream_keys(*key, np.arange(n)) & ~low | np.arange(n, dtype=np.uint64)
    drawn.sort()  # all distinct: the index is in the low bits
    return (drawn & low).astype(np.int64)


class RowOrder:
    """Order of the rows of shards of `shard_rows` rows (int64 [N]), in blocks of `block_rows`; a shard's last may be short."""

    def __init__(self, shard_rows: np.ndarray, block_rows: int) -> None:
        self.rows, self.block_rows = int(shard_rows.sum()), block_rows
        self.first_row = np.cumsum(shard_rows) - shard_rows
        # of each shard: its blocks, and the rows that its last block lacks
        self.blocks = -(-shard_rows // block_rows)
        self.missing = self.blocks * block_rows - shard_rows
        # shards of a group, groups of the epoch, and groups that a slot's rows come from
        self.group = min(len(shard_rows), -(-GROUP_BLOCKS // int(self.blocks.max())))
        self.groups = -(-len(shard_rows) // self.group)
        self.active = min(self.groups, max(1, ACTIVE_SHARDS // self.group))

    def row_ids(self, seed: int, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Row ids at `positions` (int64 [n], in 0..rows - 1) of an epoch: a bijection of its positions to the rows."""
        starts = _slot_starts(self, seed, epoch)
        slots = np.searchsorted(starts, positions, side="right") - 1
        row_ids = np.empty_like(positions)
        for slot in np.unique(slots).tolist():
            in_slot = np.flatnonzero(slots == slot)
            at = positions[in_slot] - starts[slot]
            edges = _slot(self, seed, epoch, slot)[2]
            windows = np.searchsorted(edges, at, side="right") - 1
            for window in np.unique(windows).tolist():
                in_window = windows == window
                rows = _window(self, seed, epoch, slot, window)
                row_ids[in_slot[in_window]] = rows[at[in_window] - edges[window]]
        return row_ids

    @property
    def shards_in_use(self) -> int:
        """Most shards that a slot's rows come from."""
        return min(len(self.blocks), self.active * self.group)

    def slot(self, seed: int, position: int) -> tuple[int, int]:
        """(epoch, slot in it) of a position, counted from the beginning of epoch 0. Its rows are from the same shards as the slot's."""
        epoch, within = divmod(position, self.rows)
        return epoch, int(np.searchsorted(_slot_starts(self, seed, epoch), within, side="right")) - 1

    def shards_from(self, seed: int, position: int) -> Iterator[int]:
        """Shards in the order in which the rows need them from `position` on, epoch after epoch without end."""
        start, first = self.slot(seed, position)
        for epoch in itertools.count(start):
            shards = _shards(self, seed, epoch).tolist()
            for slot in range(first, self.groups):
                # those of earlier slots that the first one still uses, then its own
                for part in reversed(range(self.active if slot == first else 1)):
                    group = (slot - part) % self.groups
                    yield from shards[group * self.group : (group + 1) * self.group]
            first = 0

    def by_epoch(self, seed: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row ids, epochs), both int64 [n], of `positions` (int64 [n]) that count from the beginning of epoch 0."""
        epochs, within = np.divmod(positions, self.rows)
        row_ids = np.empty_like(within)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            row_ids[in_epoch] = self.row_ids(seed, epoch, within[in_epoch])
        return row_ids, epochs


def _part_edges(blocks: np.ndarray, parts: int) -> np.ndarray:
    """The first block of each of `parts` equal parts of `blocks` blocks, and the end of the last, int64 [..., parts + 1]."""
    return blocks[..., None] * np.arange(parts + 1) // parts


@lru_cache(maxsize=KEPT)
def _shards(order: RowOrder, seed: int, epoch: int) -> np.ndarray:
    """The shards in the epoch's order, int64 [N]."""
    return permutation(len(order.blocks), SHARD_STREAM, seed, epoch)


@lru_cache(maxsize=KEPT)
def _slot_starts(order: RowOrder, seed: int, epoch: int) -> np.ndarray:
    """The position at which each slot begins, int64 [groups]."""
    shards = _shards(order, seed, epoch)
    blocks = np.add.reduceat(order.blocks[shards], np.arange(0, len(shards), order.group))
    parts = np.diff(_part_edges(blocks, order.active))
    rows = np.zeros(order.groups, np.int64)
    for part in range(order.active):
        rows += order.block_rows * np.roll(parts[:, part], part)
    for group in np.unique(np.flatnonzero(order.missing[shards]) // order.group).tolist():
        edges = _part_edges(blocks[group], order.active)
        missing = order.block_rows - _group(order, seed, epoch, group)[1]
        for place in np.flatnonzero(missing).tolist():
            part = int(np.searchsorted(edges, place, side="right")) - 1
            rows[(group + part) % order.groups] -= missing[place]
    return np.cumsum(rows) - rows


@lru_cache(maxsize=KEPT)
def _group(order: RowOrder, seed: int, epoch: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """The permuted blocks of a group of shards: first row and number of rows of each, both int64 [b]."""
    shards = _shards(order, seed, epoch)[group * order.group : (group + 1) * order.group]
    blocks = order.blocks[shards]
    last = np.cumsum(blocks) - 1
    block = np.arange(last[-1] + 1) - np.repeat(last - blocks + 1, blocks)
    first = np.repeat(order.first_row[shards], blocks) + block * order.block_rows
    rows = np.full(len(first), order.block_rows)
    rows[last] -= order.missing[shards]
    chosen = permutation(len(first), BLOCK_STREAM, seed, epoch, group)
    return first[chosen], rows[chosen]


@lru_cache(maxsize=KEPT)
def _slot(order: RowOrder, seed: int, epoch: int, slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The permuted blocks of a slot: first row and number of rows of each, int64 [b], and where each window begins."""
    first, rows = [], []
    for part in range(order.active):
        group_first, group_rows = _group(order, seed, epoch, (slot - part) % order.groups)
        begin, end = _part_edges(np.array(len(group_rows)), order.active)[part : part + 2]
        first.append(group_first[begin:end])
        rows.append(group_rows[begin:end])
    chosen = permutation(sum(map(len, rows)), SLOT_STREAM, seed, epoch, slot)
    size = np.concatenate(rows)[chosen]
    return np.concatenate(first)[chosen], size, (np.cumsum(size) - size)[::WINDOW_BLOCKS]


@lru_cache(maxsize=KEPT)
def _window(order: RowOrder, seed: int, epoch: int, slot: int, window: int) -> np.ndarray:
    """The permuted rows of a window of a slot, int64 [r]."""
    blocks_of_window = slice(window * WINDOW_BLOCKS, (window + 1) * WINDOW_BLOCKS)
    first, rows = (all_blocks[blocks_of_window] for all_blocks in _slot(order, seed, epoch, slot)[:2])
    within = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
    return (np.repeat(first, rows) + within)[permutation(len(within), ROW_STREAM, seed, epoch, slot, window)]
