"""The planner's blind test: its rows, a split by names, and the committed score, which the documentation states."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from megabert.commands.plan.published import published_runs
from megabert.commands.plan.step_time import DEVICES, Fabric
from tests.commands.plan import mlperf
from tests.commands.plan.mlperf import FROZEN, MANY, OWN_SOFTWARE, blind, calibration, error, terms
from tests.conftest import ROOT


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


def test_the_committed_score_is_what_the_code_gives() -> None:
    report = json.loads((ROOT / "benchmarks/results/plan_blind_2026-11-28.json").read_text())
    found = mlperf.score()
    for row, now in zip(report["rows"], found["rows"], strict=True):
        assert (row["run"], row["side"], row["rate"]) == (now["run"], now["side"], now["rate"])
        assert row["predicted"] == pytest.approx(now["predicted"], rel=1e-3), row["run"]
    for part in ("blind", "samples", "minutes"):
        assert report[part] == found[part], part
    assert report["constants"] == json.loads(json.dumps(found["constants"]))
    page = (ROOT / "docs/planner.md").read_text()
    assert mlperf.table(found) in page and report["about"]["revision"] in page


def test_the_blind_rows_meet_their_aims() -> None:
    found = mlperf.score()
    judged = found["blind"]["all"]
    assert judged["rows"] == 76 and judged["median"] <= 0.08 and judged["p90"] <= 0.20
    assert found["samples"]["median"] <= 0.10
    assert 3 * found["calibration"]["rows"] <= found["calibration"]["rows"] + found["known"]["rows"] + judged["rows"]


def test_no_single_change_improves_the_fit() -> None:
    """The committed constants are a minimum on the calibrating rows, to their rounding."""
    least = mlperf.loss(FROZEN)
    for move in mlperf.moves(FROZEN):
        for factor in (0.97, 1.03):
            assert mlperf.loss(move(FROZEN, factor)) > least - 2e-4
    fitted_to = [abs(error(run, FROZEN)) for run in calibration() if run.submitter != OWN_SOFTWARE]
    assert sorted(fitted_to)[len(fitted_to) // 2] < 0.03


def test_evaluations_by_the_rules() -> None:
    """Batch 4,608: every floor(0.05 x (230.23 x 4,608 + 3 M) / 25,000) x 25,000 = 200,000 samples, 157 a GPU, forward."""
    run = next(run for run in calibration() if run.batch == 4_608 and run.gpu == "h100")
    found, sample = terms(run, FROZEN), 4_608 / 64
    passes = sum(found[name] for name in ("products", "attention", "elementwise", "kernels"))
    assert found["evaluations"] == pytest.approx(passes / 3 * 157 / sample * 4_608 / 200_000, rel=0.05)
