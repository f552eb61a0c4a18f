"""Verdict on a hang: which ranks the others wait for, from what every rank reports of itself.

Ranks run one program, so in each process group they enter the same collectives in the same order. One that has entered
fewer than others is waited for by those; it is the cause unless it waits itself, in another group, for a third one. Where
the counts tell nobody apart, the collective that was entered does, then the step, and last the stack: under NCCL a healthy
rank waits outside of torch's code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Standing:
    """Where a rank stands: collectives it has entered and the oldest unfinished one, by process group; updates done; and
    whether its stack is in a collective."""

    rank: int
    step: int = 0
    waiting: bool = False
    entered: dict[str, int] = field(default_factory=dict)
    unfinished: dict[str, str] = field(default_factory=dict)


def find_failed_ranks(ranks: Sequence[Standing]) -> dict[int, str]:
    """The ranks that block the others, each with the reason; all ranks where nothing tells them apart."""
    return (
        _absent(ranks)
        or _elsewhere(ranks)
        or _everybody_in_the_same(ranks)
        or _behind(ranks)
        or _outside(ranks)
        or {one.rank: "and every rank waits for the others" for one in ranks}
    )


def _absent(ranks: Sequence[Standing]) -> dict[int, str]:
    """Those that have not entered what others wait in."""
    waits, missing = _waits(ranks)
    if not waits.any():
        return {}
    reach = _closure(waits)
    both = reach & reach.T | np.eye(len(ranks), dtype=bool)
    last = ~(reach & ~both).any(axis=1)  # whoever they wait for waits for them
    waiters = waits.sum(axis=0)
    found = {}
    for i in np.flatnonzero(last & (waiters > 0)).tolist():
        circle = both[i]
        if waiters[i] == waiters[circle].max():  # of ranks that wait for each other the one that most wait for
            group, count = missing[ranks[i].rank]
            names = Counter(one.unfinished[group] for one in ranks if group in one.unfinished)
            name = f" ({names.most_common(1)[0][0]})" if names else ""
            text = f"has not entered collective {count} of group {group}{name} that {waiters[i]} of {len(ranks)} ranks are in"
            if circle.sum() > 1:
                text += " but waits for them in another group: collectives in another order"
            if ranks[i].unfinished:
                own, its = min(ranks[i].unfinished.items())
                text += f"; it is itself in {its} of group {own}"
            found[ranks[i].rank] = text
    return found


def _waits(ranks: Sequence[Standing]) -> tuple[np.ndarray, dict[int, tuple[str, int]]]:
    """bool [n, n]: rank i has entered a collective that rank j, of those in its group, is the furthest from; and for each
    rank that is waited for (group, number) of what it has not entered."""
    waits = np.zeros((len(ranks), len(ranks)), dtype=bool)
    missing: dict[int, tuple[str, int]] = {}
    for group in sorted({name for one in ranks for name in one.entered}):
        members = np.array([group in one.entered for one in ranks])
        counts = np.array([one.entered.get(group, 0) for one in ranks])
        least = counts[members].min()
        ahead, behind = members & (counts > least), members & (counts == least)
        if ahead.any():
            waits |= ahead[:, None] & behind[None, :]
            for i in np.flatnonzero(behind).tolist():
                missing.setdefault(ranks[i].rank, (group, int(least) + 1))
    return waits, missing


def _closure(edges: np.ndarray) -> np.ndarray:
    """bool [n, n]: whether a path leads from i to j."""
    reach, size = edges, -1
    while reach.sum() != size:
        size = reach.sum()
        reach = reach | (reach.astype(np.float32) @ reach.astype(np.float32) > 0)
    return reach


def _elsewhere(ranks: Sequence[Standing]) -> dict[int, str]:
    """A minority that entered another collective than the others did under the same number."""
    for group in sorted({name for one in ranks for name in one.unfinished}):
        names = Counter(one.unfinished[group] for one in ranks if group in one.unfinished)
        usual, count = names.most_common(1)[0]
        others = [one for one in ranks if one.unfinished.get(group, usual) != usual]
        if others and count > len(others):
            return {
                one.rank: f"entered {one.unfinished[group]} of group {group} where {count} of {len(ranks)} ranks entered {usual}"
                for one in others
            }
    return {}


def _everybody_in_the_same(ranks: Sequence[Standing]) -> dict[int, str]:
    """All, where all entered the same collectives and one does not finish."""
    if not all(one.unfinished for one in ranks):
        return {}
    group, name = min(ranks[0].unfinished.items())
    reason = f"in {name} of group {group}, which every rank has entered: a device, the network, or ranks that disagree"
    return {one.rank: reason for one in ranks}


def _behind(ranks: Sequence[Standing]) -> dict[int, str]:
    """Those that have done fewer updates."""
    least, most = min(one.step for one in ranks), max(one.step for one in ranks)
    if least == most:
        return {}
    return {one.rank: f"behind the others at step {most}" for one in ranks if one.step == least}


def _outside(ranks: Sequence[Standing]) -> dict[int, str]:
    """Those whose stack is not in a collective."""
    return {one.rank: "and it does not wait for other ranks" for one in ranks if not one.waiting}
