"""Data that a preset cannot use: the plan and the run refuse it alike; pairs that nothing learns from are one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megabert.data.shards import write_manifest
from tests.integration.conftest import command

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden" / "dataset"


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        (
            {"nsp": False},
            [],
            "model.nsp=true but the dataset has no sentence pairs; build it with --nsp, or set model.nsp=false",
        ),
        ({}, ["model.max_positions=32"], "model.max_positions=32 is below the dataset's seq_len=64"),
        ({}, ["model.vocab_size=77"], "model.vocab_size=77 but the tokenizer has"),
        ({}, ["data.seq_len=128"], "data.seq_len=128 but "),
    ],
)
def test_plan_and_train_refuse_the_same_data(changes, overrides, message, tmp_path):
    data = shutil.copytree(GOLDEN, tmp_path / "data")
    tree = json.loads((data / "manifest.json").read_text())
    tree["options"] |= changes
    del tree["fingerprint"]
    write_manifest(data, tree)
    shared = ["--config", "tiny", "--data", data, *overrides]
    for call in (["plan", *shared], ["train", "--run", tmp_path / "run", *shared]):
        done = command("-m", "megabert", *call)
        assert done.returncode == 2 and f"error: {message}" in done.stderr, done.stdout + done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_plan_warns_once_of_pairs_without_their_head():
    phases = ("model.nsp=false", "phases=[{share=0.5},{share=0.3},{share=0.2}]")
    done = command("-m", "megabert", "plan", "--config", "tiny", "--data", GOLDEN, *phases)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("phase ") == 3 and done.stderr.count("warning: the dataset's rows are sentence pairs") == 1


@pytest.mark.slow
def test_train_warns_once_of_pairs_without_their_head(tmp_path):
    done = command(
        *(
            "-m",
            "megabert",
            "train",
            "--config",
            "tiny",
            "--data",
            GOLDEN,
            "--run",
            tmp_path / "run",
            "model.nsp=false",
        ),
        *("model.layers=1", "model.hidden=32", "model.heads=2", "batch.global_size=8", "batch.micro_size=8"),
        *("schedule.total_steps=1", "schedule.warmup_steps=0", "peak_tflops=1.0", "data.workers=0", "eval.rows=8"),
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("warning: the dataset's rows are sentence pairs") == 1
