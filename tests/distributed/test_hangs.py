"""Verdicts on hangs from where every rank stands, and the evidence that a rank gives of itself."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from megabert.distributed import hangs
from megabert.distributed.hangs import Standing, find_failed_ranks
from megabert.distributed.ranks import wait_for_ranks

RANKS = 8
SUM, FLAGS = "nccl:all_reduce of [[4096]] Float", "gloo:all_reduce of [[4]] Long"


def ranks(count: int = RANKS, **changes: dict[int, object]) -> list[Standing]:
    """`count` ranks in collective 40 of the device's group and past 21 of the control group, none of whose stacks is in a
    collective; `changes`: by field, the value of some ranks."""
    usual = Standing(0, 5, False, {"0": 40, "1": 21}, {"0": SUM})
    return [
        replace(usual, rank=rank, **{field: its[rank] for field, its in changes.items() if rank in its})
        for rank in range(count)
    ]


@pytest.mark.parametrize("failed", [0, 5])
def test_the_rank_missing_in_a_collective_is_named(failed: int) -> None:
    found = find_failed_ranks(ranks(entered={failed: {"0": 39, "1": 21}}, unfinished={failed: {}}))
    assert found == {failed: f"has not entered collective 40 of group 0 ({SUM}) that 7 of 8 ranks are in"}


def test_ranks_ahead_are_not_named() -> None:
    """Nothing holds a rank back at a collective that returns at once."""
    ahead = {rank: {"0": 40 + rank, "1": 21 + rank % 3} for rank in range(RANKS) if rank != 5}
    found = find_failed_ranks(ranks(entered=ahead | {5: {"0": 38, "1": 21}}, unfinished={5: {"1": FLAGS}}))
    assert list(found) == [5] and found[5].endswith(f"; it is itself in {FLAGS} of group 1")


def test_a_rank_that_waits_for_a_third_is_not_named() -> None:
    """Ranks 0 to 3 wait for 4 to 7 on the device, and 4 to 6 in the control group for 7."""
    entered = {rank: {"0": 39, "1": 22} for rank in (4, 5, 6)} | {7: {"0": 39, "1": 21}}
    assert list(find_failed_ranks(ranks(entered=entered))) == [7]


def test_groups_count_for_their_members_only() -> None:
    """Ranks 4 to 7 share a group more, where 6 is missing; 0 to 3 wait for them in the group of all."""
    entered = {rank: {"0": 39, "1": 21, "2": 8} for rank in (4, 5, 7)} | {6: {"0": 39, "1": 21, "2": 7}}
    assert list(find_failed_ranks(ranks(entered=entered))) == [6]


@pytest.mark.parametrize("own", [{"0": 39, "1": 22}, {"0": 38, "1": 24}], ids=["one left out", "several left out"])
def test_another_order_of_collectives_is_named(own: dict[str, int]) -> None:
    found = find_failed_ranks(ranks(entered={2: own}))
    assert list(found) == [2] and "collectives in another order" in found[2]


def test_halves_that_wait_for_each_other_are_both_named() -> None:
    assert len(find_failed_ranks(ranks(entered={rank: {"0": 39, "1": 22} for rank in range(4)}))) == RANKS


def test_another_collective_under_the_same_number_is_named() -> None:
    found = find_failed_ranks(ranks(unfinished={6: {"0": "nccl:all_reduce of [[4095]] Float"}}))
    assert found == {6: f"entered nccl:all_reduce of [[4095]] Float of group 0 where 7 of 8 ranks entered {SUM}"}


def test_all_are_named_where_all_entered_the_same() -> None:
    found = find_failed_ranks(ranks())
    assert len(found) == RANKS and all(SUM in text and "the network" in text for text in found.values())


def test_without_a_collective_step_and_stack_decide() -> None:
    nowhere: dict[int, object] = {rank: {} for rank in range(RANKS)}
    waiting: dict[int, object] = {rank: rank != 3 for rank in range(RANKS)}
    found = find_failed_ranks(ranks(unfinished=nowhere, waiting=waiting))
    assert found == {3: "and it does not wait for other ranks"}
    found = find_failed_ranks(ranks(unfinished=nowhere, waiting=waiting, step={1: 4}))
    assert found == {1: "behind the others at step 5"}


def test_a_thousand_ranks_are_judged() -> None:
    late: dict[int, object] = {700: {"0": 39, "1": 21}, 701: {"0": 39, "1": 21}}
    assert list(find_failed_ranks(ranks(1024, entered=late))) == [700, 701]


def looks_of_main_thread(action: object) -> tuple[str, bool]:
    """Evidence of the main thread while it runs `action`."""
    found: list[tuple[str, bool]] = []
    timer = threading.Timer(0.1, lambda: found.append(hangs.main_thread()))
    timer.start()
    action()  # type: ignore[operator]
    timer.join()
    return found[0]


def test_a_wait_for_a_collective_started_earlier_is_a_wait() -> None:
    """The wait is in C, so its innermost Python code is ours and not torch's."""
    place, waiting = looks_of_main_thread(lambda: wait_for_ranks(SimpleNamespace(wait=partial(time.sleep, 0.3))))  # type: ignore[arg-type]
    assert waiting and "ranks.py" in place
    place, waiting = looks_of_main_thread(partial(time.sleep, 0.3))
    assert not waiting and "test_hangs.py" in place
