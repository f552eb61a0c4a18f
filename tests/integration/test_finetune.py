"""The command as a user types it: several runs, their table, predictions; stopped and started again; on two ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.common.hardware import free_port
from megabert.finetune import tasks
from tests.helpers import finetune_problem, finetuned
from tests.helpers.job import Job
from tests.integration.conftest import BIN, ROOT, end, output_of

SMALL = ("--max-length", "32", "--batch", "8", "--log-interval", "1")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finetune")
    finetune_problem.write_run(folder / "run")
    for name, seed in (("train", 1), ("dev", 2), ("test", 3)):
        finetune_problem.write_texts(folder / f"{name}.tsv", 40, seed)
        finetune_problem.write_tags(folder / f"{name}.conll", 40, seed)
    return folder


def texts(base: Path, output: Path, *more: object) -> list[object]:
    files = ("--train", base / "train.tsv", "--dev", base / "dev.tsv", "--output", output)
    columns = ("--kind", "classify", "--text", "text", "--label", "label")
    return ["finetune", "--model", base / "run", *files, *columns, *SMALL, *more]


@pytest.mark.slow
def test_rates_and_seeds_then_predictions(base, tmp_path) -> None:
    output, predicted = tmp_path / "out", tmp_path / "test.tsv"
    metrics = ("--metric", "accuracy", "--metric", "macro_f1", "--test", base / "test.tsv", "--epochs", 1)
    given = texts(base, output, *metrics, "--lr", 1e-3, 1e-4)
    shown = output_of(*given, "--seeds", 2)
    names = [f"lr{lr}-seed{seed}" for lr in ("0.001", "0.0001") for seed in (1, 2)]
    summary = json.loads((output / "summary.json").read_text())
    assert [run["name"] for run in summary["runs"]] == names and "--lr" in summary["command"]
    assert list(summary["points"][0]["scores"]["test"]) == ["accuracy", "macro_f1"]
    head, *rows, best_model, predicting, exporting = shown.splitlines()[-6:]
    assert head.split()[:4] == ["lr", "runs", "dev", "accuracy"] and [row.split()[1] for row in rows] == ["2", "2"]
    lr = f"{summary['points'][0]['point']['lr']:g}"
    scores = {run["name"]: run["scores"]["dev"]["accuracy"] for run in summary["runs"] if f"lr{lr}-" in run["name"]}
    winner, accuracy = output / max(scores, key=scores.__getitem__) / "best", max(scores.values())
    assert summary["best"]["model"] == str(winner) and winner.is_dir()
    assert best_model == f"best model: {winner} (epoch 1 of 1, dev accuracy {accuracy:.4f}). Next:"
    assert predicting == f"  megabert finetune --model {winner} --predict FILE --output PREDICTIONS"
    assert exporting == f"  megabert export   --model {winner} --output HF_DIR"
    assert re.search(r"step +3/5 +60%  loss", shown) and "epoch 1 of 1  dev  accuracy" in shown
    assert "run 4 of 4, 1 epochs at rate 0.0001" in shown
    for kind in ("metrics.jsonl", "tensorboard", "best/task.json", "predictions-dev.tsv", "result.json"):
        assert (output / names[0] / kind).exists(), kind
    common = json.loads((output / "settings.json").read_text())
    common["precision"] = {"fp32": "bf16", "bf16": "fp32"}[
        common["precision"]
    ]  # of a device on which auto is the other
    (output / "settings.json").write_text(json.dumps(common))
    again = output_of(*given, "--seeds", 1)
    assert "step" not in again and "±" not in again, "the results are there: nothing is run again"
    output_of("finetune", "--model", output / names[0], "--predict", base / "test.tsv", "--output", predicted)
    assert predicted.read_bytes() == (output / names[0] / "predictions-test.tsv").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_terminated_run_resumes(number, base, tmp_path) -> None:
    whole, parts = (tmp_path / name / "seed1" for name in ("whole", "parts"))
    output_of(*texts(base, whole.parent, "--epochs", 30))
    given = texts(base, parts.parent, "--epochs", 30)
    job = Job(base, parts.parent, command=tuple(given), ranks=1)
    job.wait_for("step     40/")
    job.signal(number)
    *shown, saved, stopped = end(job, 85, within=60).splitlines()
    assert re.fullmatch(r"stopped: saved at step \d+; the same command resumes", saved)
    assert stopped == "stopped with 0 of 1 runs finished; the same command resumes"
    notice = "stopping: the run is saved after this update; Ctrl-C again ends it at once"
    assert shown.count(notice) == (number == signal.SIGINT)
    assert not (parts / "result.json").exists()
    assert "resuming at step" in output_of(*given)
    one, other = (load_file(run / "best/model.safetensors") for run in (whole, parts))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_interrupted_predictions_leave_nothing(base, tmp_path) -> None:
    finetuned.save_untrained(base, tasks.custom("classify", ["text"], "label"), base / "train.tsv", max_length=32)
    many, output = tmp_path / "many.tsv", tmp_path / "out"
    many.write_text("text\n" + f"{' '.join(finetune_problem.WORDS[:20])}\n" * 500_000)
    output.mkdir()
    words = ("finetune", "--model", base, "--predict", many, "--output", output / "many.tsv")
    job = Job(base, tmp_path / "job", command=words, ranks=1)
    while job.processes[0].poll() is None and not list(output.iterdir()):
        time.sleep(0.1)
    job.signal(signal.SIGINT)
    assert end(job, 130, within=60).splitlines()[-1] == "error: interrupted" and not list(output.iterdir())


@pytest.mark.dist
def test_ranks_with_other_files_are_refused(base, tmp_path) -> None:
    """Each host has its own copy of train.tsv."""
    words = texts(base, tmp_path / "out")
    lines = (base / "train.tsv").read_text().splitlines(keepends=True)
    for rank in (0, 1):
        (tmp_path / f"{rank}").mkdir()
        (tmp_path / f"{rank}/train.tsv").write_text("".join(lines[: len(lines) - 8 * rank]))
    words[words.index("--train") + 1] = "train.tsv"
    driver = f"import os\nos.chdir({str(tmp_path)!r} + '/' + os.environ['RANK'])\n"
    job = Job(base, tmp_path / "out", command=tuple(words), driver=driver)
    (line,) = [line for line in end(job, 2, 2).splitlines() if "error" in line]
    same = r"error: files_sha256 must be the same on all ranks: .* on rank 0 \(.*\), .* on rank 1 \(.*\)"
    assert re.fullmatch(same, line) and not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_of_torchrun_and_deepspeed(base, tmp_path) -> None:
    def launched(name: str, given: list[object]) -> subprocess.CompletedProcess[str]:
        options = {"torchrun": ("--nproc_per_node", 2, "-m"), "deepspeed": ("--num_gpus", 2, "--module")}[name]
        argv = [BIN / name, "--master_port", free_port(), *options, "megabert.finetune", *given[1:]]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.run([*map(str, argv)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)

    scores = []
    for name in ("torchrun", "deepspeed"):
        files = ("--train", base / "train.conll", "--dev", base / "dev.conll", "--output", tmp_path / name)
        options = ("--kind", "tag", "--metric", "f1", "--epochs", 20, "--lr", 3e-3, *SMALL)
        done = launched(name, ["finetune", "--model", base / "run", *files, *options])
        assert done.returncode == 0, (name, done.stderr)
        (run,) = json.loads((tmp_path / name / "summary.json").read_text())["runs"]
        scores.append(run["scores"])
        assert run["steps"] == 100
    assert scores[0] == scores[1] and scores[0]["dev"]["f1"] > 0.9
    done = launched("torchrun", texts(base, tmp_path / "odd", "--batch", 7))
    assert done.returncode != 0 and "--batch 7 cannot be split evenly over 2 ranks" in done.stderr
    assert not (tmp_path / "odd").exists()
