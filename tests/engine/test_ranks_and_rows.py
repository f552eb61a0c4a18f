"""The same update on any number of ranks: dropout follows the row, not the rank, and uneven shares hold the same rows."""

from __future__ import annotations

from typing import Any

import pytest

from megabert.ops.backend import MISSING
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks

DROPOUT = {"model__dropout": 0.1, "model__attention_dropout": 0.1}
# By name: configuration, and the ZeRO stages of three ranks.
SETUPS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "torch": (DROPOUT | {"ops__attention": "sdpa", "ops__layer": "torch"}, (0, 1, 2, 3)),
    "recipe": ({"model__tied": False, "model__zero_init": True}, (0, 1, 2, 3)),
}
if not MISSING:
    SETUPS["native"] = (DROPOUT | {"ops__attention": "native", "ops__layer": "native"}, (1,))


def losses(world: Any) -> dict[str, list[tuple[float, float]]]:
    found = {}
    for name, (settings, stages) in SETUPS.items():
        for stage in stages if world.size == 3 else (1,):
            engine = tiny.engine(tiny.config(zero__stage=stage, **settings), world)
            found[f"{name} {stage}"] = tiny.train(engine, range(6))
    return found


@pytest.mark.slow
@pytest.mark.dist
def test_losses_do_not_depend_on_ranks_or_stage() -> None:
    one = run_ranks(1, losses)[0]
    for ranks in (2, 3, 4):  # 8 rows on 3 ranks, 2 a micro-step: the last one of one rank has none
        for name, found in run_ranks(ranks, losses)[0].items():
            for ours, theirs in zip(found, one[f"{name.split()[0]} 1"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5), (ranks, name)
