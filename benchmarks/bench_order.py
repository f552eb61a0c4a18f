"""Files that ranks open in an update, and how alike the rows of a batch are, under both orders of rows.

    python benchmarks/bench_order.py [--json FILE] [--rows N] [--ranks N] [--data DIR]

No shard is needed for the first: ranks are played by the order alone, each with as many shards open as a dataset keeps open.
With --data the second: every row is a vector of its token counts (folded to 256 numbers, less the mean of all rows, of length
1), and two rows are as alike as their product. Batches of rows that have nothing to do with each other have a mean near 0, one
of rows of the same documents has more. Rows drawn at random are measured beside the two orders, as what chance gives.
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

import numpy as np

from benchmarks.common import hardware
from megabert.common.hash_mixer import mix64
from megabert.data.order import BlockOrder, Order
from megabert.data.shard_order import ShardOrder
from megabert.data.shards import Dataset
from megabert.data.shards.dataset import OPEN_SHARDS

SHARD_ROWS, BLOCK_ROWS = 65_536, 256  # of a build
SAMPLE = 16  # ranks that are played
FOLDED = 256  # numbers of a row's vector
NAMES = ("order 1: blocks of any shards", "order 2: few shards at a time")


def opens(order: Order, ranks: int, batch: int, updates: int, workers: int, micro: int) -> dict[str, float]:
    """Files opened a rank an update, over `updates` from the first on and over their second half."""
    played = np.unique(np.linspace(0, ranks - 1, SAMPLE).astype(np.int64))
    steps = np.arange(-(-batch // (ranks * micro)))
    seats = ((steps[:, None] * ranks + played[:, None, None]) * micro)[..., None] + np.arange(micro)
    kept: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(len(played) * workers)]
    found = np.zeros(updates)
    for update in range(updates):
        positions = update * batch + np.minimum(seats, batch - 1).reshape(len(played), -1)
        shards = order.row_ids(1, 0, positions.ravel()).reshape(positions.shape) // SHARD_ROWS
        for rank, its in enumerate(shards):
            maps = kept[rank * workers + update % workers]
            for shard in np.unique(its).tolist():
                found[update] += shard not in maps
                maps[shard] = None
                maps.move_to_end(shard)
                if len(maps) > OPEN_SHARDS:
                    maps.popitem(last=False)
    found /= len(played)
    return {"mean": found.mean(), "second half": found[updates // 2 :].mean(), "most": found.max()}


def vectors(dataset: Dataset, rows: int) -> np.ndarray:
    """Folded token counts of the first `rows` rows, less their mean and of length 1: float32 [rows, FOLDED]."""
    vocab, first = (np.arange(dataset.manifest.vocab_size, dtype=np.uint64), max(dataset.manifest.special_ids.values()))
    hashed = mix64(vocab)
    place, sign = (hashed % np.uint64(FOLDED)).astype(np.int64), np.where(hashed >> np.uint64(63), 1.0, -1.0)
    sign[: first + 1] = 0.0  # special tokens say nothing of a text
    found = np.empty((rows, FOLDED), np.float32)
    for start in range(0, rows, 4096):
        ids = dataset.read(np.arange(start, min(rows, start + 4096))).ids
        at = np.arange(len(ids))[:, None] * FOLDED + place[ids]
        sums = np.bincount(at.ravel(), sign[ids].ravel(), minlength=len(ids) * FOLDED)
        found[start : start + len(ids)] = sums.reshape(-1, FOLDED)
    found -= found.mean(0)
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-9)


def alike(rows: np.ndarray, order: np.ndarray, batch: int) -> tuple[float, float]:
    """Mean product of two different rows of a batch, and its standard error over the batches of an epoch."""
    means = []
    for first in range(0, len(order) - batch + 1, batch):
        its = rows[order[first : first + batch]]
        total = its.sum(0, dtype=np.float64)
        means.append((total @ total - np.square(its).sum(dtype=np.float64)) / (batch * (batch - 1)))
    return float(np.mean(means)), float(np.std(means) / len(means) ** 0.5)


def both(rows: int, shard_rows: np.ndarray, block_rows: int) -> dict[str, Order]:
    return dict(zip(NAMES, (BlockOrder(rows, block_rows), ShardOrder(shard_rows, block_rows)), strict=True))


def measure_rows(dataset: Dataset, batches: list[int]) -> list[dict[str, Any]]:
    """How alike rows of a batch are, for each size of batch of which an epoch holds four."""
    m = dataset.manifest
    found, epoch = vectors(dataset, m.rows), np.arange(m.rows)
    orders = {
        name: order.row_ids(1, 0, epoch)
        for name, order in both(m.rows, np.array([s.rows for s in m.shards]), m.block_rows).items()
    }
    orders["at random"] = np.random.default_rng(1).permutation(m.rows)
    orders["as they lie in the shards"] = epoch
    results = []
    for batch in batches:
        if 4 * batch > m.rows:
            continue
        for name, order in orders.items():
            mean, error = alike(found, order, batch)
            results.append({"batch": batch, "order": name, "mean": mean, "standard_error": error})
            print(f"  batches of {batch:>6,}, {name:<32} {mean * 1e6:>9.1f} ± {error * 1e6:.1f} millionths")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    hardware.add_json(parser)
    parser.add_argument("--rows", type=int, default=1_000_013_824, help="rows of the dataset that is played")
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--global-batch", type=int, default=65_536)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2, help="loader processes a rank")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--data", metavar="DIR", help="measure how alike this dataset's rows are too")
    args = parser.parse_args()
    hardware.refuse_dirty(parser, args)
    print(hardware.describe())
    shards = -(-args.rows // SHARD_ROWS)
    sizes = np.full(shards, SHARD_ROWS)
    sizes[-1] -= shards * SHARD_ROWS - args.rows
    report: dict[str, Any] = {"benchmark": "order", "shards": shards, "opens": {}}
    print(f"{shards:,} shards, {args.ranks} ranks, {args.global_batch:,} rows an update, {args.updates} updates:")
    for name, order in both(args.rows, sizes, BLOCK_ROWS).items():
        found = opens(order, args.ranks, args.global_batch, args.updates, args.workers, args.micro_batch)
        report["opens"][name] = found
        print(f"  {name:<32} " + ", ".join(f"{what} {value:.2f}" for what, value in found.items()) + " opens a rank")
    before, now = (report["opens"][name]["mean"] for name in NAMES)
    report["ratio"] = before / now
    if args.data:
        try:
            dataset = Dataset(args.data)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        print(f"{args.data}: how alike two rows of a batch are")
        report["alike"] = measure_rows(dataset, [16, 256, 4096, 65_536])
    if args.json:
        hardware.write_json(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
