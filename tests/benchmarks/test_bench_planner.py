"""The committed report of the planner against published runs is what the code gives, and as good as the documentation has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_planner
from benchmarks.common.published_runs import DEVICES, RUNS, Run
from megabert.commands.plan.step_time import ACHIEVED, Constants

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return bench_planner.report()


def test_one_row_a_generation_is_fitted_and_it_is_the_smallest_system(found: dict[str, Any]) -> None:
    smallest: dict[str, Run] = {}
    for run in RUNS:
        generation = DEVICES[run.cluster.device].generation
        if run.gpus < smallest.setdefault(generation, run).gpus:
            smallest[generation] = run
    fitted = {DEVICES[run.cluster.device].generation: run for run in RUNS if run.fitted}
    assert len(fitted) == sum(run.fitted for run in RUNS) == 5
    assert {g: run.gpus for g, run in fitted.items()} == {g: run.gpus for g, run in smallest.items()}
    assert found["fitted"] == ACHIEVED | {"tpu v3": DEVICES["tpu-v3"].achieved}
    for row in found["rows"]:
        if row["error"] is None:
            assert row["predicted"] == pytest.approx(row["published"], rel=2e-4), row["name"]


def test_errors_of_predicted_rows(found: dict[str, Any]) -> None:
    """Also of a generation whose rows did not choose the network's share."""
    errors = [abs(row["error"]) for row in found["rows"] if row["error"] is not None]
    assert len(errors) == len(RUNS) - 5 == 43
    assert sorted(errors)[21] == found["summary"]["median"] <= 0.10
    assert max(errors) == found["summary"]["worst"] <= 0.20
    assert all(group["median"] <= 0.10 for group in found["groups"].values())
    left_out, shares = found["cross_validation"]["left_out"], found["cross_validation"]["shares"]
    assert set(left_out) == set(found["fitted"]) and all(left["worst"] <= 0.20 for left in left_out.values())
    assert min(shares, key=lambda share: shares[share]["rms"]) == str(Constants().network)


def test_the_committed_report_is_what_the_code_gives(found: dict[str, Any]) -> None:
    report = json.loads(max((ROOT / "benchmarks/results").glob("plan_published_*.json")).read_text())
    assert [row["name"] for row in report["rows"]] == [run.name for run in RUNS]
    for row, now in zip(report["rows"], found["rows"], strict=True):
        assert row["published"] == now["published"] and row["how"] == now["how"]
        assert row["predicted"] == pytest.approx(now["predicted"], rel=1e-3), row["name"]
        assert row["milliseconds"] == pytest.approx(now["milliseconds"], rel=1e-2, abs=0.02), row["name"]
    for part in ("fitted", "constants", "summary", "groups", "cross_validation", "sensitivity"):
        assert report[part] == found[part], part
    shown = set((ROOT / "docs/planner.md").read_text().splitlines()) & set(bench_planner.table(found).splitlines())
    assert len(shown) >= 14 and any(f"{100 * found['summary']['worst']:+.1f}%" in line for line in shown)


def test_evaluations_by_the_rules() -> None:
    """Batch 4,608: every floor(0.05 x (230.23 x 4,608 + 3 M) / 25,000) x 25,000 = 200,000 samples, 157 a GPU, forward."""
    run = next(run for run in RUNS if run.name == "H100 3.0, 64")
    system = bench_planner.system_of(run, DEVICES, Constants())
    (part,) = run.parts
    one = bench_planner.pass_seconds(bench_planner.LARGE, bench_planner.REAL_SAMPLE.times(157), system)
    assert bench_planner.evaluations(run, part, system) == pytest.approx(one.seconds / 3 * 4_608 / 200_000)
    unrated = next(run for run in RUNS if "DeepLearningExamples" in run.name)
    assert bench_planner.evaluations(unrated, unrated.parts[0], system) == 0.0


def test_a_published_time_of_two_parts() -> None:
    """The run of hours is the sum of its phases' updates."""
    run = next(run for run in RUNS if run.name == "V100 DeepSpeed, 64")
    system = bench_planner.system_of(run, DEVICES, Constants())
    first, second = (bench_planner.update(run, part, system).seconds for part in run.parts)
    seconds = 403e6 / 65_536 * first + 20e6 / 32_768 * second
    assert 1 / bench_planner.rate(run, DEVICES, Constants()) == pytest.approx(seconds)
    assert 8 < seconds / 3_600 < 10
