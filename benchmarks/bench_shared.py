"""Rows a second of `mini_modern` beside other busy processes, by the number of spins of OpenMP's threads before they sleep.

    python benchmarks/bench_shared.py --data DIR [--busy 0 1 2] [--ranks 1 2] [--rounds 2] [--json FILE]

`megabert` sets 1,000 spins (GOMP_SPINCOUNT); libgomp's default is 300,000. Each round trains 60 updates with both alternately and
measures the last 40. The table also shows whether the run warned about shared cores.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware

TURNS = {"libgomp's default": {"GOMP_SPINCOUNT": "300000"}, "megabert": {}}
FIRST, LAST, ROWS = 20, 60, 32
SETTINGS = (
    *("schedule.by=steps", "schedule.total_steps=100000", "objective.causal_share=0", "log.interval=10", "log.tensorboard=false"),
    *("eval.interval=0", "checkpoint.minutes=0", "checkpoint.interval=100000", f"batch.global_size={ROWS}"),
)  # fmt: skip


def measure(turns: dict[str, str], data: str, ranks: int, busy: int, scratch: Path) -> dict[str, Any]:
    """Rows a second over all ranks, and whether the run warned about shared cores. Raises RuntimeError with its output."""
    run = scratch / "run"
    command = [
        sys.executable,
        "megabert/train.py",
        "--config",
        "mini_modern",
        "--data",
        data,
        "--run",
        str(run),
        *SETTINGS,
    ]
    command += ["--stop-after", str(LAST)]
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    port = str(hardware.free_port())
    try:
        jobs = []
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            env = hardware.clone_environment(**turns, **(place | {"MASTER_PORT": port} if ranks > 1 else {}))
            env.pop("OMP_NUM_THREADS", None)
            jobs.append(
                subprocess.Popen(
                    command, cwd=hardware.ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        output = "".join([job.communicate()[0] for job in jobs])
    finally:
        for process in others:
            process.kill()
    if any(job.returncode for job in jobs):
        raise RuntimeError(output)
    seconds = {line["step"]: line["time/train_seconds"] for line in hardware.logged(run) if "train/loss" in line}
    return {
        "rows_per_sec": (LAST - FIRST) * ROWS / (seconds[LAST] - seconds[FIRST]),
        "said": "waited for a core" in output,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="dataset of rows of 128 tokens without pairs")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="busy processes beside the run")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    hardware.add_json(parser)
    args = parser.parse_args(argv)
    hardware.refuse_dirty(parser, args)
    results = []
    for ranks in args.ranks:
        for busy in args.busy:
            by_turns: dict[str, list[dict[str, Any]]] = {name: [] for name in TURNS}
            for _ in range(args.rounds):
                for name, turns in TURNS.items():
                    with tempfile.TemporaryDirectory(prefix="bench_shared_") as scratch:
                        by_turns[name].append(measure(turns, args.data, ranks, busy, Path(scratch)))
            row = {"ranks": ranks, "busy": busy} | {
                name: {
                    "rows_per_sec": round(statistics.median(one["rows_per_sec"] for one in all_rounds), 1),
                    "said": sum(one["said"] for one in all_rounds),
                }
                for name, all_rounds in by_turns.items()
            }
            results.append(row)
            print(row, flush=True)
    if args.json:
        setting = {"updates": LAST - FIRST, "rows": ROWS, "rounds": args.rounds}
        hardware.write_json(args.json, {"benchmark": "shared", "setting": setting, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
