"""When one training curve is as good as another, in numbers and as a picture: the report of `bench_quality.py`.

A curve is a list of points with `seconds` of training and held-out figures; between two points it is a straight line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import hardware

LOSS, ACCURACY = "eval/mlm_loss", "eval/mlm_accuracy"
Result = dict[str, Any]


def time_to(curve: list[Result], loss: float) -> float | None:
    """Seconds of training after which a curve is at `loss` or below, linear between evaluations; None: never."""
    for before, after in zip([None, *curve], curve, strict=False):
        if after[LOSS] <= loss:
            if before is None or before[LOSS] <= after[LOSS]:
                return float(after["seconds"])
            share = (before[LOSS] - loss) / (before[LOSS] - after[LOSS])
            return before["seconds"] + share * (after["seconds"] - before["seconds"])
    return None


def compare(report: Result) -> None:
    """Adds to each of our runs when it reached the peer's final loss, and the best `ratio` to the report."""
    peer = next(
        (run for run in report["runs"].values() if run["system"] == "huggingface" and run["curve"]), None
    )
    report["ratio"] = None
    for run in report["runs"].values():
        if run["curve"]:
            run["final"] = {key: run["curve"][-1][key] for key in ("seconds", LOSS, ACCURACY)}
        if peer is None or run["system"] != "megabert":
            continue
        last = peer["curve"][-1]
        reached = time_to(run["curve"], last[LOSS])
        run["reached_peer_seconds"] = None if reached is None else round(reached, 1)
        run["ratio"] = round(last["seconds"] / reached, 3) if reached else None
        report["ratio"] = max(filter(None, (report["ratio"], run["ratio"])), default=None)


def plot(report: Result, path: Path) -> None:
    """Held-out loss and accuracy against minutes of training, with the peer's final loss as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    colours = {"megabert": ["#1b6ca8", "#4fa3d1", "#0b3c5d"], "huggingface": ["#d1495b"]}
    for label, run in report["runs"].items():
        colour = colours[run["system"]].pop(0) if colours[run["system"]] else None
        minutes = [point["seconds"] / 60 for point in run["curve"]]
        for panel, key in zip(panels, (LOSS, ACCURACY), strict=True):
            panel.plot(
                minutes,
                [point[key] for point in run["curve"]],
                marker="o",
                markersize=3,
                label=label,
                color=colour,
            )
        if run["system"] == "huggingface":
            panels[0].axhline(run["curve"][-1][LOSS], color=colour, linewidth=0.8, linestyle="--")
        elif run.get("reached_peer_seconds"):
            panels[0].axvline(run["reached_peer_seconds"] / 60, color=colour, linewidth=0.8, linestyle="--")
    for panel, title in zip(panels, ("held-out MLM loss", "held-out MLM accuracy"), strict=True):
        panel.set(xlabel="minutes of training", title=title)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(
        f"{report['settings']['config']}, {report['settings']['threads']} threads, {hardware.describe()}",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
