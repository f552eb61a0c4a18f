"""Exchange between the hosts of a run: one small collective an update for all that they have to know of each other.

It is on its way while the next update is trained. Where something is logged, evaluated or saved it is waited for at once,
and numbers that a log line sums over the ranks travel with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from megabert.common import errors
from megabert.distributed.process_group import Pending, World

Result = TypeVar("Result")


class Refused(ValueError):
    """The data cannot be used, or could not be read; the same on every rank."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code


class Report(NamedTuple):
    """What the ranks have to know of each other after an update, as integers: the maximum counts."""

    nanoseconds: int  # of the update
    stop: int  # asked to stop
    saving: int  # `Checkpoints.status` of the save in flight
    problem: int  # the data could not be had: an exit code


@dataclass(frozen=True)
class Asked:
    """A report on its way between the ranks, and this rank's own problem with the update (text and exit code)."""

    pending: Pending
    problem: str
    code: int


class Exchange:
    """Reports of all ranks. Its methods are collectives and raise Refused where a rank has a problem."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._asked: list[Asked] = []

    def tell(self, own: Report, problem: str, counts: Sequence[int] | None) -> tuple[list[Report], list[int] | None]:
        """Send this rank's report on an update; what is known now, oldest first: the reports of the updates before and,
        with `counts` or on a lone rank, this one's. `counts` are given back summed over the ranks."""
        known, size = self.outstanding(), self._world.size
        if counts is None and size > 1:
            self._asked.append(Asked(self._world.start_max_ints(own), problem, own.problem))
            return known, None
        slots = [slot for value in own for slot in self._world.slots(int(value))]
        sums = self._world.sum_ints([*slots, *(counts or ())])
        found = Report(*(max(sums[first : first + size]) for first in range(0, len(slots), size)))
        self._refuse(found, problem, own.problem)
        return [*known, found], None if counts is None else sums[len(slots) :]

    def outstanding(self) -> list[Report]:
        """The reports that are on their way, waited for."""
        asked, self._asked = self._asked, []
        found = []
        for one in asked:
            found.append(Report(*one.pending.result()))
            self._refuse(found[-1], one.problem, one.code)
        return found

    def _refuse(self, report: Report, problem: str, code: int) -> None:
        if report.problem:
            refuse(self._world, problem, code)


def refuse(world: World, problem: str, code: int) -> None:
    """Raises Refused on every rank when any has a problem ("": none), naming the first; `code` is its exit code. A
    collective. A fault (code 4) of any rank is the one that is named: what another reports may be its consequence."""
    if not world.max_ints([code])[0]:
        return
    found = [(rank, *report) for rank, report in enumerate(world.gather([problem, code])) if report[0]]
    for rank, text, its in sorted(found, key=lambda report: report[2] != errors.FAILED):
        raise Refused(text if world.size == 1 else f"rank {rank}: {text}", its)


def agreed(world: World, action: Callable[[], Result]) -> Result:
    """What every rank does for itself. A collective; raises Refused on every rank where any raises ValueError or OSError."""
    found: list[Result] = []
    problem, code = "", errors.OK
    try:
        found.append(action())
    except (ValueError, OSError) as error:
        problem, code = errors.describe(error), errors.exit_code(error)
    refuse(world, problem, code)
    return found[0]
