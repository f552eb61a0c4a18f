"""What recipes add to a model, at every ZeRO stage on two ranks: the losses of stage 0 on one."""

from __future__ import annotations

import pytest

from megabert.distributed.ranks import World
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks

RECIPE = {"model__tied": False, "model__zero_init": True}


def losses(world: World, stages: tuple[int, ...]) -> list[list[tuple[float, float]]]:
    engines = (tiny.engine(tiny.config(zero__stage=stage, **RECIPE), world) for stage in stages)
    return [tiny.train(engine, range(6)) for engine in engines]


@pytest.mark.dist
@pytest.mark.slow
def test_every_stage_computes_the_same() -> None:
    (alone,) = run_ranks(1, losses, (0,))[0]
    assert alone[0][0] > alone[-1][0] + 0.1
    for found in run_ranks(2, losses, (0, 1, 2, 3))[0]:
        for ours, theirs in zip(found, alone, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
