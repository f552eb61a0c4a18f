"""Data that a preset cannot use: the plan and the run refuse it alike; pairs that nothing learns from are one line."""

from __future__ import annotations

import json
import shutil

import pytest

from megabert.data.shards import write_manifest
from tests.integration.conftest import ROOT, SMALL, command, output_of

GOLDEN = ROOT / "tests/data/golden/dataset"
NO_PAIRS = "model.nsp=true but the dataset has no sentence pairs; build it with --nsp, or set model.nsp=false"


@pytest.mark.parametrize(
    ("nsp", "override", "message"),
    [
        (False, "model.nsp=true", NO_PAIRS),
        (True, "model.max_positions=32", "model.max_positions=32 is below the dataset's seq_len=64"),
        (True, "model.vocab_size=77", "model.vocab_size=77 but the tokenizer has"),
        (True, "data.seq_len=128", "data.seq_len=128 but "),
    ],
)
def test_plan_and_train_refuse_the_same_data(nsp, override, message, tmp_path):
    data = shutil.copytree(GOLDEN, tmp_path / "data")
    tree = json.loads((data / "manifest.json").read_text())
    tree["options"]["nsp"] = nsp
    del tree["fingerprint"]
    write_manifest(data, tree)
    for head in (("plan",), ("train", "--run", tmp_path / "run")):
        assert f"error: {message}" in output_of(*head, "--config", "tiny", "--data", data, override, code=2)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("name", ["plan", pytest.param("train", marks=pytest.mark.slow)])
def test_pairs_without_their_head_are_warned_of_once(name, tmp_path):
    more = {
        "plan": ("phases=[{share=0.5},{share=0.3},{share=0.2}]",),
        "train": ("--run", tmp_path / "run", *SMALL, "schedule.total_steps=1", "schedule.warmup_steps=0"),
    }[name]
    done = command("-m", "megabert", name, "--config", "tiny", "--data", GOLDEN, "model.nsp=false", *more)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("warning: the dataset's rows are sentence pairs") == 1
    assert name == "train" or done.stdout.count("phase ") == 3
