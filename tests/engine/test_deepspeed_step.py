"""DeepSpeed under the engine: what its import loads, and stage 1's own sums of bf16 gradients, which equal stage 2's in fp32."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import count
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from megabert.distributed import ranks
from megabert.engine import deepspeed_step
from megabert.engine.rank_times import ComputeTime
from tests.conftest import ROOT
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks

STEPS = 10
CODE = """
import importlib, importlib.util, sys, torch
from megabert.distributed.ranks import World
from megabert.engine.deepspeed_step import import_deepspeed
import_deepspeed(World(0, 0, 1, torch.device("cpu"), "gloo", "single"))
assert "deepspeed.runtime.zero.muon.muon_optimizer" in sys.modules
print(*(name for name in ("mlflow", "torch._inductor") if name in sys.modules))
compiler = importlib.import_module("deepspeed.runtime.compiler")
assert compiler.compile() is torch.compile
if importlib.util.find_spec("mlflow"):
    importlib.import_module("mlflow")
"""


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
@pytest.mark.parametrize(("visible", "selected"), [(1, 0), (4, 3)])
def test_deepspeed_selects_the_rank_s_gpu(visible, selected, launcher, monkeypatch):
    """Local rank 3 where each rank sees one GPU, and where it sees those of all four ranks."""
    engine = pytest.importorskip("deepspeed.runtime.engine")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    mpi = {"OMPI_COMM_WORLD_LOCAL_RANK": "3"} if launcher == "mpirun" else {}
    for name, value in (mpi | {"LOCAL_RANK": "3"}).items():
        monkeypatch.setenv(name, value)
    places = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "5"}
    world = ranks.discover(places)
    chosen: list[int] = []
    device = SimpleNamespace(set_device=chosen.append, device_name=lambda number: f"cuda:{number}")
    monkeypatch.setattr(engine, "get_accelerator", lambda: device)
    monkeypatch.setattr(engine, "dist", SimpleNamespace(get_world_size=lambda: 4, get_rank=lambda: 3))
    built = SimpleNamespace()
    with deepspeed_step.device_as_local_rank(world):
        engine.DeepSpeedEngine._configure_with_arguments(built, None, None)
        engine.DeepSpeedEngine._set_distributed_vars(built, None)
    assert (chosen, built.device, world.device) == ([selected], *[torch.device("cuda", selected)] * 2)
    assert os.environ["LOCAL_RANK"] == "3"


def sums_over_ranks(world: Any) -> dict[str, Any]:
    """Losses of updates of 2 micro-steps without clipping, whose factor each stage rounds in its own way."""
    found: dict[str, Any] = {}
    shape = {"precision": "bf16", "optimizer__clip": 0.0}
    found["stage 2"] = tiny.train(tiny.engine(tiny.config(zero__stage=2, **shape), world), range(STEPS))
    for name, least in (("to owners", 1), ("to all", 1 << 40)):
        deepspeed_step.LEAST, deepspeed_step.BUCKET = least, 3000
        engine = tiny.engine(tiny.config(zero__stage=1, **shape), world)
        sums, early = engine.step.flat, []
        finish = sums.finish

        def watched(finish: Any = finish, sums: Any = sums, early: Any = early) -> None:
            early.append((sums._launched, len(sums._buckets)))
            finish()

        sums.finish = watched
        found[name], found[f"{name}, early"] = tiny.train(engine, range(STEPS)), early
    return found


@pytest.mark.dist
def test_stage_1_sums_equal_stage_2_and_overlap():
    two = run_ranks(2, sums_over_ranks)
    for way in ("to owners", "to all"):
        assert two[0][way] == two[1][way] == two[0]["stage 2"]
        for launched, buckets in two[0][f"{way}, early"]:
            # all but what the very last parameter completes were under way
            assert buckets > 10 and launched == buckets


def test_neither_mlflow_nor_the_compiler_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


class Event:
    """Of CUDA; each pair of events is a quarter of a second apart."""

    done: ClassVar[set[Any]] = set()

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def query(self) -> bool:
        return self in self.done

    def elapsed_time(self, end: Event) -> float:
        return 250.0  # ms


def test_own_time_leaves_out_waits_and_queued_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ran = count(), count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(time, "thread_time", lambda: 0.75 * next(ran))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    stream = SimpleNamespace(query=iter([False, True, False]).__next__)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    on_cpu, queued = ComputeTime(torch.device("cpu")), ComputeTime(torch.device("cuda"))
    for _ in range(3):
        with on_cpu:
            pass
        next(clock)  # another rank is waited for
        queued.begin_update()
        with queued:
            pass
    assert on_cpu.seconds() == on_cpu.seconds() == 3.0
    assert on_cpu.host_seconds == 0.75  # a quarter of the time this thread had no core
    on_cpu.reset()
    assert on_cpu.seconds() == on_cpu.host_seconds == 0.0
    ends = [end for _, end, _ in queued._queued]
    assert queued.seconds() == 0.0
    Event.done |= set(ends[:2])
    assert queued.seconds() == 0.5
    assert queued.host_seconds == 0.25  # the second update found the device idle
    queued.reset()
    Event.done.add(ends[2])
    assert queued.seconds() == 0.25


def test_another_deepspeed_is_refused_by_name():
    class BF16_Optimizer:
        """With other methods than those that are replaced."""

    with pytest.raises(
        ValueError, match=r"step\.BF16_Optimizer of DeepSpeed 0\.\S+ is not the one whose step is replaced"
    ):
        deepspeed_step.check_known(BF16_Optimizer)
