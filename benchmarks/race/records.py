"""Records of the race: every entry with its recipe, its scores by seed and its curves; tables, comparisons and the picture.

    {"about": …, "entries": [{"track", "recipe", "digest", "about", "change", "system", "preset", "vocabulary", "keys",
                              "data": {"documents", "train", "held_out"}, "seeds": {"42": {…}}}]}

A seed's result has the date, revision, hardware and load of its own run, the three figures, and the curve. An entry is
known by its track, its recipe's digest and the dataset: the same command adds the seeds that are missing.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import hardware
from benchmarks.race.recipes import RaceRecipe, Track, track_of

RECORDS = hardware.ROOT / hardware.RESULTS / "speedrun.json"
SEEDS_OF_A_RECORD = 3
COLOURS, PEER_COLOURS = (
    ["#1b6ca8", "#2a9d8f", "#6a4c93", "#0b3c5d", "#4fa3d1"],
    ["#d1495b", "#e08e45", "#8d5a3b", "#b56576"],
)
Entry = dict[str, Any]


class Records:
    """The file, and entries of it; `write` after each change. Several commands may add to one file at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Entry] = self._on_disk()
        self.comparisons: list[dict[str, Any]] = []

    def _on_disk(self) -> list[Entry]:
        return json.loads(self.path.read_text())["entries"] if self.path.is_file() else []

    def write(self) -> None:
        """Write the entries, and what others have added to the file since it was read."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            for theirs in self._on_disk():
                ours = next((entry for entry in self.entries if _known_by(entry) == _known_by(theirs)), None)
                if ours is None:
                    self.entries.append(theirs)
                else:
                    ours["seeds"] = theirs["seeds"] | ours["seeds"]
            more = {"comparisons": self.comparisons} if self.comparisons else {}
            hardware.write_json(self.path, {"entries": self.entries} | more)
        finally:
            os.close(folder)

    def entry(self, track: Track, recipe: RaceRecipe, data: dict[str, str]) -> Entry:
        """The entry of a recipe on a track, made where it is not there.

        Raises ValueError where the file's entries were scored on other held-out documents.
        """
        known = (track.name, recipe.digest, data)
        for entry in self.entries:
            if entry["data"]["documents"] != data["documents"]:
                raise ValueError(
                    f"{self.path}: its entries were scored on other held-out documents than those of this --text; "
                    "name another --json"
                )
            if _known_by(entry) == known:
                return entry
        entry = {"track": track.name, "recipe": recipe.name, "digest": recipe.digest}
        entry |= {"about": recipe.about, "change": recipe.change, "system": recipe.system}
        entry |= {"preset": recipe.preset, "vocabulary": vocabulary_name(recipe), "keys": dict(recipe.keys)}
        entry |= {"data": data, "seeds": {}}
        self.entries.append(entry)
        return entry

    def of(self, track: str) -> list[Entry]:
        """Entries of a track with a result, the best first."""
        found = [entry for entry in self.entries if entry["track"] == track and entry["seeds"]]
        return sorted(found, key=lambda entry: mean(entry, "bits"))


def _known_by(entry: Entry) -> tuple[str, str, dict[str, str]]:
    return entry["track"], entry["digest"], entry["data"]


def vocabulary_name(recipe: RaceRecipe) -> str:
    return f"{recipe.vocabulary:,} tokens" if isinstance(recipe.vocabulary, int) else Path(recipe.vocabulary).name


def circumstances() -> dict[str, Any]:
    """Date, revision, machine, and how busy it was when the run began."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "revision": hardware.revision(),
        "hardware": hardware.describe(),
        "load": round(os.getloadavg()[0], 2),
    }


def mean(entry: Entry, figure: str) -> float:
    return statistics.fmean(found[figure] for found in entry["seeds"].values())


def spread(entry: Entry, figure: str) -> float | None:
    """Standard deviation over the seeds; None for one seed."""
    values = [found[figure] for found in entry["seeds"].values()]
    return statistics.stdev(values) if len(values) > 1 else None


def record_dates(entries: list[Entry]) -> dict[str, str]:
    """Date of each entry of a track that was a record when its third seed was in, by digest.

    Only entries with SEEDS_OF_A_RECORD seeds are compared; the first such entry is a record.
    """
    complete = [entry for entry in entries if len(entry["seeds"]) >= SEEDS_OF_A_RECORD]
    finished = {entry["digest"]: max(run["date"] for run in entry["seeds"].values()) for entry in complete}
    best, found = float("inf"), {}
    for entry in sorted(complete, key=lambda entry: finished[entry["digest"]]):
        if mean(entry, "bits") < best:
            best, found[entry["digest"]] = mean(entry, "bits"), finished[entry["digest"]]
    return found


def table(records: Records, track: str) -> str:
    """The entries of a track as a Markdown table, the best first."""
    entries = records.of(track)
    dates = record_dates(entries)
    lines = [
        "| recipe | bits a byte | loss | right | tokens | seeds | record | what made it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        cells = [entry["recipe"], with_spread(entry, "bits", ".4f"), with_spread(entry, "loss", ".3f")]
        cells += [with_spread(entry, "accuracy", ".1%"), f"{mean(entry, 'tokens') / 1e6:.2f} M"]
        cells += [str(len(entry["seeds"])), dates.get(entry["digest"], "")[:10], entry["change"] or entry["about"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_spread(entry: Entry, figure: str, form: str) -> str:
    deviation = spread(entry, figure)
    return format(mean(entry, figure), form) + (f" ± {format(deviation, form)}" if deviation is not None else "")


def gains(records: Records, track: str, base: RaceRecipe) -> str:
    """What each changed key of a recipe gained over it, as a Markdown table, the most first: by how much less the held-out loss
    is, on the seeds that both have."""
    entries = records.of(track)
    before = next((entry for entry in entries if entry["digest"] == base.digest), None)
    rows = []
    for entry in entries:
        change = entry["recipe"].removeprefix(f"{base.name}, ")
        if before is None or change == entry["recipe"]:
            continue
        both = sorted(before["seeds"].keys() & entry["seeds"].keys())
        if found := [before["seeds"][s]["loss"] - entry["seeds"][s]["loss"] for s in both]:
            deviation = f" ± {statistics.stdev(found):.3f}" if len(found) > 1 else ""
            rows.append((statistics.fmean(found), deviation, change, len(found)))
    lines = [f"| change of {base.name} | gain in held-out loss | seeds |", "|---|---|---|"]
    ordered = sorted(rows, reverse=True)
    return "\n".join([*lines, *(f"| `{row[2]}` | {row[0]:+.3f}{row[1]} | {row[3]} |" for row in ordered)])


def reached(curve: list[dict[str, Any]], loss: float, what: str) -> float | None:
    """`what` ("seconds" or "tokens") at which a curve first reaches `loss`, linear between points; None: never."""
    for before, after in pairwise(curve):
        if after["loss"] <= loss < before["loss"]:
            share = (before["loss"] - loss) / (before["loss"] - after["loss"])
            return before[what] + share * (after[what] - before[what])
    return None


def comparisons(entries: list[Entry], peer: Entry) -> list[dict[str, Any]]:
    """What the entries took to the last loss of the peer's curve, in seconds of training and in tokens; `ratio` is the peer's
    over theirs, above 1 is better. What of the first is not in the second is throughput."""
    (theirs, *_) = peer["seeds"].values()
    end, found = theirs["curve"][-1], []
    for entry in entries:
        for seed, run in entry["seeds"].items() if entry is not peer else ():
            for what in ("seconds", "tokens"):
                taken = reached(run["curve"], end["loss"], what)
                if taken:
                    row = {
                        "ours": entry["recipe"],
                        "peer": peer["recipe"],
                        "seed": seed,
                        "what": f"{what} to the peer's loss",
                    }
                    found.append(row | {"taken": taken, "peer_taken": end[what], "ratio": end[what] / taken})
    return found


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
    colours = {"megabert": COLOURS.copy(), "huggingface": PEER_COLOURS.copy()}
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
