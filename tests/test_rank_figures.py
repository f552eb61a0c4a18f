"""A rank that is slower than the others for long is named, with what it loses its time by."""

from __future__ import annotations

import json
import logging.handlers
import queue
import time
from pathlib import Path
from typing import Any

import pytest

from megabert.common.logs import log
from megabert.distributed.ranks import World
from megabert.metrics import Stragglers, median
from tests.helpers import tiny
from tests.helpers.loop import Killed
from tests.helpers.ranks import run_ranks
from tests.test_trainer import trainer

RANKS = 8


def seconds(updates: int, **slow: float) -> list[float]:
    """Of eight ranks, within 2% of each other; `slow`: times as long, of rank `r<number>`."""
    return [updates * 0.2 * (1 + 0.0025 * rank) * slow.get(f"r{rank}", 1.0) for rank in range(RANKS)]


@pytest.mark.parametrize("interval", [10, 30, 200])
def test_a_rank_that_is_10_percent_slower_for_50_updates_is_named_once(interval: int) -> None:
    found, stragglers, done = [], Stragglers(), 0
    while done < 200:
        done += interval
        for slow in stragglers.add(interval, seconds(interval, r3=1.1), [0.0] * RANKS):
            found.append((slow.rank, round(slow.ratio, 2), slow.waits))
            assert 50 <= done < 50 + interval
    assert found == [(3, 1.1, 0.0)] and list(stragglers.named) == [3]


def test_a_rank_that_was_slow_and_is_no_longer_may_be_named_again() -> None:
    stragglers = Stragglers()
    named = []
    for factor in (1.0, 1.0, 1.2, 1.2, 1.0, 1.0, 1.2, 1.2):
        named.append([slow.rank for slow in stragglers.add(25, seconds(25, r5=factor), [0.0] * RANKS)])
    assert named == [[], [], [5], [], [], [], [5], []]


def test_noise_and_one_slow_moment_name_nobody() -> None:
    stragglers = Stragglers()
    for number in range(40):
        one = {f"r{number % RANKS}": 1.3}
        assert not stragglers.add(5, seconds(5, **one), [0.0] * RANKS)


def test_waiting_for_data_counts_and_is_told_apart() -> None:
    wait = [0.0] * RANKS
    wait[6] = 4.0
    (slow,) = Stragglers().add(50, seconds(50), wait)
    assert slow.rank == 6 and slow.waits == pytest.approx(4 / (4 + 10.15), abs=0.01)


def test_of_two_ranks_the_faster_one_is_the_measure() -> None:
    assert median([2.0, 1.0]) == 1.0 and median([3.0, 1.0, 2.0]) == 2.0
    (slow,) = Stragglers().add(50, [10.0, 11.0], [0.0, 0.0])
    assert slow.rank == 1


SLEEP, STEPS = 0.15, 60  # seconds a micro-batch, updates


def trains_with_a_slow_rank(world: World, folder: str, late: str) -> list[str]:
    """Rank 1 sleeps, in its forward passes or before it has its rows. What is logged."""
    said = logging.handlers.QueueHandler(queue.Queue())
    log.addHandler(said)
    cfg = tiny.config(
        precision="bf16", zero__stage=1, log__interval=20, log__tensorboard=False, checkpoint__asynchronous=False
    )  # fmt: skip
    ours = trainer(cfg, world, Path(folder), updates=STEPS)
    ours.workload.saved_at = -1  # type: ignore[attr-defined]
    ours.stop_after = None
    if world.rank == 1 and late == "forward":
        ours.engine.module.register_forward_pre_hook(lambda *_: time.sleep(SLEEP))
    elif world.rank == 1:
        updates = ours.updates

        def slowly() -> Any:
            for update in updates:
                time.sleep(SLEEP)
                yield update

        ours.updates = slowly()
    with pytest.raises(Killed):
        ours.train()
    log.removeHandler(said)
    return [said.queue.get().getMessage() for _ in range(said.queue.qsize())]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("late", ["forward", "data"])
def test_of_two_real_ranks_the_slow_one_is_known_by_its_own_time(late: str, tmp_path) -> None:
    said, nothing = run_ranks(2, trains_with_a_slow_rank, str(tmp_path), late)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    compute, wait = (lines[-1][f"perf/rank_{name}_seconds"] for name in ("compute", "data_wait"))
    longer, other = (compute, wait) if late == "forward" else (wait, compute)
    assert longer[1] > longer[0] + 0.8 * SLEEP and abs(other[1] - other[0]) < 0.5 * SLEEP
    assert lines[-1]["perf/slowest_rank"] == 1 and lines[-1]["perf/stragglers"] == [1]
    (line,) = [text for text in said if "is slow:" in text]
    assert "rank 1 (host " in line and "over the last 50 updates" in line, line
    assert not any("is slow:" in text for text in nothing)
