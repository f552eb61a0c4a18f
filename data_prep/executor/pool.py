"""The same function over the same items, by this process, a pool of processes or MPI ranks: results by item.

Nothing that a result holds may depend on which of them made it. Only this file knows of mpi4py.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from data_prep.common.errors import BadInput, WorkerDied
from data_prep.executor.shared_cache import Channels

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[Any], None]
TAG = 1
PR_SET_PDEATHSIG = 1  # linux/prctl.h
POLL_SECONDS = 0.001
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE")


def default_workers() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def collect_seldom() -> None:
    """Words and their ids are millions of small lists in no cycle: looking for one costs a twentieth of the time."""
    gc.set_threshold(200_000, 50, 100)


def _begin_worker(parent: int, channels: Channels) -> None:
    """Runs first in a worker: it ends with its parent, or it would write beside the build that goes on."""
    collect_seldom()
    channels.join()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Local:
    """This process alone (`workers` 1) or a pool of `workers` processes, at most two items each in flight."""

    is_root = True

    def __init__(self, workers: int) -> None:
        self.size = workers
        self._pool = None
        if workers > 1:
            # Forked before this process has threads of its own: nothing is imported a second time.
            start = (os.getpid(), Channels(workers))
            self._pool = ProcessPoolExecutor(workers, get_context("fork"), _begin_worker, start)
            self._pool.submit(os.getpid).result()

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
            raise WorkerDied(
                "a worker process died (killed for memory?); the same command goes on, with fewer --workers perhaps"
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
    """MPI ranks: each takes the next item when it is free; rank 0 runs the build, works too, and hands out the items.

    A thread of rank 0 answers the others. It looks for messages and sleeps, so that it costs no core.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise BadInput("this MPI was started without MPI_THREAD_MULTIPLE, which data_prep needs")
        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.size = self._comm.Get_size()
        self.rank = self._comm.Get_rank()
        self.is_root = self.rank == 0

    def _attempt(self, function: Callable[[Any], Any], item: Any) -> Any:
        """The result of an item, or the exception that is its user's to mend; any other ends the job."""
        try:
            return function(item)
        except (BadInput, ValueError, OSError) as error:
            return error
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            self._comm.Abort(1)

    def map(self, function: Callable[[Item], Result], items: Sequence[Item], done: Progress) -> list[Result]:
        """As Local.map. After an error no further item is begun; the error of the first failing item is raised."""
        self._comm.bcast((function, items), root=0)
        found: dict[int, Any] = {}
        coming = iter(range(len(items)))
        lock, failed = threading.Lock(), threading.Event()

        def take(index: int | None, result: Any) -> int | None:
            """Record a result, if there is one, and choose the next item; None when there is none."""
            with lock:
                if index is not None:
                    found[index] = result
                    if isinstance(result, Exception):
                        failed.set()
                    else:
                        done(result)
                return None if failed.is_set() else next(coming, None)

        def answer() -> None:
            status = self._mpi.Status()
            working = self.size - 1
            while working:
                if not self._comm.iprobe(self._mpi.ANY_SOURCE, TAG, status):
                    time.sleep(POLL_SECONDS)
                    continue
                source = status.Get_source()
                following = take(*self._comm.recv(source=source, tag=TAG))
                self._comm.send(following, dest=source, tag=TAG)
                working -= following is None

        server = threading.Thread(target=answer)
        server.start()
        index = take(None, None)
        while index is not None:
            index = take(index, self._attempt(function, items[index]))
        server.join()
        for _, result in sorted(found.items()):
            if isinstance(result, Exception):
                raise result
        return [found[i] for i in range(len(items))]

    def serve(self) -> None:
        """Work for rank 0 until it closes."""
        while (call := self._comm.bcast(None, root=0)) is not None:
            function, items = call
            mine: tuple[int | None, Any] = (None, None)
            while (
                index := self._comm.sendrecv(mine, dest=0, sendtag=TAG, source=0, recvtag=TAG)
            ) is not None:
                mine = index, self._attempt(function, items[index])

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
