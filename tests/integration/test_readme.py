"""The README's commands, read from the README and run.

A fenced `bash` block after `<!-- test: NAME -->` is run here by the test of that name, with the environment that runs the
tests (`VENV=`) and, but for the slow ones, with sizes that take seconds. What differs from the README is in each test.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.hardware import free_port

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SMALL = "model.hidden=32 log.interval=4 eval.rows=64 batch.global_size=32 batch.micro_size=16"


def commands(name: str) -> list[str]:
    """The lines of the block marked `name`; every marker is there exactly once."""
    found = re.findall(rf"<!-- test: {name} -->\n```bash\n(.*?)```", README, re.S)
    assert len(found) == 1, f"README.md has {len(found)} blocks marked {name}"
    return found[0].strip().splitlines()


def run(command: str, timeout: int = 600, **env: str) -> str:
    """Runs one line as a user's shell would, from the repository's root; returns what it printed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "VENV": "", "OMP_NUM_THREADS": "1"} | env
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def documents(folder: Path, count: int) -> Path:
    """Real English: topics of Python's language reference, one a file."""
    from pydoc_data.topics import topics

    folder.mkdir()
    for name, text in sorted(topics.items())[:count]:
        (folder / f"{name}.txt").write_text(re.sub(r"[*`\\]+", "", text))
    return folder


def losses(run_folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["eval/mlm_loss"]) for line in lines if "eval/mlm_loss" in line]


def accuracy(shown: str) -> tuple[float, float]:
    """Accuracy of the model and of the most frequent token under the held-out masks, in percent."""
    (found,) = re.findall(r"accuracy: ([\d.]+)% of [\d,]+ held-out masks; .*: ([\d.]+)%", shown)
    return float(found[0]), float(found[1])


def test_every_block_is_run_here_or_needs_other_hardware() -> None:
    marked = set(re.findall(r"<!-- test: (\S+) -->\n```bash\n", README))
    assert marked == {"quickstart", "suite", "own-text"}
    unmarked = re.findall(r"(?<!-->\n)```bash\n(.*?)```", README, re.S)
    for block in unmarked:
        assert "sbatch" in block or "--config large" in block, f"not marked for a test:\n{block}"


def test_the_two_commands_are_make_targets() -> None:
    assert commands("quickstart") == ["make quickstart"] and commands("suite") == ["make test"]
    shown = run("make --dry-run test")
    assert "ruff check" in shown and "mypy" in shown and "pytest" in shown


@pytest.mark.dist
@pytest.mark.slow  # .ci/run does it as it is written
def test_quickstart_on_your_own_text(tmp_path) -> None:
    (command,) = commands("quickstart")
    corpus, out = documents(tmp_path / "corpus", 40), tmp_path / "out"
    sizes = {"STEPS": "24", "VOCAB": "600", "SEQ_LEN": "64", "EXTRA": SMALL}
    shown = run(command, CORPUS=str(corpus), OUT=str(out), **sizes)
    table = [line.split() for line in shown.splitlines() if ", step " in line]
    assert [row[row.index("step") + 1] for row in table] == ["0", "12", "24"], shown
    first, middle, last = (float(row[row.index("step") + 2]) for row in table)
    assert first > middle > last, shown
    assert "resuming from" in shown and "at step 12" in shown
    assert f"--logdir {out}/run/tensorboard" in shown
    assert list((out / "run/tensorboard").glob("events*"))
    page = (out / "run/report.html").read_text()
    assert ">update 0<" in page and ">update 24<" in page and ">restart</td>" in page
    assert [step for step, _ in losses(out / "run")] == [0, 24]
    assert "training loss, updates" in shown and accuracy(shown)


@pytest.mark.slow
@pytest.mark.dist
def test_pre_training_on_your_own_text_line_by_line(tmp_path) -> None:
    """The README's lines; only folders, the vocabulary, the model's size and the length of the run are replaced."""
    documents(tmp_path / "corpus", 40)
    smaller = {"--vocab-size 30000": "--vocab-size 600", "--config mini_modern": "--config launch/quickstart.toml"}
    extra = f"{SMALL} schedule.total_steps=8 schedule.warmup_steps=2 eval.interval=0"
    shown = {}
    for line in commands("own-text"):
        for old, new in smaller.items():
            line = line.replace(old, new)
        for folder in ("corpus", "data/seq128", "runs/mini"):
            line = re.sub(rf"(?<=\s){folder}(?=[\s/]|$)", shlex.quote(str(tmp_path / folder)), line)
        name = line.split()[0] if "-m" not in line else " ".join(line.split()[2:4])
        if name == "deepspeed":
            line += f" {extra}"
            line = line.replace("--num_gpus 2", f"--num_gpus 2 --master_port {free_port()}")
        if name == "tensorboard":
            line = line.replace("--logdir", "--inspect --logdir")  # shows what is there and exits
        shown[name] = run(line)
    assert list(shown) == [
        "data_prep build",
        "data_prep verify",
        "data_prep inspect",
        "deepspeed",
        "megabert evaluate",
        "tensorboard",
    ]
    figures = json.loads(shown["megabert evaluate"])
    assert figures["step"] == 8 and figures["eval/mlm_loss"] < losses(tmp_path / "runs/mini")[0][1]
    assert (
        "1_loss/training" in shown["tensorboard"]
        and "train/loss" in shown["tensorboard"]
        and "eval/mlm_loss" in shown["tensorboard"]
    )


@pytest.mark.slow
def test_quickstart_as_written(tmp_path) -> None:
    """Everything as a stranger runs it but the folder: about four minutes on two cores."""
    (command,) = commands("quickstart")
    shown = run(command, timeout=1200, OUT=str(tmp_path), OMP_NUM_THREADS="")
    figures = losses(tmp_path / "run")
    assert figures[0][0] == 0 and figures[-1][0] == 600
    assert figures[-1][1] < figures[0][1] - 2, figures
    assert "resumed and finished" in shown and shown.count("  untrained: ") == shown.count("  trained: ") == 3
    model, most_frequent = accuracy(shown)
    assert model > 2 * most_frequent, shown
