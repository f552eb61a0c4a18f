"""Continued training: bits a byte on new and on old text after the same number of tokens, by schedule, replay and objective.

    python benchmarks/bench_continue.py --run runs/continue --json benchmarks/results/continue.json

A small model is trained on Wikipedia, down to a tenth of its peak learning rate, and continues on novels, with the same vocabulary:

    plain               at the last rate of that training
    re-warm             warmed up to the peak rate again, then down to the same end
    replay              plain, a quarter of the rows from Wikipedia
    replay, re-warm     both
    detour, re-warm     re-warm, its first half causal

All start from the weights without moments. One document in twenty of either text is held out before the build. Budgets are in
tokens, so results do not depend on the machine's speed; each finished run is in the file, and the same command adds missing ones.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks import bench_vocabulary
from benchmarks.common import hardware
from benchmarks.race import training
from benchmarks.race.dataset import RaceData, Scorer
from benchmarks.race.recipes import RaceRecipe, track_of

PEAK, END = 3e-3, 0.1
BASE = bench_vocabulary.BASE | {"optimizer.lr": PEAK, "schedule.final_ratio": END}
PLAIN = bench_vocabulary.KEYS | {"optimizer.lr": PEAK * END, "schedule.name": "constant", "warmup": 0.0}
REWARM = bench_vocabulary.KEYS | {"optimizer.lr": PEAK, "schedule.final_ratio": END, "warmup": 0.1}
DETOUR = {"objective.causal_share": 0.5}
# keys of each variant, and the share of old text
VARIANTS: dict[str, tuple[dict[str, Any], float]] = {
    "plain": (PLAIN, 0.0),
    "re-warm": (REWARM, 0.0),
    "replay": (PLAIN, 0.25),
    "replay, re-warm": (REWARM, 0.25),
    "detour, re-warm": (REWARM | DETOUR, 0.0),
}
# bytes of each text: all novels
TEXT = 24 << 20


def trained(
    recipe: RaceRecipe, tokens: int, data: RaceData, run: Path, seed: int, scorers: dict[str, Scorer]
) -> dict[str, Any]:
    """Train a run, resuming it after a kill; returns its tokens and its figures on each held-out text."""
    track = track_of(f"{tokens / 1000:g}k-tokens", threads=1)
    finished = training.train_ours(recipe, track, data, run, seed)
    last = finished.points[-1]
    weights = training.weights_of(last)
    return {"tokens": last.tokens} | {name: s.score(weights, finished.config) for name, s in scorers.items()}


def main(argv: list[str] | None = None) -> int:
    parser = bench_vocabulary.study_parser(__doc__, "runs/continue", tokens=[2_000_000, 150_000], rows=256, size=TEXT)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME")
    args = parser.parse_args(argv)
    hardware.refuse_dirty(parser, args)
    result = json.loads(args.json.read_text()) if args.json.is_file() else {"runs": {}}
    runs = result["runs"]

    def note(key: str, scores: dict[str, Any]) -> None:
        runs[key] = scores
        hardware.write_json(args.json, {"tokens": args.tokens, "runs": runs})
        print(f"{key}: old {scores['old']['bits']:.3f}, new {scores['new']['bits']:.3f}", flush=True)

    old = bench_vocabulary.prepare("base", args)
    tokenizer = str(old.train / old.manifest.tokenizer["file"])
    new = bench_vocabulary.prepare("novels", args, tokenizer)
    scorers = {name: Scorer(data.held_out, args.rows, threads=1) for name, data in (("old", old), ("new", new))}
    base = args.run / "runs/base"
    if "base" not in runs:
        recipe = RaceRecipe("base", "the model that is continued", keys=BASE)
        note("base", trained(recipe, args.tokens[0], old, base, 42, scorers))
    for seed, name in product(range(42, 42 + args.seeds), args.variants):
        if (key := f"{name} {seed}") in runs:
            continue
        keys, share = VARIANTS[name]
        keys = keys | {"init_from": str(base)}
        if share:
            keys["data.mix"] = f"{{{json.dumps(str(old.train))} = {share}}}"
        run = args.run / "runs" / key.replace(",", "").replace(" ", "-")
        note(key, trained(RaceRecipe(name, "continued", keys=keys), args.tokens[1], new, run, seed, scorers))
        shutil.rmtree(run)
    print(table(runs))
    return 0


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Bits a byte on new and on old text by variant, mean ± sample deviation over the seeds."""
    lines = ["| | new text | old text |", "|---|---|---|"]
    for name in dict.fromkeys(key.rpartition(" ")[0] or key for key in runs):
        cells = []
        for text in ("new", "old"):
            bits = [run[text]["bits"] for key, run in runs.items() if (key.rpartition(" ")[0] or key) == name]
            spread = f" ± {statistics.stdev(bits):.3f}" if len(bits) > 1 else ""
            cells.append(f"{statistics.mean(bits):.3f}{spread}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
