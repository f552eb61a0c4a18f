"""`launch/kubernetes` and `launch/skypilot.yaml`: what is rendered, and the commands in it on this machine, which stands for the nodes."""

import os
import re
import signal
import subprocess
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.common.hardware import free_port
from megabert.common import storage
from megabert.common.processes import is_alive
from tests.helpers import programs
from tests.helpers.job import SMALL, with_descendants
from tests.helpers.object_store import PASS, Proxy
from tests.helpers.waiting import wait_until
from tests.integration.conftest import BIN, ROOT, logged

VALUES = {"IMAGE": "registry:5000/megabert:cuda", "DATA": "s3://data/shards", "MIRROR": "s3://trained/pods"}
VALUES["SECRET"] = "bucket-keys"
TINY = {"PHASE1": "tiny", "PHASE2": "tiny", "GPUS": "1", "MAX_RESTARTS": "9"}
SKYPILOT = "skypilot==0.14.1"


def render(*words: str, **values: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "launch/kubernetes/render.sh"), *words]
    return subprocess.run(command, env=os.environ | VALUES | values, capture_output=True, text=True, timeout=30)


def objects(*words: str, **values: str) -> dict[str, Any]:
    """The rendered objects by kind."""
    done = render(*words, **values)
    assert done.returncode == 0 and "${" not in done.stdout, done.stdout + done.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}


def build_job(jobset: dict[str, Any]) -> dict[str, Any]:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]


@pytest.mark.parametrize("values", [{}, {"NODES": "4", "RUNS_CLAIM": "runs", "SECRET": "", "PHASE2": ""}])
def test_objects_have_only_fields_of_their_apis(values: dict[str, str]) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    rendered = objects("jobset", "zero.stage=2", **values) | objects("trainjob", "zero.stage=2", **values)
    known = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    assert set(rendered) == {*known, "NetworkPolicy"}
    for kind, model in known.items():
        # from_dict drops what it does not know
        assert model.from_dict(rendered[kind]).to_dict() == rendered[kind]
    job = models.IoK8sApiBatchV1JobSpec.from_dict(build_job(rendered["JobSet"]))
    assert job.parallelism == job.completions == int(values.get("NODES", 1))
    assert rendered["TrainingRuntime"]["spec"]["template"]["spec"] == rendered["JobSet"]["spec"]


def test_nodes_share_a_claim_and_one_needs_none() -> None:
    for values, volume in (
        ({"DISK": "7Gi"}, {"emptyDir": {"sizeLimit": "7Gi"}}),
        ({"NODES": "2", "RUNS_CLAIM": "shared"}, {"persistentVolumeClaim": {"claimName": "shared"}}),
    ):
        pod = build_job(objects("jobset", **values)["JobSet"])["template"]["spec"]
        (mount,) = (each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "runs")
        assert pod["containers"][0]["args"][1].startswith(mount["mountPath"] + "/")
        assert {"name": "runs"} | volume in pod["volumes"]


ODD = [
    *(("IMAGE", ""), ("DATA", ""), ("MIRROR", ""), ("MIRROR", "/a/folder"), ("NAME", "Large"), ("NODES", "0")),
    *(("GPUS", "8 "), ("SHM", "64"), ("GRACE", "10m"), ("SECRET", "a, b"), ("DATA", 's3://a"\nb: {x')),
    *(("MIRROR", "s3://$(touch owned)"), ("PHASE1", "large; touch owned"), ("RUNS_CLAIM", "a}")),
]


@pytest.mark.parametrize(("words", "values", "said"), [
    *((words, {}, "error: ") for words in (["pod"], [], ["jobset", 'a="b'], ["jobset", "a=$(HOME)"])),
    (["jobset"], {"NODES": "2"}, "error: RUNS_CLAIM is empty: 2 nodes write one checkpoint"),
    *((["jobset"], {name: value}, f"error: {name}=.*; set it in launch/kubernetes/values.sh$") for name, value in ODD),
])  # fmt: skip
def test_mistake_is_one_line(words: list[str], values: dict[str, str], said: str) -> None:
    done = render(*words, **values)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert re.match(said, done.stderr), done.stderr


def test_exit_codes_restart_as_documented() -> None:
    """The table in docs/cluster.md, Kubernetes' rules, of which the first that matches applies, and SkyPilot's list."""
    table = (ROOT / "docs/cluster.md").read_text().partition("| code | meaning | restarted |")[2]
    documented = {int(code): end for code, end in re.findall(r"^\| (\d+) \|.*\| (\w+) \|$", table, re.M)}
    assert set(documented) >= {0, 2, 3, 4, 85}
    jobset = objects("jobset", RESTARTS="5")["JobSet"]
    job = build_job(jobset)
    (container,) = job["template"]["spec"]["containers"]

    def of_pod(code: int) -> str:
        for rule in job["podFailurePolicy"]["rules"]:
            asked = rule.get("onExitCodes", {"values": []})
            if code in asked["values"]:
                assert (asked["containerName"], asked["operator"]) == (container["name"], "In")
                return rule["action"]
        return "Count"  # to backoffLimit, which is 0: the job fails with another reason, and the set restarts

    policy = jobset["spec"]["failurePolicy"]
    of_set = {reason: rule["action"] for rule in policy["rules"] for reason in rule["onJobFailureReasons"]}
    sky = yaml.safe_load((ROOT / "launch/skypilot.yaml").read_text())["resources"]["job_recovery"]
    assert job["backoffLimit"] == sky["max_restarts_on_errors"] == 0
    assert of_set == {"PodFailurePolicy": "FailJobSet"} and policy["maxRestarts"] == 5
    for code, end in documented.items():
        if code:
            assert of_pod(code) == {"never": "FailJob", "yes": "Ignore" if code == 85 else "Count"}[end]
            assert (code in sky["recover_on_exit_codes"]) == (end == "yes")


class Pod:
    """The container of a rendered JobSet, as a process of this machine; `disks` holds its /local and /runs, of all pods."""

    def __init__(self, jobset: dict[str, Any], index: int, disks: Path, port: int, **more: str) -> None:
        (container,) = build_job(jobset)["template"]["spec"]["containers"]
        env = {each["name"]: each.get("value", str(index)) for each in container["env"]}
        assert env["PET_MASTER_ADDR"] == f"{jobset['metadata']['name']}-node-0-0.{jobset['metadata']['name']}"
        assert container["workingDir"] == "/opt/megabert"
        env |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "CACHE": f"{disks}{env['CACHE']}"}
        env |= {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env |= {"RESTART_WAIT": "1"} | more
        args = [word.replace("/runs/", f"{disks}/runs/") for word in container["args"]]
        disks.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(suffix=".log", prefix=f"pod{index}-", dir=disks, delete=False) as log:
            self.log = Path(log.name)
            words = [*container["command"], *args]
            self.process = subprocess.Popen(words, cwd=ROOT, env=os.environ | env, stdout=log, stderr=log)

    def lose(self) -> None:
        """As when the node is gone: no process of it does anything more."""
        for pid in with_descendants([self.process.pid]):
            os.kill(pid, signal.SIGKILL)

    def wait(self, timeout: float = 200) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.output) from None

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")


# What stands for torchrun: writes down what it was asked for, and does what the n-th word of $PLAN says: its code, + for a new checkpoint
TORCHRUN = """#!/usr/bin/env python3
import os, sys
from pathlib import Path
calls = Path(os.environ["CALLS"])
number = len(calls.read_text().splitlines()) if calls.exists() else 0
with calls.open("a") as file:
    print(os.environ["PET_MASTER_PORT"], *sys.argv[1:], file=file)
word = os.environ["PLAN"].split()[number]
code, run = int(word.rstrip("+")), Path(sys.argv[sys.argv.index("--run") + 1])
(run / "checkpoints").mkdir(parents=True, exist_ok=True)
if word.endswith("+"):
    (run / "checkpoints/pointer.json").write_text(str(number))
Path(os.environ["MEGABERT_EXIT_DIR"], str(number)).write_text(f"{code}\\n")
sys.exit(code and 1)
"""


@pytest.mark.parametrize(("plan", "phases", "code"), [
    # a checkpoint of either phase is progress
    ("0 0", "12", 0), ("85 0 0", "112", 0), ("0+ 4+ 0 4+ 0 4+ 0 0", "12121212", 0), ("0 4 0 4", "1212", 4), ("2", "1", 2),
    ("0 3", "12", 3),
])  # fmt: skip
def test_pod_runs_phases_and_ends_with_their_code(plan: str, phases: str, code: int, tmp_path: Path) -> None:
    programs.write(tmp_path / "torchrun", TORCHRUN)
    jobset = objects("jobset", "batch.micro_size=16", MAX_RESTARTS="1", PHASE1="base")["JobSet"]
    more = {"PLAN": plan, "CALLS": str(tmp_path / "calls"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    more["RESTART_WAIT"] = "0"
    pod = Pod(jobset, 0, tmp_path, 29500, **more)
    assert pod.wait(60) == code, pod.output
    run = tmp_path / "runs/megabert-large"
    expected = {
        phase: f"{port} -- megabert/train.py --config {preset} --data s3://data/shards/{length} --run {run}/phase{phase} "
        f"checkpoint.mirror=s3://trained/pods/phase{phase} data.cache_dir={tmp_path}/local/cache{more} batch.micro_size=16"
        for phase, port, preset, length, more in (
            ("1", 29500, "base", "seq128", ""),
            ("2", 29501, "large_phase2", "seq512", f" init_from={run}/phase1"),
        )
    }
    assert (tmp_path / "calls").read_text().splitlines() == [expected[phase] for phase in phases]


def test_a_stop_before_there_are_ranks_leaves_no_process(tmp_path: Path) -> None:
    programs.write(tmp_path / "torchrun", f"#!/bin/sh\necho $$. >{tmp_path}/pid\nexec sleep 600\n")
    pod = Pod(objects("jobset")["JobSet"], 0, tmp_path, 29500, PATH=f"{tmp_path}:{os.environ['PATH']}")
    file = tmp_path / "pid"
    wait_until(lambda: file.is_file() and "." in file.read_text())
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait(60) == 85, pod.output
    wait_until(lambda: not is_alive(int(file.read_text().strip(".\n"))))


def test_a_stop_between_the_phases_starts_no_phase(tmp_path: Path) -> None:
    programs.write(tmp_path / "torchrun", f"#!/bin/sh\necho >>{tmp_path}/starts\n")
    env = {"DATA": "s3://a", "MIRROR": "s3://b", "CACHE": "/c", "PET_MASTER_PORT": "29500"}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BASH_FUNC_wait%%": '() { builtin wait "$@"; kill -USR2 $$; }'}
    done = subprocess.run([ROOT / "launch/phases.sh", "--run", tmp_path], env=os.environ | env, timeout=60)
    assert done.returncode == 85 and (tmp_path / "starts").read_text() == "\n"


def test_a_stop_while_the_first_phase_ends_starts_no_phase(tmp_path: Path) -> None:
    rank = f'echo >>{tmp_path}/starts; trap "echo 0 >$MEGABERT_EXIT_DIR/0; exit" USR2; while sleep 0.05; do :; done'
    programs.write(tmp_path / "torchrun", f"#!/bin/sh\nLOCAL_RANK=0 sh -c '{rank}'\n")
    pod = Pod(objects("jobset")["JobSet"], 0, tmp_path, 29500, PATH=f"{tmp_path}:{os.environ['PATH']}")
    wait_until((tmp_path / "starts").exists)
    time.sleep(0.2)
    pod.process.send_signal(signal.SIGTERM)
    assert pod.wait(60) == 85 and (tmp_path / "starts").read_text() == "\n", pod.output


@pytest.mark.slow
@pytest.mark.dist
def test_pods_go_on_after_lost_disks_and_drains(dataset: Path, tmp_path: Path, proxy: Proxy) -> None:
    """Two nodes: all are lost in phase 1, and their disks; later rank 0's is drained in phase 2 and another pod takes its place."""
    pytest.importorskip("s3fs")
    for path in dataset.rglob("*"):
        for length in ("seq128", "seq512") if path.is_file() else ():
            storage.put(path, f"s3://data/shards/{length}/{path.relative_to(dataset).as_posix()}")
    small = (*SMALL, "schedule.total_steps=60", "checkpoint.interval=10")
    jobset = objects("jobset", *small, NODES="2", RUNS_CLAIM="runs", **TINY)["JobSet"]
    port, pods, committed = free_port(), list[Pod](), set[str]()

    def note(method: str, path: str, number: int) -> str:
        """The checkpoints whose manifests are in the bucket."""
        found = re.search(r"/(phase\d)/checkpoints/step-\d+/manifest", path)
        if method == "PUT" and found:
            committed.add(found[1])
        return PASS

    def wait_for(phase: str) -> None:
        wait_until(lambda: phase in committed, 120, lambda: "".join(pod.output for pod in pods))

    def start(index: int, disks: str) -> Pod:
        pods.append(Pod(jobset, index, tmp_path / disks, port))
        return pods[-1]

    proxy.fault = note
    try:
        first = [start(index, "lost") for index in range(2)]
        wait_for("phase1")
        for pod in first:
            pod.lose()
        drained, stays = (start(index, "new") for index in range(2))
        wait_for("phase2")
        drained.process.send_signal(signal.SIGTERM)
        assert drained.wait() == 85, drained.output
        new = start(0, "new")
        assert (stays.wait(), new.wait()) == (0, 0), stays.output + new.output
    finally:
        for pod in pods:
            if pod.process.poll() is None:
                pod.lose()
    runs = tmp_path / "new/runs/megabert-large"
    for phase in ("phase1", "phase2"):
        assert list(logged(runs / phase)) == list(range(1, 61))
    assert f"{VALUES['MIRROR']}/phase1: step-000000" in drained.output
    assert f"starting from the weights of {runs}/phase1 at step 60" in drained.output
    assert f"resuming from {runs}/phase2" in new.output
    before = logged(tmp_path / "lost/runs/megabert-large/phase1")
    assert before.items() <= logged(runs / "phase1").items() and len(before) >= 10


SKY = """
import sys, yaml, sky
given = [tuple(word.split("=", 1)) for word in sys.argv[2:]]
task = sky.Task.from_yaml_config(yaml.safe_load(open(sys.argv[1])), env_overrides=given)
(resources,) = task.resources
print([task.num_nodes, resources.accelerators, resources.use_spot, resources.job_recovery, sorted(task.envs)])
"""


@pytest.mark.slow
def test_skypilot_reads_its_job(tmp_path: Path) -> None:
    """By SkyPilot's own parser, which checks names and values, in an environment of its own."""
    venv.create(tmp_path / "sky", with_pip=True)
    python = tmp_path / "sky/bin/python"
    got = subprocess.run([python, "-m", "pip", "install", "-q", SKYPILOT], capture_output=True, text=True)
    if got.returncode:
        pytest.skip(f"pip cannot install {SKYPILOT}: {got.stderr.splitlines()[-1]}")
    env = os.environ | {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}

    def parse(*words: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-c", SKY, ROOT / "launch/skypilot.yaml", *words]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)

    done = parse("DATA=s3://a", "MIRROR=s3://b")
    recovery = "{'strategy': 'EAGER_NEXT_REGION', 'max_restarts_on_errors': 0, 'recover_on_exit_codes': [4, 85]}"
    names = ["DATA", "MIRROR", "OVERRIDES", "PHASE1", "PHASE2", "RUNS"]
    assert done.stdout.strip() == f"[1, {{'H100': 8}}, True, {recovery}, {names}]", done.stderr
    assert "'DATA' is None" in parse().stderr


def test_skypilot_command_starts_the_phases(tmp_path: Path) -> None:
    programs.write(tmp_path / ".venv/bin/activate", f"export PATH={tmp_path}:$PATH\n")
    for name in ("launch", "megabert"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs.write(tmp_path / "torchrun", '#!/bin/sh\nenv | grep ^PET_ | sort\necho "$*"\n')
    task = yaml.safe_load((ROOT / "launch/skypilot.yaml").read_text())
    sky = {"NUM_NODES": "2", "NODE_RANK": "1", "NUM_GPUS_PER_NODE": "8", "NODE_IPS": "10.0.0.4\n10.0.0.5"}
    env = {f"SKYPILOT_{name}": value for name, value in sky.items()} | {"HOME": str(tmp_path), "MAX_RESTARTS": "0"}
    env |= task["envs"] | {"DATA": "s3://a", "MIRROR": "s3://b", "PHASE2": "", "OVERRIDES": "zero.stage=2 seed=3"}

    def start(**more: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-c", task["run"]]
        return subprocess.run(command, cwd=tmp_path, env=os.environ | env | more, capture_output=True, text=True)

    refused = start()
    assert refused.returncode == 2 and refused.stderr.startswith("error: RUNS is empty: 2 nodes write one checkpoint")
    done = start(RUNS="/shared")
    assert done.returncode == 4, "torchrun without ranks"
    *variables, words = done.stdout.splitlines()
    pet = {"MASTER_ADDR": "10.0.0.4", "MASTER_PORT": 29500, "NNODES": 2, "NODE_RANK": 1, "NPROC_PER_NODE": 8}
    assert variables == [f"PET_{name}={value}" for name, value in pet.items()]
    assert words == (
        "-- megabert/train.py --config large_phase1 --data s3://a/seq128 --run /shared/phase1 "
        f"checkpoint.mirror=s3://b/phase1 data.cache_dir={tmp_path}/cache zero.stage=2 seed=3"
    )
