"""Verification of datasets, shard by shard in several processes; what is reported never depends on how many."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tqdm import tqdm

from megabert.data import shards


def datasets(folder: str | os.PathLike[str]) -> list[Path]:
    """`folder` itself where it holds a manifest or a shard, else its sub-folders that do, by name; else `folder`.

    What was added to a dataset comes after it.
    """
    folder = Path(folder)
    places = [place for place in sorted(folder.glob("added-*")) if any(place.rglob(shards.MANIFEST))]
    added = [found for place in places for found in datasets(place)]
    if _is_dataset(folder):
        return [folder, *added]
    own = sorted(place for place in folder.glob("*") if _is_dataset(place) and place not in added)
    if own or added:
        return own + added
    return sorted(filter(_is_dataset, folder.glob("*"))) or [folder]


def _is_dataset(folder: Path) -> bool:
    """A shard without a manifest counts: a dataset that lost its manifest must not pass unseen."""
    return (folder / shards.MANIFEST).exists() or any(folder.glob("*.tar"))


def verify(folder: str | os.PathLike[str], workers: int = 1, progress: bool = False) -> Iterator[str]:
    """Every problem of the datasets in `folder`, one line each, always in the same order (see `shards.plan`).

    `workers` processes read one shard each at a time. `progress` draws a bar of bytes on stderr where that is a terminal.
    """
    parts = [part for dataset in datasets(folder) for part in shards.plan(dataset)]
    checks = [part for part in parts if isinstance(part, shards.ShardCheck)]
    workers = min(workers, len(checks))
    bar = tqdm(
        total=sum(check.shard.bytes for check in checks),
        unit="B",
        unit_scale=True,
        desc="verify",
        disable=None if progress else True,
    )
    pool = None
    try:
        if workers > 1:
            context = multiprocessing.get_context("spawn")  # a fork would copy the parent's threads' locks
            pool = ProcessPoolExecutor(workers, context, _leave_interrupts_to_the_parent)
            results = pool.map(shards.ShardCheck.problems, checks)
        else:
            results = map(shards.ShardCheck.problems, checks)
        for part in parts:
            if isinstance(part, str):
                yield part
            else:
                yield from next(results)
                bar.update(part.shard.bytes)
    finally:
        bar.close()
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
