"""Search over seeds and a small grid of settings: one run each, and scores as means with their deviation.

OUTPUT/settings.json holds what all of its runs have in common; a command that differs in any of it is refused, one that only adds
seeds or values of the grid resumes. Every run has a folder named by its values, and is not repeated once its result exists.

    OUTPUT/RUN/            as `megabert.finetune.run` leaves it
    OUTPUT/summary.json    the command, every point of the grid, every run
"""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megabert.config import WatchdogConfig
from megabert.distributed import run_lock
from megabert.distributed.ranks import World, on_main
from megabert.distributed.session import Session
from megabert.distributed.signals import Stop
from megabert.distributed.watchdog import Watchdog
from megabert.finetune.run import RESULT, FineTuning, write_json
from megabert.finetune.settings import Settings

COMMON, SUMMARY = "settings.json", "summary.json"


def refuse(output: Path, common: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first setting in which the runs of `output` differ from `common`, or what else the folder
    holds. A folder that is empty or does not exist passes."""
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
    """Write what all runs of `output` have in common; errors as of `refuse`."""
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


def claim_folder(output: Path, common: Mapping[str, Any], ranks: Session) -> Watchdog:
    """Lock `output` for runs with `common` settings, and watch the ranks from here on. A collective. Errors as of `refuse`, before
    anything is written."""
    on_main(ranks.world, lambda: refuse(output, common))
    run_lock.take(output, ranks.world)
    on_main(ranks.world, lambda: claim(output, common))
    watchdog = ranks.watch(output, WatchdogConfig().timeout_seconds)
    ranks.apart = True
    return watchdog


def train_missing(
    output: Path,
    runs: Mapping[str, Settings],
    begin: Callable[[Path, str, Settings], FineTuning],
    world: World,
    stop: Stop,
    watchdog: Watchdog,
) -> dict[str, dict[str, Any]] | None:
    """The results of all runs by name, after training those that have none in OUTPUT/NAME; None: asked to stop, and saved. A
    collective.

    `runs`: settings by name; `begin(folder, name, settings)` makes a run.
    """
    results = {}
    for name, chosen in runs.items():
        folder = output / name
        result = world.broadcast(result_of(folder) if world.is_main else None)
        if result is None:
            result = begin(folder, name, chosen).train(stop, watchdog)
            # DeepSpeed's engine refers to itself: it would stay on the device beside the next one.
            gc.collect()
        if result is None:
            return None
        results[name] = result
    return results


def common_settings(settings: Settings, grid: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """What all runs of a command share: `facts` about model, task and files, and the settings that are not in the grid."""
    plain = {k: v for k, v in asdict(settings).items() if k != "seed" and k not in grid}
    return {**facts, **plain, "grid": sorted(grid)}
