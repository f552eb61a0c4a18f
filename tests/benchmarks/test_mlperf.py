"""The blind test's rows: the table is whole, and the split is a function of names."""

from __future__ import annotations

from collections import Counter

from benchmarks.common.mlperf import blind, calibration
from megabert.commands.plan.published import published_runs
from megabert.commands.plan.step_time import DEVICES, Fabric


def test_every_row_calibrates_judges_or_is_left_out() -> None:
    left_out = [run for run in published_runs() if run.left_out]
    assert (len(calibration()), len(blind()), len(left_out)) == (47, 95, 34)
    for run in (*calibration(), *blind()):
        assert run.gpu in DEVICES and run.gpus % run.nodes == 0 and run.year and run.rate > 0
        assert bool(Fabric.of(run.gpus // run.nodes, run.network).network) == (run.nodes > 1)


def test_no_group_stands_on_both_sides() -> None:
    sides = [{(run.submitter, run.gpu) for run in side} for side in (calibration(), blind())]
    assert not sides[0] & sides[1]
    counts, whole = (
        Counter(DEVICES[run.gpu].generation for run in runs) for runs in (calibration(), (*calibration(), *blind()))
    )
    assert all(0 < 3 * counts[generation] <= whole[generation] for generation in whole)
