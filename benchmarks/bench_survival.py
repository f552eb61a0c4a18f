"""Survival of training runs: kills at random instants, and a long run with many restarts.

    python benchmarks/bench_survival.py --kills 200 --json FILE         killed runs end like the one without kills
    python benchmarks/bench_survival.py --soak 5000 --restarts 30 --json FILE     growth of memory, files and descriptors
    python benchmarks/bench_survival.py --in-place 300 --json FILE      restarts in place: kills, TERMs and time limits
    python benchmarks/bench_survival.py --recovery 20 --json FILE       seconds from a kill to the next update, and torchrun's

Each case is a model of one layer on the CPU with 1 to 4 ranks and another partitioning of the optimizer. Updates take 10-50 ms and
checkpoints are frequent, so that kills meet as many situations as in weeks of a long run. All figures but those of --recovery are
counts. A failed case is in the result with its reason, and the exit code is 1.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed
from benchmarks.common import hardware
from benchmarks.survival.in_place import recover, survive_in_place
from benchmarks.survival.kills import survive
from benchmarks.survival.life import MODERN_MUON, Case, Failure, Server
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
    """`number` kills over the cases with `only` in their names: totals, and the results by case."""
    server, by_case = Server(), dict[str, dict[str, Any]]()
    chosen = [(index, case, share) for index, (case, share) in enumerate(CASES) if only in case.name]
    try:
        for index, case, share in chosen:
            count = -(-number * share // sum(share for _, _, share in chosen))
            case = replace(case, steps=max(80, 12 * count))
            by_case[case.name] = survive(case, data, folder / str(index), server, count, seed + index)
            print(f"{case.name}: {by_case[case.name]['kills']} kills, {by_case[case.name]['failure']}", flush=True)
    finally:
        server.close()
    cases, names = by_case.values(), ("aimed", "fell", "followed_by")
    sums = {name: dict(sum((Counter(case.get(name, {})) for case in cases), Counter[str]())) for name in names}
    return sums | {
        "kills": sum(case["kills"] for case in cases), "runs": len(cases),
        "runs_that_differ": sum(case.get("differences", 0) > 0 for case in cases),
        "failures": [case["failure"] for case in cases if case["failure"]],
        "seconds": round(sum(case["seconds"] for case in cases), 1), "cases": by_case,
    }  # fmt: skip


def main() -> int:
    parser = hardware.Parser(__doc__)
    add = parser.add_argument
    add("--kills", type=int, default=0, help="kills over all cases")
    add("--only", default="", metavar="TEXT", help="only cases with TEXT in their names")
    add("--soak", type=int, default=0, metavar="UPDATES", help="updates of the long run")
    add("--restarts", type=int, default=30, help="restarts of the long run")
    add("--in-place", type=int, default=0, metavar="KILLS", help="kills of ranks and keepers of train --in-place")
    add("--recovery", type=int, default=0, metavar="KILLS", help="timed kills each way; on a quiet machine")
    add("--data", type=Path, help="dataset folder; default: Python's documentation, built now")
    add("--seed", type=int, default=1)
    args = parser.parse()
    if not any(args.only in case.name for case, _ in CASES):
        parser.error(f"--only {args.only}: in no case's name; there are: {'; '.join(c.name for c, _ in CASES)}")
    if not (args.kills or args.soak or args.in_place or args.recovery):
        parser.error("nothing to do: name --kills, --soak, --in-place or --recovery")
    if args.soak and args.restarts < 2:
        parser.error(f"--restarts {args.restarts}: growth is from early restarts to late ones; at least 2")
    asked = {name: getattr(args, name) for name in ("kills", "soak", "in_place", "recovery", "only")}
    result: dict[str, Any] = {"seed": args.seed, "asked": asked}
    with tempfile.TemporaryDirectory() as scratch:
        folder, seed = Path(scratch), args.seed
        small = ("--input", "pydoc", "--seq-len", 64, "--vocab-size", 2000, "--held-out", 0.02, "--nsp")
        data = args.data.resolve() if args.data else hardware.build_data(folder / "data", *small)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "kills": lambda: kills(data, folder / "kills", args.kills, seed, args.only),
            "soak": lambda: soak(data / "held_out", folder / "soak", args.soak, args.restarts, seed),
            "in_place": lambda: survive_in_place(data, folder / "in-place", args.in_place, seed),
            "recovery": lambda: recover(data, folder / "recovery", args.recovery, seed),
        }
        for name, part in parts.items():
            if asked[name]:
                try:
                    result[name] = part()
                except (Failure, OSError) as error:  # TimeoutError among them
                    result[name] = {"failure": str(error)}
    hardware.write_json(args.json, result)
    failures: list[str] = []
    for name, found in result.items():
        if name in parts:  # of a part, of its cases, and what differs
            texts = (found.get("failure"), *found.get("failures", ()), *found.get("differences", ()))
            failures += [f"{name}: {text}" for text in texts if text]
        print(name, {k: v for k, v in found.items() if k != "cases"} if isinstance(found, dict) else found)
    for text in failures:
        print(f"error: {text}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    hardware.run(main)
