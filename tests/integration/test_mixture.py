"""A run over a mixture: stopped and resumed, it has the same losses as without a stop."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.integration.conftest import metrics
from tests.integration.test_train import train


def losses(run):
    return {m["step"]: m["train/loss"] for m in metrics(run) if "train/loss" in m}


def data_of(run, step):
    state = json.loads((run / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())["state"]
    return state["datasets"], {m["step"]: m["data/row_digest"] for m in metrics(run) if "data/row_digest" in m}


@pytest.mark.slow
def test_a_mixture_is_resumed_and_another_share_refused(dataset, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(dataset, other)
    mix = f'data.mix={{"{other}" = 0.25}}'
    for folder, stops in (("whole", ()), ("broken", ("--stop-after", 7)), ("broken", ())):
        done = train(dataset, tmp_path / folder, mix, *stops)
        assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "whole") == losses(tmp_path / "broken")
    parts, digests = data_of(tmp_path / "broken", 16)
    assert digests == data_of(tmp_path / "whole", 16)[1]
    assert [part["folder"] for part in parts] == [str(dataset), str(other)]
    done = train(dataset, tmp_path / "broken", mix.replace("0.25", "0.5"), "schedule.total_steps=20")
    assert done.returncode == 2 and "cannot resume: dataset fingerprint" in done.stderr
