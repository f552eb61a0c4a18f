"""Batches of an evaluation taken in step by all ranks, where a forward pass is a collective."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megabert.distributed.process_group import World


def in_step(batches: Iterable[Any], world: World, stage: int) -> Iterable[tuple[Any, bool]]:
    """`batches`, and whether each counts; at ZeRO stage 3 the last one again until every rank is done.

    Raises ValueError where a rank has none at stage 3.
    """
    if stage < 3 or world.size == 1:
        for batch in batches:
            yield batch, True
        return
    source, last = iter(batches), None
    while True:
        batch = next(source, None)
        left = world.sum_ints([batch is not None])[0]
        if not left:
            return
        if world.agree_any(batch is None and last is None):
            raise ValueError(f"evaluation at zero.stage=3 has only {left} batches for {world.size} ranks")
        last = batch if batch is not None else last
        yield last, batch is not None
