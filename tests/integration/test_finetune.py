"""The command as a user types it: several runs, their table, predictions; stopped and started again; on two ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.common.hardware import free_port
from megabert.finetune import tasks
from tests.helpers import finetune_problem, finetuned
from tests.helpers.job import Job
from tests.integration.conftest import ROOT, command

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


@pytest.mark.slow
def test_rates_and_seeds_then_predictions(base, tmp_path) -> None:
    output = tmp_path / "out"
    metrics = ("--metric", "accuracy", "--metric", "macro_f1", "--test", base / "test.tsv", "--epochs", 1)
    given = texts(base, output, *metrics, "--lr", 1e-3, 1e-4)
    done = command(*given, "--seeds", 2, **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    names = [f"lr{lr}-seed{seed}" for lr in ("0.0001", "0.001") for seed in (1, 2)]
    assert sorted(path.name for path in output.iterdir() if path.is_dir() and path.name != "lock") == names
    summary = json.loads((output / "summary.json").read_text())
    assert [run["name"] for run in summary["runs"]] == [*names[2:], *names[:2]]
    assert [point["runs"] for point in summary["points"]] == [2, 2]
    first, second = (point["scores"]["dev"]["accuracy"]["mean"] for point in summary["points"])
    assert first >= second
    assert list(summary["points"][0]["scores"]["test"]) == ["accuracy", "macro_f1"]
    assert "--lr" in summary["command"] and "lr" not in summary["settings"]
    head, *rows, best_model, predicting, exporting = done.stdout.splitlines()[-6:]
    assert head.split()[:4] == ["lr", "runs", "dev", "accuracy"] and len(rows) == 2
    figures = {run["name"]: run["scores"]["dev"]["accuracy"] for run in summary["runs"]}
    of_rate = names[2:] if first == sum(figures[name] for name in names[2:]) / 2 else names[:2]
    winner = output / max(of_rate, key=figures.__getitem__) / "best"
    assert summary["best"]["model"] == str(winner) and winner.is_dir()
    assert (
        best_model == f"best model: {winner} (epoch 1 of 1, dev accuracy {max(map(figures.get, of_rate)):.4f}). Next:"
    )
    assert predicting == f"  megabert finetune --model {winner} --predict FILE --output PREDICTIONS"
    assert exporting == f"  megabert export   --model {winner} --output HF_DIR"
    assert re.search(r"step +3/5 +60%  loss", done.stdout) and "epoch 1 of 1  dev  accuracy" in done.stdout
    assert "run 4 of 4, 1 epochs at rate 0.0001" in done.stdout
    for kind in ("metrics.jsonl", "tensorboard", "best/task.json", "predictions-dev.tsv", "result.json"):
        assert (output / names[0] / kind).exists(), kind

    again = command(*given, "--seeds", 1, **ONE_THREAD)  # the results are there: nothing is run again
    assert again.returncode == 0 and "step" not in again.stdout and "±" not in again.stdout, again.stderr
    assert len(json.loads((output / "summary.json").read_text())["runs"]) == 2

    predict = ("-m", "megabert.finetune", "--model", output / names[0], "--predict")
    done = command(*predict, base / "test.tsv", "--output", tmp_path / "test.tsv", **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "test.tsv").read_bytes() == (output / names[0] / "predictions-test.tsv").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_terminated_run_resumes(number, base, tmp_path) -> None:
    whole = command(*texts(base, tmp_path / "whole", "--epochs", 30), **ONE_THREAD)
    assert whole.returncode == 0, whole.stderr
    given = [sys.executable, *texts(base, tmp_path / "parts", "--epochs", 30)]
    environment = os.environ | ONE_THREAD | {"PYTHONUNBUFFERED": "1"}
    errors = tmp_path / "errors"
    with errors.open("wb") as stderr:
        process = subprocess.Popen(given, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "step     40/" in line:
            process.send_signal(number)
            break
    rest = process.stdout.read()
    assert process.wait(60) == 85, rest
    said = rest.splitlines()[-2:]
    assert re.fullmatch(r"stopped: saved at step \d+; the same command resumes", said[0])
    assert said[1] == "stopped with 0 of 1 runs finished; the same command resumes"
    notice = ["stopping: the run is saved after this update; Ctrl-C again ends it at once"]
    shown = [line for line in errors.read_text().splitlines() if line and not line.startswith("warning: ")]
    assert shown == notice * (number == signal.SIGINT)
    assert not (tmp_path / "parts" / "seed1" / "result.json").exists()
    again = command(*given[1:], **ONE_THREAD)
    assert again.returncode == 0 and "resuming at step" in again.stdout, again.stderr
    one, other = best(tmp_path / "whole" / "seed1"), best(tmp_path / "parts" / "seed1")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_interrupted_predictions_leave_nothing(base, tmp_path) -> None:
    finetuned.save_untrained(base, tasks.custom("classify", ["text"], "label"), base / "train.tsv", max_length=32)
    (tmp_path / "many.tsv").write_text("text\n" + f"{' '.join(finetune_problem.WORDS[:20])}\n" * 500_000)
    output = tmp_path / "out"
    output.mkdir()
    predicting = ("--predict", tmp_path / "many.tsv", "--output", output / "many.tsv")
    given = [sys.executable, "-m", "megabert", "finetune", "--model", base, *predicting]
    process = subprocess.Popen([str(part) for part in given], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not list(output.iterdir()):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors.splitlines()[-1] == "error: interrupted" and "Traceback" not in errors
    assert not list(output.iterdir())


@pytest.mark.dist
def test_ranks_with_other_files_are_refused(base, tmp_path) -> None:
    """Each host has its own copy of train.tsv."""
    words = ["finetune", *texts(base, tmp_path / "out")[2:]]
    train = words.index("--train") + 1
    for rank in (0, 1):
        (tmp_path / f"{rank}").mkdir()
        lines = Path(words[train]).read_text().splitlines(keepends=True)
        (tmp_path / f"{rank}/train.tsv").write_text("".join(lines[: len(lines) - 8 * rank]))
    words[train] = "train.tsv"
    driver = f"import os\nos.chdir({str(tmp_path)!r} + '/' + os.environ['RANK'])\n"
    job = Job(base, tmp_path / "out", command=tuple(words), driver=driver)
    assert job.codes() == [2, 2], job.output
    (line,) = [line for line in job.output.splitlines() if "error" in line]
    assert re.fullmatch(
        r"error: files_sha256 must be the same on all ranks: .* on rank 0 \(.*\), .* on rank 1 \(.*\)", line
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_of_torchrun_and_deepspeed(base, tmp_path) -> None:
    def launched(name: str, *given: object) -> subprocess.CompletedProcess[str]:
        torchrun, deepspeed = (str(Path(sys.executable).with_name(launcher)) for launcher in ("torchrun", "deepspeed"))
        port = ("--master_port", str(free_port()))
        heads = {
            "torchrun": [torchrun, "--nproc_per_node", "2", *port, "-m"],
            "deepspeed": [deepspeed, "--num_gpus", "2", *port, "--module"],
        }
        argv = [*heads[name], *map(str, given)]
        environment = os.environ | ONE_THREAD | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)

    scores = {}
    for name in ("torchrun", "deepspeed"):
        files = ("--train", base / "train.conll", "--dev", base / "dev.conll", "--output", tmp_path / name)
        options = ("--kind", "tag", "--metric", "f1", "--epochs", "20", "--lr", "3e-3", *SMALL)
        done = launched(name, "megabert.finetune", "--model", base / "run", *files, *options)
        assert done.returncode == 0, (name, done.stderr)
        (run,) = json.loads((tmp_path / name / "summary.json").read_text())["runs"]
        scores[name] = run["scores"]
        assert run["steps"] == 100
    assert scores["torchrun"] == scores["deepspeed"]
    assert scores["torchrun"]["dev"]["f1"] > 0.9
    done = launched("torchrun", *texts(base, tmp_path / "odd", "--batch", "7")[1:])
    assert done.returncode != 0 and "--batch 7 cannot be split evenly over 2 ranks" in done.stderr
    assert not (tmp_path / "odd").exists()
