"""Speed of this tree over another revision's, by one benchmark run in both trees in turn on the same machine.

    python benchmarks/bench_revisions.py --base HEAD~1 --bench data [--rounds 5] [--within 0.03] -- --data DATA
    python benchmarks/bench_revisions.py --base ../other-tree --bench step -- --data DATA --model mini --dropout 0.1

Each tree runs its own script with the arguments after `--`; which tree goes first changes every round. `ratio` is the
median over the rounds of ours over the base's rate, above 1 is better; its spread is the least and the largest. `ops` has
a rate for each operation that both trees measure, at its size. With `--within` the exit code is 1 where a ratio is below
one less that share.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware

ROOT = hardware.ROOT
LOADER = "ours, token, updates of 2048 rows"
OURS = ("ours", "fused_softmax", "native", "adamw", "lamb", "muon")  # sides of bench_ops
RATES: dict[str, Callable[[dict[str, Any]], dict[str, float]]] = {
    "step": lambda tree: {"tokens/s": tree["results"][0]["results"]["ours"]["real_tokens_per_sec"]["p50"]},
    "data": lambda tree: {"rows/s": tree["results"][0]["rows_per_sec"][LOADER]["p50"]},
    "prep": lambda tree: {"MB/s": tree["ours"]},
    "ops": lambda tree: {
        f"{of['op']} {of['size']}, {side}, calls/s": 1 / seconds["p50"]
        for of in tree["results"]
        for side, seconds in of["seconds"].items()
        if side in OURS
    },
}
FIXED = {"step": [], "data": [], "prep": ["--repeats", "1", "--workers", "1"], "ops": []}


@contextmanager
def tree_of(base: str) -> Iterator[Path]:
    """The folder `base`, or a checkout of that revision beside our compiled operations. Raises ValueError."""
    if Path(base).is_dir():
        yield Path(base).resolve()
        return
    same = subprocess.run(
        ["git", "diff", "--quiet", base, "--", "csrc", ":(exclude)*.md"], cwd=ROOT, capture_output=True
    )
    if same.returncode:
        why = (
            same.stderr.decode().strip() or "its native operations are others; check it out, build it, give the folder"
        )
        raise ValueError(f"--base {base}: {why}")
    with tempfile.TemporaryDirectory(prefix="bench_revisions_") as scratch:
        folder = Path(scratch) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", folder, base], cwd=ROOT, check=True)
        try:
            for library in (ROOT / "megabert").glob("*.so"):
                shutil.copy(library, folder / "megabert")
            yield folder
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def rates_in(tree: Path, bench: str, arguments: list[str], scratch: Path) -> dict[str, float]:
    """The rates that the tree's own benchmark measures. Raises ValueError with the end of its output when it fails."""
    target = scratch / "result.json"
    command = [sys.executable, f"benchmarks/bench_{bench}.py", *FIXED[bench], *arguments, "--json", str(target)]
    # no vocabulary is found there, so that bench_prep measures no peer
    env = os.environ | {"PYTHONPATH": str(tree), "MEGABERT_DATA": str(scratch)}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{tree}: {hardware.shown(command)} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return RATES[bench](json.loads(target.read_text()))


def compare(base: list[dict[str, float]], ours: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Of each rate that both trees have: the median ratio, the ratios of the rounds, and the rates."""
    figures = {}
    for name in (name for name in ours[0] if name in base[0]):
        rates = {"base": [of[name] for of in base], "ours": [of[name] for of in ours]}
        ratios = [new / old for new, old in zip(rates["ours"], rates["base"], strict=True)]
        figures[name] = {"ratio": statistics.median(ratios), "ratios": ratios, "rates": rates}
    return figures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, metavar="REVISION|DIR", help="compared with this tree")
    parser.add_argument("--bench", choices=list(RATES), required=True)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each tree (default: %(default)s)")
    parser.add_argument("--within", type=float, metavar="SHARE", help="fail where ours is slower by more")
    parser.add_argument("arguments", nargs="*", help="of the benchmark, after --; paths are made absolute")
    hardware.add_json(parser)
    args = parser.parse_args(argv)
    hardware.refuse_dirty(parser, args)
    arguments = [os.path.abspath(a) if os.path.exists(a) else a for a in args.arguments]
    rates: dict[str, list[dict[str, float]]] = {"base": [], "ours": []}
    try:
        with tree_of(args.base) as base, tempfile.TemporaryDirectory() as scratch:
            for number in range(args.rounds):
                sides = {"base": base, "ours": ROOT}
                for name in list(sides)[:: 1 if number % 2 else -1]:  # neither is always first
                    rates[name].append(rates_in(sides[name], args.bench, arguments, Path(scratch)))
                print(f"round {number + 1} of {args.rounds}", flush=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    figures = compare(rates["base"], rates["ours"])
    for name, of in figures.items():
        old, new = (statistics.median(of["rates"][side]) for side in ("base", "ours"))
        print(
            f"ratio {of['ratio']:.3f} ({min(of['ratios']):.3f} to {max(of['ratios']):.3f})   ours {new:,.1f}, "
            f"base {old:,.1f}   {name}"
        )
    if args.json:
        report = {"benchmark": "revisions", "bench": args.bench, "base": args.base, "figures": figures}
        hardware.write_json(args.json, report)
    return int(args.within is not None and min(of["ratio"] for of in figures.values()) < 1 - args.within)


if __name__ == "__main__":
    sys.exit(main())
