"""Commands at a terminal: Ctrl-C with and without `| tee`, a reader that ends first, a terminal that is closed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.data_prep.test_interrupt import build, write_corpus
from tests.helpers.terminal import CTRL_C, Terminal
from tests.integration.conftest import command, metrics
from tests.integration.test_train import SMALL

NOTICE = "stopping: the run is saved after this update; Ctrl-C again ends it at once"
BROKEN = "error: Broken pipe: nobody reads the output; saved at step {}; the same command resumes"


def train(dataset: Path, run: Path) -> list[object]:
    settings = (*SMALL, "schedule.total_steps=100000")
    return ["-m", "megabert", "train", "--config", "tiny", "--data", dataset, "--run", run, *settings]


def saved_step(run: Path) -> int:
    """The step of the newest checkpoint, which has every logged update."""
    step: int = json.loads((run / "checkpoints/pointer.json").read_text())["step"]
    assert metrics(run)[-1]["step"] <= step
    return step


def test_ctrl_c_of_a_pipe_saves(dataset, tmp_path):
    terminal = Terminal(tmp_path, train(dataset, tmp_path / "run"), f"tee {tmp_path / 'log'}", all_output=True)
    terminal.wait_for("  lr ")
    terminal.press(CTRL_C)
    # tee ends by the same signal
    assert terminal.codes() == [85, -2], terminal.shown
    assert saved_step(tmp_path / "run") >= 1


@pytest.mark.slow
def test_broken_pipe_saves_and_ends_with_4(dataset, tmp_path):
    terminal = Terminal(tmp_path, train(dataset, tmp_path / "run"), "grep -q step")
    assert terminal.codes() == [4, 0], terminal.shown
    assert terminal.shown.splitlines() == [BROKEN.format(saved_step(tmp_path / "run"))]


@pytest.mark.slow
def test_ctrl_c_shows_its_notice_and_saves(dataset, tmp_path):
    terminal = Terminal(tmp_path, train(dataset, tmp_path / "run"))
    terminal.wait_for("  lr ")
    terminal.press(CTRL_C)
    assert terminal.codes() == [85], terminal.shown
    stopped = f"stopped: saved at step {saved_step(tmp_path / 'run')}; the same command resumes"
    lines = terminal.shown.splitlines()
    assert lines[-1] == stopped and NOTICE in lines and "Traceback" not in terminal.shown


@pytest.mark.slow
def test_closed_terminal_saves(dataset, tmp_path):
    terminal = Terminal(tmp_path, train(dataset, tmp_path / "run"))
    terminal.wait_for("  lr ")
    terminal.close()
    assert terminal.codes() == [85]
    assert saved_step(tmp_path / "run") >= 1


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("how", ["alone", "pipe", "closed"])
def test_keep_shields_a_launcher_from_ctrl_c(how, dataset, tmp_path):
    """torchrun would end its ranks after 30 s."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        2,
        "--",
        *train(dataset, tmp_path / "run")[2:],
    ]
    launcher[6] = "megabert/train.py"
    reader = f"tee {tmp_path / 'log'}" if how == "pipe" else ""
    terminal = Terminal(tmp_path, launcher, reader, all_output=True, program="launch/keep.sh")
    terminal.wait_for("  lr ")
    if how == "closed":
        terminal.close()
    else:
        terminal.press(CTRL_C)
    assert terminal.codes() == {"alone": [85], "pipe": [85, -2], "closed": [85]}[how], terminal.shown
    assert saved_step(tmp_path / "run") >= 1
    assert "death signal" not in terminal.shown and "KeyboardInterrupt" not in terminal.shown


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    """A run of two updates, and a task of two labels as GLUE's SST-2."""
    folder = tmp_path_factory.mktemp("trained")
    done = command(*train(dataset, folder / "run"), "--stop-after", 2)
    assert done.returncode == 0, done.stderr
    (folder / "glue/SST-2").mkdir(parents=True)
    rows = [f"the film number {i} is {('bad', 'good')[i % 2]}\t{i % 2}\n" for i in range(64)]
    for name in ("train", "dev"):
        (folder / f"glue/SST-2/{name}.tsv").write_text("".join(["sentence\tlabel\n", *rows]))
    return folder


def words_of(name: str, trained: Path, dataset: Path, output: Path) -> list[object]:
    """A command that trains longer than a test waits."""
    model = ["-m", "megabert", name, "--model", trained / "run"]
    tuned = ["--output", output, "--lr", "1e-4", "--epochs", 9999, "--log-interval", 1, "--seeds", 1]
    files = [word for name in ("train", "dev") for word in (f"--{name}", trained / f"glue/SST-2/{name}.tsv")]
    match name:
        case "finetune":
            return [*model, "--task", "sst2", *files, *tuned]
        case "glue":
            return [*model, "--data", trained / "glue", *tuned]
    assert name == "distill"
    return [*model, "--layers", 1, "--data", dataset, "--run", output, *SMALL[3:], "schedule.total_steps=100000"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["pipe", "reader", "closed"])
@pytest.mark.parametrize("name", ["finetune", "glue", "distill"])
def test_other_training_saves_too(name, how, trained, dataset, tmp_path):
    words, output = words_of(name, trained, dataset, tmp_path / "out"), tmp_path / "out"
    reader = {"pipe": f"tee {tmp_path / 'log'}", "reader": "grep -q loss", "closed": ""}[how]
    terminal = Terminal(tmp_path, words, reader, all_output=how == "pipe")
    if how != "reader":
        terminal.wait_for("  lr ")
    if how == "pipe":
        terminal.press(CTRL_C)
    elif how == "closed":
        terminal.close()
    assert terminal.codes() == {"pipe": [85, -2], "reader": [4, 0], "closed": [85]}[how], terminal.shown
    (pointer,) = output.rglob("pointer.json")
    step = saved_step(pointer.parents[1])
    if how == "reader":
        assert terminal.shown.splitlines()[-1] == BROKEN.format(step)
    assert "Traceback" not in terminal.shown


@pytest.mark.slow
@pytest.mark.parametrize("how", ["alone", "pipe", "closed"])
def test_a_build_ends_and_resumes(how, tmp_path):
    """With its documented code, though the bar is drawn where nobody reads."""
    out = tmp_path / "out"
    words = ["-m", "megabert", *build(write_corpus(tmp_path / "corpus", 1, 30_000), out, "--vocab-size", "300")]
    terminal = Terminal(tmp_path, words, f"tee {tmp_path / 'log'}" if how == "pipe" else "", all_output=True)
    terminal.wait_for("sample ")
    if how == "closed":
        terminal.close()
    else:
        terminal.press(CTRL_C)
    assert terminal.codes() == {"alone": [130], "pipe": [130, -2], "closed": [-1]}[how], terminal.shown
    if how == "alone":
        kept = "error: interrupted: finished parts are kept, the same command resumes"
        assert terminal.shown.splitlines()[-1] == kept
    assert "Traceback" not in terminal.shown and not (out / "manifest.json").exists()
    done = command(*words)
    assert done.returncode == 0, done.stderr
    assert not (out / ".work").exists()
