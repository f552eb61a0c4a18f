"""Records of the race: every entry with its recipe, its scores by seed and its curves; tables, comparisons and the picture.

    {"about": …, "entries": [{"track", "recipe", "digest", "about", "change", "system", "preset", "vocabulary", "keys",
                              "data": {"documents", "train", "held_out"}, "seeds": {"42": {…}}}]}

A seed's result has the date, revision, hardware and load of its run, the three figures, and the curve. An entry is identified by its
track, its recipe's digest and the dataset; the same command adds missing seeds.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import hardware
from benchmarks.race.recipes import RaceRecipe, Track, track_of

RECORD_P = 0.01  # the probability below which a gain over the record before it makes an entry the record
RECORDS = hardware.ROOT / hardware.RESULTS / "speedrun.json"
Entry = dict[str, Any]


class Records:
    """The file and its entries; call `write` after each change. Several commands may add to one file at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Entry] = self._on_disk()
        self.comparisons: list[dict[str, Any]] = []

    def _on_disk(self) -> list[Entry]:
        return json.loads(self.path.read_text())["entries"] if self.path.is_file() else []

    def _known(self, *known: Any) -> Entry | None:
        """The entry with this track, digest and data."""
        return next((e for e in self.entries if (e["track"], e["digest"], e["data"]) == known), None)

    def write(self) -> None:
        """Write the entries, with those added to the file by others since it was read."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            for theirs in self._on_disk():
                if ours := self._known(theirs["track"], theirs["digest"], theirs["data"]):
                    ours["seeds"] = theirs["seeds"] | ours["seeds"]
                else:
                    self.entries.append(theirs)
            more = {"comparisons": self.comparisons} if self.comparisons else {}
            hardware.write_json(self.path, {"entries": self.entries} | more)
        finally:
            os.close(folder)

    def entry(self, track: Track, recipe: RaceRecipe, data: dict[str, str]) -> Entry:
        """The entry of a recipe on a track, created if missing.

        Raises ValueError if the file's entries were scored on other held-out documents.
        """
        if any(entry["data"]["documents"] != data["documents"] for entry in self.entries):
            other = "its entries were scored on other held-out documents than those of this --text; name another --json"
            raise ValueError(f"{self.path}: {other}")
        if found := self._known(track.name, recipe.digest, data):
            return found
        described = {"track": track.name, "recipe": recipe.name, "digest": recipe.digest} | asdict(recipe)
        entry = {name: value for name, value in described.items() if name != "name"} | {"data": data, "seeds": {}}
        self.entries.append(entry)
        return entry

    def find(self, name: str) -> tuple[Entry, RaceRecipe]:
        """The entry TRACK/RECIPE, the newest of several, and the recipe of its description. Raises ValueError."""
        entries = [entry for entry in self.entries if f"{entry['track']}/{entry['recipe']}" == name and entry["seeds"]]
        if not entries:
            raise ValueError(f"{name}: no record of {self.path}; write TRACK/RECIPE")
        entry = max(entries, key=last_date)
        fields = ("about", "change", "system", "preset", "vocabulary", "keys")
        recipe = RaceRecipe(entry["recipe"], **{field: entry[field] for field in fields})
        if recipe.digest != entry["digest"]:
            raise ValueError(f"{self.path}: {name} does not describe what was trained: its digest is another")
        return entry, recipe

    def of(self, track: str) -> list[Entry]:
        """Entries of a track with a result, the best first."""
        entries = [entry for entry in self.entries if entry["track"] == track and entry["seeds"]]
        return sorted(entries, key=lambda entry: mean(entry, "bits"))


def circumstances() -> dict[str, Any]:
    """Date, revision, machine, and how many of its cores others use before the run."""
    where = {"date": hardware.now(), "revision": hardware.revision(), "hardware": hardware.describe()}
    return where | {"busy_cores": round(busy_cores(), 2)}


def busy_cores(seconds: float = 1.0) -> float:
    """Cores that are in use during `seconds` of doing nothing, or taken by other machines on the same host."""
    import psutil

    return float(psutil.cpu_percent(seconds)) / 100 * psutil.cpu_count()


def mean(entry: Entry, figure: str) -> float:
    return statistics.fmean(result[figure] for result in entry["seeds"].values())


def table(records: Records, track: str) -> str:
    """The entries of a track as a Markdown table, the best first."""
    head = ("recipe", "bits a byte", "loss", "accuracy", "tokens", "seeds", "what made it")
    rows = []
    for entry in records.of(track):
        figures = [with_spread(entry, *form) for form in (("bits", ".4f"), ("loss", ".3f"), ("accuracy", ".1%"))]
        about = f"{mean(entry, 'tokens') / 1e6:.2f} M", str(len(entry["seeds"])), entry["change"] or entry["about"]
        rows.append((entry["recipe"], *figures, *about))
    return hardware.markdown(head, rows)


def history(entries: list[Entry]) -> list[tuple[Entry, float | None]]:
    """The records of a track in the order in which they were set, each with the probability that its gain over the one before is
    chance: Welch's t-test of bits a byte over seeds, one-sided. None for the first. One seed sets no record."""
    from scipy.stats import ttest_ind

    found: list[tuple[Entry, float | None]] = []
    for entry in sorted(entries, key=last_date):
        bits, p = [seed["bits"] for seed in entry["seeds"].values()], 0.0
        if len(bits) < 2:
            continue
        if found:
            before = [seed["bits"] for seed in found[-1][0]["seeds"].values()]
            p = float(ttest_ind(bits, before, equal_var=False, alternative="less").pvalue)
        if p < RECORD_P:
            found.append((entry, p if found else None))
    return found


def last_date(entry: Entry) -> str:
    return max(seed["date"] for seed in entry["seeds"].values())


def history_table(records: Records, track: str) -> str:
    """The records of a track as a Markdown table, the first one first."""
    rows = []
    for entry, p in history(records.of(track)):
        cells = [last_date(entry)[:10], entry["recipe"], with_spread(entry, "bits", ".4f"), str(len(entry["seeds"]))]
        rows.append([*cells, "" if p is None else f"{p:.1g}", entry["change"] or entry["about"]])
    return hardware.markdown(("date", "recipe", "bits a byte", "seeds", "p", "what made it"), rows)


def with_spread(entry: Entry, figure: str, form: str) -> str:
    """Mean and standard deviation over the seeds."""
    return hardware.show(hardware.over_seeds([result[figure] for result in entry["seeds"].values()]), form)


def reached(curve: Sequence[Mapping[str, float]], bits: float, what: str) -> float | None:
    """`what` ("seconds" or "tokens") at which a curve first reaches these bits a byte, interpolated linearly; None: never."""
    for before, after in pairwise(curve):
        if after["bits"] <= bits < before["bits"]:
            share = (before["bits"] - bits) / (before["bits"] - after["bits"])
            return before[what] + share * (after[what] - before[what])
    return None


def comparisons(entries: list[Entry], peer: Entry) -> list[dict[str, Any]]:
    """Seconds of training and tokens of the entries until the last bits a byte of the peer's curves, the mean over its seeds; `ratio` is
    the peer's over theirs, above 1 is better; None for a curve that ends above those bits. The quotient of the two ratios is that of
    throughput."""
    ends = [run["curve"][-1] for run in peer["seeds"].values()]
    end = {name: statistics.fmean(point[name] for point in ends) for name in ("bits", "seconds", "tokens")}
    rows = []
    for entry in entries:
        for seed, run in entry["seeds"].items() if entry is not peer else ():
            sides = {"ours": entry["recipe"], "peer": peer["recipe"], "seed": seed}
            for what in ("seconds", "tokens"):
                taken = reached(run["curve"], end["bits"], what)
                figures = {"taken": taken, "peer_taken": end[what], "ratio": end[what] / taken if taken else None}
                rows.append(sides | {"what": f"{what} to the peer's loss"} | figures)
    return rows


# peers' names in plots
NAMES = {
    "hf-modern-8000": "Hugging Face ModernBERT", "hf-modern": "Hugging Face ModernBERT, 30,000 tokens",
    "hf-tuned": "Hugging Face BERT", "hf-loop": "Hugging Face BERT, not tuned",
}  # fmt: skip


def plot(entries: list[Entry], path: Path) -> None:
    """Write .svg or .png: a line for each seed, a colour for each entry, ours solid and the peer's dashed.

    With several tracks the labels include the track, and the axis is logarithmic, without the start. Raises ValueError if some are of
    minutes and some of tokens.
    """
    tracks = sorted({track_of(entry["track"]) for entry in entries}, key=lambda t: (t.minutes, t.tokens))
    names, several = ", ".join(track.name for track in tracks), len(tracks) > 1
    in_tokens = {track.tokens > 0 for track in tracks}
    if len(in_tokens) > 1:
        raise ValueError(f"--plot: {names} count minutes and tokens; plot either")
    by_time = ("seconds", 60, "minutes of training")
    what, unit, axis = ("tokens", 1e6, "million real tokens") if True in in_tokens else by_time
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for colour, entry in enumerate(entries):
        ours, recipe = entry["system"] == "megabert", str(entry["recipe"])
        look = {"linestyle": "-" if ours else "--", "color": f"C{colour}", "marker": "."}
        label = f"MegaBERT, {recipe}" if ours else NAMES.get(recipe, recipe)
        track = track_of(entry["track"])
        label += f", {track.minutes:g} minutes" if several and track.minutes else f", {track.name}" * several
        for number, run in enumerate(entry["seeds"].values()):
            points = [point for point in run["curve"] if point[what] > 0 or not several]
            across = [point[what] / unit for point in points]
            for panel, name in zip(panels, ("bits", "accuracy"), strict=True):
                panel.plot(across, [point[name] for point in points], label=None if number else label, **look)
    for panel, title in zip(panels, ("held-out loss (masked LM, bits a byte)", "held-out accuracy"), strict=True):
        panel.set(xlabel=axis, title=title)
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
