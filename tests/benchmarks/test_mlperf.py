"""The blind test's rows: the table is whole, and the split is a function of names."""

from __future__ import annotations

from collections import defaultdict

from benchmarks.common.mlperf import MANY, blind, calibration
from megabert.commands.plan.published import published_runs
from megabert.commands.plan.step_time import DEVICES, Fabric


def test_every_row_calibrates_judges_or_is_left_out() -> None:
    left_out = [run for run in published_runs() if run.left_out]
    assert (len(calibration()), len(blind()), len(left_out)) == (69, 76, 48)
    for run in (*calibration(), *blind()):
        assert run.gpu in DEVICES and run.gpus % run.nodes == 0 and run.year and run.rate > 0
        assert bool(Fabric.of(run.gpus // run.nodes, run.network).adapters) == (run.nodes > 1)


def test_every_gpu_calibrates_with_whole_groups() -> None:
    chosen, kinds = set(calibration()), {run.gpu for run in calibration()}
    assert kinds == set(DEVICES)
    strata: dict[tuple[object, ...], set[bool]] = defaultdict(set)
    for run in published_runs():
        if not run.left_out and run.table == 1:
            strata[run.submitter, run.gpu, run.network, run.nodes >= MANY].add(run in chosen)
    assert all(len(sides) == 1 for sides in strata.values())
