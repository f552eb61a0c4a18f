"""The order of an epoch's rows is the documented bijection, and it mixes widely."""

from __future__ import annotations

import numpy as np
import pytest

from megabert.data.order import row_order
from tests.helpers.streams import shuffled


def independent_order(rows, block_rows, seed, epoch):
    """Blocks, then rows in windows of 16 permuted blocks, by plain lists and Python integers."""
    blocks = [list(range(b * block_rows, min(rows, (b + 1) * block_rows))) for b in range(-(-rows // block_rows))]
    blocks = shuffled(blocks, int.from_bytes(b"block"), seed, epoch)
    order = []
    for w in range(0, len(blocks), 16):
        window = [row for block in blocks[w : w + 16] for row in block]
        order += shuffled(window, int.from_bytes(b"row"), seed, epoch, w // 16)
    return order


@pytest.mark.parametrize(
    ("rows", "block"), [(1, 4), (3, 4), (64, 4), (65, 4), (200, 4), (203, 4), (130, 1), (2563, 64)]
)
def test_order_is_the_documented_bijection(rows, block):
    for seed, epoch in ((0, 0), (0, 1), (9, 5)):
        want = independent_order(rows, block, seed, epoch)
        got = row_order(rows, block, seed, epoch, np.arange(rows))
        assert got.tolist() == want and sorted(want) == list(range(rows))
        pick = np.random.default_rng(0).integers(0, rows, 40)
        assert row_order(rows, block, seed, epoch, pick).tolist() == [want[p] for p in pick]


def test_order_mixes_widely():
    """Neighbours of an epoch come from 16 blocks, and two epochs agree on about 1 position in `rows`."""
    rows = 256 * 64
    first, second = (row_order(rows, 256, 1, e, np.arange(rows)) for e in (0, 1))
    assert (first == second).sum() < 12
    blocks = [len(set((first[i : i + 128] // 256).tolist())) for i in range(0, rows, 128)]
    assert min(blocks) == 16 and max(blocks) == 16
