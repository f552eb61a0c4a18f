"""Search over seeds and a small grid: runs side by side, and figures as means with their spread.

OUTPUT/settings.json says what all of its runs have in common; a command that differs in any of it is refused, one that
only adds seeds or values of the grid goes on. Every run has a folder named by its values, and is not run again once its
result is there.
"""

from __future__ import annotations

import gc
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from megabert.common.errors import OK
from megabert.common.logs import log
from megabert.config import WatchdogConfig
from megabert.distributed import run_lock
from megabert.distributed.preemption import REQUEUE, Stop
from megabert.distributed.process_group import World
from megabert.distributed.session import Session
from megabert.distributed.together import together
from megabert.distributed.watchdog import Watchdog
from megabert.finetune.run import RESULT, Run, RunSettings, write_json

AXES = ("lr", "batch", "epochs", "dropout", "warmup", "weight_decay")
COMMON, SUMMARY = "settings.json", "summary.json"
S = TypeVar("S", bound=RunSettings)


def parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """`["lr=2e-5,3e-5", "batch=16"]` -> the values of each axis. Raises ValueError naming what cannot be read."""
    kinds: dict[str, Any] = {f.name: type(f.default) for f in fields(RunSettings)}
    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in AXES or name in grid or not values:
            raise ValueError(f"--grid {text}: write one of {', '.join(AXES)}, once, as lr=2e-5,3e-5")
        try:
            grid[name] = [kinds[name](value) for value in values.split(",")]
        except ValueError:
            raise ValueError(
                f"--grid {text}: a value of {name} is no {'whole ' * (kinds[name] is int)}number"
            ) from None
        if len(set(grid[name])) < len(grid[name]):
            raise ValueError(f"--grid {text}: a value is there twice")
    return grid


def parse_seeds(values: Sequence[int]) -> list[int]:
    """One number says how many seeds, several say which. Raises ValueError."""
    if min(values) < 0 or values == [0] or len(set(values)) < len(values):
        raise ValueError(f"--seeds {' '.join(map(str, values))}: give how many, or several different ones")
    return list(range(1, values[0] + 1)) if len(values) == 1 else list(values)


def combinations(settings: S, grid: Mapping[str, Sequence[Any]], seeds: Sequence[int]) -> dict[str, S]:
    """Every run's settings by its name, e.g. `lr2e-05-batch16-seed1`; the seeds of a grid point follow each other."""
    found = {}
    for values in product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        for seed in seeds:
            name = "-".join([*(f"{axis}{value:g}" for axis, value in point.items()), f"seed{seed}"])
            found[name] = replace(settings, seed=seed, **point)
    return found


def refuse(output: Path, common: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first setting in which the runs of `output` differ from `common`, or what else the
    folder holds; one that is empty or does not exist is good."""
    path = output / COMMON
    if path.is_file():
        try:
            there = json.loads(path.read_text())
        except ValueError:
            raise ValueError(f"{path}: is damaged; name another --output") from None
        now = json.loads(json.dumps(common))
        for name in {**now, **there}:
            if now.get(name) != there.get(name):
                raise ValueError(
                    f"{output}: was made with {name}={there.get(name)!r}, this command says {now.get(name)!r}; "
                    "name another --output"
                )
    elif others := sorted(entry.name for entry in output.glob("*") if entry.name != "lock"):
        raise ValueError(f"{output}: holds {others[0]} and no {COMMON}; name an empty folder as --output")


def claim(output: Path, common: Mapping[str, Any]) -> None:
    """Note what all runs of `output` have in common; errors as of `refuse`."""
    refuse(output, common)
    if not (output / COMMON).is_file():
        write_json(output / COMMON, common)


def result_of(folder: Path) -> dict[str, Any] | None:
    """A finished run's result; None where it is not finished."""
    path = folder / RESULT
    return json.loads(path.read_text()) if path.is_file() else None


def summarise(results: Sequence[Mapping[str, Any]], axes: Sequence[str], metric: str) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds (0 for one run) of each grid point, the best mean of dev's `metric` first."""
    points: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for result in results:
        points.setdefault(tuple(result["settings"][axis] for axis in axes), []).append(result)
    rows = []
    for values, runs in points.items():
        scores: dict[str, dict[str, dict[str, float]]] = {}
        for split, figures in runs[0]["scores"].items():
            scores[split] = {}
            for name in figures:
                seen = [run["scores"][split][name] for run in runs]
                spread = statistics.stdev(seen) if len(seen) > 1 else 0.0
                scores[split][name] = {"mean": statistics.fmean(seen), "std": spread}
        seconds = statistics.fmean(run["seconds"] for run in runs)
        point = dict(zip(axes, values, strict=True))
        rows.append({"point": point, "runs": len(runs), "scores": scores, "seconds": round(seconds, 3)})
    return sorted(rows, key=lambda row: -row["scores"]["dev"][metric]["mean"])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Grid points as aligned lines: values, runs, each split's metrics as mean ± standard deviation, seconds a run."""
    head = [*rows[0]["point"], "runs"]
    head += [f"{split} {name}" for split, figures in rows[0]["scores"].items() for name in figures]
    lines = [[*head, "seconds"]]
    for row in rows:
        cells = [f"{value:g}" for value in row["point"].values()] + [str(row["runs"])]
        for figures in row["scores"].values():
            cells += [f"{f['mean']:.4f} ± {f['std']:.4f}" for f in figures.values()]
        lines.append([*cells, f"{row['seconds']:.0f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def train_all(
    output: Path,
    runs: Mapping[str, S],
    begin: Callable[[Path, str, S], Run],
    common: Mapping[str, Any],
    axes: Sequence[str],
    metric: str,
    ranks: Session,
    stop: Stop,
) -> int:
    """Every run that has no result yet, then the table and `summary.json`; the exit code. A collective.

    `runs`: settings by name; `begin(folder, name, settings)` makes a run; `common`, `axes` and `metric` as in `claim` and
    `summarise`. Raises ValueError naming what does not fit, before anything is written.
    """
    world = ranks.world
    together(world, lambda: refuse(output, common))
    run_lock.take(output, world)
    together(world, lambda: claim(output, common))
    watchdog = ranks.watch(output, WatchdogConfig().timeout_seconds)
    ranks.apart = True
    found = train_missing(output, runs, begin, world, stop, watchdog)
    if found is None:
        return REQUEUE
    results = list(found.values())
    rows = summarise(results, axes, metric)
    log.info(table(rows))
    if world.is_main:
        write_summary(output, shlex.join(sys.argv), common, rows, results)
    return OK


def train_missing(
    output: Path,
    runs: Mapping[str, S],
    begin: Callable[[Path, str, S], Run],
    world: World,
    stop: Stop,
    watchdog: Watchdog,
) -> dict[str, dict[str, Any]] | None:
    """The results of all runs by name, those that have none yet trained in OUTPUT/NAME; None: asked to stop, and saved. A
    collective. `runs` and `begin` as in `train_all`."""
    results = {}
    for name, chosen in runs.items():
        folder = output / name
        result = world.broadcast(result_of(folder) if world.is_main else None)
        if result is None:
            result = begin(folder, name, chosen).train(stop, watchdog)
            gc.collect()  # DeepSpeed's engine refers to itself: it would lie on the device beside the next one
        if result is None:
            return None
        results[name] = result
    return results


def write_summary(
    output: Path, command: str, common: Mapping[str, Any], rows: Sequence[Any], results: Sequence[Any]
) -> None:
    tree = {"command": command, "settings": dict(common), "points": list(rows), "runs": list(results)}
    write_json(output / SUMMARY, tree)


def common_settings(settings: RunSettings, grid: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """What all runs of a command share: `facts` about model, task and files, and the settings off the grid."""
    plain = {k: v for k, v in asdict(settings).items() if k != "seed" and k not in grid}
    return {**facts, **plain, "grid": sorted(grid)}
