"""Journal of finished items of work, by which a build that was killed goes on.

A finished item is never done twice: it is taken over, checked. An item is known by a key: what is done (function, options,
item) and the digest of all that the stages before reported, CRC-32 of their files included. So a record fits exactly when
doing the item again would give the same bytes, whatever changed in between. Records are small JSON files, replaced
atomically; the files they name are compared before use.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.executor import work_files
from data_prep.executor.pool import Pool, Progress
from data_prep.executor.work_files import Done, Job
from megabert.common.files import sync, write_whole

FOLDER = "journal"
# Bytes of a stage from which on its files go as soon as nothing needs them. Before that, what was made of them must be on the
# disk, which takes a build of 200 MB a tenth of its time; the files of small stages go with the work folder.
SWEPT = 1 << 30


def write_json(path: Path, value: Any) -> None:
    write_whole(path, json.dumps(value, sort_keys=True).encode())


def _load(path: Path) -> Any:
    """The JSON value of a record, None where there is no record or only a part of one."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _digest(*values: Any) -> str:
    found = hashlib.blake2b(digest_size=16)
    for value in values:  # one at a time: items name millions of files
        found.update(repr(value).encode() + b"\0")
    return found.hexdigest()


def _record_of(job: Job, stage: str, index: int) -> Path:
    return Path(job.work, FOLDER, stage, f"{index:07d}.json")


def _run(function: Callable[[Job, Any], Done], job: Job, stage: str, digest: str, numbered: tuple[int, Any]) -> Done:
    """One item, in whatever process: taken over from its record, or done and recorded."""
    index, item = numbered
    path = _record_of(job, stage, index)
    key = _digest(function.__name__, job, item, digest)
    record = _load(path)
    if record and record["key"] == key:
        done = Done.from_json(record["done"])
        if work_files.is_whole(job.work, done.files):
            return done
    done = function(job, item)
    done.peak = work_files.peak_memory()
    # Not forced to the disk: what a loss of power leaves of a record, or of the files it names, counts for nothing.
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_bytes(json.dumps({"key": key, "done": done.as_json()}, sort_keys=True).encode())
    fresh.replace(path)
    return done


@dataclass(frozen=True)
class Stage:
    """A stage that ended: its results in the order of its items."""

    name: str
    key: str
    results: list[Done]


class Journal:
    """Runs stages over an executor and keeps what they finished in the folder `work`."""

    def __init__(self, work: Path, executor: Pool) -> None:
        self._work, self._executor = work, executor
        self._digest = ""
        self._sweeper = ThreadPoolExecutor(1)
        self._sweeping: list[Future[None]] = []

    def holds_something(self) -> bool:
        """Whether an earlier process finished an item here."""
        return any((self._work / FOLDER).rglob("*.json"))

    def map(
        self, name: str, function: Callable[[Job, Any], Done], job: Job, items: Sequence[Any], progress: Progress
    ) -> Stage:
        """`function(job, item)` of every item; `progress` is told of each result as it arrives.

        A build calls the same stages in the same order every time: what one reports decides what fits the next.
        """
        key = _digest(name, function.__name__, job, self._digest, *items)
        record = _load(self._work / FOLDER / f"{name}.json")
        if record and record["key"] == key:
            results = [Done.from_json(raw) for raw in record["results"]]
            for done in results:
                progress(done)
        else:
            (self._work / FOLDER / name).mkdir(parents=True, exist_ok=True)
            call = partial(_run, function, job, name, self._digest)
            results = self._executor.map(call, list(enumerate(items)), progress)
        self._digest = _digest(json.dumps([key, [done.identity() for done in results]], sort_keys=True))
        return Stage(name, key, results)

    def do_part(
        self,
        name: str,
        function: Callable[[Job, Any], Done],
        job: Job,
        items: Sequence[Any],
        part: tuple[int, int],
        progress: Progress,
    ) -> list[Done]:
        """Every n-th item from the k-th on, for `part` (k, n) with k from 1; other jobs do the others of the stage."""
        (self._work / FOLDER / name).mkdir(parents=True, exist_ok=True)
        call = partial(_run, function, job, name, self._digest)
        return self._executor.map(call, list(enumerate(items))[part[0] - 1 :: part[1]], progress)

    def missing(self, name: str, function: Callable[[Job, Any], Done], job: Job, items: Sequence[Any]) -> list[int]:
        """The numbers of items that nobody has a fitting record of."""
        key = _digest(name, function.__name__, job, self._digest, *items)
        record = _load(self._work / FOLDER / f"{name}.json")
        if record and record["key"] == key:
            return []
        found = []
        for index, item in enumerate(items):
            record = _load(_record_of(job, name, index))
            if not record or record["key"] != _digest(function.__name__, job, item, self._digest):
                found.append(index)
        return found

    def keep(self, stage: Stage) -> None:
        """Record the results of a stage whose files stay: other processes take them over without reading the files."""
        self._write_results(stage)

    def _write_results(self, stage: Stage) -> None:
        results = [done.as_json() for done in stage.results]
        write_json(self._work / FOLDER / f"{stage.name}.json", {"key": stage.key, "results": results})

    def consume(self, stage: Stage, *makers: Stage) -> None:
        """Delete the files of `stage`, if they are large: nothing reads them any more now that `makers` have ended.

        What was made of them is on the disk first with its records, and then the results of `stage`, so that it is never asked for again.
        Waiting for the disk is done in a thread; `settle` raises what went wrong there.
        """
        if sum(size for done in stage.results for size, _ in done.files.values()) >= SWEPT:
            self._sweeping.append(self._sweeper.submit(self._consume, stage, makers))

    def settle(self) -> None:
        """Wait until everything consumed is gone. Raises OSError when the disk is full."""
        while self._sweeping:
            self._sweeping.pop(0).result()

    def close(self) -> None:
        """End the thread, whatever became of what it does: the work folder may go afterwards."""
        self._sweeper.shutdown(wait=True, cancel_futures=True)

    def _consume(self, stage: Stage, makers: tuple[Stage, ...]) -> None:
        for maker in makers:
            records = self._work / FOLDER / maker.name
            made = (self._work / name for done in maker.results for name in done.files)
            for path in (*made, *records.glob("*.json"), records):
                if path.exists():  # else it was consumed itself
                    sync(path)
        self._write_results(stage)
        for done in stage.results:
            for name in done.files:
                (self._work / name).unlink(missing_ok=True)
        shutil.rmtree(self._work / FOLDER / stage.name, ignore_errors=True)
