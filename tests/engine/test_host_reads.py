"""Updates wait for nothing, and a run for nothing between its log lines: counted on the CPU, which stands for the device
(`tests/helpers/host_reads.py`)."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest

from megabert.checkpoint import Checkpoints
from megabert.distributed.watchdog import Watchdog
from megabert.trainer import Trainer
from tests.helpers import once, tiny
from tests.helpers.host_reads import HostReads, pretend_device
from tests.helpers.loop import StopAt, Workload
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.dist

SETUPS = {("adamw", "bf16"): (0, 2, 3), ("adamw", "fp32"): (0, 1), ("lamb", "bf16"): (0, 1)}
SETUPS[("muon", "bf16")] = (0, 3, 1)
CASES = [
    (*setup, stage) for setup, stages in SETUPS.items() for stage in stages
]  # the last also shows that reads count
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
