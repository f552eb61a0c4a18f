"""A run that moves to other numbers of ranks, other ZeRO stages, micro-batches and workers is the run that never moved."""

from __future__ import annotations

import pytest

from tests.helpers.job import Job
from tests.integration.conftest import metrics

COMMON = (
    *("precision=fp32", "schedule.total_steps=16", "model.dropout=0.0", "model.attention_dropout=0.0"),
    *("watchdog.timeout_seconds=0",),
)
# ranks, ZeRO stage, rows of a micro-step, loader's workers, the step where it is stopped; 16 rows an update, which 3 ranks
# share unevenly
LEGS = ((1, 0, 16, 0, 4), (2, 1, 4, 2, 7), (3, 3, 3, 1, 10), (4, 2, 2, 1, 13), (1, 3, 8, 3, 16))

RATES = {"adamw": 2e-3, "lamb": 2e-2, "muon": 2e-3}


def leg(data, run, ranks, stage, micro, workers, until, *extra):
    settings = (f"zero.stage={stage}", f"batch.micro_size={micro}", f"data.workers={workers}")
    job = Job(data, run, *COMMON, *settings, *extra, "--stop-after", until, ranks=ranks)
    assert job.codes(timeout=240) == [0] * ranks, job.output
    return job.output


def logged(run):
    return {m["step"]: m for m in metrics(run) if "train/loss" in m}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", RATES)
def test_one_two_three_four_and_one_ranks_under_stages_0_to_3(optimizer, dataset, tmp_path):
    choice = (f"optimizer.name={optimizer}", f"optimizer.lr={RATES[optimizer]}")
    leg(dataset, tmp_path / "straight", *LEGS[0][:4], 16, *choice)
    for ranks, stage, micro, workers, until in LEGS:
        output = leg(dataset, tmp_path / "moving", ranks, stage, micro, workers, until, *choice)
        assert f"ZeRO-{stage}" in output and f"{ranks} rank(s)" in output
    straight, moving = logged(tmp_path / "straight"), logged(tmp_path / "moving")
    assert list(straight) == list(moving) == list(range(1, 17))
    for step, line in straight.items():
        assert moving[step]["data/row_digest"] == line["data/row_digest"], f"other rows by step {step}"
    worst = max(abs(moving[s]["train/loss"] / line["train/loss"] - 1) for s, line in straight.items())
    print(f"{optimizer}: losses within {worst:.1e} of the run that never moved")
    assert worst < 1e-5
    assert straight[16]["train/loss"] < straight[1]["train/loss"] - 0.2, "nothing was learned"
