"""What a GPU machine is, and whether NCCL starts on one rank without a network; one JSON file of either."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a clone need not be installed

from benchmarks.common import hardware
from megabert.common import environment


def machine() -> dict[str, Any]:
    """GPUs, driver, free shared memory in GiB, and seconds to import what a training process imports, for the first time."""
    stat = os.statvfs("/dev/shm")
    seconds = {}
    for name in ("torch", "deepspeed", "megabert.open_run"):
        began = time.perf_counter()
        importlib.import_module(name)
        seconds[name] = round(time.perf_counter() - began, 1)
    return {
        "gpus": environment.gpus(),
        "driver": environment.nvidia_driver(),
        "shared_memory_gib": round(stat.f_bavail * stat.f_frsize / 2**30, 2),
        "import_seconds": seconds,
    }


def ranks() -> dict[str, Any]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("machine", "ranks"))
    hardware.add_json(parser)
    args = parser.parse_args()
    hardware.write_json(args.json, {"machine": machine, "ranks": ranks}[args.what]())


if __name__ == "__main__":
    main()
