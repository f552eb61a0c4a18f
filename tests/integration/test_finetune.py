"""The command as a user types it: several runs, their table, predictions; stopped and started again; on two ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import finetune_problem
from tests.integration.conftest import ROOT, command, free_port

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SMALL = ("--max-length", "32", "--batch", "8", "--log-interval", "1")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    finetune_problem.write_run(folder / "run")
    for name, seed in (("train", 1), ("dev", 2), ("test", 3)):
        finetune_problem.write_texts(folder / f"{name}.tsv", 40, seed)
        finetune_problem.write_tags(folder / f"{name}.conll", 40, seed)
    return folder


def texts(base: Path, output: Path, *more: object) -> list[str]:
    files = ("--train", base / "train.tsv", "--dev", base / "dev.tsv", "--output", output)
    columns = ("--kind", "classify", "--text", "text", "--label", "label")
    return [str(a) for a in ("-m", "megabert.finetune", "--model", base / "run", *files, *columns, *SMALL, *more)]


def best(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "best" / "model.safetensors")


def test_rates_and_seeds_then_predictions(base, tmp_path) -> None:
    output = tmp_path / "out"
    metrics = ("--metric", "accuracy", "--metric", "macro_f1", "--test", base / "test.tsv", "--epochs", 1)
    given = texts(base, output, *metrics, "--lr", 1e-3, 1e-4)
    done = command(*given, "--seeds", 2, **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    names = [f"lr{lr}-seed{seed}" for lr in ("0.0001", "0.001") for seed in (1, 2)]
    assert sorted(path.name for path in output.iterdir() if path.is_dir()) == names
    summary = json.loads((output / "summary.json").read_text())
    assert [run["name"] for run in summary["runs"]] == [*names[2:], *names[:2]]
    assert [point["runs"] for point in summary["points"]] == [2, 2]
    first, second = (point["scores"]["dev"]["accuracy"]["mean"] for point in summary["points"])
    assert first >= second
    assert list(summary["points"][0]["scores"]["test"]) == ["accuracy", "macro_f1"]
    assert "--lr" in summary["command"] and "lr" not in summary["settings"]
    head, *rows = done.stdout.splitlines()[-3:]
    assert head.split()[:4] == ["lr", "runs", "dev", "accuracy"] and len(rows) == 2
    for kind in ("metrics.jsonl", "tensorboard", "best/task.json", "predictions-dev.tsv", "result.json"):
        assert (output / names[0] / kind).exists(), kind

    again = command(*given, "--seeds", 1, **ONE_THREAD)  # the results are there: nothing is run again
    assert again.returncode == 0 and "step" not in again.stdout, again.stderr
    assert len(json.loads((output / "summary.json").read_text())["runs"]) == 2

    predict = ("-m", "megabert.finetune", "--model", output / names[0], "--predict")
    done = command(*predict, base / "test.tsv", "--output", tmp_path / "test.tsv", **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "test.tsv").read_bytes() == (output / names[0] / "predictions-test.tsv").read_bytes()


@pytest.mark.slow
def test_terminated_run_resumes(base, tmp_path) -> None:
    whole = command(*texts(base, tmp_path / "whole", "--epochs", 30), **ONE_THREAD)
    assert whole.returncode == 0, whole.stderr
    given = [sys.executable, *texts(base, tmp_path / "parts", "--epochs", 30)]
    environment = os.environ | ONE_THREAD | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(given, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "step     40/" in line:
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    assert process.wait(60) == 85, rest
    assert not (tmp_path / "parts" / "seed1" / "result.json").exists()
    again = command(*given[1:], **ONE_THREAD)
    assert again.returncode == 0 and "resuming at step" in again.stdout, again.stderr
    one, other = best(tmp_path / "whole" / "seed1"), best(tmp_path / "parts" / "seed1")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_second_command_on_one_folder_is_refused(base, tmp_path) -> None:
    given = texts(base, tmp_path / "out", "--epochs", 2000)
    environment = os.environ | ONE_THREAD | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([sys.executable, *given], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "step" in line:
                break
        second = command(*given)
        assert second.returncode == 2 and second.stderr.count("\n") == 1
        assert f"is in use by pid {process.pid}" in second.stderr
    finally:
        process.terminate()
        process.stdout.read()
        assert process.wait(60) == 85


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_of_torchrun_and_deepspeed(base, tmp_path) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    deepspeed = Path(sys.executable).with_name("deepspeed")
    heads = {
        "torchrun": [str(torchrun), "--nproc_per_node", "2", "--master_port", str(free_port())],
        "deepspeed": [str(deepspeed), "--num_gpus", "2", "--master_port", str(free_port()), "--module"],
    }
    scores = {}
    for name, head in heads.items():
        files = ("--train", base / "train.conll", "--dev", base / "dev.conll", "--output", tmp_path / name)
        options = ("--kind", "tag", "--metric", "f1", "--epochs", "20", "--lr", "3e-3", *SMALL)
        module = ["-m", "megabert.finetune"] if name == "torchrun" else ["megabert.finetune"]
        given = [*head, *module, "--model", base / "run", *files, *options]
        started = time.monotonic()
        done = subprocess.run(
            [str(a) for a in given],
            cwd=ROOT,
            env=os.environ | ONE_THREAD | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, (name, time.monotonic() - started, done.stderr)
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        scores[name] = summary["runs"][0]["scores"]
        assert summary["runs"][0]["steps"] == 100
    assert scores["torchrun"] == scores["deepspeed"]
    assert scores["torchrun"]["dev"]["f1"] > 0.9
    wrong = [*heads["torchrun"], *texts(base, tmp_path / "odd", "--batch", "7")]
    done = subprocess.run(
        wrong, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode != 0 and "--batch 7 cannot be split evenly over 2 ranks" in done.stderr
    assert not (tmp_path / "odd").exists()


@pytest.mark.slow
@pytest.mark.dist
def test_dead_rank_is_named(base, tmp_path) -> None:
    given = texts(base, tmp_path / "out", "--epochs", 500)
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    base_env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | ONE_THREAD | master
    ranks = [
        subprocess.Popen(
            [sys.executable, *given],
            cwd=ROOT,
            env=base_env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].stdout is not None
        assert any("step      3/" in line for line in iter(ranks[0].stdout.readline, ""))
        ranks[1].kill()
        _, output = ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == 4, output
    assert "rank 1 (host " in output and f"pid {ranks[1].pid}) died; at step" in output
