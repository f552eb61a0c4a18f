"""Survival of training runs: kills at random instants, and a long run with many restarts.

    python benchmarks/bench_survival.py --kills 200 --json FILE         every run ends as the one that was never killed
    python benchmarks/bench_survival.py --soak 5000 --restarts 30 --json FILE     nothing grows

Every case is one model of one layer on the CPU, with 1 or 2 ranks, its optimizer partitioned in another way; updates
take 10-50 ms and checkpoints follow each other closely, so that a kill has all the chances a long run gives it in weeks.
All figures are counts of what happened. A case that fails stays in the result with its reason, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware
from benchmarks.survival.kills import FROM_NOTHING, RESUMED, UNSEEN, survive
from benchmarks.survival.life import ROOT, Case, Failure, Server
from benchmarks.survival.soak import soak

FP32, SYNCHRONOUS = "precision=fp32", "checkpoint.asynchronous=false"
MUON = (
    *("zero.stage=1", "optimizer.name=muon", "objective.causal_share=0.4"),
    *("model.kind=modern", "model.norm=pre", "model.nsp=false"),
)
CASES = (  # the last number is each one's share of the kills
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
BY_COMMAND = 2  # lives of each case that the real command starts, without the server


def kills(
    data: Path,
    folder: Path,
    number: int,
    seed: int,
    known: dict[str, Any],
    at_most: int = len(CASES),
    only: str = "",
    keep: Callable[[dict[str, Any]], None] = lambda cases: None,
) -> dict[str, Any]:
    """`number` kills over the cases with `only` in their names; gives the results by case, those of `known` as they are,
    `at_most` new ones.

    `keep` is called with all results so far after each new case.
    """
    server, found = Server(), dict(known)
    chosen = [index for index, (case, _) in enumerate(CASES) if only in case.name]
    whole = sum(CASES[index][1] for index in chosen)
    new = [index for index in chosen if CASES[index][0].name not in known][:at_most]
    try:
        for index in new:
            case, share = CASES[index]
            count = -(-number * share // whole)
            case = replace(case, steps=max(80, 12 * count))
            by_command = range(3, 3 + BY_COMMAND)
            result = survive(case, data, folder / str(index), server, count, seed + index, by_command)
            found[case.name] = result
            print(f"{case.name}: {result['kills']} kills, {result['fell']}", flush=True)
            keep(found)
    finally:
        server.close()
    return found


def sums(cases: dict[str, Any]) -> dict[str, Any]:
    """Totals over cases, all of them counted from what happened in each."""
    fell, followed = Counter[str](), Counter[str]()
    for case in cases.values():
        fell.update(case["fell"])
        followed.update(case["followed_by"])
    compared = [case for case in cases.values() if "differences" in case]
    return {
        "kills": sum(case["kills"] for case in cases.values()),
        "followed_by": {what: followed[what] for what in (RESUMED, FROM_NOTHING, UNSEEN)},
        "fell": dict(fell),
        "with one rank's write delayed by 0.5-6 s": sum(c["aimed_at"].get("slow", 0) for c in cases.values()),
        "lives started by the real command": sum(c["lives_started_by_the_real_command"] for c in cases.values()),
        "runs": len(cases),
        "runs_that_came_to_their_end": len(compared),
        "runs_that_differ": sum(case["differences"] > 0 for case in compared),
        **{
            key: sum(case[key] for case in compared)
            for key in ("updates_lost", "updates_repeated", "updates_of_other_rows")
        },
        "failures": {name: case["failure"] for name, case in cases.items() if case["failure"]},
        "seconds": round(sum(c["uninterrupted_seconds"] + c["killed_seconds"] for c in cases.values()), 1),
        "cases": cases,
    }


def failures(result: dict[str, Any]) -> dict[str, str]:
    """Reason by case of everything in a result that did not survive."""
    found = dict(result.get("kills", {}).get("failures", {}))
    if failure := result.get("soak", {}).get("failure"):
        found["soak"] = failure
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=0, help="kills over all cases")
    parser.add_argument("--only", default="", metavar="TEXT", help="of the cases those with TEXT in their names")
    parser.add_argument("--soak", type=int, default=0, metavar="UPDATES", help="updates of the long run")
    parser.add_argument("--restarts", type=int, default=30, help="restarts of the long run")
    parser.add_argument("--data", type=Path, help="dataset folder; default: Python's documentation, built now")
    parser.add_argument("--seed", type=int, default=1)
    hardware.add_json(parser, "write the result here; what it holds already is not measured again")
    parser.add_argument("--at-most", type=int, default=len(CASES), help="new cases of kills now; go on later")
    args = parser.parse_args()
    hardware.refuse_dirty(parser, args)
    result: dict[str, Any] = {"seed": args.seed, "asked": {"kills": args.kills, "soak": args.soak}}
    if args.only:
        result["asked"]["only"] = args.only
    if not any(args.only in case.name for case, _ in CASES):
        parser.error(f"--only {args.only}: in no case's name; there are: {'; '.join(c.name for c, _ in CASES)}")
    if args.json and args.json.exists():
        before = json.loads(args.json.read_text())
        if any(before.get(key) != result[key] for key in result):
            parser.error(f"{args.json} is of another seed, or of other numbers; write elsewhere")
        if before.pop("about")["revision"] != hardware.revision():
            parser.error(f"{args.json} is of another revision; write elsewhere")
        result = before
    with tempfile.TemporaryDirectory() as scratch:
        folder, data = Path(scratch), args.data
        if data is None:
            data = folder / "data"
            build = ("--input", "pydoc", "--output", data, "--seq-len", 64, "--vocab-size", 2000)
            command = [sys.executable, "-m", "data_prep", "build", *map(str, build), "--held-out", "0.02"]
            subprocess.run([*command, "--quiet"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        if args.kills:
            known = result.get("kills", {}).get("cases", {})

            def keep(cases: dict[str, Any]) -> None:
                result["kills"] = sums(cases)
                if args.json:
                    hardware.write_json(args.json, result)

            keep(kills(data, folder / "kills", args.kills, args.seed, known, args.at_most, args.only, keep))
        if args.soak and "soak" not in result:
            try:
                result["soak"] = soak(data / "held_out", folder / "soak", args.soak, args.restarts, args.seed)
            except (Failure, TimeoutError) as error:
                result["soak"] = {"updates": args.soak, "failure": str(error)}
    if args.json:
        hardware.write_json(args.json, result)
    for name, part in result.items():
        print(name, {k: v for k, v in part.items() if k != "cases"} if isinstance(part, dict) else part)
    for name, reason in failures(result).items():
        print(f"error: {name}: {reason}", file=sys.stderr)
    return 1 if failures(result) else 0


if __name__ == "__main__":
    sys.exit(main())
