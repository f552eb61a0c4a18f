"""Stages of a build, and the journal of their finished items, from which a killed build resumes.

A stage calls `function(job, item)` for every item; it writes work files and returns an `ItemResult`. A recorded result
is verified and reused. Its key is the digest of function, job, item and all results of earlier stages with the CRC-32
of their files: a record matches if and only if the same code would write the same bytes again. `output_folder` refuses
to resume with different code. Records are small JSON files, replaced atomically.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from data_prep.common.errors import UNREADABLE
from data_prep.common.records import JOURNAL
from data_prep.executor import work_files
from data_prep.executor.pool import Pool
from data_prep.executor.work_files import BuildJob, ItemResult, total
from megabert.common import logs
from megabert.common.files import atomic_file, sync, write_atomically

# Files of a stage with at least so many bytes are deleted as soon as no later stage reads them and what was made from
# them is synced, which costs a tenth of a build of 200 MB; smaller stages are deleted with the work folder.
SWEEP_BYTES = 1 << 30

StageFunction = Callable[[BuildJob, Any], ItemResult]


class BarStream:
    """stderr for a progress bar; `write` ignores a closed stream, as `logs.write` does."""

    def write(self, text: str) -> None:
        logs.write(text, sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, sort_keys=True).encode())


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


def _run(function: StageFunction, job: BuildJob, stage: str, digest: str, numbered: tuple[int, Any]) -> ItemResult:
    """The result of an item, from its record or computed and recorded. Runs in a worker."""
    index, item = numbered
    path = Path(job.work, JOURNAL, stage, f"{index:07d}.json")
    key = _digest(function.__name__, job, item, digest)
    record = _load(path)
    # a file that was unreadable, also of a tokenizer's sample, may no longer be
    found = record["result"] if record and record["key"] == key else None
    if found and UNREADABLE not in {*found["problems"], *found["facts"].get("read", {}).get("problems", ())}:
        result = ItemResult.from_json(found)
        if _policy_allows(job, record, [result]) and work_files.files_intact(job.work, result.files):
            return result
    result = function(job, item)
    result.peak = work_files.peak_memory()
    # Not synced: a record or a file of it that was truncated by a loss of power does not match.
    with atomic_file(path, synced=False) as file:
        record = {"key": key, "on_error": job.on_error, "result": result.as_json()}
        file.write(json.dumps(record, sort_keys=True).encode())
    return result


def _policy_allows(job: BuildJob, record: dict[str, Any], results: list[ItemResult]) -> bool:
    """Whether results recorded under another `on_error` are valid for this job: not under "stop" with dropped input."""
    return job.on_error == "skip" or record["on_error"] == "stop" or not any(result.problems for result in results)


class _Finished(NamedTuple):
    key: str
    on_error: str
    results: list[ItemResult]


class Stages:
    """Runs stages on an executor, with a progress bar each on stderr, and records their items in the folder `work`.

    `everything` is the sum of all results; `figures` has the seconds and the peak process memory (bytes) of each stage.
    """

    def __init__(self, work: Path, executor: Pool, progress: bool) -> None:
        self._work, self._records, self._executor, self._progress = work, work / JOURNAL, executor, progress
        # whether this build resumes an earlier process, which finished at least one item
        self.resumed = any(self._records.rglob("*.json"))
        self.everything = ItemResult()
        self.figures: dict[str, dict[str, float]] = {}
        self._digest = ""
        self._finished: dict[str, _Finished] = {}
        self._sweeper = ThreadPoolExecutor(1)
        self._sweeping: list[Future[None]] = []

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *failed: Any) -> None:
        """End the thread, so that the work folder can be deleted."""
        self._sweeper.shutdown(wait=True, cancel_futures=True)

    def map(
        self, name: str, function: StageFunction, job: BuildJob, items: Sequence[Any], unit: str = "part"
    ) -> list[ItemResult]:
        """The results of all items, in their order; with the unit B the progress bar counts their `size`.

        The results of a stage are part of the key of the next, so a build has to run the same stages in the same order every time.
        """
        began = time.perf_counter()
        key = self._key(name, function, job, items)
        results = self._recorded(name, key, job)
        if results is None:
            results = self._compute(name, function, job, list(enumerate(items)), unit)
        # all but memory depends only on input and options
        known = [result.as_json() | {"peak": 0} for result in results]
        self._digest = _digest(json.dumps([key, known], sort_keys=True))
        self._finished[name] = _Finished(key, job.on_error, results)
        peak = max((result.peak for result in results), default=0)
        self.figures[name] = {"seconds": time.perf_counter() - began, "peak_memory": peak}
        self.everything = total([self.everything, *results])
        return results

    def map_part(
        self, name: str, function: StageFunction, job: BuildJob, items: Sequence[Any], part: tuple[int, int]
    ) -> None:
        """Compute part k of n of the items (k, k + n, …; `part` is (k, n), k from 1) for other jobs to merge. Does
        nothing if the whole stage is recorded."""
        # its key takes time, since items may be millions
        recorded = (self._records / f"{name}.json").exists()
        if not recorded or self._recorded(name, self._key(name, function, job, items), job) is None:
            self._compute(name, function, job, list(enumerate(items))[part[0] - 1 :: part[1]], "B")

    def _key(self, name: str, function: StageFunction, job: BuildJob, items: Sequence[Any]) -> str:
        return _digest(name, function.__name__, job, self._digest, *items)

    def _recorded(self, name: str, key: str, job: BuildJob) -> list[ItemResult] | None:
        """The results of a stage whose files may be gone; None without a record."""
        record = _load(self._records / f"{name}.json")
        if not record or record["key"] != key:
            return None
        results = [ItemResult.from_json(raw) for raw in record["results"]]
        return results if _policy_allows(job, record, results) else None

    def _compute(
        self, name: str, function: StageFunction, job: BuildJob, numbered: list[tuple[int, Any]], unit: str
    ) -> list[ItemResult]:
        (self._records / name).mkdir(parents=True, exist_ok=True)
        call = partial(_run, function, job, name, self._digest)
        # a bar for a single item, such as training a tokenizer, would stay at 0%: show the elapsed time instead
        shape = "{desc} {elapsed}, running" if unit != "B" and len(numbered) == 1 else None
        bar = tqdm(
            total=sum(item.size for _, item in numbered) if unit == "B" else len(numbered),
            desc=f"{name:13}",
            unit=unit,
            unit_scale=unit == "B",
            disable=not self._progress,
            file=BarStream(),
            leave=False,
            bar_format=shape,
        )
        with bar, _ticking(bar):
            return self._executor.map(call, numbered, lambda result: bar.update(result.size or 1))

    def keep(self, name: str) -> None:
        """Sync the files of a stage, if it was run, and record all its results, so that other processes can use them without reading
        the files."""
        if name in self._finished:
            for path in filter(Path.exists, self._files(name)):
                sync(path)
            self._record(name)

    def _record(self, name: str) -> None:
        key, on_error, results = self._finished[name]
        record = {"key": key, "on_error": on_error, "results": [one.as_json() for one in results]}
        write_json(self._records / f"{name}.json", record)

    def consume(self, *names: str) -> None:
        """Delete the files of those of these stages that ran and are large; no later stage may read them.

        Runs in a thread: it syncs the files of later stages to disk, records the results of the stage, then deletes
        its files. `flush` raises its errors.
        """
        for name in filter(self._finished.__contains__, names):
            files = (file for result in self._finished[name].results for file in result.files.values())
            if sum(size for size, _ in files) >= SWEEP_BYTES:
                later = list(self._finished)[list(self._finished).index(name) + 1 :]
                self._sweeping.append(self._sweeper.submit(self._consume, name, later))

    def flush(self) -> None:
        """Wait until all consumed files are deleted. Raises OSError when the disk is full."""
        while self._sweeping:
            self._sweeping.pop(0).result()

    def _consume(self, name: str, later: list[str]) -> None:
        for maker in later:
            for path in (*self._files(maker), *(self._records / maker).glob("*.json"), self._records / maker):
                if path.exists():  # otherwise consumed before
                    sync(path)
        self._record(name)
        for path in self._files(name):
            path.unlink(missing_ok=True)
        shutil.rmtree(self._records / name, ignore_errors=True)

    def _files(self, name: str) -> Iterator[Path]:
        return (self._work / file for result in self._finished[name].results for file in result.files)


@contextlib.contextmanager
def _ticking(bar: tqdm[Any]) -> Iterator[None]:
    """Refresh the bar's clock inside the block, also during long items such as the training of a tokenizer."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(1.0):
            bar.refresh()

    # no executor: Ctrl-C while it starts its thread would leave it running, and the process would wait for it without end
    ticker = threading.Thread(target=tick, daemon=True)
    try:
        if not bar.disable:
            ticker.start()
        yield
    finally:
        ended.set()
        if ticker.ident is not None:
            ticker.join()  # then nothing is drawn any more
