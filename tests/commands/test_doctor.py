"""The doctor reports this machine and what is missing; preflight names differences and slow ranks of all machines."""

import importlib.metadata
import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.hardware import free_port
from megabert import config
from megabert.commands import doctor
from megabert.commands.doctor import Finding
from megabert.commands.preflight import RankSurvey, check_shared_files, report, survey
from megabert.common import logs
from megabert.distributed.ranks import World
from megabert.distributed.signals import UNSAVED
from tests.helpers.ranks import run_ranks
from tests.integration.conftest import ROOT, command

FACTS = {"torch": "2.13.0", "numpy": "2.4.6", "megabert": "abc", "kernel": "6.1", "device": "H100, 80 GiB"}
WORLD = World(0, 0, 8, torch.device("cpu"), "nccl", "srun")


def test_a_cluster_without_rank_0_is_reported_soon() -> None:
    code = "from megabert.commands import doctor; doctor.PREFLIGHT_SECONDS = 1.0; exit(doctor.main(['--cluster']))"
    peer = {
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    done = command("-c", code, timeout=100, **peer)
    assert done.returncode == 4 and "rank 1 cannot connect to the other ranks at 127.0.0.1:" in done.stderr
    assert "rank 1: warning: waiting for rank 0 at 127.0.0.1:" in done.stderr


def test_ctrl_c_ends_the_report_of_a_cluster(tmp_path, monkeypatch, capfd, own_signals) -> None:
    shown, write = threading.Event(), logs.write_notice
    monkeypatch.setattr(logs, "write_notice", lambda text: (write(text), shown.set()))

    def interrupted(*_) -> None:  # a product takes longer than the thread that prints the notice
        os.kill(os.getpid(), signal.SIGINT)
        assert shown.wait(30)

    monkeypatch.setattr("megabert.engine.ceiling.matmul_tflops", interrupted)
    assert doctor.main(["--cluster", "--folder", str(tmp_path)]) == 130
    assert capfd.readouterr().err.strip().splitlines() == [UNSAVED.decode().strip(), "error: interrupted"]


def test_this_machine_is_reported_as_it_is() -> None:
    done = command("-m", "megabert.commands.doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {(line["section"], line["name"]): line for line in json.loads(done.stdout)}
    for name in doctor.NEEDED:
        line = lines["packages", name]
        assert (line["state"], line["value"]) == ("ok", importlib.metadata.version(name))
    assert f"{len(os.sched_getaffinity(0))} usable cores" in lines["machine", "cpu"]["value"]
    operations = {name.split()[0]: line["value"] for (section, name), line in lines.items() if section == "operations"}
    assert set(config.OpsConfig.model_fields) <= set(operations)
    built = (ROOT / "megabert" / "_native.abi3.so").is_file()
    assert (lines["operations", "native library"]["state"] == "ok") == built
    for op in config.OpsConfig.model_fields:
        backend, _, reason = operations[op].partition(": ")
        assert backend in ("sdpa", "varlen", "native", "torch") and reason


@pytest.mark.slow
def test_apex_is_imported_as_training_does(tmp_path, monkeypatch) -> None:
    line = doctor.apex()
    assert (line.state, line.value) == ("note", "not used: ModuleNotFoundError: No module named 'amp_C'") and line.fix
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("def authenticate(): ...\n")
    assert "the package apex installed here is another one" in doctor.apex().value
    kernels = "multi_tensor_adam_capturable = multi_tensor_lamb_mp = None\n"
    (tmp_path / "apex/multi_tensor_apply.py").write_text("multi_tensor_applier = None\n")
    (tmp_path / "amp_C.py").write_text(kernels)
    assert doctor.apex() == Finding("packages", "apex", "ok", "NVIDIA's, no version")


def test_without_torch_training_cannot_run_and_nothing_crashes(monkeypatch, capsys) -> None:
    real = doctor.probe
    refused = (False, "ModuleNotFoundError: No module named 'torch'")
    monkeypatch.setattr(doctor, "probe", lambda code: refused if "import torch" in code else real("print(1)"))
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "!! torch" in out and "No module named 'torch'" in out
    assert out.splitlines()[-1].startswith("training cannot run here; missing: torch")


def test_a_version_out_of_range_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "probe", lambda code: (True, ""))
    own = {"torch": "2.10.1+cu128", "deepspeed": "0.20.0", "numpy": "1.26", "pydantic": "2.14.3rc1"}
    monkeypatch.setattr(doctor, "version", lambda name: own.get(name, "99"))
    lines = {line.name: line for line in doctor.packages()}
    assert (
        lines["torch"].state == lines["deepspeed"].state == "missing"
        and "pip install 'torch>=2.11'" in lines["torch"].fix
    )
    assert {lines[name].state for name in ("numpy", "pydantic", "tqdm")} == {"ok"}


def test_a_probe_survives_what_it_probes() -> None:
    assert doctor.probe("print('first'); print('last')") == (True, "last")
    refused = (False, "ModuleNotFoundError: No module named 'no_such_module'")
    assert doctor.probe("import no_such_module") == refused
    assert doctor.probe("import os; os.abort()") == (False, "killed by signal 6")
    latin_1 = "import sys; sys.stdout.buffer.write('caf\\xe9'.encode('latin-1'))"
    assert doctor.probe(latin_1) == (True, "caf\N{REPLACEMENT CHARACTER}"), "of another encoding"


def surveys(**changes: dict[int, Any]) -> list[RankSurvey]:
    """Eight ranks on four nodes, all alike; `changes`: by field, the value of some ranks."""
    usual = RankSurvey(0, "", FACTS, tflops=700.0, link=2e10, files=2e8)
    found = []
    for rank in range(8):
        own = {name: of_rank[rank] for name, of_rank in changes.items() if rank in of_rank}
        found.append(replace(usual, rank=rank, host=f"n{rank // 2}", **own))
    return found


def lines(found: list[RankSurvey]) -> dict[str, Finding]:
    return {line.name: line for line in report(WORLD, found, 0.002)}


def test_what_differs_between_nodes_is_named() -> None:
    found = lines(surveys())
    assert {line.state for line in found.values()} == {"ok"}
    assert found["ranks"].value == "8 on 4 node(s) by srun, nccl: n0 x2, n1 x2, n2 x2, n3 x2"
    assert "device H100, 80 GiB" in found["the same on all"].value and "torch 2.13.0" in found["the same on all"].value
    assert found["all-reduce of 4 MiB"].value == "2.00 ms, 3.670 GB/s a rank"  # 2 x 7/8 x 2^22 bytes in 2 ms
    other = FACTS | {"torch": "2.12.1"}
    found = lines(surveys(facts={4: other, 5: other, 7: FACTS | {"kernel": "6.2"}, 0: FACTS | {"device": "A100"}}))
    difference = "missing", "2.12.1 on n2; 2.13.0 elsewhere", "make torch the same on all nodes"
    assert found["torch differs"] == Finding("cluster", "torch differs", *difference)
    for name, value in (("kernel", "6.2 on n3"), ("device", "A100 on n0")):
        assert found[f"{name} differs"].state == "note" and value in found[f"{name} differs"].value


def test_a_slow_rank_is_named() -> None:
    for field, of_rank, name, slowest in (
        ("tflops", {5: 600.0}, "product rate", "rank 5 (n2): 600 TFLOP/s"),
        ("link", {4: 1e9}, "links between nodes", "rank 3 (n1) to rank 4 (n2): 1,000 MB/s"),
        ("link", {3: 1e9}, "links in nodes", "rank 2 (n1) to rank 3 (n1): 1,000 MB/s"),
        ("files", {6: 4e7}, "files", "rank 6 (n3): 40 MB/s"),
    ):
        found = lines(surveys(**{field: of_rank}))
        assert found[name].state == "note" and found[name].value.endswith(slowest), found[name]
        assert [line.name for line in found.values() if line.state != "ok"] == [name]
    missing = lines(surveys(problem={3: "/runs is not shared: what n2 wrote is not seen"}, files={3: 0.0}))["files"]
    assert missing.state == "missing" and missing.value.startswith("rank 3 (n1): /runs is not")


def test_a_lone_rank_writes_and_removes_its_file(tmp_path) -> None:
    world, place = replace(WORLD, size=1), replace(surveys()[0], files=0.0)
    check_shared_files(world, tmp_path, place)
    assert place.files > 0 and not place.problem and not list(tmp_path.iterdir())
    check_shared_files(world, Path("/proc/nowhere"), place)
    assert "/proc/nowhere" in place.problem


def surveyed(world: World, folder: str) -> list[tuple[str, str]]:
    found, summed = survey(world, Path(folder), lambda: 1.0 + world.rank)
    assert len(found) == world.size and all(one.link > 1e5 for one in found)
    return [(line.name, line.state) for line in report(world, found, summed)]


@pytest.mark.slow
@pytest.mark.dist
def test_real_ranks_measure_and_leave_nothing(tmp_path) -> None:
    found = run_ranks(3, surveyed, str(tmp_path))
    assert found[0] == found[1] == found[2]
    assert {"links in nodes", "files", "all-reduce of 4 MiB"} <= {name for name, _ in found[0]}
    assert ("product rate", "note") in found[0] and not list(tmp_path.iterdir())
