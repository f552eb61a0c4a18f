"""Order of rows: position -> row id of an epoch, a function of the seed and the manifest alone, not a state.

A manifest names the version of its rows' order: 1 is `BlockOrder`, 2 is `shard_order.ShardOrder`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from megabert.data.masking import stream_keys

WINDOW = 16  # blocks whose rows are shuffled together: 16 reads near each other serve 4,096 rows
BLOCK_STREAM, ROW_STREAM, MIX_STREAM = (
    0x626C6F636B,
    0x726F77,
    0x6D6978,
)  # keep the permutations apart from each other and from masks


def permutation(n: int, *key: int) -> np.ndarray:
    """Permutation of range(n), int64 [n], a function of `key` alone (no library's random stream is involved)."""
    low = np.uint64((1 << n.bit_length()) - 1)
    drawn = stream_keys(*key, np.arange(n)) & ~low | np.arange(n, dtype=np.uint64)
    drawn.sort()  # all distinct: the index is in the low bits
    return (drawn & low).astype(np.int64)


@lru_cache(maxsize=4)
def _blocks(blocks: int, seed: int, epoch: int) -> np.ndarray:
    return permutation(blocks, BLOCK_STREAM, seed, epoch)


@lru_cache(maxsize=64)
def _window(rows: int, seed: int, epoch: int, window: int) -> np.ndarray:
    return permutation(rows, ROW_STREAM, seed, epoch, window)


@lru_cache(maxsize=64)
def mixed_places(size: int, seed: int, window: int) -> np.ndarray:
    """Permutation of range(size), int64 [size]: the places of window `window` of a mixture in their order."""
    return permutation(size, MIX_STREAM, seed, window)


def row_order(rows: int, block_rows: int, seed: int, epoch: int, positions: np.ndarray) -> np.ndarray:
    """Row ids at `positions` (int64 [n], in 0..rows - 1) of an epoch: a bijection of the epoch's positions to its rows.

    Blocks are permuted, then rows within windows of 16 permuted blocks; the last block of a dataset may be short.
    """
    blocks = -(-rows // block_rows)
    order = _blocks(blocks, seed, epoch)
    missing = blocks * block_rows - rows  # rows the last block falls short by
    short_window, short_place = divmod(int(np.flatnonzero(order == blocks - 1)[0]), WINDOW)
    span = WINDOW * block_rows
    # Positions as if the last block were full: those after it move on by what it lacks.
    virtual = positions + np.where(positions >= (short_window + 1) * span - missing, missing, 0)
    window, at = np.divmod(virtual, span)
    for w in np.unique(window).tolist():
        here = window == w
        size = min(span, blocks * block_rows - w * span) - (missing if w == short_window else 0)
        at[here] = _window(size, seed, epoch, w)[at[here]]
    cut = short_place * block_rows + block_rows - missing
    at += np.where((window == short_window) & (at >= cut), missing, 0)
    place, row = np.divmod(at, block_rows)
    return order[window * WINDOW + place] * block_rows + row


class Order(Protocol):
    """Order of `rows` rows."""

    @property
    def rows(self) -> int: ...

    def row_ids(self, seed: int, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Row ids at `positions` (int64 [n], in 0..rows - 1) of an epoch: a bijection of its positions to the rows."""


@dataclass(frozen=True)
class BlockOrder:
    """Order of `rows` rows in which the blocks of a window may lie in any shards."""

    rows: int
    block_rows: int

    def row_ids(self, seed: int, epoch: int, positions: np.ndarray) -> np.ndarray:
        """As `row_order`."""
        return row_order(self.rows, self.block_rows, seed, epoch, positions)


def by_epoch(order: Order, seed: int, positions: np.ndarray, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(row ids, epochs), both int64 [n], of `positions` (int64 [n]) that count from the beginning of epoch `first`."""
    epochs, within = np.divmod(positions, order.rows)
    epochs += first
    row_ids = np.empty_like(within)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        row_ids[here] = order.row_ids(seed, epoch, within[here])
    return row_ids, epochs
