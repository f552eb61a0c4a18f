"""Rows a second from a bucket beside a local folder, epoch by epoch.

    python benchmarks/bench_store.py [--json FILE] [--rate MB] [--delay MS]

The store is moto's S3 server behind a proxy that sends `rate` MB a second in all and waits `delay` ms before each request. A process
reads a dataset of 192 shards on one core (order, checksums, masking, batches) for three epochs: from the folder, from the store with a cache
that holds the dataset, and with one that holds half of it. Rounds alternate; each begins with an empty cache. `ratio` is the lowest
rate of the second and third epochs with the whole cache over the folder's, of medians over the rounds.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

import torch

from benchmarks.bench_data import MICRO, synthetic
from benchmarks.common import hardware
from megabert.common import storage
from megabert.common.environment import keep_freed_memory
from megabert.data.loader import Loader
from megabert.data.masking import MaskingVocabulary
from megabert.data.shards import Cache, Dataset
from tests.helpers.object_store import Proxy, environment, s3_server

ROWS, SHARDS, SEQ_LEN, UPDATE, EPOCHS, ROUNDS = 786_432, 192, 128, 2048, 3, 3
URL = "s3://bench/rows"


def read(place: str, cache: Cache, vocabulary: MaskingVocabulary, variables: dict[str, str]) -> dict[str, Any]:
    """Seconds until the shards in use are there, and rows a second of each epoch; in a process of its own."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    keep_freed_memory()
    dataset = Dataset(place, cache=cache)
    began = time.perf_counter()
    dataset.fetch_ahead(1, 0, lambda done, of: None)
    waited = time.perf_counter() - began
    loader, rates = Loader(dataset, vocabulary, global_batch=UPDATE, micro_batch=MICRO, seed=1), []
    for _ in range(EPOCHS):
        began = time.perf_counter()
        for _ in range(ROWS // UPDATE):
            next(loader)
        rates.append(ROWS / (time.perf_counter() - began))
    return {"wait_s": waited, "rows_per_sec": rates}


def measure(scratch: Path, rate: float, delay: float, port: int) -> dict[str, Any]:
    dataset, vocabulary = synthetic(scratch / "data", ROWS, SEQ_LEN, SHARDS)
    whole = sum(shard.bytes for shard in dataset.manifest.shards)
    proxy = Proxy(port)
    variables = environment(proxy.port)
    os.environ.update(variables)
    import s3fs

    s3fs.S3FileSystem().makedirs("bench", exist_ok=True)
    for path in sorted((scratch / "data").iterdir()):
        storage.put(path, f"{URL}/{path.name}")
    proxy.rate, proxy.delay = rate, delay
    sides = {
        "a local folder": (str(scratch / "data"), 0.0),
        "the store, a cache of all of it": (URL, 2.0),
        "the store, a cache of half of it": (URL, 0.5),
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, (place, share) in sides.items():
            cache, before = Cache(str(scratch / "cache"), share * whole / 2**30), proxy.bytes
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                runs[name].append(pool.apply(read, (place, cache, vocabulary, variables)))
            runs[name][-1]["sent_mb"] = (proxy.bytes - before) / 1e6
            shutil.rmtree(scratch / "cache", ignore_errors=True)
    proxy.close()
    return {"dataset_mb": whole / 1e6, "bytes_a_row": whole / ROWS, "sides": {n: summary(r) for n, r in runs.items()}}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, beside each of them."""
    rates = [median(run["rows_per_sec"][epoch] for run in runs) for epoch in range(EPOCHS)]
    return {"rows_per_sec": rates, "wait_s": median(run["wait_s"] for run in runs), "rounds": runs}


def main() -> None:
    parser = hardware.Parser(__doc__)
    parser.add_argument("--rate", type=float, default=50, help="MB a second of the store")
    parser.add_argument("--delay", type=float, default=100, help="milliseconds before each answer")
    args = parser.parse()
    print(hardware.describe())
    with tempfile.TemporaryDirectory(prefix="bench_store_") as name:
        scratch = Path(name)
        (scratch / "data").mkdir()
        with s3_server(scratch / "log") as port:
            result = measure(scratch, args.rate * 1e6, args.delay / 1e3, port)
    local, cached = (result["sides"][name]["rows_per_sec"] for name in list(result["sides"])[:2])
    ratio = min(a / b for a, b in zip(cached[1:], local[1:], strict=True))
    print(f"\n{result['dataset_mb']:,.0f} MB, {result['bytes_a_row']:.0f} bytes a row; rows/s of an epoch on one core")
    for name, side in result["sides"].items():
        rates = "".join(f"{rate:>10,.0f}" for rate in side["rows_per_sec"])
        print(f"  {name:<34}{rates}   waited {side['wait_s']:.1f} s, {side['rounds'][0]['sent_mb']:,.0f} MB sent")
    print(f"  ratio after the first epoch {ratio:.3f}")
    about = {"benchmark": "store", "unit": "rows/s on one core", "rate_mb_s": args.rate, "delay_ms": args.delay}
    hardware.write_json(args.json, about | {"ratio": ratio} | result)


if __name__ == "__main__":
    hardware.run(main)
