"""What all ranks learn of an update before they decide anything: their reports, gathered while the next update runs and reduced.

Decisions depend on a reduced `Sync` alone, so they are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

UNREAD, REQUESTED = 1, 2  # values of `Sync.stop`: nobody reads a rank's output any more, or a rank was asked to stop
# Reductions of a field of `Sync` over the ranks, in rank order; a dict is reduced per key.
Max = Annotated[int, max]
Sum = Annotated[int, sum]
Sums = Annotated[dict[str, int], sum]
ByRank = Annotated[dict[str, Any], list]


@dataclass(frozen=True)
class Sync:
    """A rank's report on an update and, reduced over the ranks field by field, the report of all ranks."""

    nanoseconds: Max  # time of the update, on the slowest rank
    stop: Max  # REQUESTED, UNREAD, or 0 to train on
    saving: Max  # `Checkpoints.status` of the save in flight
    problem: Max  # exit code of a problem with the data; 0 without one
    tokens: Sum  # tokens of the update, without padding
    rows: Sums  # `RowDigest.counts` of all updates of this process
    # `Meter.counts` and `RankMetrics.counts` since the last log line
    counts: Sums
    ranks: ByRank

    def values(self) -> list[int]:
        """All numbers, in the order of the fields, a dict's in the order of its keys."""
        numbers: list[int] = []
        for name in REDUCTIONS:
            value = getattr(self, name)
            numbers += [value[key] for key in sorted(value)] if isinstance(value, dict) else [int(value)]
        return numbers

    def reduce(self, rows: list[list[int]]) -> Sync:
        """The report of all ranks, from the `values` of each."""
        columns = zip(*rows, strict=True)
        reduced: dict[str, Any] = {}
        for name, reduction in REDUCTIONS.items():
            value = getattr(self, name)
            if isinstance(value, dict):
                reduced[name] = {key: reduction(next(columns)) for key in sorted(value)}
            else:
                reduced[name] = reduction(next(columns))
        return Sync(**reduced)


REDUCTIONS = {name: hint.__metadata__[0] for name, hint in get_type_hints(Sync, include_extras=True).items()}
# a rank's report on its newest update, its problem in words, and what waits for the values of all ranks
SentReport = tuple[Sync, str, Callable[[], list[list[int]]]]
