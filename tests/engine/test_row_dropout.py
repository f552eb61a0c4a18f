"""The same update with dropout on any number of ranks: what is dropped follows the row, not the rank, and shares that are
uneven hold the same rows."""

from __future__ import annotations

from typing import Any

import pytest

from megabert.ops.backend import MISSING
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks

BACKENDS = {"torch": {"ops__attention": "sdpa", "ops__layer": "torch"}}
if not MISSING:
    BACKENDS["native"] = {"ops__attention": "native", "ops__layer": "native"}


def losses(world: Any) -> dict[str, list[tuple[float, float]]]:
    found = {}
    for name, ops in BACKENDS.items():
        for stage in (0, 1, 2, 3) if world.size == 3 and name == "torch" else (1,):
            cfg = tiny.config(model__dropout=0.1, model__attention_dropout=0.1, zero__stage=stage, **ops)
            found[f"{name} {stage}"] = tiny.train(tiny.engine(cfg, world), range(6))
    return found


@pytest.mark.slow
@pytest.mark.dist
def test_any_number_of_ranks_drops_the_same() -> None:
    one = run_ranks(1, losses)[0]
    for ranks in (2, 3, 4):  # 8 rows on 3 ranks, 2 a micro-step: the last one of one rank has none
        for name, found in run_ranks(ranks, losses)[0].items():
            for ours, theirs in zip(found, one[f"{name.split()[0]} 1"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5), (ranks, name)
