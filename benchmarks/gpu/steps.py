"""Steps of several shapes and backends in one process, since each start takes as long as a measurement.

    python benchmarks/gpu/steps.py FILE.jsonl KEY OPTIONS [KEY OPTIONS …]

OPTIONS are those of `bench_step.py`, as one word. A line {"key", "value"} is appended for each; one that fails ends the process.
"""

from __future__ import annotations

import gc
import json
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a clone need not be installed

import torch

from benchmarks import bench_step
from megabert.distributed import ranks
from megabert.engine import precision


def main(target: Path, cases: list[str]) -> None:
    world = ranks.init(ranks.discover({}))
    for key, options in zip(cases[::2], cases[1::2], strict=True):
        print(f"-- {key}: {options}", flush=True)
        args = bench_step.parser().parse_args(shlex.split(options))
        args.precision = precision.choose(args.precision, world)
        result = bench_step.measure(args, args.dropout[0], world, Path(args.data))
        bench_step.show(result)
        with target.open("a") as file:
            file.write(json.dumps({"key": key, "value": result}) + "\n")
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    ranks.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
