"""Loss against compute at several sizes, for an old and a new recipe: fitted laws, their bands, and what they predict.

    python benchmarks/scaling_law.py --old adamw-128@1.2m-tokens adamw-256@2.8m-tokens adamw-512@7m-tokens \
        --new muon-128@1.2m-tokens muon-256@2.8m-tokens muon-512@7m-tokens --at base=1.1e19 large=1.1e20 --plot FILE.svg

The runs are those of benchmarks/speedrun.py: a recipe for each size, on tracks that hold the tokens a parameter fixed (the
track may be left out where a recipe has runs on one only). A law is loss = a x compute^-b (Kaplan et al. 2020), fitted to the logarithms by least squares over every seed of every size; its
band is the middle 90% of fits to seeds drawn again for each size (and says nothing of whether the law holds so far out).
Compute is the FLOPs that the run's own log counts. `--at` names a budget in FLOPs: its loss is a prediction.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware
from benchmarks.race.records import RECORDS, Records

DRAWS, MIDDLE = 2_000, 0.9
COLOURS = {"old": "#d1495b", "new": "#1b6ca8"}


@dataclass(frozen=True)
class Law:
    """loss = scale x compute^-power."""

    scale: float
    power: float

    def loss(self, compute: float) -> float:
        return self.scale * compute**-self.power

    def compute(self, loss: float) -> float:
        return (self.scale / loss) ** (1 / self.power)


@dataclass(frozen=True)
class Size:
    """One recipe's runs: FLOPs of one, and the held-out loss of each seed."""

    name: str
    compute: float
    losses: tuple[float, ...]


Fits = tuple[Law, list[Law]]  # of all runs, and of runs drawn again


def fit(points: Sequence[tuple[float, float]]) -> Law:
    """Least squares of log loss over log compute. Raises ValueError for points at fewer than two computes."""
    xs, ys = [math.log(c) for c, _ in points], [math.log(loss) for _, loss in points]
    if len(set(xs)) < 2:
        raise ValueError("a law needs runs of two sizes or more")
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    slope /= sum((x - mean_x) ** 2 for x in xs)
    return Law(math.exp(mean_y - slope * mean_x), -slope)


def fits(sizes: Sequence[Size], draws: int = DRAWS, seed: int = 0) -> Fits:
    """The law of all runs, and those of runs drawn again, seeds with replacement within each size."""
    source = random.Random(seed)
    whole = fit([(size.compute, loss) for size in sizes for loss in size.losses])
    again = [
        fit([(s.compute, loss) for s in sizes for loss in source.choices(s.losses, k=len(s.losses))])
        for _ in range(draws)
    ]
    return whole, again


def band(values: Sequence[float]) -> tuple[float, float]:
    """The middle 90%."""
    ordered, cut = sorted(values), (1 - MIDDLE) / 2
    return ordered[round(cut * (len(ordered) - 1))], ordered[round((1 - cut) * (len(ordered) - 1))]


def sizes_of(kept: Records, recipes: Sequence[str]) -> list[Size]:
    """The runs of each RECIPE@TRACK, or RECIPE where it has runs on one track only. Raises ValueError naming the recipe."""
    found = []
    for said in recipes:
        name, _, track = said.partition("@")
        entries = [entry for entry in kept.entries if entry["recipe"] == name and entry["seeds"]]
        tracks = ", ".join(entry["track"] for entry in entries) or "none"
        entries = [entry for entry in entries if not track or entry["track"] == track]
        if len(entries) != 1:
            raise ValueError(f"{said}: name one track, RECIPE@TRACK; {kept.path} has runs of it on {tracks}")
        runs = list(entries[0]["seeds"].values())
        if any(run.get("flops_per_token") is None for run in runs):
            raise ValueError(f"{name}: its runs in {kept.path} do not say their FLOPs a token")
        compute = sum(run["flops_per_token"] * run["tokens"] for run in runs) / len(runs)
        found.append(Size(name, compute, tuple(run["loss"] for run in runs)))
    return sorted(found, key=lambda size: size.compute)


def report(sides: Mapping[str, Sequence[Size]], laws: Mapping[str, Fits], at: Mapping[str, float]) -> dict[str, Any]:
    """Points, laws with their bands, and predictions of both sides; by how much less compute the new one gets there."""
    result: dict[str, Any] = {"benchmark": "scaling_law", "band": MIDDLE, "sides": {}, "predicted": {}}
    for side, sizes in sides.items():
        whole, again = laws[side]
        result["sides"][side] = {
            "points": [{"recipe": s.name, "flops": s.compute, "losses": s.losses} for s in sizes],
            "scale": whole.scale,
            "power": whole.power,
            "power_band": band([law.power for law in again]),
        }
    for name, compute in at.items():
        row: dict[str, Any] = {"flops": compute}
        for side, (whole, again) in laws.items():
            row[side] = {"loss": whole.loss(compute), "band": band([law.loss(compute) for law in again])}
        old, new = laws["old"][0], laws["new"][0]
        row["less_compute"] = compute / new.compute(old.loss(compute))
        result["predicted"][name] = row
    return result


def show(result: Mapping[str, Any]) -> None:
    for side, law in result["sides"].items():
        low, high = law["power_band"]
        print(f"{side}: loss = {law['scale']:.3g} x FLOPs^-{law['power']:.4f} ({low:.4f} to {high:.4f})")
        for point in law["points"]:
            losses = ", ".join(f"{loss:.3f}" for loss in point["losses"])
            print(f"  {point['recipe']:<20} {point['flops']:.3g} FLOPs   {losses}")
    for name, row in result["predicted"].items():
        both = "   ".join(
            f"{side} {row[side]['loss']:.2f} ({row[side]['band'][0]:.2f} to {row[side]['band'][1]:.2f})"
            for side in COLOURS
        )
        print(f"predicted, {name}, {row['flops']:.2g} FLOPs: {both}   {row['less_compute']:.2f} x less compute")


def plot(sides: Mapping[str, Sequence[Size]], laws: Mapping[str, Fits], path: Path) -> None:
    """Points, laws and bands, over the computes that were run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(6, 4), layout="constrained")
    for side, sizes in sides.items():
        whole, again = laws[side]
        first, last = math.log(sizes[0].compute), math.log(sizes[-1].compute)
        xs = [math.exp(first + (last - first) * i / 40) for i in range(41)]
        edges = [band([law.loss(x) for law in again]) for x in xs]
        lows, highs = [low for low, _ in edges], [high for _, high in edges]
        panel.fill_between(xs, lows, highs, alpha=0.2, color=COLOURS[side])
        panel.plot(xs, [whole.loss(x) for x in xs], color=COLOURS[side], label=side)
        for size in sizes:
            panel.plot([size.compute] * len(size.losses), size.losses, "o", ms=3, color=COLOURS[side])
    panel.set(xscale="log", yscale="log", xlabel="FLOPs of training", ylabel="held-out MLM loss")
    panel.grid(alpha=0.3, which="both")
    panel.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def budget(said: str) -> tuple[str, float]:
    name, _, flops = said.partition("=")
    try:
        return name, float(flops)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{said}: write NAME=FLOPS, as large=1.1e20") from None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for side in COLOURS:
        parser.add_argument(f"--{side}", nargs="+", required=True, metavar="RECIPE[@TRACK]", help="one for each size")
    parser.add_argument("--at", nargs="*", type=budget, default=[], metavar="NAME=FLOPS")
    parser.add_argument("--records", type=Path, default=RECORDS, help="as speedrun.py writes it")
    parser.add_argument("--plot", type=Path, help=".svg or .png")
    hardware.add_json(parser)
    args = parser.parse_args(argv)
    hardware.refuse_dirty(parser, args)
    try:
        kept = Records(args.records)
        sides = {side: sizes_of(kept, getattr(args, side)) for side in COLOURS}
        laws = {side: fits(sizes) for side, sizes in sides.items()}
        result = report(sides, laws, dict(args.at))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(result)
    if args.plot:
        plot(sides, laws, args.plot)
    if args.json:
        hardware.write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
