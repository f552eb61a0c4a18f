"""Comparison of training curves in time and in tokens, in numbers and as a picture: the report of `bench_quality.py`.

A curve is a list of points with `seconds` of training, real `tokens` so far and held-out figures; between two points it
is a straight line.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import hardware

LOSS, ACCURACY = "eval/mlm_loss", "eval/mlm_accuracy"
Result = dict[str, Any]


def reached(curve: list[Result], loss: float, what: str = "seconds") -> float | None:
    """`what` at which a curve is at `loss` or below, linear between evaluations; None: never, or not recorded."""
    if not all(what in point for point in curve):
        return None
    for before, after in zip([None, *curve], curve, strict=False):
        if after[LOSS] <= loss:
            if before is None or before[LOSS] <= after[LOSS]:
                return float(after[what])
            share = (before[LOSS] - loss) / (before[LOSS] - after[LOSS])
            return before[what] + share * (after[what] - before[what])
    return None


def loss_at(curve: list[Result], tokens: float) -> float | None:
    """Held-out loss after so many real tokens; None where the curve ends before, or has none recorded."""
    if not curve or not all("tokens" in point for point in curve) or curve[-1]["tokens"] < 0.99 * tokens:
        return None
    for before, after in pairwise(curve):
        if before["tokens"] <= tokens <= after["tokens"]:
            share = (tokens - before["tokens"]) / (after["tokens"] - before["tokens"])
            return before[LOSS] + share * (after[LOSS] - before[LOSS])
    return float(curve[-1][LOSS])


def compare(report: Result) -> None:
    """Adds to each of our runs what it took to the peer's final loss, in time and in tokens, and the best `ratio` to the report.

    `ratio` is in seconds of training; `ratio_tokens` is that run's in real tokens: what of the first is not in the second
    is throughput.
    """
    peer = next((run for run in report["runs"].values() if run["system"] == "huggingface" and run["curve"]), None)
    report |= {"ratio": None, "ratio_tokens": None, "comparisons": []}
    for label, run in report["runs"].items():
        if run["curve"]:
            last = run["curve"][-1]
            run["final"] = {key: last[key] for key in ("seconds", "tokens", LOSS, ACCURACY) if key in last}
            if last.get("step") and "tokens" in last:
                run["tokens_per_update"] = round(last["tokens"] / last["step"], 1)
        if peer is None or run["system"] != "megabert":
            continue
        end = peer["curve"][-1]
        for what, name in (("seconds", "ratio"), ("tokens", "ratio_tokens")):
            found = reached(run["curve"], end[LOSS], what)
            run[f"reached_peer_{what}"] = None if found is None else round(found, 1)
            run[name] = round(end[what] / found, 3) if found and what in end else None
            if run[name]:
                spent = f"{what} of training" if what == "seconds" else "real tokens"
                report["comparisons"].append(
                    {
                        "what": f"{spent} to the peer's final held-out loss",
                        "ours": label,
                        "peer": end[what],
                        "ratio": run[name],
                    }
                )
        equal = loss_at(run["curve"], end["tokens"]) if "tokens" in end else None
        run["loss_at_peer_tokens"] = None if equal is None else round(equal, 5)
        if run["ratio"] and run["ratio"] > (report["ratio"] or 0):
            report |= {"ratio": run["ratio"], "ratio_tokens": run["ratio_tokens"]}


def caption(report: Result) -> str:
    """The size, the machine and what the peer is."""
    settings = report["settings"]
    theirs = [run for run in report["runs"].values() if run["system"] == "huggingface"]
    tuned = "tuned on a grid of short runs" if any(run.get("tuning") for run in theirs) else "not tuned"
    return (
        f"{settings['config']}, {settings['threads']} threads, {hardware.describe()}; "
        f"peer: Hugging Face's BertForMaskedLM in a plain loop, {tuned}"
    )


def plot(report: Result, path: Path) -> None:
    """Held-out loss and accuracy against minutes of training, and the loss against real tokens; the peer's end as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(14, 3.8), layout="constrained")
    colours = {"megabert": ["#1b6ca8", "#4fa3d1", "#0b3c5d"], "huggingface": ["#d1495b"]}
    for label, run in report["runs"].items():
        colour = colours[run["system"]].pop(0) if colours[run["system"]] else None
        look = {"marker": "o", "markersize": 3, "label": label, "color": colour}
        minutes = [point["seconds"] / 60 for point in run["curve"]]
        for panel, key in zip(panels, (LOSS, ACCURACY), strict=False):
            panel.plot(minutes, [point[key] for point in run["curve"]], **look)
        counted = [point for point in run["curve"] if "tokens" in point]
        panels[2].plot([p["tokens"] / 1e6 for p in counted], [p[LOSS] for p in counted], **look)
        if run["system"] == "huggingface":
            for panel in (panels[0], panels[2]):
                panel.axhline(run["curve"][-1][LOSS], color=colour, linewidth=0.8, linestyle="--")
        elif run.get("reached_peer_seconds"):
            panels[0].axvline(run["reached_peer_seconds"] / 60, color=colour, linewidth=0.8, linestyle="--")
    titles = ("held-out MLM loss", "held-out MLM accuracy", "held-out MLM loss")
    for panel, title in zip(panels, titles, strict=True):
        panel.set(xlabel="million real tokens" if panel is panels[2] else "minutes of training", title=title)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(caption(report), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
