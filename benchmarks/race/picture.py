"""Picture of a track: held-out loss and share right of every entry against what the track counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import hardware
from benchmarks.race.records import Entry

OURS, PEERS = (
    ["#1b6ca8", "#2a9d8f", "#6a4c93", "#0b3c5d", "#4fa3d1"],
    ["#d1495b", "#e08e45", "#8d5a3b", "#b56576"],
)


def plot(entries: list[Entry], track: str, path: Path) -> None:
    """Writes .svg or .png: a line a seed, a colour an entry, ours solid and the peer's dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tokens = track.endswith("-tokens")
    across = (lambda point: point["tokens"] / 1e6) if tokens else (lambda point: point["seconds"] / 60)
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    colours = {"megabert": OURS.copy(), "huggingface": PEERS.copy()}
    for entry in entries:
        left = colours[entry["system"]]
        colour = left.pop(0) if left else None
        look: dict[str, Any] = {"linestyle": "-" if entry["system"] == "megabert" else "--", "color": colour}
        for number, run in enumerate(entry["seeds"].values()):
            label = entry["recipe"] if number == 0 else None
            for panel, name in zip(panels, ("loss", "accuracy"), strict=True):
                values = [point[name] for point in run["curve"]]
                (line,) = panel.plot(
                    [across(point) for point in run["curve"]], values, marker=".", label=label, **look
                )
                look["color"] = line.get_color()
    for panel, title in zip(panels, ("held-out MLM loss", "held-out masks right"), strict=True):
        panel.set(xlabel="million real tokens" if tokens else "minutes of training", title=title)
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend()
    machines = sorted({run["hardware"] for entry in entries for run in entry["seeds"].values()})
    figure.suptitle(f"{track}; {'; '.join(machines) or hardware.describe()}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
