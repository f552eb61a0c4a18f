"""Verdicts of a watchdog from heartbeats, without waiting for real ones, and the evidence that a rank gives of itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megabert.distributed import watchdog as module
from megabert.distributed.ranks import World, wait_for_ranks
from megabert.distributed.watchdog import LOST_SECONDS, SILENT_SECONDS, START_SECONDS, Peer, Watchdog, find_failed_ranks

RANKS = 8


def peers(count: int = RANKS, **changes: dict[int, Any]) -> list[Peer]:
    """`count` ranks past 40 collectives of the device's group and 21 of the control group, none of whose stacks is in a
    collective; `changes`: by field, the value of some ranks."""
    found = []
    for rank in range(count):
        usual = {"step": 5, "waiting": False, "entered": {"0": 40, "1": 21}}
        own = {name: of_rank[rank] for name, of_rank in changes.items() if rank in of_rank}
        found.append(Peer(rank, "n1", "", 100 + rank, **usual | own))
    return found


@pytest.mark.parametrize("failed", [0, 5])
def test_the_rank_missing_in_a_collective_is_named(failed: int) -> None:
    found = find_failed_ranks(peers(entered={failed: {"0": 39, "1": 21}}))
    assert found == {failed: "has not entered collective 40 of group 0 that 7 of 8 ranks are in"}


def test_ranks_ahead_are_not_named() -> None:
    """Nothing holds a rank back at a collective that returns at once."""
    ahead = {rank: {"0": 40 + rank, "1": 21 + rank % 3} for rank in range(RANKS) if rank != 5}
    assert list(find_failed_ranks(peers(entered=ahead | {5: {"0": 38, "1": 21}}))) == [5]


def test_a_rank_that_waits_for_a_third_is_not_named() -> None:
    """Ranks 0 to 3 wait for 4 to 7 on the device, and 4 to 6 in the control group for 7."""
    entered = {rank: {"0": 39, "1": 22} for rank in (4, 5, 6)} | {7: {"0": 39, "1": 21}}
    assert list(find_failed_ranks(peers(entered=entered))) == [7]


def test_groups_count_for_their_members_only() -> None:
    """Ranks 4 to 7 share a group more, where 6 is missing; 0 to 3 wait for them in the group of all."""
    entered = {rank: {"0": 39, "1": 21, "2": 8} for rank in (4, 5, 7)} | {6: {"0": 39, "1": 21, "2": 7}}
    assert list(find_failed_ranks(peers(entered=entered))) == [6]


@pytest.mark.parametrize("own", [{"0": 39, "1": 22}, {"0": 38, "1": 24}], ids=["one left out", "several left out"])
def test_another_order_of_collectives_is_named(own: dict[str, int]) -> None:
    found = find_failed_ranks(peers(entered={2: own}))
    assert list(found) == [2] and "collectives in another order" in found[2]


def test_halves_that_wait_for_each_other_are_both_named() -> None:
    assert len(find_failed_ranks(peers(entered={rank: {"0": 39, "1": 22} for rank in range(4)}))) == RANKS


def test_with_equal_counts_step_and_stack_decide() -> None:
    waiting = {rank: rank != 3 for rank in range(RANKS)}
    assert find_failed_ranks(peers(waiting=waiting)) == {3: "and it does not wait for other ranks"}
    assert find_failed_ranks(peers(waiting=waiting, step={1: 4})) == {1: "behind the others at step 5"}
    found = find_failed_ranks(peers(waiting=dict.fromkeys(range(RANKS), True)))
    assert found == dict.fromkeys(range(RANKS), "and every rank waits for the others")


def test_a_thousand_ranks_are_judged() -> None:
    late = {700: {"0": 39, "1": 21}, 701: {"0": 39, "1": 21}}
    assert list(find_failed_ranks(peers(1024, entered=late))) == [700, 701]


def seen_in_main_thread(action: Callable[[], object]) -> tuple[str, bool]:
    """Evidence of the main thread while it runs `action`."""
    found: list[tuple[str, bool]] = []
    timer = threading.Timer(0.1, lambda: found.append(module.main_thread()))
    timer.start()
    action()
    timer.join()
    return found[0]


def test_a_wait_for_a_collective_started_earlier_is_a_wait() -> None:
    """The wait is in C, so its innermost Python code is ours and not torch's."""
    work: Any = SimpleNamespace(wait=partial(time.sleep, 0.3))
    place, waiting = seen_in_main_thread(lambda: wait_for_ranks(work))
    assert waiting and "ranks.py" in place
    place, waiting = seen_in_main_thread(partial(time.sleep, 0.3))
    assert not waiting and "test_watchdog.py" in place


def watchdog(tmp_path: Path, timeout: float = 30.0) -> Watchdog:
    """Rank 0 of 3, which has done 5 updates; the others are on other hosts and sent a heartbeat just now."""
    dog = Watchdog(World(0, 0, 3, torch.device("cpu"), "gloo", "torchrun"), tmp_path, timeout)
    dog._peers = [Peer(rank, f"host{rank}", f"home{rank}", 100 + rank) for rank in range(3)]
    dog._peers[0].namespace, dog._peers[0].pid = module.pid_namespace(), os.getpid()
    dog.progress(5)
    return dog


def beat(dog: Watchdog, rank: int, number: int, **changes: object) -> None:
    life = {"beat": number, "step": 5, "doing": "a.py:1 in f", "waiting": True, "left": False, "entered": {"0": 12}}
    dog._heartbeats[rank] = life | changes


def look(dog: Watchdog, seconds: int) -> None:
    for _ in range(seconds):
        for peer in dog._watched():
            dog._look_at(peer, 1.0)


def test_heartbeats_give_no_verdict(tmp_path) -> None:
    dog = watchdog(tmp_path)
    for number in range(60):
        beat(dog, 1, number)
        look(dog, 1)
        assert dog._find() is None


def test_a_silent_rank_of_another_host_is_lost(tmp_path) -> None:
    dog = watchdog(tmp_path)
    beat(dog, 1, 1)
    look(dog, int(LOST_SECONDS))
    assert dog._find() is None
    look(dog, 1)
    verdict = dog._find()
    assert verdict is not None and not verdict.hang
    assert verdict.text.startswith("rank 1 (host host1, pid 101) is lost") and verdict.kill == [1]
    beat(dog, 1, 2, left=True)
    look(dog, int(LOST_SECONDS) + 2)
    assert dog._find() is None


def test_a_process_gone_from_this_host_is_dead(tmp_path) -> None:
    dog = watchdog(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dog._peers[1].namespace, dog._peers[1].pid = module.pid_namespace(), child.pid
    beat(dog, 1, 1)
    look(dog, 3)
    assert module.is_alive(child.pid) and dog._find() is None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it waits to be reaped
    look(dog, 1)
    assert not module.is_alive(child.pid) and dog._find() is None
    look(dog, 1)
    verdict = dog._find()
    child.wait()
    assert verdict is not None and f"pid {child.pid}) died; at step 5" in verdict.text


def test_the_time_out_names_the_silent_rank(tmp_path) -> None:
    dog = watchdog(tmp_path, timeout=8)
    dog._idle = 8.0
    for number in range(int(SILENT_SECONDS) + 1):
        beat(dog, 1, number)
        beat(dog, 2, 0)
        look(dog, 1)
    verdict = dog._find()
    assert verdict is not None and verdict.hang and verdict.kill == [2]
    assert "rank 2" in verdict.text and "stopped or lost" in verdict.text and "rank 1" not in verdict.text


def test_the_time_out_names_the_rank_that_entered_less(tmp_path, monkeypatch) -> None:
    """As under NCCL: the others wait for the device, which their stacks do not show."""
    dog = watchdog(tmp_path, timeout=8)
    monkeypatch.setattr(module, "main_thread", lambda: ("b.py:2 in g", False))
    monkeypatch.setattr(module, "entered", lambda: {"0": 12})
    for number in range(3):
        beat(dog, 1, number, entered={"0": 11}, waiting=True, doing="reader.py:7 in read")
        beat(dog, 2, number, waiting=False)
        dog._idle = 8.0
        look(dog, 1)
    verdict = dog._find()
    assert verdict is not None and verdict.hang and verdict.kill == []
    assert verdict.text == (
        "rank 1 (host host1, pid 101) hangs: nothing finished in 8 s, has not entered collective 12 of group 0 that 2 of "
        "3 ranks are in; at step 5, reader.py:7 in read"
    )


@pytest.mark.parametrize(("done", "limit"), [(False, START_SECONDS), (True, 8.0)])
def test_the_first_time_out_is_longer(tmp_path, done, limit) -> None:
    dog = Watchdog(World(0, 0, 1, torch.device("cpu"), "gloo", "single"), tmp_path, 8)
    if done:
        dog.progress(1)
    assert dog._limit == limit
    assert Watchdog(dog.world, tmp_path, 0)._limit == float("inf")
