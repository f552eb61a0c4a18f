"""Run a function on N real gloo ranks, each its own process; a failure on any rank fails the test with its traceback."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

# Forked by a server that has imported torch and DeepSpeed and has no threads: a fork of the test's own process might hang in
# one of torch's locks, and a fresh interpreter spends seconds on the imports.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.helpers.rank_imports"])


def run_ranks(size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Results of `function(world, *args)` on every rank, in rank order. `function` is a module's top-level one.

    When a rank is killed by a signal, every result is that signal's negative number; the others are killed too.
    """
    results: Any = CONTEXT.Queue()
    folder, here = tempfile.mkdtemp(prefix="ranks-"), (os.getcwd(), dict(os.environ))
    meeting = os.path.join(folder, "store")  # a file: a port that is free now may be another program's a moment later
    workers = [
        CONTEXT.Process(target=_rank, args=(here, rank, size, meeting, results, function, args), daemon=True)
        for rank in range(size)
    ]
    for worker in workers:
        worker.start()
    found: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(found) < size:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{function.__name__}: only ranks {sorted(found)} finished in {timeout} s")
            try:
                rank, good, value = results.get(timeout=0.2)
            except queue.Empty:
                if killed := _signals(workers):
                    return [killed[0]] * size
                continue
            if not good:
                time.sleep(0.5)  # the failure may be that of a rank whose peer was killed
                if killed := _signals(workers):
                    return [killed[0]] * size
                raise AssertionError(f"rank {rank} of {size} failed:\n{value}")
            found[rank] = pickle.loads(value)
    finally:
        for worker in workers:
            worker.join(timeout=5 if len(found) == size else 0)
            if worker.is_alive() and worker.pid:
                os.kill(worker.pid, signal.SIGKILL)
                worker.join()
        shutil.rmtree(folder)
    return [found[rank] for rank in range(size)]


def _signals(workers: list[Any]) -> list[int]:
    return [worker.exitcode for worker in workers if worker.exitcode is not None and worker.exitcode < 0]


def _rank(
    here: tuple[str, dict[str, str]], rank: int, size: int, meeting: str, results: Any,
    function: Callable[..., Any], args: Any,
) -> None:  # fmt: skip
    folder, environment = here  # of the test, not of the server
    os.chdir(folder)
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    place["MASTER_PORT"] = "1"  # never used: the group is started here
    os.environ.clear()
    os.environ.update(environment | place | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    try:
        import torch

        from megabert.distributed import ranks

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=size)
        world = ranks.init(ranks.discover())
        # bytes: a tensor sent as itself is a file descriptor of a process that may be gone when it is read
        results.put((rank, True, pickle.dumps(function(world, *args))))
        world.barrier()
        ranks.shutdown()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
