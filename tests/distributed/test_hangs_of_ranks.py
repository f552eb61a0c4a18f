"""Hangs of eight real ranks under collectives that return at once and are waited for later, as NCCL's: the failed rank is
named, and no other. gloo stands for NCCL; ranks are forked after the imports, so that eight of them are cheap."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megabert.distributed import ranks
from megabert.distributed.ranks import World
from megabert.distributed.watchdog import Watchdog
from tests.integration.conftest import free_port

pytestmark = [pytest.mark.dist, pytest.mark.slow]
RANKS, TIMEOUT = 8, 9.0  # seconds, of which the ranks have seven to sync
BAD_STEP = 3
Fault = Callable[[World, dist.ProcessGroup], object]


def synchronize(works: list[dist.Work]) -> None:
    """The device's queue is worked off; as in CUDA's own, nothing here is torch's code of hangs."""
    while not all(work.is_completed() for work in works):
        time.sleep(0.01)


def all_reduce(group: dist.ProcessGroup, size: int = 1000) -> dist.Work:
    return dist.all_reduce(torch.ones(size), group=group, async_op=True)


def updates(world: World, device: dist.ProcessGroup, watchdog: Watchdog, fault: Fault, failed: int) -> None:
    """Two sums on the device an update, waited for every second one, and flags between the hosts, an update late."""
    works, flags = [], world.start_gather([0])
    for step in range(1, 200):
        if step == BAD_STEP and world.rank == failed:
            fault(world, device)
        works += [all_reduce(device), all_reduce(device)]
        if step % 2 == 0:
            synchronize(works)
            works = []
        flags()
        flags = world.start_gather([step])
        watchdog.progress(step)


def loops(world: World, device: dist.ProcessGroup) -> None:
    while True:
        pass


def gathers_alone(world: World, device: dist.ProcessGroup) -> None:
    """What only one rank decided to do."""
    world.gather(["something seen by one rank"])


def leaves_sums_out(world: World, device: dist.ProcessGroup) -> None:
    global all_reduce
    all_reduce = lambda group, size=1000: dist.barrier(async_op=True)  # noqa: E731


def rank_process(rank: int, port: int, folder: Path, fault: Fault, failed: int) -> None:
    """In the child: it ends here, with its output in the folder."""
    # not the test's own streams, which its runner has taken
    sys.stdout = sys.stderr = open(folder / f"rank{rank}.txt", "w")  # noqa: SIM115
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        world = ranks.init(ranks.discover())
        device = dist.new_group(backend="gloo")
        watchdog = Watchdog(world, folder, TIMEOUT)
        watchdog.start()
        try:
            updates(world, device, watchdog, fault, failed)
        except RuntimeError:  # a rank has acted on the verdict before this one
            watchdog.explain()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


@pytest.mark.parametrize(
    ("fault", "failed"),
    [(loops, 5), (gathers_alone, 2), (leaves_sums_out, 6)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_failed_rank_of_eight_is_named(fault, failed, tmp_path) -> None:
    port, children = free_port(), []
    torch.set_num_threads(1)
    try:
        for rank in range(RANKS):
            if not (child := os.fork()):
                rank_process(rank, port, tmp_path, fault, failed)
            children.append(child)
        deadline, codes = time.monotonic() + 60, {}
        while len(codes) < RANKS and time.monotonic() < deadline:
            for rank, child in enumerate(children):
                if rank not in codes and os.waitpid(child, os.WNOHANG)[0]:
                    codes[rank] = True
            time.sleep(0.1)
    finally:
        for rank, child in enumerate(children):
            if rank not in codes:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    said = [(tmp_path / f"rank{rank}.txt").read_text() for rank in range(RANKS)]
    assert len(codes) == RANKS, "\n".join(said)
    (line,) = [line for text in said for line in text.splitlines() if line.startswith("error:")]
    assert f"error: rank {failed} (host " in line and line.count("(host ") == 1, line
    assert "has not entered" in line and ("another order" in line) == (fault in (leaves_sums_out, gathers_alone))
    if fault is loops:
        assert f"in {fault.__name__}" in line
        assert f"in {fault.__name__}" in (tmp_path / f"hang-{failed}.txt").read_text()
