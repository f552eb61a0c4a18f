"""Picture of tracks: held-out loss and share right of every entry against what the tracks count, minutes or tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common import hardware
from benchmarks.race.records import Entry
from benchmarks.race.tracks import track_of

OURS, PEERS = (["#1b6ca8", "#2a9d8f", "#6a4c93", "#0b3c5d", "#4fa3d1"], ["#d1495b", "#e08e45", "#8d5a3b", "#b56576"])


def plot(entries: list[Entry], path: Path) -> None:
    """Writes .svg or .png: a line a seed, a colour an entry, ours solid and the peer's dashed.

    Entries of several tracks have the track's name beside their own, and an axis of equal ratios, which begins after the
    start. Raises ValueError where some are of minutes and some of tokens.
    """
    tracks = sorted({track_of(entry["track"]) for entry in entries}, key=lambda t: (t.minutes, t.tokens))
    names = ", ".join(track.name for track in tracks)
    in_tokens = {track.tokens > 0 for track in tracks}
    if len(in_tokens) > 1:
        raise ValueError(f"--plot: {names} count minutes and tokens; plot either")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tokens, several = True in in_tokens, len(tracks) > 1
    across = (lambda point: point["tokens"] / 1e6) if tokens else (lambda point: point["seconds"] / 60)
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    colours = {"megabert": OURS.copy(), "huggingface": PEERS.copy()}
    for entry in entries:
        left = colours[entry["system"]]
        colour = left.pop(0) if left else None
        look: dict[str, Any] = {"linestyle": "-" if entry["system"] == "megabert" else "--", "color": colour}
        label = entry["recipe"] + (f", {entry['track']}" if several else "")
        for number, run in enumerate(entry["seeds"].values()):
            points = [point for point in run["curve"] if across(point) > 0 or not several]
            for panel, name in zip(panels, ("loss", "accuracy"), strict=True):
                (line,) = panel.plot(
                    [across(point) for point in points],
                    [point[name] for point in points],
                    marker=".",
                    label=label if number == 0 else None,
                    **look,
                )
                look["color"] = line.get_color()
    for panel, title in zip(panels, ("held-out MLM loss", "held-out masks right"), strict=True):
        panel.set(xlabel="million real tokens" if tokens else "minutes of training", title=title)
        if several:
            panel.set_xscale("log")
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend()
    machines = sorted({run["hardware"] for entry in entries for run in entry["seeds"].values()})
    figure.suptitle(f"{names}; {'; '.join(machines) or hardware.describe()}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
