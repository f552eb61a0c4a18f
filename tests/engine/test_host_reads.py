"""Updates wait for nothing, and a run for nothing between its log lines: reads, copies to the host and synchronisations are
counted on the CPU. A CPU tensor stands for one on the device, so every read counts, also of one that on CUDA is the host's."""

from __future__ import annotations

import contextlib
import math
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megabert.checkpoint import Checkpoints
from megabert.distributed.watchdog import Watchdog
from megabert.trainer import Trainer
from tests.helpers import once, tiny
from tests.helpers.loop import StopAt, Workload
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist

aten = torch.ops.aten
OPERATIONS = {  # each has a result that the host needs
    aten._local_scalar_dense,  # .item(), float(), bool(), if
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.repeat_interleave,
    aten.bincount,
}
ON_CPUS_ALONE = {"embedding.py": "backward"}  # `adds_in_16_bits`
METHODS = ("tolist", "cpu")  # no operations where the tensor is on the CPU; `numpy` refuses one on a device


class HostReads(TorchDispatchMode):
    """While entered: `found` counts waits by what they are and where, as `bool or float in engine.py:step`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in OPERATIONS:
            self.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def add(self, what: str) -> None:
        frames = traceback.extract_stack()
        inside = [f for f in frames if "/torch/" not in f.filename and "host_reads" not in f.filename]
        file, function = inside[-1].filename.rsplit("/", 1)[-1], inside[-1].name
        if ON_CPUS_ALONE.get(file) != function:
            self.found[f"{what} in {file}:{function}"] += 1

    def __enter__(self) -> HostReads:
        self._undo = contextlib.ExitStack()
        for name in METHODS:
            self._replace(torch.Tensor, name, lambda *args, **kwargs: True)
        for name in ("tensor", "as_tensor"):  # host numbers copied from memory that is not pinned
            self._replace(torch, name, lambda *args, **kwargs: kwargs.get("device") is not None)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._undo.close()

    def _replace(self, owner: Any, name: str, counts: Callable[..., bool]) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if counts(*args, **kwargs):
                self.add(name)
            return original(*args, **kwargs)

        setattr(owner, name, counted)
        self._undo.callback(setattr, owner, name, original)


class Queue:
    """What DeepSpeed takes for a stream or an event of a device."""

    def __init__(self, reads: HostReads) -> None:
        self._reads = reads

    def synchronize(self) -> None:
        self._reads.add("synchronize")

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, other: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def query(self) -> bool:
        return False


def pretend_device(reads: HostReads) -> None:
    """DeepSpeed takes this process' CPU for a device with streams from here on; what it waits for is counted."""
    from deepspeed.accelerator import get_accelerator

    @contextlib.contextmanager
    def stream(queue: Any) -> Iterator[None]:
        yield

    kind = type(get_accelerator())
    for name in ("Stream", "Event", "current_stream", "default_stream"):
        setattr(kind, name, property(lambda self: lambda *args, **kwargs: Queue(reads)))
    for name in ("is_synchronized_device", "resolves_data_dependency", "use_host_timers"):
        setattr(kind, name, lambda self: False)
    kind.stream = lambda self, queue: stream(queue)
    kind.synchronize = lambda self, *args: reads.add("synchronize")
    torch.Tensor.record_stream = lambda self, queue: None  # type: ignore[method-assign, assignment]


SETUPS = {("adamw", "bf16"): (0, 2, 3), ("adamw", "fp32"): (0, 1), ("lamb", "bf16"): (0, 1)}
SETUPS[("muon", "bf16")] = (0, 3, 1)  # the last also shows that reads count
CASES = [(*setup, stage) for setup, stages in SETUPS.items() for stage in stages]
# DeepSpeed's own waits at stage 3, for the streams that it gathers weights and reduces gradients on: none of them reads.
STAGE_3 = {"stage3.py", "partition_parameters.py", "partitioned_param_coordinator.py"}
BAD = 6  # the step whose loss is not finite
LINES, STEPS = 4, 10  # updates between log lines, updates


def waits(world: Any) -> dict[Any, Any]:
    """What 2 updates of 2 micro-steps wait for, the first one aside, which builds what the others use."""
    found: dict[Any, Any] = {}
    reads = HostReads()
    pretend_device(reads)
    for name, precision, stage in CASES:
        cfg = tiny.config(optimizer__name=name, precision=precision, zero__stage=stage)
        engine = tiny.engine(cfg, world)
        engine.train_update(tiny.update(0, cfg, world), 0.003)
        later = [tiny.update(step, cfg, world) for step in (1, 2)]
        reads.found.clear()
        with reads:
            for update in later:
                engine.train_update(update, 0.003)
        found[name, precision, stage] = dict(reads.found)
    reads.found.clear()
    with reads:  # it counts what it is for
        result = engine.train_update(later[0], 0.003, veto=lambda loss: False)
        assert not result.skipped
        result.losses.tolist()
    found["asked for"] = dict(reads.found)
    by_time = {"log__interval": 1, "log__seconds": 1e9, "spikes__policy": "rollback"}
    return found | {"run": run(world, reads, log__interval=LINES), "by time": run(world, reads, **by_time)}


def run(world: Any, reads: HostReads, **settings: Any) -> dict[str, Any]:
    """A run with a bad update: what the updates before a log line waited for, and what was logged."""
    cfg = tiny.config(
        precision="bf16", zero__stage=1, log__tensorboard=False, schedule__total_steps=STEPS,
        schedule__warmup_steps=0, checkpoint__asynchronous=False, **settings,
    )  # fmt: skip
    engine = tiny.engine(cfg, world)
    intervals: list[dict[str, int]] = []
    with tempfile.TemporaryDirectory() as folder:

        class Watched(Trainer):
            def train_update(self) -> Any:
                if self.state.step and not self.schedule.reading_due(self.state.step, len(self.judge.pending), False):
                    intervals.append(dict(reads.found))
                reads.found.clear()
                weights, bad = engine._weights, self.state.step + 1 == BAD
                engine._weights = weights * (math.nan if bad else 1.0)
                done = super().train_update()
                engine._weights = weights
                return done

        trainer = Watched(
            config=cfg, engine=engine, workload=Workload(cfg, world, engine, STEPS, saved_at=STEPS),
            checkpoints=Checkpoints(folder, world, cfg.checkpoint), stop=StopAt(), watchdog=Watchdog(world, folder, 0),
            provenance={"config": cfg.model_dump()},
        )  # fmt: skip
        with reads:
            assert trainer.train()
        trainer.close()
        trainer.checkpoints.latest()
        return {
            "intervals": intervals,
            "trouble": (Path(folder) / "trouble.jsonl").read_text().splitlines(),
            "skipped": (trainer.state.skipped, engine.skipped_steps, trainer.checkpoints.state["skipped"]),
            "updates": engine.optimizer.count_updates(m.tensor for m in engine.layout.masters),
        }


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[Any, Any]:
    return once.value(tmp_path_factory, "host-reads", lambda: run_ranks(1, waits)[0])


def test_an_update_waits_for_nothing(found):
    for case in CASES:
        left = {k: n for k, n in found[case].items() if k.split(" in ")[1].split(":")[0] not in STAGE_3}
        assert left == {} and (case[2] == 3 or not found[case]), (case, found[case])
        assert all(what.startswith("synchronize") for what in found[case])
    assert sum(found["asked for"].values()) == 3, found["asked for"]  # the veto's loss, `skipped`, the losses


@pytest.mark.parametrize(("name", "quiet"), [("run", STEPS - 4), ("by time", STEPS - 2)])  # update 1 has a line
def test_a_run_reads_nothing_between_its_log_lines(name, quiet, found):
    run = found[name]
    assert len(run["intervals"]) == quiet and not any(run["intervals"]), run["intervals"]
    assert len(run["trouble"]) == 1 and f'"step": {BAD}' in run["trouble"][0]
    assert run["skipped"] == (1, 1, 1) and run["updates"] == STEPS - 1
