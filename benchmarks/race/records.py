"""Records file of the race: every entry with its recipe, its scores by seed and its curves; who holds a track's record.

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
from pathlib import Path
from typing import Any

from benchmarks.common import hardware
from benchmarks.race.recipes import Recipe
from benchmarks.race.tracks import Track

RECORDS = hardware.ROOT / hardware.RESULTS / "speedrun.json"
SEEDS_OF_A_RECORD = 3
Entry = dict[str, Any]


class Records:
    """The file, and entries of it; `write` after each change. Several commands may add to one file at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Entry] = self._on_disk()

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
            hardware.write_json(self.path, {"entries": self.entries})
        finally:
            os.close(folder)

    def entry(self, track: Track, recipe: Recipe, data: dict[str, str]) -> Entry:
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


def vocabulary_name(recipe: Recipe) -> str:
    return f"{recipe.vocabulary:,} pieces" if isinstance(recipe.vocabulary, int) else Path(recipe.vocabulary).name


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


def gains(records: Records, track: str, base: Recipe) -> str:
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
