"""What rank 0 does for all ranks."""

from __future__ import annotations

from collections.abc import Callable

from megabert.common import errors
from megabert.distributed.process_group import World


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
