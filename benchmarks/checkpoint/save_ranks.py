"""One rank that saves again and again: for `bench_checkpoint.py`, of any tree that PYTHONPATH names.

    {"side": "store" | "dcp", "folder": ..., "saves": N, "stage": 0-3, "optimizer": ..., "model": {...}}

comes as the argument. Rank 0 prints JSON: for each save the seconds of the slowest rank, `blocked` in calls that belong to
saving and `committed` until it could be gone on from. Updates are pauses, after each of which the ranks agree on one
number, as a run's do anyway; that is not counted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from megabert import config as configuration
from megabert.checkpoint import Checkpoints
from megabert.config import CheckpointConfig
from megabert.distributed import process_group
from megabert.engine.deepspeed_engine import Engine
from megabert.model import BertForPreTraining

UPDATE = 0.05  # seconds


def engine_of(asked: dict[str, Any], world: process_group.World) -> tuple[Engine, dict[str, Any]]:
    """An engine whose optimizer has taken an update, and a run's state."""
    tree: dict[str, Any] = {
        "model": asked["model"],
        "precision": "fp32",
        "zero": {"stage": asked["stage"]},
        "optimizer": {"name": asked["optimizer"]},
        "batch": {"global_size": world.size, "micro_size": 1},
        "ops": {"attention": "sdpa", "mlm_loss": "torch", "layer": "torch"},
    }
    config = configuration.from_dict(tree)
    torch.manual_seed(1)
    engine = Engine(config, BertForPreTraining(config.model, config.ops), world)
    engine.optimizer.resume([master.tensor for master in engine.layout.masters], 1)
    return engine, {"config": config.model_dump(), "dataset": "d" * 64, "tokenizer": "t" * 64}


class Store:
    """This project's checkpoints, committed in the background as its trainer has it done."""

    def __init__(self, asked: dict[str, Any], world: process_group.World) -> None:
        self.engine, self.state = engine_of(asked, world)
        self.world = world
        self.checkpoints = Checkpoints(asked["folder"], world, CheckpointConfig(keep=2))

    def save(self, step: int) -> None:
        self.checkpoints.save(self.engine, self.state | {"step": step})

    def told(self) -> int:
        """What the ranks agree about after an update: the greatest counts."""
        if hasattr(self.checkpoints, "status"):
            return self.checkpoints.status
        return int(self.checkpoints.pending and not self.checkpoints.ready)  # revisions that commit in `finish`

    def heard(self, number: int) -> bool:
        """Whether the save is committed."""
        if hasattr(self.checkpoints, "heard"):
            self.checkpoints.heard(number)
        elif not number:
            self.checkpoints.finish()
        return not self.checkpoints.pending


class Dcp:
    """torch.distributed.checkpoint's asynchronous save of the same tensors: what this rank holds, each under its own name."""

    def __init__(self, asked: dict[str, Any], world: process_group.World) -> None:
        engine, _ = engine_of(asked, world)
        self.folder = Path(asked["folder"])
        self.future: Any = None  # of the save in flight
        self.tensors: dict[str, torch.Tensor] = {}
        for segment, view in engine.layout.pieces() if engine.layout.partitioned or world.is_main else ():
            self.tensors[f"weight:{engine.layout.names[segment.index]}:{segment.offset}"] = view
        for piece in engine.layout.moments(engine.optimizer):
            if engine.layout.partitioned or world.is_main:
                values = piece.values.items()
                self.tensors |= {f"{kind}:{piece.name}:{piece.offset}": values for kind, values in values}
        self.group = dist.new_group(backend="gloo")

    def save(self, step: int) -> None:
        place = self.folder / f"step-{step:08d}"
        self.future = dcp.async_save(self.tensors, checkpoint_id=place, process_group=self.group)

    def told(self) -> int:
        return int(not self.future.done())

    def heard(self, number: int) -> bool:
        if not number:
            self.future.result()
        return not number


def timed(action: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    begun = time.perf_counter()
    found = action(*args)
    return time.perf_counter() - begun, found


def measure(side: Any, world: process_group.World, saves: int) -> list[dict[str, float]]:
    found = []
    for step in range(1, saves + 1):
        world.barrier()
        begun = time.perf_counter()
        blocked, _ = timed(side.save, step)
        done = False
        while not done:
            time.sleep(UPDATE)
            number = world.max_ints([side.told()])[0]
            seconds, done = timed(side.heard, number)
            blocked += seconds
        each = [blocked, time.perf_counter() - begun]
        slowest = [number / 1e9 for number in world.max_ints([round(1e9 * seconds) for seconds in each])]
        found.append(dict(zip(("blocked", "committed"), slowest, strict=True)))
    return found


def main() -> None:
    asked = json.loads(sys.argv[1])
    world = process_group.init(process_group.discover())
    side = (Dcp if asked["side"] == "dcp" else Store)(asked, world)
    found = measure(side, world, asked["saves"])
    if world.is_main:
        print(json.dumps(found), flush=True)
    process_group.shutdown()


if __name__ == "__main__":
    main()
