"""A student from a run, by the command: stopped, resumed, evaluated, exported, and no other teacher is taken for its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.conftest import command, metrics

SMALL = (
    *("model.layers=3", "model.hidden=64", "model.heads=2", "batch.global_size=32", "batch.micro_size=16"),
    *("optimizer.lr=2e-3", "schedule.total_steps=10", "schedule.warmup_steps=2", "log.interval=1"),
    *("eval.interval=0", "eval.rows=64", "data.workers=0", "peak_tflops=1.0", "precision=fp32"),
)


def output_of(*args: object, code: int = 0) -> str:
    done = command(*args)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


@pytest.mark.slow
def test_distilled_by_the_command(dataset: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    train = ("megabert/train.py", "--config", "tiny", "--data", dataset, "--run", teacher, *SMALL)
    output_of(*train)
    last = [m for m in metrics(teacher) if "eval/mlm_loss" in m][-1]

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    head = ("-m", "megabert", "distill", "--model", teacher, "--layers", 2, "--data", dataset, "--run")
    assert "deepspeed " in output_of(*head, whole)
    output_of("megabert/train.py", "--config", "tiny", "--data", dataset, "--run", parts, *SMALL,
         "model.layers=2", f"distill.teacher={teacher}", "--stop-after", 4)  # fmt: skip
    assert "resuming from" in output_of(*head, parts)
    keys = ("train/loss", "train/mlm_loss", "train/nsp_loss", "train/soft_loss", "train/cosine_loss")
    found = [[[m[k] for k in keys] for m in metrics(run) if "train/loss" in m] for run in (whole, parts)]
    assert len(found[0]) == 10 and found[0] == found[1]
    first = next(m for m in metrics(whole) if "eval/mlm_loss" in m)
    assert first["step"] == 0 and first["eval/mlm_loss"] < last["eval/mlm_loss"] + 0.5  # begins as its teacher
    assert json.loads((whole / "config.json").read_text())["config"]["model"]["layers"] == 2

    figures = json.loads(output_of("-m", "megabert", "evaluate", "--model", whole, "--data", dataset))
    assert figures["step"] == 10 and figures["eval/mlm_loss"] < 8
    assert "BertForPreTraining of step 10" in output_of(
        "-m", "megabert", "export", "--model", whole, "--output", tmp_path / "hf"
    )
    assert (
        output_of("-m", "megabert", "fill", "--model", whole, "the [MASK] is").count("%") == 5
    )  # words with their shares

    output_of(*train, "schedule.total_steps=11", "--extend")
    assert "distill.teacher's weights (SHA-256)" in output_of(*head, whole, "schedule.total_steps=12", code=2)
    for args, wrong in (((*head, tmp_path / "new", "model.hidden=32"), "model.hidden=32 but the teacher's is 64"),
                        (("-m", "megabert", "distill", "--model", tmp_path, *head[4:], whole), "no checkpoint in it")):  # fmt: skip
        error = output_of(*args, code=2)
        assert wrong in error and error.count("\n") == 1
