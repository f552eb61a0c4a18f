"""Search for the keys of the peer's recipe by successive halving, scored on documents that neither training nor the race uses.

    python benchmarks/recipe_search.py --json benchmarks/results/search_hf-modern.json

Trial 0 is the unchanged recipe; the others draw each key at random. A rung's budget is given in floating-point operations, those
of a number of tokens of trial 0, so that a smaller model trains on more tokens, as in equal minutes, and results do not depend on
the load of the machine. The best of a rung enter the next. The file is written after each run; the same command adds missing ones.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware
from benchmarks.race import dataset, recipes, records, training
from benchmarks.race.recipes import RaceRecipe
from megabert import config as configuration
from megabert.data.shards import Dataset
from megabert.metrics import training_flops

RECIPE = "hf-modern"
SPACE: dict[str, Any] = {
    "model.hidden": [128, 192, 256],
    "model.layers": [4, 6],
    "model.window": [0, 128],
    "lr": (5e-4, 5e-3),
    "beta2": [0.98, 0.999],
    "weight_decay": [0.01, 0.1],
    "batch": [16, 32],
    "warmup": [0.02, 0.06, 0.15],
    "masking": [0.15, 0.3],
}
# trials, and millions of tokens of trial 0
TRIALS = 13
RUNGS = ((TRIALS, 0.3), (4, 1.0))
SEED, SEARCH_ROWS = 1_001, 1_024


def drawn(trial: int) -> dict[str, Any]:
    """Keys of a trial. Over all trials a key's values are equally frequent, and learning rates log-uniform."""
    if not trial:
        return {}
    keys: dict[str, Any] = {}
    for key, among in SPACE.items():
        place = random.Random(f"{SEED}/{key}").sample(range(TRIALS - 1), TRIALS - 1)[trial - 1]
        if isinstance(among, list):
            keys[key] = among[place % len(among)]
        else:
            low, high = among
            keys[key] = float(f"{low * (high / low) ** ((place + 0.5) / (TRIALS - 1)):.3g}")
    return keys | {"model.heads": keys["model.hidden"] // 64}


def flops(recipe: RaceRecipe) -> float:
    """FLOPs of a training token."""
    sizes = recipes.collect_overrides({key: value for key, value in recipe.keys.items() if key.startswith("model.")})
    model = configuration.load(
        recipe.preset, [*sizes, "model.norm=pre", "model.nsp=false", "model.vocab_size=30000"]
    ).model
    length = dataset.SEQ_LEN
    return training_flops(model, length, length**2, round(recipe.keys["masking"] * length), 1) / length


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=dataset.default_text(), help="as of speedrun.py")
    parser.add_argument("--run", type=Path, default=Path("runs/race"), help="folder of shards and runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, on a thread each")
    hardware.add_json(parser, "the table", required=True)
    args = parser.parse_args(argv)
    hardware.refuse_dirty(parser, args)
    base = recipes.load(RECIPE)
    data = dataset.prepare(args.run, args.text, base.vocabulary)
    held_out = Dataset(data.train).held_out_path
    assert held_out is not None
    scorer = dataset.Scorer(held_out, SEARCH_ROWS, threads=1)
    rows: list[dict[str, Any]] = json.loads(args.json.read_text())["rows"] if args.json.is_file() else []
    settings = {"recipe": RECIPE, "space": SPACE, "rungs": RUNGS, "data": data.identity()}

    def run(rung: int, trial: int) -> dict[str, Any]:
        recipe = replace(base, keys=dict(base.keys) | drawn(trial))
        budget = f"{RUNGS[rung][1] * 1000 * flops(base) / flops(recipe):.0f}k-tokens"
        row = {"rung": rung, "trial": trial, "track": budget, "keys": drawn(trial)} | records.circumstances()
        folder = args.run / "searches" / f"{RECIPE}-{trial}-{budget}"
        try:
            trained = training.train_peer(recipe, recipes.track_of(budget, threads=1), data, folder, SEED)
        except ValueError as error:
            if "not finite" not in str(error):
                raise
            return row | {"diverged": True, "bits": None}
        *_, last = trained.points
        figures = scorer.score(training.weights_of(last), trained.config) | training.without_weights(last)
        shutil.rmtree(folder)
        return row | {"diverged": False} | figures

    def score(trial: int, rung: int) -> float:
        return min(row["bits"] or math.inf for row in rows if (row["trial"], row["rung"]) == (trial, rung))

    trials = list(range(RUNGS[0][0]))
    for rung, (count, _) in enumerate(RUNGS):
        trials = sorted(trials, key=lambda trial: score(trial, rung - 1))[:count] if rung else trials
        left = [trial for trial in trials if not any((row["trial"], row["rung"]) == (trial, rung) for row in rows)]
        with ThreadPoolExecutor(args.jobs) as pool:
            for row in pool.map(partial(run, rung), left):
                rows.append(row)
                hardware.write_json(args.json, {"settings": settings, "rows": rows})
                print(f"rung {rung}, trial {row['trial']}: {row['bits']} bits a byte  {row['keys']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
