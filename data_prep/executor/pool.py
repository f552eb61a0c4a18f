"""Pool of workers: this process alone, forked processes, or MPI ranks.

Results may not depend on the worker. Only this file imports mpi4py.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from queue import SimpleQueue
from typing import Any, TypeVar

from data_prep.common.errors import BadInput, WorkerDied
from megabert.common.environment import cores, end_with_parent, raise_descriptor_limit, require_packages

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[Any], object]
# environment variables of launchers; srun --mpi=pmix sets no size among MPI's
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE")
PMIX, SRUN_SIZE = "PMIX_RANK", "SLURM_STEP_NUM_TASKS"


def collect_garbage_rarely() -> None:
    """Run the garbage collector rarely: scanning millions of small lists of words and ids without cycles costs 5%."""
    gc.set_threshold(200_000, 50, 100)


def _init_worker(parent: int) -> None:
    """First call in a worker. It must end with its parent, or it would write while the build is resumed."""
    collect_garbage_rarely()
    # the library's threads do not survive a fork: a batch would wait for them without end
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored by shells for background jobs
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block. Processes started inside inherit that, or each would print a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    usual, came = signal.getsignal(signal.SIGINT), list[tuple[Any, ...]]()
    # a library's thread may receive the signal all the same, and Python then calls its handler here
    if callable(usual):
        signal.signal(signal.SIGINT, lambda *call: came.append(call))
    try:
        yield
    finally:
        if callable(usual):
            signal.signal(signal.SIGINT, usual)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if came and callable(usual):
            usual(*came[0])


def launched_ranks() -> int:
    """Number of ranks started by mpirun or srun, by their environment variables; 0 without these."""
    sizes = [int(os.environ[name]) for name in MPI_SIZES if os.environ.get(name)]
    if not sizes and PMIX in os.environ:
        return int(os.environ.get(SRUN_SIZE) or 0)
    return max(sizes, default=0)


@contextlib.contextmanager
def _dead_workers_named() -> Iterator[None]:
    """Raises WorkerDied if a forked process died."""
    try:
        yield
    except BrokenProcessPool:
        raise WorkerDied(
            "a worker process died (out of memory?); the same command resumes, if need be with fewer --workers"
        ) from None


@dataclass(frozen=True)
class Pool:
    """`size` workers: this process alone, forked processes, MPI ranks or Ray tasks.

    `root_works`: rank 0 of MPI runs the build and computes items, too. `cancel()` ends running items after Ctrl-C, for
    workers that do not receive the signal.
    """

    size: int
    executor: Executor | None = None
    root_works: bool = False
    cancel: Callable[[], object] = lambda: None

    @_dead_workers_named()
    def map(self, function: Callable[[Item], Result], items: Sequence[Item], progress: Progress) -> list[Result]:
        """Results in the order of `items`; `progress(result)` is called as each arrives.

        After an error no further item is started, and it is raised after the running ones have ended, so that no worker writes
        when the caller removes the work folder.
        """
        executor = self.executor

        def report(result: Result) -> Result:
            progress(result)
            return result

        if executor is None:
            return [report(function(item)) for item in items]
        results: dict[int, Result] = {}
        waiting = iter(enumerate(items))
        numbers: dict[Future[Result], int] = {}
        ended: SimpleQueue[Future[Result]] = SimpleQueue()

        def submit(count: int) -> None:
            for index, item in islice(waiting, count):
                future = executor.submit(function, item)
                numbers[future] = index
                future.add_done_callback(ended.put)

        def take_next() -> None:
            future = ended.get()
            if not future.cancelled():
                results[numbers[future]] = report(future.result())

        try:
            # Submit at most one waiting item per worker, so that nothing has to be cancelled: if workers have died, as
            # after Ctrl-C, ProcessPoolExecutor prints a traceback for a cancelled item (fixed in Python 3.12).
            submit(len(items) if self.root_works else 2 * self.size)
            # Workers take items from the front; rank 0 takes the last waiting one.
            for future, index in reversed(numbers.items()) if self.root_works else ():
                if not future.cancel():
                    break
                results[index] = report(function(items[index]))
                while not ended.empty():
                    take_next()
            while len(results) < len(items):
                take_next()
                submit(1)
        except KeyboardInterrupt:
            self.cancel()
            raise
        finally:
            wait([future for future in numbers if not (self.root_works and future.cancel())])
        return [results[i] for i in range(len(items))]


@contextlib.contextmanager
def opened(workers: int | None, executor: str | None = None) -> Iterator[Pool | None]:
    """MPI ranks if mpirun or srun started several, else `workers` processes (default: the number of cores).

    Ranks other than 0 work until rank 0 leaves the block, then get None. Raises BadInput if `executor` does not match
    the launcher.
    """
    raise_descriptor_limit()  # a stage maps two files of every task of reading
    launched = launched_ranks()
    if launched <= 1 and executor == "mpi":
        raise BadInput("--executor mpi: mpirun or srun started no ranks; put mpirun -n N before the command")
    if launched > 1:
        if executor not in (None, "mpi"):
            raise BadInput(f"--executor {executor}: {launched} ranks were started; leave out mpirun or srun")
        if workers not in (None, 1):
            raise BadInput("--workers: under mpirun a rank is a worker; leave it out and choose mpirun -n")
        require_packages(f"{launched} ranks were started", "mpi", "mpi4py")
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor

        if MPI.COMM_WORLD.Get_size() == 1:
            raise BadInput(
                f"{launched} ranks were started, but MPI sees one: mpi4py's MPI does not support this launcher; use the mpirun "
                "that belongs to it, or independent jobs with --part K/N"
            )
        with MPICommExecutor(MPI.COMM_WORLD, root=0) as entered:
            ranks: Any = entered  # an executor on rank 0, else None; typed as MPICommExecutor
            yield None if ranks is None else Pool(MPI.COMM_WORLD.Get_size(), ranks, root_works=True)
        return
    workers = cores() if workers is None else workers
    if workers == 1:
        yield Pool(1)
        return
    # Forked before this process has threads; forking saves workers a second of imports.
    with ProcessPoolExecutor(workers, get_context("fork"), _init_worker, (os.getpid(),)) as processes:
        with interrupts_blocked(), _dead_workers_named():
            processes.submit(os.getpid).result()
        yield Pool(workers, processes)
