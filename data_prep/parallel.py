"""The same function over the same items, by this process, a pool of processes or MPI ranks: results by item.

Nothing that a result holds may depend on which of them made it. Only this file knows of mpi4py.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from data_prep.problems import BadInput

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[Any], None]
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE")


def default_workers() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Local:
    """This process alone (`workers` 1) or a pool of `workers` processes, at most two items each in flight."""

    is_root = True

    def __init__(self, workers: int) -> None:
        self.size = workers
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers > 1 else None

    def map(self, function: Callable[[Item], Result], items: Sequence[Item], done: Progress) -> list[Result]:
        """Results in the order of `items`; `done(result)` is called as each arrives."""
        if self._pool is None:
            results = []
            for item in items:
                results.append(function(item))
                done(results[-1])
            return results
        running: dict[Any, int] = {}
        try:
            return self._map(function, items, done, running)
        except BrokenProcessPool:
            raise BadInput(
                "a worker process died (killed for memory?); give fewer --workers or more memory"
            ) from None
        finally:
            # After an error nobody may still be writing when the caller removes the work folder.
            for future in running:
                future.cancel()
            wait(running)

    def _map(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        done: Progress,
        running: dict[Any, int],
    ) -> list[Result]:
        assert self._pool is not None
        found: dict[int, Result] = {}
        coming = iter(enumerate(items))
        while True:
            while len(running) < 2 * self.size and (following := next(coming, None)) is not None:
                running[self._pool.submit(function, following[1])] = following[0]
            if not running:
                return [found[i] for i in range(len(items))]
            finished = wait(running, return_when=FIRST_COMPLETED).done
            for future in sorted(finished, key=running.__getitem__):
                index = running.pop(future)
                found[index] = future.result()
                done(found[index])

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


class Ranks:
    """MPI ranks: rank 0 runs the build and its share of each map, the others wait in `serve` for theirs."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD
        self.size = self._comm.Get_size()
        self.rank = self._comm.Get_rank()
        self.is_root = self.rank == 0

    def _share(
        self, function: Callable[[Any], Any], items: Sequence[Any], done: Progress
    ) -> list[tuple[int, Any]]:
        """(index, result) of this rank's items, ending early with (index, exception)."""
        mine: list[tuple[int, Any]] = []
        for index in range(self.rank, len(items), self.size):
            try:
                mine.append((index, function(items[index])))
                done(mine[-1][1])
            except (BadInput, ValueError, OSError) as error:
                mine.append((index, error))
                break
            except Exception:
                traceback.print_exc()
                sys.stderr.flush()
                self._comm.Abort(1)
        return mine

    def map(self, function: Callable[[Item], Result], items: Sequence[Item], done: Progress) -> list[Result]:
        """As Local.map, but `done` sees the results of rank 0 alone. Raises the error of the first failing item."""
        self._comm.bcast((function, items), root=0)
        shares = self._comm.gather(self._share(function, items, done), root=0)
        merged = sorted((entry for share in shares or () for entry in share), key=lambda entry: entry[0])
        for _, result in merged:
            if isinstance(result, Exception):
                raise result
        return [result for _, result in merged]

    def serve(self) -> None:
        """Work for rank 0 until it closes."""
        while (call := self._comm.bcast(None, root=0)) is not None:
            function, items = call
            self._comm.gather(self._share(function, items, lambda _: None), root=0)

    def close(self) -> None:
        if self.is_root:
            self._comm.bcast(None, root=0)


def make(workers: int | None) -> Local | Ranks:
    """Ranks when mpirun started several of them, else a pool of `workers` processes (default: the cores)."""
    if any(int(os.environ.get(name) or 1) > 1 for name in MPI_SIZES):
        if workers not in (None, 1):
            raise BadInput("--workers: under mpirun a rank is a worker; leave it out and choose mpirun -n")
        return Ranks()
    if workers is None:
        workers = 1 if any(name in os.environ for name in MPI_SIZES) else default_workers()
    return Local(workers)
