"""The SLURM scripts without SLURM: the batch script runs as SLURM's shell would run it, with the variables SLURM sets.

`srun` is replaced by a script that drops its own options and runs the command once; everything behind it is real.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRUN = '#!/usr/bin/env bash\nwhile [[ $1 == --* ]]; do shift; done\necho "srun: $*"\nexec "$@"\n'
SMALL = [
    *("model.layers=1", "model.hidden=32", "batch.global_size=16", "batch.micro_size=16", "eval.rows=32"),
    *("schedule.total_steps=4", "schedule.warmup_steps=1", "peak_tflops=1.0", "log.interval=1"),
]


def submit(
    script: str, folder: Path, *arguments: str, srun: str = SRUN, **env: str
) -> subprocess.CompletedProcess[str]:
    """`sbatch script arguments…` with this environment's python in place of the site's."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "srun").write_text(srun)
    (tools / "srun").chmod(0o755)
    site = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "VENV": str(Path(sys.executable).parents[1]),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "7",
        "MASTER_ADDR": "127.0.0.1",
        "SLURM_PROCID": "0",  # the batch shell has it too, and is not a rank
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        ["bash", str(ROOT / script), *arguments],
        cwd=folder, env=os.environ | site | env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.dist
@pytest.mark.slow
def test_phase_2_starts_from_phase_1_and_a_second_job_passes_over_both(dataset, tmp_path) -> None:
    runs = tmp_path / "my runs"  # a path with a space in it
    env = {"PHASE1": "tiny", "PHASE2": "tiny", "RUNS": str(runs), "SLURM_NTASKS": "1"}
    env |= {"DATA_128": str(dataset), "DATA_512": str(dataset)}
    done = submit("launch/pretrain_large.slurm", tmp_path, *SMALL, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"starting from the weights of {runs}/large_phase1 at step 4" in done.stdout
    scores = {}
    for phase in ("large_phase1", "large_phase2"):
        lines = [json.loads(line) for line in (runs / phase / "metrics.jsonl").read_text().splitlines()]
        scores[phase] = [line["eval/mlm_loss"] for line in lines if "eval/mlm_loss" in line]
        assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4]
    assert scores["large_phase2"][0] == pytest.approx(scores["large_phase1"][-1], rel=2e-3)

    again = submit("launch/pretrain_large.slurm", tmp_path, *SMALL, **env)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("resuming from") == 2 and "step       5" not in again.stdout


def test_a_missing_environment_is_one_clear_line(tmp_path) -> None:
    values = {"RUNS": str(tmp_path), "SLURM_NTASKS": "1"}
    done = submit("launch/pretrain_large.slurm", tmp_path, VENV=str(tmp_path / "nothing"), **values)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        f"error: {tmp_path}/nothing/bin/python is missing: run make venv in {ROOT}, or set VENV in launch/env.sh"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_RESTARTS", "3; touch owned"),
        ("EXCLUDE_SLOW", "1; touch owned"),
        ("RUNS", "relative"),
        ("DATA", "/tmp/two\nlines"),
        ("CONTAINER", "/missing.sif"),
        ("MASTER_ADDR", "$(touch owned)"),
        ("NCCL_SOCKET_IFNAME", "ib0 && touch owned"),
        ("NETWORK", "10.78.0.0/24; touch owned"),
    ],
)
def test_an_odd_value_is_one_line_that_names_it(name, value, tmp_path) -> None:
    values = {"SLURM_NTASKS": "1", "RUNS": str(tmp_path / "runs")} | {name: value}
    done = submit("launch/pretrain_large.slurm", tmp_path, **values)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and name in line.replace(value, name), line
    assert not list(tmp_path.rglob("owned")) and not (ROOT / "owned").exists()


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_a_container_is_given_every_folder_and_quoted_as_it_is(runtime, dataset, tmp_path) -> None:
    """Neither runtime is here: a stand-in for apptainer says what it was given; pyxis is options of srun."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "apptainer").write_text('#!/usr/bin/env bash\nprintf "apptainer:%s\\n" "$@"\nexit 2\n')
    (tools / "apptainer").chmod(0o755)
    image = tmp_path / "an image.sif"
    image.touch()
    values = {"CONTAINER": str(image), "CONTAINER_RUNTIME": runtime, "SLURM_NTASKS": "1", "PHASE1": "tiny"}
    values |= {"DATA_128": str(dataset), "DATA": str(tmp_path / "data"), "RUNS": str(tmp_path / "my runs")}
    log = tmp_path / "srun"
    srun = f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" >{log}\nwhile [[ $1 == --* ]]; do shift; done\n'
    srun += '[[ $1 == apptainer ]] && exec "$@"\nexit 2\n'
    done = submit("launch/pretrain_large.slurm", tmp_path, srun=srun, **values)
    assert done.returncode == 2, done.stdout + done.stderr
    given = log.read_text().splitlines()
    folders = [str(ROOT), str(tmp_path / "my runs"), str(tmp_path / "data"), str(dataset)]
    if runtime == "apptainer":
        assert f"apptainer:{image}" in done.stdout and "apptainer:python" in done.stdout
        mounts = next(word for word in given if word.startswith(str(ROOT) + ",")).split(",")
    else:
        assert f"--container-image={image}" in given and f"--container-workdir={ROOT}" in given
        (option,) = (word for word in given if word.startswith("--container-mounts="))
        mounts = [pair.split(":")[0] for pair in option.partition("=")[2].split(",")]
    assert mounts == folders


def test_a_build_in_a_container_is_given_what_it_reads(tmp_path) -> None:
    for name in ("books", "wiki-1", "image.sif"):
        (tmp_path / name).mkdir()
    (tmp_path / "t.model").touch()
    values = {
        "CONTAINER": str(tmp_path / "image.sif"),
        "CONTAINER_RUNTIME": "pyxis",
        "SLURM_NTASKS": "1",
        "MPI": "srun",
    }
    values |= {"CORPUS": f"{tmp_path}/books/*.txt {tmp_path}/wiki-?/x here.txt", "DATA": str(tmp_path / "data")}
    values |= {"PREP": f"--tokenizer {tmp_path}/t.model", "RUNS": str(tmp_path / "runs")}
    log = tmp_path / "srun.log"
    done = submit(
        "launch/prep.slurm", tmp_path, srun=f'#!/usr/bin/env bash\nprintf "%s\n" "$@" >{log}\nexit 2\n', **values
    )
    assert done.returncode == 2, done.stdout + done.stderr
    given = log.read_text().splitlines()
    (option,) = (word for word in given if word.startswith("--container-mounts="))
    mounts = [pair.split(":")[0] for pair in option.partition("=")[2].split(",")]
    assert mounts[:3] == [str(ROOT), str(tmp_path / "runs"), str(tmp_path / "data")]
    assert mounts[3:] == [f"{tmp_path}/books", str(tmp_path), f"{tmp_path}/t.model"]
    assert all(Path(path).exists() for path in mounts)
    assert f"{tmp_path}/books/*.txt" in given


@pytest.mark.skipif(not shutil.which("ip"), reason="no `ip` (iproute2) here")
def test_each_node_finds_its_own_interface_in_the_ranks_network() -> None:
    """127.0.0.0/8 is every machine's."""
    show = ["sh", "-c", "echo $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME"]
    script = [str(ROOT / "launch/network.sh"), "127.0.0.0/8", *show]
    bare = {k: v for k, v in os.environ.items() if not k.endswith("_SOCKET_IFNAME")}
    for own, printed in (({}, "=lo lo"), ({"GLOO_SOCKET_IFNAME": "ib0"}, "=lo ib0")):
        done = subprocess.run(script, env=bare | own, capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr
    script[1] = "203.0.113.0/24"  # nobody's (RFC 5737)
    done = subprocess.run(script, env=bare, capture_output=True, text=True)
    assert done.returncode == 2 and "has no address in NETWORK=203.0.113.0/24" in done.stderr


@pytest.mark.dist
def test_prep_makes_both_lengths_with_one_tokenizer_over_ranks(corpus, tmp_path) -> None:
    env = {"CORPUS": str(corpus), "VOCAB": "1000", "SLURM_NTASKS": "2"}
    env |= {"DATA": str(tmp_path / "data"), "PREP": "--nsp --held-out 0.02 --dedup documents near"}
    done = submit("launch/prep.slurm", tmp_path, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    short, long = (
        json.loads((tmp_path / "data" / name / "manifest.json").read_text()) for name in ("seq128", "seq512")
    )
    assert (short["seq_len"], long["seq_len"]) == (128, 512)
    assert short["tokenizer"]["sha256"] == long["tokenizer"]["sha256"]
    assert short["statistics"]["documents"] == long["statistics"]["documents"] > 50
    again = submit("launch/prep.slurm", tmp_path, **env)
    assert again.returncode == 0 and "nothing to do" in again.stdout
