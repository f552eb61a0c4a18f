"""A run whose dataset grows, and one over a mixture: stopped and gone on with, the same losses as without a stop."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.integration.conftest import command, metrics
from tests.integration.test_train import train


def losses(run):
    return {m["step"]: m["train/loss"] for m in metrics(run) if "train/loss" in m}


def data_of(run, step):
    state = json.loads((run / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())["state"]
    return state["datasets"], {m["step"]: m["data/row_digest"] for m in metrics(run) if "data/row_digest" in m}


@pytest.mark.slow
def test_a_run_goes_on_with_added_text_and_repeats_itself(dataset, corpus, tmp_path):
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(dataset, data)
    done = train(data, run, "--stop-after", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "new.txt").write_text(
        "\n\n".join(f"Text {i} that was not there before, and is now." for i in range(2000))
    )
    done = command("-m", "data_prep", "build", "--add", "--output", data, "--input", tmp_path / "new.txt", "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    done = train(data, run, "--stop-after", 9)
    assert done.returncode == 0 and "at step 4" in done.stdout, done.stdout + done.stderr
    (part,), _ = data_of(run, 9)
    assert [segment["parts"] for segment in part["segments"]] == [1, 2]
    twin = tmp_path / "twin"
    shutil.copytree(run, twin)
    for folder, stops in ((run, ()), (twin, ("--stop-after", 12)), (twin, ())):
        done = train(data, folder, *stops)
        assert done.returncode == 0, done.stdout + done.stderr
    assert losses(run) == losses(twin) and list(losses(run)) == list(range(1, 17))


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
