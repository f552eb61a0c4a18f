"""Survival of training runs: kills at random instants, and a long run with many restarts.

    python benchmarks/bench_survival.py --kills 200 --json FILE         killed runs end like the one without kills
    python benchmarks/bench_survival.py --soak 5000 --restarts 30 --json FILE     growth of memory, files and descriptors
    python benchmarks/bench_survival.py --in-place 300 --json FILE      restarts in place: kills, TERMs and time limits
    python benchmarks/bench_survival.py --recovery 20 --json FILE       seconds from a kill to the next update, and others'

Each case is a model of one layer on the CPU with 1 to 4 ranks and another partitioning of the optimizer. Updates take 10-50 ms and
checkpoints are frequent, so that kills meet as many situations as in weeks of a long run. All figures but those of --recovery are
counts. A failed case is in the result with its reason, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware
from benchmarks.survival.in_place import survive_in_place
from benchmarks.survival.kills import survive
from benchmarks.survival.life import MODERN_MUON, Case, Failure, Server
from benchmarks.survival.recovery import recover
from benchmarks.survival.soak import soak

FP32, SYNCHRONOUS = "precision=fp32", "checkpoint.asynchronous=false"
MUON = ("zero.stage=1", "objective.causal_share=0.4", *MODERN_MUON)
# the last number is the case's share of the kills
CASES = (
    (Case("1 rank, saving in the background", 1, 200, 5), 20),
    (Case("1 rank, fp32, saving at once", 1, 200, 5, (FP32, SYNCHRONOUS)), 20),
    (Case("2 ranks, ZeRO-0, fp32", 2, 200, 5, ("zero.stage=0", FP32)), 25),
    (Case("2 ranks, ZeRO-1, loader workers", 2, 200, 5, ("zero.stage=1", "data.workers=1")), 35),
    (Case("2 ranks, ZeRO-1, LAMB", 2, 200, 5, ("zero.stage=1", "optimizer.name=lamb")), 20),
    (Case("2 ranks, ZeRO-1, Muon, modern, causal start", 2, 200, 5, MUON), 20),
    (Case("2 ranks, ZeRO-2, saving at once", 2, 200, 5, ("zero.stage=2", SYNCHRONOUS)), 20),
    (Case("2 ranks, ZeRO-3", 2, 200, 5, ("zero.stage=3",)), 25),
    (Case("1 rank, LAMB, loader workers", 1, 200, 5, ("optimizer.name=lamb", "data.workers=1")), 35),
)


def kills(data: Path, folder: Path, number: int, seed: int, only: str = "") -> dict[str, Any]:
    """`number` kills over the cases with `only` in their names; returns the results by case."""
    server, by_case = Server(), {}
    chosen = [(index, case, share) for index, (case, share) in enumerate(CASES) if only in case.name]
    try:
        for index, case, share in chosen:
            count = -(-number * share // sum(share for _, _, share in chosen))
            case = replace(case, steps=max(80, 12 * count))
            by_case[case.name] = survive(case, data, folder / str(index), server, count, seed + index)
            print(f"{case.name}: {by_case[case.name]['kills']} kills, {by_case[case.name]['failure']}", flush=True)
    finally:
        server.close()
    return by_case


def sums(cases: dict[str, Any]) -> dict[str, Any]:
    """Totals over cases."""
    total = {
        name: dict(sum((Counter(case.get(name, {})) for case in cases.values()), Counter[str]()))
        for name in ("aimed", "fell", "followed_by")
    }
    return {
        "kills": sum(case["kills"] for case in cases.values()),
        **total,
        "runs": len(cases),
        "runs_that_differ": sum(case.get("differences", 0) > 0 for case in cases.values()),
        "failures": {name: case["failure"] for name, case in cases.items() if case["failure"]},
        "seconds": round(sum(case["seconds"] for case in cases.values()), 1),
        "cases": cases,
    }


def build_data(folder: Path) -> Path:
    """A dataset of Python's documentation."""
    build = ("--input", "pydoc", "--output", folder, "--seq-len", 64, "--vocab-size", 2000, "--held-out", "0.02")
    command = [sys.executable, "-m", "data_prep", "build", *map(str, build), "--nsp", "--quiet"]
    subprocess.run(command, cwd=hardware.ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=0, help="kills over all cases")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with TEXT in their names")
    parser.add_argument("--soak", type=int, default=0, metavar="UPDATES", help="updates of the long run")
    parser.add_argument("--restarts", type=int, default=30, help="restarts of the long run")
    parser.add_argument(
        "--in-place",
        type=int,
        default=0,
        metavar="KILLS",
        help="kills of ranks and keepers of jobs that restart in place",
    )
    parser.add_argument(
        "--recovery", type=int, default=0, metavar="KILLS", help="timed kills each way; on a quiet machine"
    )
    parser.add_argument("--data", type=Path, help="dataset folder; default: Python's documentation, built now")
    parser.add_argument("--seed", type=int, default=1)
    hardware.add_json(parser)
    args = parser.parse_args()
    hardware.refuse_dirty(parser, args)
    if not any(args.only in case.name for case, _ in CASES):
        parser.error(f"--only {args.only}: in no case's name; there are: {'; '.join(c.name for c, _ in CASES)}")
    result: dict[str, Any] = {"seed": args.seed, "asked": {"kills": args.kills, "soak": args.soak, "only": args.only}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = args.data.resolve() if args.data else build_data(folder / "data")
        if args.kills:
            result["kills"] = sums(kills(data, folder / "kills", args.kills, args.seed, args.only))
        if args.soak:
            try:
                result["soak"] = soak(data / "held_out", folder / "soak", args.soak, args.restarts, args.seed)
            except (Failure, TimeoutError) as error:
                result["soak"] = {"updates": args.soak, "failure": str(error)}
        if args.in_place:
            try:
                result["in_place"] = survive_in_place(data, folder / "in-place", args.in_place, args.seed)
            except (Failure, OSError) as error:
                result["in_place"] = {"kills": args.in_place, "failure": str(error)}
        if args.recovery:
            try:
                result["recovery"] = recover(data, folder / "recovery", args.recovery, args.seed)
            except Failure as error:
                result["recovery"] = {"kills": args.recovery, "failure": str(error)}
    if args.json:
        hardware.write_json(args.json, result)
    failures = dict(result.get("kills", {}).get("failures", {}))
    failures |= {
        name: result[name]["failure"] for name in ("soak", "in_place", "recovery") if "failure" in result.get(name, {})
    }
    for name in ("failures", "differences"):
        if found := result.get("in_place", {}).get(name):
            failures[f"in_place, {len(found)} {name}"] = "\n".join(found)
    for name, part in result.items():
        print(name, {k: v for k, v in part.items() if k != "cases"} if isinstance(part, dict) else part)
    for name, reason in failures.items():
        print(f"error: {name}: {reason}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
