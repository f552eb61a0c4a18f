"""The digest of rows is the sum of the documented hashes: free of order and ranks, and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from megabert.data.batch import RowDigest, row_digest
from megabert.data.loader import Loader
from megabert.data.shards import Dataset
from megabert.distributed.ranks import World
from tests.helpers.ranks import run_ranks
from tests.helpers.rows import make_dataset, vocabulary
from tests.helpers.streams import key


def by_hand(pairs) -> int:
    """splitmix64 of stream, epoch and row id, in Python's integers."""
    return sum(key(int.from_bytes(b"digest"), epoch, row) for row, epoch in pairs) % 2**64


def test_the_digest_is_the_documented_sum():
    draw = np.random.default_rng(0)
    rows, epochs = draw.integers(0, 10**9, 1000), draw.integers(0, 5, 1000)
    want = by_hand(zip(rows.tolist(), epochs.tolist(), strict=True))
    assert row_digest(rows, epochs) == want
    order = draw.permutation(1000)
    assert row_digest(rows[order], epochs[order]) == want
    assert row_digest(np.append(rows, -1), np.append(epochs, 0)) == want  # a filler is no row
    assert row_digest(rows, epochs + 1) != want and row_digest(rows[1:], epochs[1:]) != want


def totals(world: World, folder: str, steps: int) -> int:
    dataset = Dataset(folder)
    digest = RowDigest(5)
    options = {"global_batch": 48, "micro_batch": 8, "seed": 1, "rank": world.rank, "world": world.size}
    loader = Loader(dataset, vocabulary(), **options)
    for _ in range(steps):
        digest.add(next(loader))
    counts = digest.counts
    return digest.total(dict(zip(counts, world.sum_ints(list(counts.values())), strict=True)))


@pytest.mark.dist
def test_the_digest_does_not_depend_on_ranks(tmp_path):
    folder = make_dataset(tmp_path, 144)
    want = (5 + by_hand((row, epoch) for epoch in range(2) for row in range(144))) % 2**64
    alone = totals(World(0, 0, 1, None, "gloo", "single"), str(folder), 6)  # type: ignore[arg-type]
    assert alone == want
    assert run_ranks(2, totals, str(folder), 6) == [alone, alone]
