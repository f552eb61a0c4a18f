"""Train a record of the race again from its committed description, and compare the result with those of its seeds.

    python benchmarks/reproduce.py 30min-2cores/modern-192-init                exit code 0: inside the 95% band
    python benchmarks/reproduce.py 30min-2cores/modern-192-init --in-tokens    with the same tokens, on another machine
    python benchmarks/reproduce.py 30min-2cores/modern-192-init --share 0.01   a short trial without the comparison

A band is the prediction interval of one more seed, by the mean and the deviation of the record's seeds (Student's t). The text
must have the record's held-out documents, which is checked by their digest. The code is that of this tree; the record's revisions,
for `git checkout`, are printed.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed
from benchmarks import speedrun
from benchmarks.common import hardware
from benchmarks.race import dataset, recipes, records
from benchmarks.race.recipes import Track
from benchmarks.race.records import Entry, Records

BANDS = (0.5, 0.95, 0.99)


def budget(entry: Entry, in_tokens: bool, share: float) -> Track:
    """The track of a record, or one of its tokens; `share`: share of it."""
    track = recipes.track_of(entry["track"])
    if track.minutes and not in_tokens:
        return track if share == 1 else recipes.track_of(f"{track.minutes * share:g}min-{track.cores}cores")
    tokens = records.mean(entry, "tokens") if in_tokens else track.tokens
    return recipes.track_of(f"{tokens * share / 1e3:.1f}k-tokens", track.cores)


def band(bits: list[float], result: float) -> float | None:
    """The smallest of BANDS that contains a result; None without one. Raises ValueError for a single seed, which has no band."""
    from scipy.stats import t

    if len(bits) < 2:
        raise ValueError("the record has one seed, so it has no band; train more with benchmarks/speedrun.py --seeds")
    deviation = statistics.stdev(bits) * math.sqrt(1 + 1 / len(bits))
    within = 1 - 2 * t.sf(abs(result - statistics.fmean(bits)) / deviation, len(bits) - 1)
    return next((share for share in BANDS if within <= share), None)


def main() -> int:
    parser = hardware.Parser(__doc__)
    add = parser.add_argument
    add("record", metavar="TRACK/RECIPE")
    add("--records", type=Path, default=records.RECORDS, help="records file")
    add("--text", type=Path, default=dataset.default_text(), help="as of benchmarks/speedrun.py")
    add("--run", type=Path, default=Path("runs/reproduce"), help="folder of shards and runs")
    add("--seed", type=int, help="default: one that the record has not, as its band supposes")
    add("--in-tokens", action="store_true", help="train for the record's tokens instead of its minutes")
    add("--share", type=float, default=1.0, help="share of the budget; below 1 nothing is compared")
    args = parser.parse()
    entry, recipe = Records(args.records).find(args.record)
    bits = [seed["bits"] for seed in entry["seeds"].values()]
    if args.share == 1:
        band(bits, bits[0])  # that there is one, before the budget is spent
    data = dataset.prepare(args.run, args.text, recipe.vocabulary)
    for name, digest in data.identity().items():
        if digest != entry["data"][name] and name == "documents":
            raise ValueError(f"--text {args.text}: its held-out documents are not those of the record")
        if digest != entry["data"][name]:
            print(f"note: the shards of {name} are not the record's ({digest[:12]}, not {entry['data'][name][:12]})")
    revisions = sorted({seed["revision"] for seed in entry["seeds"].values()})
    print(f"code: revision {hardware.revision()}, the record's {', '.join(revisions)}", flush=True)
    track = budget(entry, args.in_tokens, args.share)
    args.seed = args.seed if args.seed is not None else max(map(int, entry["seeds"])) + 1
    run = args.run / "runs" / track.name / f"{recipe.name}-{recipe.digest}-{args.seed}"
    result = records.circumstances() | speedrun.run_seed(track, recipe, data, run, args.seed)
    hardware.write_json(args.json, {"record": args.record, "track": track.name, "seed": args.seed} | result)
    figures = f"{result['bits']:.4f} bits a byte after {result['tokens'] / 1e6:.2f} M tokens"
    print(f"{track.name}, seed {args.seed}: {figures}")
    if args.share != 1:
        print("a trial: not compared")
        return 0
    inside = band(bits, result["bits"])
    where = f"inside the {inside:.0%} band" if inside else f"outside the {BANDS[-1]:.0%} band"
    print(f"{where} of {records.with_spread(entry, 'bits', '.4f')}, {records.mean(entry, 'tokens') / 1e6:.2f} M tokens")
    return 0 if inside and inside <= 0.95 else 1


if __name__ == "__main__":
    hardware.run(main)
