"""Race to held-out quality: recipes with the same text and budget, scored on the same masks of the same held-out documents.

    python benchmarks/speedrun.py --track 30min-2cores --recipe plain hf-loop --seeds 3 --plot FILE.svg --against hf-loop
    python benchmarks/speedrun.py --track 4min-1cores 20min-1cores --show --against hf-modern-8000 --plot FILE.svg

A recipe is a TOML file in benchmarks/recipes, of ours (trained by megabert/train.py) or of a plain loop with Hugging Face's model.
The score is the held-out masked-LM loss at 15% in bits a byte, by which vocabularies roughly compare; loss and accuracy are shown
too. The records file is written after each seed, and the same command trains missing ones; a killed run of ours resumes from its
newest checkpoint. Tracks of minutes need an otherwise idle machine; how busy it is before each run is in the file. Tracks of
tokens do not. `--against` shows time and tokens of the others until a peer's last loss.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed
from benchmarks.common import hardware
from benchmarks.race import dataset, recipes, records
from benchmarks.race.recipes import RaceRecipe, Track
from benchmarks.race.records import Entry, Records

FIRST_SEED = 42
BUSY = 0.5  # cores that others use


def enter(args: argparse.Namespace, track: Track, recipe: RaceRecipe, kept: Records) -> None:
    """Run the seeds of a recipe that the records lack. Raises ValueError."""
    data = dataset.prepare(args.run, args.text, recipe.vocabulary)
    entry = kept.entry(track, recipe, data.identity())
    for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
        if str(seed) in entry["seeds"]:
            continue
        about = records.circumstances()
        if track.minutes and about["busy_cores"] > BUSY:
            print(f"warning: others use {about['busy_cores']} cores: the minutes are unreliable", file=sys.stderr)
        print(f"{track.name}: {recipe.name}, seed {seed} …", file=sys.stderr, flush=True)
        run = args.run / "runs" / track.name / f"{recipe.name}-{recipe.digest}-{seed}"
        entry["seeds"][str(seed)] = about | run_seed(track, recipe, data, run, seed)
        kept.write()
        if not args.keep:
            shutil.rmtree(run)


def run_seed(track: Track, recipe: RaceRecipe, data: dataset.RaceData, run: Path, seed: int) -> dict[str, object]:
    """Train one seed and score it on the held-out documents; returns the final figures and the curve."""
    from benchmarks.race import training

    train = training.train_peer if recipe.system == recipes.PEER else training.train_ours
    trained = train(recipe, track, data, run, seed)
    *_, last = trained.points
    scorer = dataset.Scorer(data.held_out, dataset.HELD_OUT_ROWS, track.cores)
    along = dataset.Scorer(data.held_out, dataset.CURVE_ROWS, track.cores)
    curve = [point.described() | along.score(point.weights(), trained.config) for point in trained.points]
    about: dict[str, object] = {"command": trained.command, "tokens_per_second": trained.tokens_per_second}
    about |= {"precision": trained.config["precision"]}
    return about | last.described() | scorer.score(last.weights(), trained.config) | {"curve": curve}


def compare(args: argparse.Namespace, entries: list[Entry], kept: Records) -> None:
    """Print and write time and tokens of the entries until the peer's last loss. Raises ValueError without the peer's entry."""
    peers = [entry for entry in entries if entry["recipe"] == args.against]
    if not peers:
        raise ValueError(f"--against {args.against}: has no result on {', '.join(args.track)}")
    # of several tracks the longest run of the peer
    peer = max(peers, key=lambda entry: records.mean(entry, "tokens"))
    kept.comparisons = records.comparisons(entries, peer)
    for row in kept.comparisons:
        taken, ratio = (f"{row['taken']:,.0f}", f"{row['ratio']:.2f}") if row["taken"] else ("never", "none")
        taken += f" against {row['peer_taken']:,.0f}"
        print(f"{row['ours']}, seed {row['seed']}: {row['what']} of {row['peer']}: {taken}, ratio {ratio}")
    if not args.show:
        kept.write()


def main() -> None:
    parser = hardware.Parser(__doc__, help="the records file", default=records.RECORDS)
    add = parser.add_argument
    tracks = f"{', '.join(recipes.TRACKS)}; or another budget, as 6min-1cores or 300k-tokens; several with --show"
    text = "folder with enwiki/*/wiki_* and novels/*.txt; without them, the documentation installed with Python"
    as_set = f"the tracks' records as they were set, each with p < {records.RECORD_P} over seeds against the one before"
    add("--track", nargs="+", required=True, metavar="NAME", help=tracks)
    which = f"{', '.join(recipes.names())}, or a .toml file; default: plain; with --show those that --plot draws, all"
    add("--recipe", nargs="+", default=[], metavar="NAME", help=which)
    add("--seeds", type=int, default=1, help="runs of each recipe")
    add("--against", metavar="RECIPE", help="print and write time and tokens until this entry's last loss")
    add("--text", type=Path, default=dataset.default_text(), help=text)
    add("--run", type=Path, default=Path("runs/race"), help="folder of shards and runs")
    add("--keep", action="store_true", help="keep the folders of finished runs in RUN/runs, to fine-tune their models")
    add("--threads", type=int, default=2, help="threads of a run on a track of tokens")
    add("--show", action="store_true", help="only print the tracks' tables (and make --plot)")
    add("--history", action="store_true", help=f"only print {as_set}")
    add("--plot", type=Path, help="all curves of the tracks, .svg or .png")
    args = parser.parse_args()
    args.show |= args.history
    if len(args.track) > 1 and not args.show:
        parser.error("--track: several only with --show")
    if not args.show:
        parser.refuse_dirty(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the training run is ended too
    track, *_ = (recipes.track_of(name, args.threads) for name in args.track)
    chosen = [] if args.show else [recipes.load(name) for name in args.recipe or ["plain"]]
    if track.cores > (os.cpu_count() or 1) and not args.show:
        raise ValueError(f"--track {track.name}: this machine has {os.cpu_count()} cores")
    kept = Records(args.json)
    for recipe in chosen:
        enter(args, track, recipe, kept)
    entries = [entry for name in args.track for entry in kept.of(name)]
    if args.plot:
        only = args.recipe if args.show else []
        records.plot([entry for entry in entries if not only or entry["recipe"] in only], args.plot)
    table = records.history_table if args.history else records.table
    for name in args.track:
        print(f"{name}\n{table(kept, name)}" if len(args.track) > 1 else table(kept, name))
    if args.against:
        compare(args, entries, kept)


if __name__ == "__main__":
    hardware.run(main)
