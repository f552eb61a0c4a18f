"""The same update with dropout on 1, 2 and 4 ranks: what is dropped follows the row, not the rank."""

from __future__ import annotations

from typing import Any

import pytest

from megabert.model.ops.backend import MISSING
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks

BACKENDS = {"torch": {"ops__attention": "sdpa", "ops__layer": "torch"}}
if not MISSING:
    BACKENDS["native"] = {"ops__attention": "native", "ops__layer": "native"}


def losses(world: Any) -> dict[str, list[tuple[float, float]]]:
    found = {}
    for name, ops in BACKENDS.items():
        cfg = tiny.config(model__dropout=0.1, model__attention_dropout=0.1, zero__stage=1, **ops)
        found[name] = tiny.train(tiny.engine(cfg, world), range(6))
    return found


@pytest.mark.slow
@pytest.mark.dist
def test_any_number_of_ranks_drops_the_same() -> None:
    one, two, four = (run_ranks(ranks, losses)[0] for ranks in (1, 2, 4))
    for name in BACKENDS:
        for others in (two, four):
            for ours, theirs in zip(others[name], one[name], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-5)
