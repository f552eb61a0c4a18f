"""The SLURM scripts without SLURM: the batch script runs as SLURM's shell would run it, with the variables SLURM sets.

`srun` is replaced by a script that drops its own options and runs the command once; everything behind it is real.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import programs
from tests.integration.conftest import BIN, MPI_AS_ROOT, ROOT, SHORT, logged

SRUN = '#!/usr/bin/env bash\nprintf "%s\\n" "$@" >{}\nwhile [[ $1 == --* ]]; do shift; done\necho "srun: $*"\n'
PRETRAIN, PREP = "launch/pretrain_large.slurm", "launch/prep.slurm"


def submit(
    script: str,
    folder: Path,
    *arguments: str,
    code: int = 0,
    runs: str = 'exec "$@"',
    log: object = subprocess.PIPE,
    **env: object,
) -> subprocess.CompletedProcess[str]:
    """`sbatch script arguments…` with this environment's python in place of the site's; `runs`: what srun does in the end."""
    tools = programs.write(folder / "tools/srun", SRUN.format(folder / "srun.log") + runs).parent
    site = {"PATH": f"{tools}:{os.environ['PATH']}", "VENV": str(BIN.parent), "SLURM_SUBMIT_DIR": str(ROOT)}
    site |= {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    site |= {"SLURM_PROCID": "0"}  # the batch shell has it too, and is not a rank
    site |= MPI_AS_ROOT | {"RUNS": str(folder / "my runs")} | {name: str(value) for name, value in env.items()}
    command = ["bash", str(ROOT / script), *arguments]
    streams = {"stdout": log, "stderr": subprocess.PIPE}
    done = subprocess.run(command, cwd=folder, env=os.environ | site, text=True, timeout=300, **streams)
    assert done.returncode == code, (done.stdout or "") + done.stderr
    return done


def srun_words(folder: Path) -> list[str]:
    return (folder / "srun.log").read_text().splitlines()


def mounts(folder: Path) -> list[str]:
    """The folders that pyxis is told to mount."""
    (option,) = (word for word in srun_words(folder) if word.startswith("--container-mounts="))
    return [pair.split(":")[0] for pair in option.partition("=")[2].split(",")]


@pytest.mark.dist
@pytest.mark.slow
def test_phase_2_starts_from_phase_1(dataset, tmp_path) -> None:
    runs = tmp_path / "my runs"  # a path with a space in it
    env = {"PHASE1": "tiny", "PHASE2": "tiny", "DATA_128": dataset, "DATA_512": dataset}
    small = ("model.layers=1", "model.hidden=32", "batch.global_size=16", "batch.micro_size=16", "eval.rows=32")
    small += (*SHORT, "peak_tflops=1.0", "log.interval=1")
    done = submit(PRETRAIN, tmp_path, *small, **env)
    assert f"starting from the weights of {runs}/large_phase1 at step 4" in done.stdout
    scores = []
    for phase in ("large_phase1", "large_phase2"):
        assert list(logged(runs / phase)) == [1, 2, 3, 4]
        scores.append(list(logged(runs / phase, "eval/mlm_loss").values()))
    assert scores[1][0] == pytest.approx(scores[0][-1], rel=2e-3)
    again = submit(PRETRAIN, tmp_path, *small, **env)
    assert again.stdout.count("resuming from") == 2 and "step       5" not in again.stdout


@pytest.mark.parametrize(("name", "value"), [
    ("VENV", "/none"), ("MAX_RESTARTS", "3; touch owned"), ("EXCLUDE_SLOW", "1; touch owned"), ("RUNS", "relative"),
    ("DATA", "/tmp/two\nlines"), ("CONTAINER", "/missing.sif"), ("MASTER_ADDR", "$(touch owned)"),
    ("NCCL_SOCKET_IFNAME", "ib0 && touch owned"), ("NETWORK", "10.78.0.0/24; touch owned"), ("CORPUS", "/a\n/b"),
])  # fmt: skip
def test_odd_value_is_one_line_that_names_it(name, value, tmp_path) -> None:
    (line,) = submit(PRETRAIN, tmp_path, code=2, **{name: value}).stderr.splitlines()
    assert line.startswith("error: ") and name in line.replace(value, name), line
    missing = f"/none/bin/python is missing: run make venv in {ROOT}, or set VENV in launch/env.sh"
    assert name != "VENV" or line.endswith(missing), line
    assert not list(tmp_path.rglob("owned")) and not (ROOT / "owned").exists()


@pytest.mark.parametrize(("words", "values", "said"), [
    (["--stop-after=5"], {}, "--stop-after: phase 2 would start from an unfinished phase 1"),
    ([], {"NODES": "1", "SLURM_JOB_NUM_NODES": "2"}, "NODES=1 of the job's 2 nodes have no whole number of its 1 tasks"),
])  # fmt: skip
def test_jobs_that_would_train_wrongly_are_refused(words, values, said, dataset, tmp_path) -> None:
    done = submit(PRETRAIN, tmp_path, *words, code=2, runs="exit 0", DATA_128=dataset, DATA_512=dataset, **values)
    assert said in done.stderr and "srun" not in done.stdout, done


def with_modules(folder: Path, commands: str) -> Path:
    """A project whose `env.sh` ends with these commands."""
    shutil.copytree(ROOT / "launch", folder / "launch")
    (folder / "megabert").mkdir()
    (folder / "megabert/train.py").touch()
    with (folder / "launch/env.sh").open("a") as file:
        file.write(commands)
    return folder


def test_modules_may_read_unset_variables(tmp_path) -> None:
    project = with_modules(tmp_path, 'module() { export OLD="$OF_NO_SITE"; }\nmodule load cuda\n')
    done = submit(PRETRAIN, tmp_path, code=2, PROJECT=project)
    assert "manifest.json is missing" in done.stderr


BOTH_PHASES = {"PHASE1": "tiny", "PHASE2": "tiny", "RESTART_WAIT": "0"}


@pytest.mark.parametrize(("modules", "starts"), [("", 1), ("kill -USR2 $$", 0)])
def test_a_signal_between_phases_starts_no_phase(modules, starts, dataset, tmp_path) -> None:
    """Also not while the modules are loaded. What an earlier job of this number has left is not counted."""
    project = with_modules(tmp_path, modules)
    (tmp_path / "my runs/.job-7").mkdir(parents=True)
    (tmp_path / "my runs/.job-7/restarts").write_text("9\n\n")
    last = 'trap "" USR2; kill -USR2 $PPID; sleep 0.5; echo 0 >"$MEGABERT_EXIT_DIR/0"'
    values = BOTH_PHASES | {"DATA_128": dataset, "DATA_512": dataset, "PROJECT": project}
    done = submit(PRETRAIN, tmp_path, code=85, runs=last, **values)
    assert done.stdout.count("srun: ") == starts and "ended with 85: requeued" in done.stdout, done.stdout


def test_a_signal_while_slurm_may_requeue_it_ends_with_85(dataset, tmp_path) -> None:
    runs = '(sleep 3; kill -USR2 $PPID) & echo 4 >"$MEGABERT_EXIT_DIR/0"; exit 1'
    values = BOTH_PHASES | {"DATA_128": dataset, "DATA_512": dataset, "RESTARTS": 0, "HOLD": 250}
    assert "scontrol cannot requeue this job" in submit(PRETRAIN, tmp_path, code=85, runs=runs, **values).stdout


@pytest.mark.parametrize(("runs", "starts", "code"), [
    ('trap "echo 85 >\'$MEGABERT_EXIT_DIR/0\'; exit 85" USR2; kill -USR2 $PPID; sleep 9 & wait', 1, 85),
    ('echo 4 >"$MEGABERT_EXIT_DIR/0"; exit 1', 2, 4),
])  # fmt: skip
def test_a_full_disk_of_the_log_loses_nothing(runs, starts, code, dataset, tmp_path) -> None:
    runs = f"echo >>{tmp_path}/starts\n{runs}"
    with open("/dev/full", "w") as full:
        values = BOTH_PHASES | {"DATA_128": dataset, "DATA_512": dataset, "MAX_RESTARTS": 1}
        submit(PRETRAIN, tmp_path, code=code, runs=runs, log=full, **values)
    assert (tmp_path / "starts").read_text().count("\n") == starts


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_container_is_given_every_folder_as_it_is(runtime, dataset, tmp_path) -> None:
    """Neither runtime is here: a stand-in for apptainer says what it was given; pyxis is options of srun."""
    image = tmp_path / "an image.sif"
    programs.write(tmp_path / "tools/apptainer", '#!/usr/bin/env bash\nprintf "apptainer:%s\\n" "$@"\nexit 2\n')
    image.touch()
    values = {"CONTAINER": image, "CONTAINER_RUNTIME": runtime, "PHASE1": "tiny", "DATA_128": dataset}
    values |= {"DATA": tmp_path / "data", "DATA_512": shutil.copytree(dataset, tmp_path / "long")}
    done = submit(PRETRAIN, tmp_path, code=2, runs='[[ $1 == apptainer ]] && exec "$@"\nexit 2\n', **values)
    folders = [str(ROOT), str(tmp_path / "my runs"), str(tmp_path / "data"), str(dataset), str(tmp_path / "long")]
    if runtime == "apptainer":
        assert f"apptainer:{image}" in done.stdout and "apptainer:python" in done.stdout
        assert next(word for word in srun_words(tmp_path) if word.startswith(f"{ROOT},")).split(",") == folders
    else:
        assert {f"--container-image={image}", f"--container-workdir={ROOT}"} <= set(srun_words(tmp_path))
        assert mounts(tmp_path) == folders


def test_build_in_a_container_is_given_its_inputs(tmp_path) -> None:
    for name in ("books", "wiki-1", "image.sif"):
        (tmp_path / name).mkdir()
    (tmp_path / "t.model").touch()
    programs.write(tmp_path / "tools/mpirun", "#!/bin/sh\nexit 3\n")  # of the node, which pyxis does not reach
    values = {"CONTAINER": tmp_path / "image.sif", "CONTAINER_RUNTIME": "pyxis"}
    values |= {"CORPUS": f"{tmp_path}/books/*.txt {tmp_path}/wiki-?/x here.txt", "DATA": tmp_path / "data"}
    submit(PREP, tmp_path, code=2, runs="exit 2\n", PREP=f"--tokenizer {tmp_path}/t.model", **values)
    own = [str(ROOT), str(tmp_path / "my runs"), str(tmp_path / "data")]
    assert mounts(tmp_path) == [*own, f"{tmp_path}/books", str(tmp_path), f"{tmp_path}/t.model"]
    assert all(Path(path).exists() for path in mounts(tmp_path))
    assert f"{tmp_path}/books/*.txt" in srun_words(tmp_path)
    done = submit(PREP, tmp_path, code=2, MPI="mpirun", **values)
    assert "MPI=mpirun: does not start a container of pyxis; leave MPI unset" in done.stderr


@pytest.mark.skipif(not shutil.which("ip"), reason="no `ip` (iproute2) here")
def test_node_finds_its_interface_in_the_ranks_network() -> None:
    bare = {k: v for k, v in os.environ.items() if not k.endswith("_SOCKET_IFNAME")}
    for network, own, code, said in (
        ("127.0.0.0/8", {}, 0, "=lo lo\n"),  # every machine's
        ("127.0.0.0/8", {"GLOO_SOCKET_IFNAME": "ib0"}, 0, "=lo ib0\n"),
        ("203.0.113.0/24", {}, 2, "has no address in NETWORK=203.0.113.0/24"),  # nobody's (RFC 5737)
    ):
        script = [ROOT / "launch/network.sh", network, "sh", "-c", "echo $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME"]
        done = subprocess.run(script, env=bare | own, capture_output=True, text=True)
        assert done.returncode == code and (done.stdout == said if code == 0 else said in done.stderr), done


def test_what_every_attempt_of_a_build_rewrites_is_no_progress(tmp_path) -> None:
    script = (ROOT / PREP).read_text()
    function = script[script.index("progress() {") :].partition("\n}\n")[0] + "\n}\nprogress"

    def write(name: str, text: str = "x") -> str:
        """Write a file of the build; returns what counts as its progress."""
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        done = subprocess.run(["bash", "-c", function], env={"DATA": str(tmp_path)}, capture_output=True, text=True)
        return done.stdout

    before = write(".work/build.json")
    for name in (".work/build.json", ".work/lock", ".work/.read-0000000.tokens.1a2b.tmp", ".work/read-0000000.tokens"):
        assert write(name, "changed") == before
    for name in (".work/journal/read/0000000.json", "seq128/shard-000000.tar", "seq128/manifest.json"):
        before, last = write(name), before
        assert before != last and write(".work/build.json", name) == before


@pytest.mark.dist
def test_prep_makes_both_lengths_with_one_tokenizer(corpus, tmp_path) -> None:
    (tmp_path / "my corpus").symlink_to(corpus)
    env = {"CORPUS": tmp_path / "my corpus", "VOCAB": 1000, "SLURM_NTASKS": 2, "DATA": tmp_path / "data"}
    env["PREP"] = "--nsp --held-out 0.02 --dedup documents near"
    submit(PREP, tmp_path, **env)
    short, long = (json.loads((tmp_path / f"data/seq{size}/manifest.json").read_text()) for size in (128, 512))
    assert (short["seq_len"], long["seq_len"]) == (128, 512)
    assert short["tokenizer"]["sha256"] == long["tokenizer"]["sha256"]
    assert short["statistics"]["documents"] == long["statistics"]["documents"] > 50
    assert "nothing to do" in submit(PREP, tmp_path, **env).stdout
