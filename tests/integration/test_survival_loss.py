"""A spike is warned of, not applied or gone back from; any update can be repeated to the bit."""

from __future__ import annotations

import json

import pytest

from tests.helpers.job import Job
from tests.integration.conftest import metrics

SPIKES = (
    *("spikes.window=8", "spikes.threshold=8", "--stop-after", "16", "checkpoint.interval=4"),
    *("optimizer.lr=1e-4", "model.dropout=0.1"),
)
# the update of data 9 (the tenth) has three times its loss and gradient
SPIKE = """
from megabert.engine import Engine
from megabert.model import BertForPreTraining
now = [0]
def update(self, update, *rest, do=Engine.train_update):
    now[0] = update.step
    return do(self, update, *rest)
def forward(self, *args, do=BertForPreTraining.forward, **named):
    out = do(self, *args, **named)
    return out._replace(mlm_loss_sum=out.mlm_loss_sum * 3) if self.training and now[0] in TIMES else out
Engine.train_update, BertForPreTraining.forward = update, forward
"""


def run_with(dataset, run, *extra, times=(9,), **options):
    job = Job(dataset, run, *SPIKES, *extra, driver=f"TIMES = {times}\n{SPIKE}", **options)
    return job, job.codes(150)


def curve(run) -> dict[int, dict]:
    return {m["step"]: m for m in metrics(run) if "train/loss" in m}


def trouble(run) -> list[dict]:
    return [json.loads(line) for line in (run / "trouble.jsonl").read_text().splitlines()]


@pytest.mark.dist
@pytest.mark.slow
def test_a_skipped_spike_is_applied_on_no_rank_and_can_be_replayed(dataset, tmp_path):
    run = tmp_path / "run"
    job, codes = run_with(dataset, run, "spikes.policy=skip", "zero.stage=2", ranks=2)
    assert codes == [0, 0], job.output
    (entry,) = trouble(run)
    assert (entry["step"], entry["cursor"], entry["kind"], entry["action"]) == (10, 9, "spike", "skip")
    assert entry["score"] > 8 and len(set(entry["row_ids"])) == 16
    found = curve(run)
    assert 10 not in found and found[16]["train/spikes"] == found[16]["train/skipped"] == 1
    before = (run / "metrics.jsonl").read_bytes(), sorted(run.rglob("*"))
    for step in (10, 15):
        job, codes = run_with(dataset, run, "spikes.policy=skip", "zero.stage=2", "--replay", step, ranks=2)
        assert codes == [0, 0], job.output
        (line,) = [text for text in job.output.splitlines() if text.startswith("{")]
        replayed = json.loads(line)
        logged = entry if step == 10 else found[step]
        assert replayed["skipped"] == (step == 10) and replayed["cursor"] == step - 1
        for name in ("train/loss", "train/mlm_loss", "train/nsp_loss", "train/grad_norm"):
            assert replayed[name] == logged[name], name
    assert before == ((run / "metrics.jsonl").read_bytes(), sorted(run.rglob("*")))


def test_rollback_goes_back_and_passes_over_the_data_through_the_spike(dataset, tmp_path):
    run = tmp_path / "run"
    job, codes = run_with(dataset, run, "spikes.policy=rollback", ranks=1)
    assert codes == [0], job.output
    assert "rolling back" in job.output and "rolled back to step 8; the data up to the spike is left out" in job.output
    found = curve(run)
    assert sorted(found) == list(range(1, 17))
    assert [found[s]["data/cursor"] for s in (8, 9, 10, 16)] == [8, 11, 12, 18]  # data 8 and 9 were passed over
    assert [entry["action"] for entry in trouble(run)] == ["rollback"]


@pytest.mark.slow
def test_spikes_again_and_again_end_the_run(dataset, tmp_path):
    run = tmp_path / "run"
    times = (9, 12, 14)
    job, codes = run_with(dataset, run, "spikes.policy=rollback", "spikes.max_rollbacks=1", times=times, ranks=1)
    assert codes == [3], job.output
    assert "error: a spike after 1 rollbacks (spikes.max_rollbacks)" in job.output
    assert len(trouble(run)) == 2


@pytest.mark.slow
def test_warn_says_so_and_goes_on(dataset, tmp_path):
    run = tmp_path / "run"
    job, codes = run_with(dataset, run, ranks=1)
    assert codes == [0], job.output
    assert job.output.count("is a spike (score") == 1
    assert curve(run)[16]["train/spikes"] == 1 and 10 in curve(run)
