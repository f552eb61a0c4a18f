"""Tracks of the race, which are budgets, and its recipes, the settings of an entry as a TOML file.

about = "what it is, in a line"
change = "what made it better than the record before"
system = "megabert"  # or "huggingface": the plain loop of benchmarks/peers
preset = "mini"      # the size; of ours also all other settings
vocabulary = 30_000  # its size, or a tokenizer file

[keys]  # ours: section.key of the configuration; the peer's: fields of its PeerRecipe, and model.key
"optimizer.lr" = 1.5e-3
warmup = 0.06        # share of the budget, for both systems
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.common import hardware
from megabert import config
from megabert.common.arguments import toml_names
from megabert.config import Config, sources

TRACKS = (*("3min-2cores", "10min-2cores", "30min-2cores", "120min-2cores"), *("5m-tokens", "20m-tokens", "80m-tokens"))
_MINUTES = re.compile(r"(\d+(?:\.\d+)?)min-(\d+)cores")
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([km])-tokens")
FOLDER = hardware.ROOT / "benchmarks/recipes"
OURS, PEER = "megabert", "huggingface"
WARM_UP = "warmup"
# keys of `schedule` that the track sets
BUDGET = {"by", "total_steps", "warmup_steps", "budget_minutes", "budget_tokens", "budget_warmup"}


@dataclass(frozen=True)
class Track:
    """A budget: either `minutes` of training on `cores` threads, or real `tokens`, without padding."""

    name: str
    minutes: float = 0.0
    tokens: int = 0
    cores: int = 2


def track_of(name: str, threads: int = 2) -> Track:
    """The track of a name: one of TRACKS, or another budget in the same form, which is not official.

    `threads`: for a track of tokens; the name of a track of minutes includes them. Raises ValueError for a malformed name.
    """
    if match := _MINUTES.fullmatch(name):
        track = Track(name, minutes=float(match[1]), cores=int(match[2]))
        if track.minutes and track.cores:
            return track
    if (match := _TOKENS.fullmatch(name)) and float(match[1]):
        return Track(name, cores=threads, tokens=round(float(match[1]) * {"k": 1e3, "m": 1e6}[match[2]]))
    raise ValueError(f"--track {name}: no budget; write one of {', '.join(TRACKS)}, or as 6min-1cores or 300k-tokens")


@dataclass(frozen=True)
class RaceRecipe:
    """See the module's first lines; `name` is the file's."""

    name: str
    about: str
    change: str = ""
    system: str = OURS
    preset: str = "mini"
    vocabulary: int | str = 30_000
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Digest of the trained settings, which does not include descriptions."""
        tree = {name: value for name, value in asdict(self).items() if name not in ("name", "about", "change")}
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def warmup(self) -> float:
        return float(self.keys.get(WARM_UP, 0.06))


def collect_overrides(keys: Mapping[str, Any]) -> list[str]:
    """`section.key=value` of each, with values in TOML syntax except for strings."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in keys.items()]


def names() -> list[str]:
    return toml_names(FOLDER)


def load(name: str) -> RaceRecipe:
    """A recipe of benchmarks/recipes, or the file of that path. Raises ValueError naming file and field."""
    path, tree = sources.read_toml(name, FOLDER, "--recipe", "recipe")
    try:
        recipe = RaceRecipe(name=path.stem, **tree)
    except TypeError as error:
        raise ValueError(f"{path}: {str(error).removeprefix('RaceRecipe.__init__() ')}") from None
    if recipe.system not in (OURS, PEER):
        raise ValueError(f"{path}: system must be {OURS} or {PEER}, is {recipe.system!r}")
    for key in recipe.keys:
        if recipe.system == OURS and key.startswith("schedule.") and key[9:] in BUDGET:
            raise ValueError(f"{path}: {key} is the track's; set {WARM_UP}, the share of the budget, or nothing")
    return recipe


def rows_an_update(settings: Config) -> float:
    """Mean over the phases, whose shares are of updates."""
    return sum((p.end - p.begin) * p.config.batch.global_size for p in config.list_phases(settings))


def our_config(recipe: RaceRecipe, track: Track, tokens_a_row: float, seed: int) -> tuple[list[str], Config]:
    """The overrides of our run on a track, and the resulting configuration. Raises ValueError."""
    keys = {"schedule.name": "linear"} | dict(recipe.keys) | {"seed": seed}
    overrides = collect_overrides({key: value for key, value in keys.items() if key != WARM_UP})
    if track.minutes:
        overrides += ["schedule.by=minutes", f"schedule.budget_minutes={track.minutes}"]
        overrides += [f"schedule.budget_warmup={recipe.warmup}", "schedule.total_steps=1000000000"]
    else:
        rows = rows_an_update(config.load(recipe.preset, overrides))
        updates = max(1, round(track.tokens / (rows * tokens_a_row)))
        overrides += [f"schedule.total_steps={updates}"]
        overrides += [f"schedule.warmup_steps={round(recipe.warmup * updates)}"]
    return overrides, config.load(recipe.preset, overrides)
