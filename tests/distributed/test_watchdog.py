"""Verdicts of a watchdog from heartbeats, without waiting for real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megabert.distributed import hangs
from megabert.distributed.ranks import World
from megabert.distributed.watchdog import LOST_SECONDS, SILENT_SECONDS, START_SECONDS, Peer, Watchdog


def watchdog(tmp_path: Path, ranks: int = 3, timeout: float = 30.0) -> Watchdog:
    """Rank 0 of `ranks`, which has done 5 updates; the others are on other hosts and sent a heartbeat just now."""
    dog = Watchdog(World(0, 0, ranks, torch.device("cpu"), "gloo", "torchrun"), tmp_path, timeout)
    dog._peers = [Peer(rank, f"host{rank}", f"home{rank}", 100 + rank) for rank in range(ranks)]
    dog._peers[0].namespace, dog._peers[0].pid = hangs.pid_namespace(), os.getpid()
    dog.progress(5)
    return dog


def sign(dog: Watchdog, rank: int, beat: int, **changes: object) -> None:
    life = {"beat": beat, "step": 5, "doing": "a.py:1 in f", "waiting": True, "left": False}
    life |= {"entered": {"0": 12}, "unfinished": {}}
    dog._heartbeats[rank] = life | changes


def look(dog: Watchdog, seconds: int) -> None:
    for _ in range(seconds):
        for peer in dog._watched():
            dog._look_at(peer, 1.0)


def test_heartbeats_give_no_verdict(tmp_path):
    dog = watchdog(tmp_path)
    for beat in range(60):
        sign(dog, 1, beat)
        look(dog, 1)
        assert dog._find() is None


def test_a_silent_rank_of_another_host_is_lost(tmp_path):
    dog = watchdog(tmp_path)
    sign(dog, 1, 1)
    look(dog, int(LOST_SECONDS))
    assert dog._find() is None
    look(dog, 1)
    verdict = dog._find()
    assert verdict is not None and not verdict.hang
    assert verdict.text.startswith("rank 1 (host host1, pid 101) is lost") and verdict.kill == [1]
    sign(dog, 1, 2, left=True)
    look(dog, int(LOST_SECONDS) + 2)
    assert dog._find() is None


def test_a_process_gone_from_this_host_is_dead(tmp_path):
    dog = watchdog(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dog._peers[1].namespace, dog._peers[1].pid = hangs.pid_namespace(), child.pid
    sign(dog, 1, 1)
    look(dog, 3)
    assert hangs.is_alive(child.pid) and dog._find() is None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it waits to be reaped
    look(dog, 1)
    assert not hangs.is_alive(child.pid) and dog._find() is None
    look(dog, 1)
    verdict = dog._find()
    child.wait()
    assert verdict is not None and f"pid {child.pid}) died; at step 5" in verdict.text


def test_the_time_out_names_the_silent_rank(tmp_path):
    dog = watchdog(tmp_path, timeout=8)
    dog._idle = 8.0
    for beat in range(int(SILENT_SECONDS) + 1):
        sign(dog, 1, beat)
        sign(dog, 2, 0)
        look(dog, 1)
    verdict = dog._find()
    assert verdict is not None and verdict.hang and verdict.kill == [2]
    assert "rank 2" in verdict.text and "stopped or lost" in verdict.text and "rank 1" not in verdict.text


def test_the_time_out_names_the_rank_that_does_not_wait(tmp_path, monkeypatch):
    dog = watchdog(tmp_path, timeout=8)
    monkeypatch.setattr(hangs, "main_thread", lambda: ("b.py:2 in g", True))
    monkeypatch.setattr(hangs, "entered", lambda: {"0": 12})
    for beat in range(3):
        sign(dog, 1, beat, waiting=False, doing="loop.py:7 in spin")
        sign(dog, 2, beat)
        dog._idle = 8.0
        look(dog, 1)
    verdict = dog._find()
    assert verdict is not None and verdict.hang and verdict.kill == []
    assert "rank 1" in verdict.text and "loop.py:7 in spin" in verdict.text
    assert "rank 0" not in verdict.text and "rank 2" not in verdict.text
    sign(dog, 1, 9)
    look(dog, 1)
    verdict = dog._find()
    assert verdict is not None and "every rank waits for the others" in verdict.text


def test_the_time_out_names_the_rank_that_entered_less(tmp_path, monkeypatch):
    """As under NCCL: the others wait for the device, which their stacks do not show."""
    dog = watchdog(tmp_path, timeout=8)
    monkeypatch.setattr(hangs, "main_thread", lambda: ("b.py:2 in g", False))
    monkeypatch.setattr(hangs, "entered", lambda: {"0": 12})
    for beat in range(3):
        sign(dog, 1, beat, entered={"0": 11}, waiting=True, doing="reader.py:7 in read")
        sign(dog, 2, beat, waiting=False)
        dog._idle = 8.0
        look(dog, 1)
    verdict = dog._find()
    assert verdict is not None and verdict.hang and verdict.kill == []
    assert verdict.text == (
        "rank 1 (host host1, pid 101) hangs: nothing finished in 8 s, has not entered collective 12 of group 0 that 2 of "
        "3 ranks are in; at step 5, reader.py:7 in read"
    )


@pytest.mark.parametrize(("done", "limit"), [(False, START_SECONDS), (True, 8.0)])
def test_the_first_time_out_is_longer(tmp_path, done, limit):
    dog = Watchdog(World(0, 0, 1, torch.device("cpu"), "gloo", "single"), tmp_path, 8)
    if done:
        dog.progress(1)
    assert dog._limit == limit
    assert Watchdog(dog.world, tmp_path, 0)._limit == float("inf")
