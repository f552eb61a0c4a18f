"""Verdicts of a watchdog from heartbeats, without waiting for real ones, and the evidence that a rank gives of itself."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabert.distributed import watchdog as module
from megabert.distributed.ranks import World, wait_for_ranks
from megabert.distributed.watchdog import LOST_SECONDS, SILENT_SECONDS, START_SECONDS, Peer, Watchdog, find_failed_ranks
from tests.helpers.ranks import run_ranks

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


def counts(first: int, second: int, more: int = 0) -> dict[str, int]:
    return {"0": first, "1": second} | ({"2": more} if more else {})


@pytest.mark.parametrize(
    ("entered", "failed", "order"),
    [
        ({5: counts(39, 21)}, [5], False),
        # nothing holds a rank back at a collective that returns at once
        ({r: counts(40 + r, 21 + r % 3) for r in range(RANKS)} | {5: counts(38, 21)}, [5], False),
        # ranks 0 to 3 wait for 4 to 7 on the device, and 4 to 6 in the control group for 7
        (dict.fromkeys((4, 5, 6), counts(39, 22)) | {7: counts(39, 21)}, [7], False),
        # ranks 4 to 7 share a group more, where 6 is missing; 0 to 3 wait for them in the group of all
        (dict.fromkeys((4, 5, 7), counts(39, 21, 8)) | {6: counts(39, 21, 7)}, [6], False),
        ({2: counts(39, 22)}, [2], True),
        ({2: counts(38, 24)}, [2], True),
        # halves that wait for each other
        (dict.fromkeys(range(4), counts(39, 22)), [*range(RANKS)], True),
    ],
    ids=["missing", "others ahead", "a chain", "a group of some", "one left out", "several left out", "halves"],
)
def test_ranks_missing_in_a_collective_are_named(entered, failed, order) -> None:
    found = find_failed_ranks(peers(entered=entered))
    assert sorted(found) == failed
    for text in found.values():
        assert "has not entered collective" in text and ("in another order" in text) is order


def test_with_equal_counts_step_and_stack_decide() -> None:
    waiting = {rank: rank != 3 for rank in range(RANKS)}
    assert find_failed_ranks(peers(waiting=waiting)) == {3: "and it does not wait for other ranks"}
    assert find_failed_ranks(peers(waiting=waiting, step={1: 4})) == {1: "behind the others at step 5"}
    found = find_failed_ranks(peers(waiting=dict.fromkeys(range(RANKS), True)))
    assert found == dict.fromkeys(range(RANKS), "and every rank waits for the others")


def entered_by_rank(world: World) -> list[dict[str, int]]:
    """Counts of torch's groups when rank 1 has left a sum out, and when rank 2 has taken another group's first."""
    device, control = (dist.new_group(backend="gloo") for _ in range(2))
    found, works = [], []
    for failed, first, last in ((1, [], [device, control]), (2, [control], [device])):
        for groups in ([device, control], first if world.rank == failed else [device]):
            works += [dist.all_reduce(torch.ones(9), group=group, async_op=True) for group in groups]
        found.append(module.entered())
        for group in last if world.rank == failed else [control]:
            works.append(dist.all_reduce(torch.ones(9), group=group, async_op=True))
    for work in works:
        work.wait()
    return found


@pytest.mark.dist
def test_counts_of_real_collectives_name_the_failed_rank() -> None:
    found = run_ranks(4, entered_by_rank)
    for number, failed in enumerate((1, 2)):
        verdict = find_failed_ranks(peers(4, entered={rank: of_rank[number] for rank, of_rank in enumerate(found)}))
        assert list(verdict) == [failed] and ("in another order" in verdict[failed]) is (failed == 2)


def seen_in_main_thread(action: Callable[[], object]) -> tuple[str, bool]:
    """Evidence of the main thread while it runs `action`."""
    found: list[tuple[str, bool]] = []
    timer = threading.Timer(0.1, lambda: found.append(module.main_thread()))
    timer.start()
    action()
    timer.join()
    return found[0]


def test_wait_for_an_earlier_collective_is_a_wait() -> None:
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
            dog._update_peer(peer, 1.0)


def test_a_silent_rank_of_another_host_is_lost(tmp_path) -> None:
    dog = watchdog(tmp_path)
    for number in range(60):
        beat(dog, 1, number)
        look(dog, 1)
        assert dog._find(dog._limit) is None
    look(dog, int(LOST_SECONDS) - 1)
    assert dog._find(dog._limit) is None
    look(dog, 1)
    verdict = dog._find(dog._limit)
    assert verdict is not None and not verdict.hang
    assert verdict.text.startswith("rank 1 (host host1, pid 101) is lost") and verdict.kill == [1]
    beat(dog, 1, 60, left=True)
    look(dog, int(LOST_SECONDS) + 2)
    assert dog._find(dog._limit) is None


def test_silent_store_of_another_host_is_lost(tmp_path) -> None:
    """Rank 1 looks at rank 0, whose host has no network any more: its store neither answers nor closes the connection."""
    dog = watchdog(tmp_path)
    dog.world = replace(dog.world, rank=1)
    dog._peers[1].namespace = "another"
    for silent, lost in ((LOST_SECONDS - 1, False), (LOST_SECONDS, True)):
        dog._store_silent = silent
        verdict = dog._find(dog._limit)
        assert (verdict is not None) == lost
    assert verdict is not None and verdict.hosts == [dog._peers[0].host] and "its store does not answer" in verdict.text
    dog._peers[1].namespace = dog._peers[0].namespace
    assert dog._find(dog._limit) is None  # on the same host the process is looked at


@pytest.mark.parametrize(
    ("beats", "first", "second", "kill", "said"),
    [
        (
            *(int(SILENT_SECONDS) + 1, {}, {"beat": 0}, [2]),
            "rank 2 (host host2, pid 102) is stopped or lost: it sends no heartbeat; at step 5, a.py:1 in f",
        ),
        # as under NCCL: the others wait for the device, which their stacks do not show
        (
            *(3, {"entered": {"0": 11}, "doing": "reader.py:7 in read"}, {"waiting": False}, []),
            "rank 1 (host host1, pid 101) hangs: nothing finished in 8 s, has not entered collective 12 of group 0 that 2 of "
            "3 ranks are in; at step 5, reader.py:7 in read",
        ),
    ],
    ids=["silent", "entered less"],
)
def test_time_out_names_the_failed_rank(beats, first, second, kill, said, tmp_path, monkeypatch) -> None:
    """The verdict of rank 0 after so many heartbeats of ranks 1 and 2."""
    monkeypatch.setattr(module, "main_thread", lambda: ("b.py:2 in g", False))
    monkeypatch.setattr(module, "entered", lambda: {"0": 12})
    dog = watchdog(tmp_path, timeout=8)
    for number in range(beats):
        beat(dog, 1, number, **first)
        beat(dog, 2, second.get("beat", number), **second)
        dog._idle = 8.0
        look(dog, 1)
    verdict = dog._find(dog._limit)
    assert verdict is not None and (verdict.text, verdict.kill, verdict.hang) == (said, kill, True)


def test_a_rank_that_works_is_waited_for(tmp_path) -> None:
    """Rank 1 writes a checkpoint, and sent a sign of that 3 s ago; ranks 0 and 2 wait for it."""
    dog = watchdog(tmp_path, timeout=8)
    for idle in (3.0, 8.0):
        for number in range(3):
            beat(dog, 1, number + int(idle), waiting=False, idle=idle)
            beat(dog, 2, number + int(idle), idle=9.0)
            dog._idle = 9.0
            look(dog, 1)
        verdict = dog._find(dog._limit)
        assert (verdict is None) == (idle < 8)
    assert verdict is not None and verdict.hang and "rank 1 (host host1, pid 101) hangs" in verdict.text


def test_the_limit_follows_the_slowest_step_of_training(world, tmp_path, monkeypatch) -> None:
    """An opening of 1.2 s does not count; a gap of 0.5 s in training makes the limit of 0.2 s three times that."""
    monkeypatch.setattr(module, "TICK", 0.05)
    dog, limits = Watchdog(world, tmp_path, 0.2), []
    dog.start()
    for pause in (1.2, 0.3, 0.02):
        time.sleep(pause)
        dog.progress(int(pause < 1))
        time.sleep(0.2)  # until the watchdog has seen that
        limits.append(dog._limit)
        if pause > 1:
            dog.training_started()
    dog.stop(good=True)
    assert limits[0] == START_SECONDS and 0.6 < limits[1] == limits[2] < 3, limits


def test_limit_is_longer_before_and_after_training(tmp_path) -> None:
    dog = Watchdog(World(0, 0, 1, torch.device("cpu"), "gloo", "single"), tmp_path, 8)
    assert dog._limit == START_SECONDS and Watchdog(dog.world, tmp_path, 0)._limit == float("inf")
    dog.progress()  # a step of the opening, a micro-step of the first update
    assert dog._limit == START_SECONDS
    dog.progress(1)
    assert dog._limit == 8.0
    dog.training_ended()
    assert 15 * 60 < dog._limit < 20 * 60  # before the time-out of the collective in which the others wait
    dog.training_started()  # the next of several fine-tuning runs
    assert dog._limit == 8.0


def test_clock_stands_still_while_suspended(tmp_path, monkeypatch) -> None:
    dog, now = Watchdog(World(0, 0, 1, torch.device("cpu"), "gloo", "single"), tmp_path, 0), [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    dog._ticked, dog._peers, dog.started = (100.0, 0.0), [Peer(0, "", "", os.getpid())], True
    before, now[0] = dog.clock(), 101.0
    assert dog.clock() - before == 1.0
    now[0] = 3700.0  # an hour later the main thread may run before `_judge`
    assert dog.clock() - before == 2.0

    def sleep(seconds: float) -> None:
        now[0] = 3700.0
        dog._leaving.set()

    monkeypatch.setattr(module.time, "sleep", sleep)
    now[0] = 100.0
    dog._judge()
    assert now[0] == 3700.0 and dog.clock() - before == 2.0
