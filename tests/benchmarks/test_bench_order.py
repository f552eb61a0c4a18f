"""Rows of one document are seen to be alike, and files are counted as often as they are opened anew."""

from __future__ import annotations

import numpy as np

from benchmarks import bench_order
from megabert.data.order import BlockOrder
from megabert.data.shard_order import ShardOrder
from megabert.data.shards import Dataset
from tests.helpers.rows import make_dataset, make_rows


def test_rows_of_a_document_are_more_alike_than_others(tmp_path):
    ids, bounds, isnext = make_rows(1280, 32, 3)
    words = np.random.default_rng(0).integers(10, 2000, (20, 12))  # of each document, of 64 rows that follow each other
    drawn = np.random.default_rng(1).integers(0, 12, ids.shape)
    ids = np.where(ids > 9, words[np.arange(1280)[:, None] // 64, drawn], ids).astype(np.uint16)
    dataset = Dataset(make_dataset(tmp_path, 1280, arrays=(ids, bounds, isnext)))
    found = {result["order"]: result for result in bench_order.measure_rows(dataset, [16, 64, 1024])}
    assert {result["batch"] for result in found.values()} == {64}, "an epoch holds four batches of it"
    assert found["as they lie in the shards"]["mean"] > 0.3
    assert abs(found["at random"]["mean"]) < 0.02


def test_files_are_counted_that_are_not_open():
    """Four shards are opened once each; of 400, which are not open at the same time, the same ones again and again."""
    order = ShardOrder(np.full(4, bench_order.SHARD_ROWS), 256)
    assert bench_order.opens(order, 1, 65_536, 4, 1, 64)["mean"] == 1
    many = BlockOrder(400 * bench_order.SHARD_ROWS, 256)
    assert bench_order.opens(many, 1, 65_536, 4, 1, 64)["second half"] > 60
