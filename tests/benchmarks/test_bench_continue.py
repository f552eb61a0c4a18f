"""The study of continued training: what its variants share, and its table."""

from __future__ import annotations

import pytest

from benchmarks import bench_continue
from benchmarks.race.recipes import RaceRecipe, our_config, track_of
from megabert.config import phases_of
from megabert.optim.schedule import learning_rate


def test_variants_end_at_one_rate_after_equal_updates() -> None:
    ends: dict[str, tuple[int, float, float, int]] = {}
    for name, (keys, _) in bench_continue.VARIANTS.items():
        _, config = our_config(RaceRecipe(name, "continued", keys=keys), track_of("150k-tokens"), 128.0, 42)
        updates, peak = config.schedule.total_steps, config.optimizer.lr
        first, last = (learning_rate(config.schedule, peak, step) for step in (0, updates))
        ends[name] = updates, last, first, len(phases_of(config))
    for name, (updates, last, _, phases) in ends.items():
        assert updates == 37 and last == pytest.approx(3e-4), name
        assert phases == (2 if "detour" in name else 1), name
    assert [ends[name][2] for name in ("plain", "replay", "re-warm")] == pytest.approx([3e-4, 3e-4, 3e-3 / 4])


def test_table_of_the_study() -> None:
    def run(old: float, new: float) -> dict[str, dict[str, float]]:
        return {"old": {"bits": old}, "new": {"bits": new}}

    runs = {
        "base": run(1.0, 2.0),
        "plain 42": run(1.1, 1.5),
        "plain 43": run(1.3, 1.7),
        "replay, re-warm 42": run(1, 3),
    }
    lines = bench_continue.table(runs).splitlines()
    assert lines[2:4] == ["| base | 2.000 | 1.000 |", "| plain | 1.600 ± 0.141 | 1.200 ± 0.141 |"]
    assert lines[4:] == ["| replay, re-warm | 3.000 | 1.000 |"]
