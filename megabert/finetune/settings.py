"""Settings of a fine-tuning run, which are options of its commands: each is a field with its help and its range. Without torch."""

from __future__ import annotations

import argparse
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from megabert.common.arguments import Parser

# How a longer text is read: cut, or in windows whose logits are averaged.
LONG = ("truncate", "pool")
HEADS = ("linear", "bilstm")
# Settings that a grid may range over.
AXES = ("lr", "batch", "epochs", "dropout", "warmup", "weight_decay")


def option(default: Any, about: str, valid: str = "", choices: Sequence[Any] = ()) -> Any:
    """A field of `Settings` with its help and the values it may have: `valid` as in ">= 0" or "> 0 < 1"."""
    return field(default=default, metadata={"about": about, "valid": valid, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """What is chosen for a run; each field is an option of the commands. The defaults are Devlin et al. 2019's (appendix A.3)."""

    seed: int = 1
    lr: float = option(5e-5, "peak learning rate", valid="> 0 < 1")
    batch: int = option(32, "texts (windows of long ones) an update", valid=">= 1")
    micro_batch: int = option(0, "of one forward pass on one rank; 0: all of a rank's share", valid=">= 0")
    epochs: int = option(3, "times that every text is trained on", valid=">= 1")
    dropout: float = option(0.1, "of the encoder and of the added layers", valid=">= 0 < 1")
    warmup: float = option(0.1, "share of the updates", valid=">= 0 < 1")
    weight_decay: float = option(0.01, "of AdamW", valid=">= 0")
    max_length: int = option(128, "tokens of a text or window; at most the model's positions", valid=">= 4")
    stride: int = option(64, "tokens from one window to the next", valid=">= 1")
    long: str = option("truncate", "texts that are longer: cut, or windows averaged", choices=LONG)
    evaluations: int = option(1, "an epoch", valid=">= 1")
    patience: int = option(0, "evaluations without improvement that end a run; 0: never", valid=">= 0")
    freeze: bool = option(False, "fixed features: only the added layers learn")
    head: str = option("linear", "bilstm: two layers over the words of fixed features", choices=HEADS)
    width: int = option(768, "of the BiLSTM, both directions together")
    from_scratch: bool = option(False, "same shape, random weights")
    precision: str = option(
        "auto", "of forward and backward; auto: bf16 where the device multiplies it", choices=("auto", "bf16", "fp32")
    )
    zero: int = option(1, "DeepSpeed ZeRO stage", choices=(0, 1, 2))


def add_options(parser: Parser, unset: Mapping[str, str]) -> None:
    """The options of every field of `Settings` that has a help text, and those that all commands share.

    `unset`: names of fields that are None where they are not given, each with what is then taken, for its help.
    """
    add = parser.add_argument
    for each in fields(Settings):
        if not each.metadata:
            continue
        name, about = f"--{each.name.replace('_', '-')}", each.metadata["about"]
        if isinstance(each.default, bool):
            add(name, action="store_true", help=about)
            continue
        default = None if each.name in unset else each.default
        about += f"; without: {unset[each.name]}" if each.name in unset else ""
        add(name, type=type(each.default), choices=each.metadata["choices"] or None, default=default, help=about)
    add("--limit", type=int, default=0, metavar="N", help="use N examples of each file, for a trial; 0: all")
    add("--log-interval", type=int, default=20, metavar="UPDATES", help="between progress lines")
    add("--local_rank", type=int, metavar="N", help="set by launchers")


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `Settings` that a command line names. Raises ValueError naming an option that is out of range."""
    for name, least in (("log_interval", 1), ("limit", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    names = [each.name for each in fields(Settings)]
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


# Comparisons that `valid` may name, and their words.
COMPARISONS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    ">=": (operator.ge, "at least"),
    ">": (operator.gt, "above"),
    "<": (operator.lt, "below"),
}


def check(settings: Settings) -> None:
    """Raises ValueError naming an option that is out of range."""
    for each in fields(settings):
        value, words = getattr(settings, each.name), each.metadata.get("valid", "").split()
        limits = [(*COMPARISONS[sign], limit) for sign, limit in zip(words[::2], words[1::2], strict=True)]
        if not all(compare(value, float(limit)) for compare, _, limit in limits):
            shown = " and ".join(f"{name} {limit}" for _, name, limit in limits)
            raise ValueError(f"--{each.name.replace('_', '-')} {value}: must be {shown}")


def parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """`["lr=2e-5,3e-5", "batch=16"]` -> the values of each axis. Raises ValueError naming what cannot be read."""
    kinds: dict[str, Any] = {f.name: type(f.default) for f in fields(Settings)}
    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in AXES or name in grid or not values:
            raise ValueError(f"--grid {text}: write one of {', '.join(AXES)}, once, as lr=2e-5,3e-5")
        try:
            grid[name] = [kinds[name](value) for value in values.split(",")]
        except ValueError:
            raise ValueError(
                f"--grid {text}: a value of {name} is not a {'whole ' if kinds[name] is int else ''}number"
            ) from None
        if len(set(grid[name])) < len(grid[name]):
            raise ValueError(f"--grid {text}: a value is given twice")
    return grid


def parse_seeds(values: Sequence[int]) -> list[int]:
    """One number is a count of seeds, several are the seeds. Raises ValueError."""
    if min(values) < 0 or values == [0] or len(set(values)) < len(values):
        raise ValueError(f"--seeds {' '.join(map(str, values))}: give how many, or several different ones")
    return list(range(1, values[0] + 1)) if len(values) == 1 else list(values)


def combinations(settings: Settings, grid: Mapping[str, Sequence[Any]], seeds: Sequence[int]) -> dict[str, Settings]:
    """Every run's settings by its name, e.g. `lr2e-05-batch16-seed1`; the seeds of a grid point follow each other."""
    runs = {}
    for values in product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        for seed in seeds:
            name = "-".join([*(f"{axis}{value:g}" for axis, value in point.items()), f"seed{seed}"])
            runs[name] = replace(settings, seed=seed, **point)
    return runs
