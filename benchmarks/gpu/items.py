"""Items of `gpu_suite.py`, each a process: what the machine is, NCCL on one rank, a training run, steps.

    python benchmarks/gpu/items.py machine|ranks --json FILE
    python benchmarks/gpu/items.py training [section.key=value …] --data DIR --json FILE
    python benchmarks/gpu/items.py steps FILE.jsonl KEY OPTIONS [KEY OPTIONS …]

The training run is `megabert train` as a user runs it: it logs, evaluates and saves, ends half-way by `--stop-after`, and resumes in a
second process. Steps are of several shapes and backends in one process, since each start takes as long as a measurement; OPTIONS are
those of `bench_step.py`, as one word. A line {"key", "value"} is appended for each; one that fails ends the process.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a clone need not be installed
from benchmarks.common import hardware
from megabert.common import environment


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """GPUs, driver, free shared memory in GiB, and seconds to import what a training process imports, for the first time."""
    stat = os.statvfs("/dev/shm")
    modules = ("torch", "deepspeed", "megabert.open_run")
    seconds = {name: round(timeit(partial(importlib.import_module, name), number=1), 1) for name in modules}
    found = {"gpus": environment.gpus(), "driver": environment.nvidia_driver(), "import_seconds": seconds}
    return found | {"shared_memory_gib": round(stat.f_bavail * stat.f_frsize / 2**30, 2)}


def ranks(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to start the process group of one rank and for its first all-reduce."""
    import torch
    import torch.distributed as dist

    from megabert.distributed import ranks

    began = time.perf_counter()
    world = ranks.init(ranks.discover({}))
    started = time.perf_counter()
    dist.all_reduce(one := torch.ones(1 << 20, device=world.device))
    assert one.sum().item() == one.numel()
    result = {"backend": world.backend, "init_seconds": round(started - began, 2)}
    result["first_all_reduce_seconds"] = round(time.perf_counter() - started, 2)
    ranks.shutdown()
    return result


def training(args: argparse.Namespace) -> dict[str, Any]:
    """Losses, tokens/s and MFU of a run of `--steps` updates in two starts. Raises CalledProcessError; ValueError without a figure."""
    half, seconds = args.steps // 2, []
    with tempfile.TemporaryDirectory(prefix="gpu_run_") as folder:
        run = Path(folder, "run")
        command = [sys.executable, "-m", "megabert", "train", "--config", args.config, "--data", args.data]
        command += ["--run", str(run), f"log.interval={max(1, args.steps // 10)}"]
        command += [f"checkpoint.interval={half}", f"eval.interval={half}", *args.overrides]
        for until in (half, args.steps):
            began = time.perf_counter()
            subprocess.run([*command, "--stop-after", str(until)], check=True)
            seconds.append(round(time.perf_counter() - began, 1))
        lines = hardware.logged(run)
    logged = [line for line in lines if "train/loss" in line]
    if logged[-1]["step"] != args.steps or not any("eval/mlm_loss" in line for line in lines):
        raise ValueError(f"{run}: its last update is {logged[-1]['step']}, not {args.steps}, or it was not evaluated")
    middle = {name: statistics.median(line[name] for line in logged) for name in ("perf/tokens_per_sec", "perf/mfu")}
    losses = {"first_loss": logged[0]["train/loss"], "last_loss": logged[-1]["train/loss"], "resumed_at": half}
    return {"steps": args.steps, "seconds_of_starts": seconds} | losses | middle


def steps(target: Path, cases: list[str]) -> None:
    import torch

    from benchmarks import bench_step
    from megabert.distributed import ranks
    from megabert.engine import import_deepspeed, precision

    world = ranks.init(ranks.discover({}))
    import_deepspeed(world)  # before a model, which its hooks would keep
    for key, options in zip(cases[::2], cases[1::2], strict=True):
        print(f"-- {key}: {options}", flush=True)
        args = bench_step.parser().parse_args(shlex.split(options))
        args.precision = precision.choose(args.precision, world)
        result = bench_step.measure(args, args.dropout[0], world, Path(args.data))
        with target.open("a") as file:
            file.write(json.dumps({"key": key, "value": result}) + "\n")
        bench_step.show(result)
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    ranks.shutdown()


def main() -> None:
    if sys.argv[1:2] == ["steps"]:  # whose options are words of the command
        steps(Path(sys.argv[2]), sys.argv[3:])
        return
    parser, items = hardware.Parser(__doc__), {"machine": machine, "ranks": ranks, "training": training}
    add = parser.add_argument
    add("item", choices=items)
    add("overrides", nargs="*")
    add("--config", default="tiny")
    add("--data", metavar="DIR")
    add("--steps", type=int, default=40)
    args = parser.parse()
    hardware.write_json(args.json, items[args.item](args))


if __name__ == "__main__":
    main()
