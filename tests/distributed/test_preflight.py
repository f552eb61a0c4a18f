"""Preflight of simulated nodes, whose differences and slow ranks are named, and of real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megabert.distributed.preflight import PreflightLine, RankSurvey, Survey, measure_files, report, survey
from megabert.distributed.ranks import World
from tests.helpers.ranks import run_ranks

VERSIONS = {"torch": "2.13.0", "numpy": "2.4.6", "megabert": "abc", "kernel": "6.1"}
FILES = {"write": 2e8, "read": 4e8, "metadata": 9000.0}


def surveys(**changes: dict[int, object]) -> list[RankSurvey]:
    """Eight ranks on four nodes, all alike; `changes`: by field, the value of some ranks."""
    usual = RankSurvey(0, "", "H100, 80 GiB", VERSIONS, tflops=700.0, link=2e10, files=FILES)
    return [
        replace(
            usual,
            rank=rank,
            host=f"n{rank // 2}",
            **{field: its[rank] for field, its in changes.items() if rank in its},
        )
        for rank in range(8)
    ]


def lines(found: list[RankSurvey]) -> dict[str, PreflightLine]:
    return {line.name: line for line in report(Survey(found, "nccl", "srun", [(2**20, 0.002)]))}


def test_nodes_that_are_alike_are_all_well_and_counted() -> None:
    found = lines(surveys())
    assert {line.state for line in found.values()} == {"ok"}
    assert found["ranks"].value == "8 on 4 node(s) by srun, nccl: n0 x2, n1 x2, n2 x2, n3 x2"
    assert found["device"].value == "H100, 80 GiB" and "torch 2.13.0" in found["versions"].value
    assert found["all-reduce 1 MiB"].value == "2.00 ms, 0.918 GB/s a rank"  # 2 x 7/8 x 2^20 bytes in 2 ms


def test_another_version_on_one_node_stops_and_is_named() -> None:
    other = VERSIONS | {"torch": "2.12.1"}
    line = lines(surveys(versions={4: other, 5: other}))["versions differ"]
    assert line == PreflightLine(
        "versions differ", "missing", "torch: 2.12.1 on n2; 2.13.0 elsewhere", "make torch the same on all nodes"
    )


def test_another_kernel_or_device_is_only_said() -> None:
    found = lines(surveys(versions={7: VERSIONS | {"kernel": "6.2"}}, device={0: "A100, 40 GiB"}))
    assert found["kernel differ"].state == "note" and "6.2 on n3" in found["kernel differ"].value
    assert found["device differ"].state == "note" and "A100, 40 GiB on n0" in found["device differ"].value
    assert found["versions"].state == "ok"


@pytest.mark.parametrize(
    ("changes", "name", "slowest"),
    [
        ({"tflops": {5: 600.0}}, "product rate", "rank 5 (n2): 600 TFLOP/s"),
        ({"link": {4: 1e9}}, "links between nodes", "rank 3 (n1) to rank 4 (n2): 1,000 MB/s"),
        ({"link": {3: 1e9}}, "links in nodes", "rank 2 (n1) to rank 3 (n1): 1,000 MB/s"),
        ({"files": {6: FILES | {"metadata": 40.0}}}, "files, metadata", "rank 6 (n3): 40 operations/s"),
    ],
)
def test_the_slowest_is_named_and_noted_where_it_is_slow(changes, name, slowest) -> None:
    found = lines(surveys(**changes))
    assert found[name].state == "note" and found[name].value.endswith(slowest), found[name]
    assert [line.name for line in found.values() if line.state != "ok"] == [name]


def test_a_node_without_the_shared_folder_is_named() -> None:
    found = lines(surveys(problem={3: "/runs is not shared: what n2 wrote is not seen here"}, files={3: {}}))
    assert found["files"].state == "missing" and found["files"].value.startswith("rank 3 (n1): /runs is not")


def test_a_lone_rank_has_files_and_no_network(tmp_path) -> None:
    world = World(0, 0, 1, torch.device("cpu"), "gloo", "single")
    place = surveys()[0]
    place.files = {}
    measure_files(world, tmp_path, place)
    assert set(place.files) == {"write", "read", "metadata"} and not place.problem
    assert min(place.files.values()) > 0 and not list(tmp_path.iterdir())
    measure_files(world, Path("/proc/nowhere"), place)
    assert "/proc/nowhere" in place.problem


def surveyed(world: World, folder: str) -> list[tuple[str, str]]:
    found = survey(world, Path(folder), lambda: 1.0 + world.rank)
    assert len(found.ranks) == world.size and all(one.link > 1e5 for one in found.ranks)
    return [(line.name, line.state) for line in report(found)]


@pytest.mark.slow
@pytest.mark.dist
def test_real_ranks_measure_and_leave_nothing(tmp_path) -> None:
    found = run_ranks(3, surveyed, str(tmp_path))
    assert found[0] == found[1] == found[2]
    assert {"links in nodes", "files, read", "all-reduce 1 MiB"} <= {name for name, _ in found[0]}
    assert ("product rate", "note") in found[0] and not list(tmp_path.iterdir())
