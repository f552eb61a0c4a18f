"""A rank's own time: what lies between `begin` and `end`, on the device where there is one."""

from __future__ import annotations

import time
from itertools import count

import pytest
import torch

from megabert.engine.update_result import OwnTime


def test_waits_for_other_ranks_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    own = OwnTime(torch.device("cpu"))
    own.end()  # no effect
    for _ in range(3):
        own.begin()
        own.begin()  # no effect
        own.end()
        next(clock)  # another rank is waited for
    assert own.seconds() == own.seconds() == 3.0
    own.reset()
    assert own.seconds() == 0.0


def test_time_of_queued_work_is_left_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    done: set[Event] = set()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def query(self) -> bool:
            return self in done

        def elapsed_time(self, end: Event) -> float:
            return 250.0  # ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    own = OwnTime(torch.device("cuda"))
    ends = []
    for _ in range(3):
        own.begin()
        own.end()
        ends.append(own._queued[-1][1])
    assert own.seconds() == 0.0
    done |= set(ends[:2])
    assert own.seconds() == 0.5
    own.reset()
    done.add(ends[2])
    assert own.seconds() == 0.25
