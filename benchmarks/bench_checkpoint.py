"""Seconds for which a save blocks training: ours and torch.distributed.checkpoint's, with the same number of gloo processes.

    python benchmarks/bench_checkpoint.py [--ranks 8] [--stage 1] [--rounds 3] [--json FILE]

Both sides save the same model alternately, starting with another one each round. `blocked` is the time of the slowest rank in
calls of a save (snapshot, commit, removal of old checkpoints), `committed` the time until the checkpoint can be resumed from;
medians over all saves except the first of each round.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.common import hardware
from megabert import config as configuration
from megabert.checkpoint import Checkpoints
from megabert.config import CheckpointConfig
from megabert.distributed import ranks
from megabert.distributed.ranks import World
from megabert.engine import Engine
from megabert.model import BertForPreTraining

OURS, DCP = "ours", "torch.distributed.checkpoint"
# seconds of a simulated update; after it the ranks reduce a number, as in a run
UPDATE = 0.05


def engine_of(asked: dict[str, Any], world: World) -> tuple[Engine, dict[str, Any]]:
    """An engine after one update of its optimizer, and a run's state."""
    tree: dict[str, Any] = {
        "model": asked["model"],
        "precision": "fp32",
        "zero": {"stage": asked["stage"]},
        "optimizer": {"name": "adamw"},
        "batch": {"global_size": world.size, "micro_size": 1},
        "ops": {"attention": "sdpa", "mlm_loss": "torch", "layer": "torch"},
    }
    config = configuration.from_dict(tree)
    torch.manual_seed(1)
    engine = Engine(config, BertForPreTraining(config.model, config.ops), world)
    engine.optimizer.resume([master.tensor for master in engine.layout.masters], 1)
    return engine, {"config": config.model_dump(), "dataset": "d" * 64, "tokenizer": "t" * 64}


class OurSaves:
    """This project's checkpoints, committed in the background as in the Trainer."""

    def __init__(self, asked: dict[str, Any], world: World) -> None:
        self.engine, self.state = engine_of(asked, world)
        self.checkpoints = Checkpoints(asked["folder"], world, CheckpointConfig(keep=2))

    def save(self, step: int) -> None:
        self.checkpoints.save(self.engine, self.state | {"step": step})

    def status(self) -> int:
        return self.checkpoints.status

    def finish(self, greatest: int) -> bool:
        """Set the largest status over ranks; returns whether the save is committed."""
        self.checkpoints.advance(greatest)
        return not self.checkpoints.pending


class DcpSaves:
    """torch.distributed.checkpoint's asynchronous save of the same tensors: those of this rank, under different names."""

    def __init__(self, asked: dict[str, Any], world: World) -> None:
        engine, _ = engine_of(asked, world)
        self.folder = Path(asked["folder"])
        self.future: Any = None
        self.tensors: dict[str, torch.Tensor] = {}
        if engine.layout.partitioned or world.is_main:
            for segment, view in engine.layout.segments():
                self.tensors[f"weight:{engine.layout.names[segment.index]}:{segment.offset}"] = view
            for part in engine.layout.moments(engine.optimizer):
                self.tensors |= {f"{kind}:{part.name}:{part.offset}": value for kind, value in part.values.items()}
        self.group = dist.new_group(backend="gloo")

    def save(self, step: int) -> None:
        place = self.folder / f"step-{step:08d}"
        self.future = dcp.async_save(self.tensors, checkpoint_id=place, process_group=self.group)

    def status(self) -> int:
        return int(not self.future.done())

    def finish(self, greatest: int) -> bool:
        if not greatest:
            self.future.result()
        return not greatest


def run_rank(asked: dict[str, Any]) -> None:
    """Repeated saves of one rank; rank 0 prints the seconds of the slowest rank for each save."""
    world = ranks.init(ranks.discover())
    side: Any = (DcpSaves if asked["side"] == DCP else OurSaves)(asked, world)
    saves = []
    for step in range(1, asked["saves"] + 1):
        world.barrier()
        start = time.perf_counter()
        side.save(step)
        blocked, done = time.perf_counter() - start, False
        while not done:
            time.sleep(UPDATE)
            greatest = world.max_ints([side.status()])[0]
            finish_start = time.perf_counter()
            done = side.finish(greatest)
            blocked += time.perf_counter() - finish_start
        each = [blocked, time.perf_counter() - start]
        slowest = [number / 1e9 for number in world.max_ints([round(1e9 * seconds) for seconds in each])]
        saves.append(dict(zip(("blocked", "committed"), slowest, strict=True)))
    if world.is_main:
        print(json.dumps(saves), flush=True)
    ranks.shutdown()


def run_side(asked: dict[str, Any], ranks: int) -> list[dict[str, float]]:
    """Figures of each save. Raises ValueError with the end of the output of a rank that failed."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(hardware.free_port()), "WORLD_SIZE": str(ranks)}
    place |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, str(Path(__file__).resolve()), "--rank", json.dumps(asked)]
    processes = []
    for rank in range(ranks):
        env = hardware.clone_environment(**place, RANK=str(rank), LOCAL_RANK=str(rank))
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [process.communicate() for process in processes]
    for process, (out, error) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise ValueError(f"{asked['side']}: a rank ended with {process.returncode}:\n{(out + error)[-2000:]}")
    return json.loads(outputs[0][0].splitlines()[-1])


def measure(args: argparse.Namespace, asked: dict[str, Any], scratch: Path) -> dict[str, dict[str, Any]]:
    by_side: dict[str, list[dict[str, float]]] = {OURS: [], DCP: []}
    for number in range(args.rounds):
        for side in list(by_side)[:: 1 if number % 2 else -1]:
            shutil.rmtree(scratch / side, ignore_errors=True)
            (scratch / side).mkdir()
            saves = run_side(asked | {"side": side, "folder": str(scratch / side)}, args.ranks)
            by_side[side] += saves[1:]
            print(f"round {number + 1}, {side}: {[round(s['blocked'], 4) for s in saves]}", flush=True)
    results: dict[str, dict[str, Any]] = {
        side: {key: round(statistics.median(save[key] for save in saves), 4) for key in saves[0]}
        for side, saves in by_side.items()
    }
    name = f"step-{args.saves:08d}"
    results[DCP]["index_bytes"] = (scratch / DCP / name / ".metadata").stat().st_size
    results[OURS]["index_bytes"] = (scratch / OURS / "checkpoints" / name / "manifest.json").stat().st_size
    return results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--stage", type=int, choices=range(4), default=1, help="ZeRO stage")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--saves", type=int, default=5, help="saves of each side in each round, at least two")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)  # this process is one of the ranks
    hardware.add_json(parser)
    args = parser.parse_args(argv)
    if args.rank:
        run_rank(args.rank)
        return 0
    hardware.refuse_dirty(parser, args)
    model = {"layers": args.layers, "hidden": args.hidden, "heads": args.hidden // 64, "vocab_size": 30_528}
    asked = {"stage": args.stage, "saves": args.saves, "model": model}
    try:
        with tempfile.TemporaryDirectory(prefix="bench_checkpoint_") as scratch:
            results = measure(args, asked, Path(scratch))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for side, figures in results.items():
        ratio = figures["blocked"] / results[OURS]["blocked"]
        print(f"{side}: {json.dumps(figures)}, blocked {ratio:.2f} times as long as ours")
    if args.json:
        setting = asked | {"ranks": args.ranks, "rounds": args.rounds}
        hardware.write_json(args.json, {"benchmark": "checkpoint", "setting": setting, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
