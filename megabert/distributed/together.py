"""Errors that ranks agree on: of what rank 0 does for all, and of what every rank does for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megabert.common import errors
from megabert.distributed.process_group import World

Result = TypeVar("Result")


def together(world: World, action: Callable[[], None]) -> None:
    """What rank 0 does, with its error raised on every rank as ValueError or Failed. A collective."""
    problem, code = "", errors.OK
    if world.is_main:
        try:
            action()
        except (ValueError, OSError) as error:
            problem, code = errors.describe(error), errors.exit_code(error)
    problem, code = world.broadcast([problem, code])
    if code:
        raise errors.Failed(problem) if code == errors.FAILED else ValueError(problem)


class Refused(ValueError):
    """The data cannot be used, or could not be read; the same on every rank."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.exit_code = code


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
