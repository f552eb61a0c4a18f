"""Two real ranks whose machines differ: refused by name on both, before the first update; replicas use the same number of threads."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megabert.distributed import ranks
from megabert.distributed.ranks import RankError, World
from megabert.ops import backend
from megabert.optim import apex
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks

HOST = socket.gethostname()


def without_gpu(patch: pytest.MonkeyPatch, world: World, folder: Path) -> None:
    """The rendezvous of rank 0 without a GPU and rank 1 with one."""
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    ranks._check_devices(replace(world, device=torch.device("cuda" if world.rank else "cpu")), store)


def with_apex(patch: pytest.MonkeyPatch, world: World, folder: Path) -> None:
    """Apex on rank 1, as on a GPU."""
    obstacle = apex.obstacle
    patch.setattr(apex, "obstacle", lambda config, device: obstacle(config, torch.device("cuda")))
    if world.rank:
        patch.syspath_prepend(folder)
    tiny.engine(tiny.config(zero__stage=0), world)


def without_library(patch: pytest.MonkeyPatch, world: World, folder: Path) -> None:
    if world.rank:
        patch.setattr(backend, "MISSING", "native library not built")
    tiny.engine(tiny.config(ops__layer="auto"), world)


def other_version(patch: pytest.MonkeyPatch, world: World, folder: Path) -> None:
    versions = ranks.environment.versions()
    if world.rank:
        patch.setattr(ranks.environment, "versions", lambda: versions | {"torch": "2.12.0"})
    tiny.engine(tiny.config(), world)


def other_value(patch: pytest.MonkeyPatch, world: World, folder: Path) -> None:
    """A configuration file that was edited on one host."""
    tiny.engine(tiny.config(optimizer__lr=0.001 * (1 + world.rank)), world)


def other_instructions(patch: pytest.MonkeyPatch, world: World, folder: Path) -> None:
    if world.rank:
        patch.setenv("ATEN_CPU_CAPABILITY", "default")
    tiny.engine(tiny.config(), world)


def asked_apex(patch: pytest.MonkeyPatch, world: World, folder: Path) -> None:
    """ops.optimizer=apex, which rank 1 cannot use."""
    patch.setattr(apex, "obstacle", lambda config, device: "NVIDIA's apex does not import" * world.rank)
    patch.setattr(apex, "load_apex", lambda: (None, None, None))
    tiny.engine(tiny.config(ops__optimizer="apex", zero__stage=0), world)


CASES = [
    (without_gpu, "the device that torch sees", "cpu", "cuda"),
    (with_apex, "kernels of ops.optimizer", "torch", "apex"),
    (other_version, "torch", ranks.environment.versions()["torch"], "2.12.0"),
    (other_value, "optimizer.lr", "0.001", "0.002"),
    (other_instructions, "environment variable ATEN_CPU_CAPABILITY", "unset", "default"),
]
if not backend.MISSING:
    CASES.append((without_library, "backend of layer", "native", "torch"))


def refusals(world: World, folder: Path) -> tuple[list[tuple[str, int]], int]:
    """Each refusal with its exit code; and the threads of ranks that had other numbers of them."""
    texts = []
    for case, *_ in [*CASES, (asked_apex,)]:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(RankError) as refused:
            case(patch, world, folder)
        texts.append((str(refused.value), refused.value.exit_code))
    torch.set_num_threads(1 + world.rank)
    tiny.engine(tiny.config(zero__stage=0), world)
    return texts, torch.get_num_threads()


@pytest.mark.dist
def test_ranks_that_differ_are_refused_by_name(tmp_path) -> None:
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").touch()
    (tmp_path / "apex/multi_tensor_apply.py").write_text("multi_tensor_applier = None\n")
    (tmp_path / "amp_C.py").write_text("multi_tensor_adam_capturable = multi_tensor_lamb_mp = None\n")
    found, other = run_ranks(2, refusals, tmp_path)
    assert found == other and found[1] == 1
    expected = [
        (f"{name} must be the same on all ranks: {first} on rank 0 ({HOST}), {second} on rank 1 ({HOST})", 2)
        for _, name, first, second in CASES
    ]
    apex_asked = "rank 1: ops.optimizer=apex cannot run here: NVIDIA's apex does not import"
    assert found[0] == [*expected, (apex_asked, 2)]
