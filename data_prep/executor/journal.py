"""Journal of finished items of work, from which a killed build resumes.

The record of a finished item is checked and used instead of computing it again. Its key is the digest of function, options and item,
and of all results of earlier stages including the CRC-32 of their files, so that a record matches exactly if computing the item again
by the same code would give the same bytes; `output_folder` refuses to resume with other code. Records are small JSON files, replaced
atomically; the files they name are compared before use.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.executor import work_files
from data_prep.executor.pool import Pool, Progress
from data_prep.executor.work_files import BuildJob, ItemResult, total
from megabert.common import logs
from megabert.common.files import appearing_file, sync, write_whole

FOLDER = "journal"
# Bytes of a stage from which on its files are deleted as soon as nothing needs them. Their results have to be synced to the disk
# before, a tenth of the time of a build of 200 MB; files of smaller stages are deleted with the work folder.
SWEPT = 1 << 30


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, sort_keys=True).encode())


def _load(path: Path) -> Any:
    """The JSON value of a record, None if it is missing or truncated."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _digest(*values: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for value in values:  # one at a time, since items name millions of files
        digest.update(repr(value).encode() + b"\0")
    return digest.hexdigest()


def _record_path(job: BuildJob, stage: str, index: int) -> Path:
    return Path(job.work, FOLDER, stage, f"{index:07d}.json")


def _run(
    function: Callable[[BuildJob, Any], ItemResult], job: BuildJob, stage: str, digest: str, numbered: tuple[int, Any]
) -> ItemResult:
    """The result of an item, from its record or computed and recorded. Runs in a worker."""
    index, item = numbered
    path = _record_path(job, stage, index)
    key = _digest(function.__name__, job, item, digest)
    record = _load(path)
    if record and record["key"] == key:
        result = ItemResult.from_json(record["result"])
        if work_files.is_whole(job.work, result.files):
            return result
    result = function(job, item)
    result.peak = work_files.peak_memory()
    # Not synced: a record or a file of it that was truncated by a loss of power does not match.
    with appearing_file(path, synced=False) as file:
        file.write(json.dumps({"key": key, "result": result.as_json()}, sort_keys=True).encode())
    return result


@dataclass(frozen=True)
class Stage:
    """A finished stage: results in the order of the items."""

    name: str
    key: str
    results: list[ItemResult]


class Journal:
    """Runs stages on an executor and records their items in the folder `work`."""

    def __init__(self, work: Path, executor: Pool) -> None:
        self._work, self._executor = work, executor
        self._digest = ""
        self._sweeper = ThreadPoolExecutor(1)
        self._sweeping: list[Future[None]] = []

    def holds_something(self) -> bool:
        """Whether an earlier process has finished an item."""
        return any((self._work / FOLDER).rglob("*.json"))

    def map(
        self,
        name: str,
        function: Callable[[BuildJob, Any], ItemResult],
        job: BuildJob,
        items: Sequence[Any],
        progress: Progress,
    ) -> Stage:
        """`function(job, item)` of every item; `progress` is called with each result as it arrives.

        The results of a stage are part of the key of the next, so a build has to run the same stages in the same order every time.
        """
        key = _digest(name, function.__name__, job, self._digest, *items)
        record = _load(self._work / FOLDER / f"{name}.json")
        if record and record["key"] == key:
            results = [ItemResult.from_json(raw) for raw in record["results"]]
            for result in results:
                progress(result)
        else:
            (self._work / FOLDER / name).mkdir(parents=True, exist_ok=True)
            call = partial(_run, function, job, name, self._digest)
            results = self._executor.map(call, list(enumerate(items)), progress)
        self._digest = _digest(json.dumps([key, [result.identity() for result in results]], sort_keys=True))
        return Stage(name, key, results)

    def map_part(
        self,
        name: str,
        function: Callable[[BuildJob, Any], ItemResult],
        job: BuildJob,
        items: Sequence[Any],
        part: tuple[int, int],
        progress: Progress,
    ) -> None:
        """Compute every n-th item from the k-th on, for `part` (k, n) with k from 1; other jobs compute the others."""
        (self._work / FOLDER / name).mkdir(parents=True, exist_ok=True)
        call = partial(_run, function, job, name, self._digest)
        self._executor.map(call, list(enumerate(items))[part[0] - 1 :: part[1]], progress)

    def keep(self, stage: Stage) -> None:
        """Record all results of a stage, so that other processes can use them without reading its files."""
        results = [result.as_json() for result in stage.results]
        write_json(self._work / FOLDER / f"{stage.name}.json", {"key": stage.key, "results": results})

    def consume(self, stage: Stage, *makers: Stage) -> None:
        """Delete the files of `stage` if they are large. Only `makers` read them, and these have ended.

        The files and records of `makers` are synced to the disk first, then the results of `stage` are recorded. A thread waits for
        the disk; `flush` raises its errors.
        """
        if sum(size for result in stage.results for size, _ in result.files.values()) >= SWEPT:
            self._sweeping.append(self._sweeper.submit(self._consume, stage, makers))

    def flush(self) -> None:
        """Wait until all consumed files are deleted. Raises OSError when the disk is full."""
        while self._sweeping:
            self._sweeping.pop(0).result()

    def close(self) -> None:
        """End the thread, so that the work folder can be deleted."""
        self._sweeper.shutdown(wait=True, cancel_futures=True)

    def _consume(self, stage: Stage, makers: tuple[Stage, ...]) -> None:
        for maker in makers:
            records = self._work / FOLDER / maker.name
            made = (self._work / name for result in maker.results for name in result.files)
            for path in (*made, *records.glob("*.json"), records):
                if path.exists():  # otherwise consumed before
                    sync(path)
        self.keep(stage)
        for result in stage.results:
            for name in result.files:
                (self._work / name).unlink(missing_ok=True)
        shutil.rmtree(self._work / FOLDER / stage.name, ignore_errors=True)


@contextlib.contextmanager
def ticking(bar: tqdm[Any]) -> Iterator[None]:
    """Refresh the bar's clock inside the block, also during long items such as the training of a tokenizer."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(1.0):
            bar.refresh()

    ticker = threading.Thread(target=tick, daemon=True)
    if not bar.disable:
        ticker.start()
    try:
        yield
    finally:
        ended.set()
        if ticker.is_alive():
            ticker.join()  # so that nothing is drawn after the bar is cleared


class Stages:
    """Runs stages with a progress bar each on stderr; `everything` is the sum of their results."""

    def __init__(self, journal: Journal, progress: bool) -> None:
        self.journal, self._progress = journal, progress
        self.everything = ItemResult()
        # seconds of each stage, and bytes of its largest process
        self.figures: dict[str, dict[str, float]] = {}

    def map(
        self, name: str, function: Any, job: BuildJob, items: Sequence[Any], unit: str = "part", size: int | None = None
    ) -> Stage:
        """`function(job, item)` or the recorded result of every item; the bar has `size` steps."""
        began = time.perf_counter()
        with self._bar(name, len(items) if size is None else size, unit) as bar, ticking(bar):
            stage = self.journal.map(name, function, job, items, lambda result: bar.update(result.size or 1))
        peak = max((result.peak for result in stage.results), default=0)
        self.figures[name] = {"seconds": time.perf_counter() - began, "peak_memory": peak}
        self.everything = total([self.everything, *stage.results])
        return stage

    def map_part(self, name: str, function: Any, job: BuildJob, items: Sequence[Any], part: tuple[int, int]) -> None:
        """Compute part (k, n) of the items, which have a `size` in bytes."""
        size = sum(item.size for item in items[part[0] - 1 :: part[1]])
        with self._bar(name, size, "B") as bar:
            self.journal.map_part(name, function, job, items, part, lambda r: bar.update(r.size))

    def _bar(self, name: str, size: int, unit: str) -> tqdm[Any]:
        return tqdm(
            total=size,
            desc=f"{name:13}",
            unit=unit,
            unit_scale=unit == "B",
            disable=not self._progress,
            file=logs.BarStream(),
            leave=False,
        )
