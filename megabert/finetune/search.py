"""Runs over seeds and learning rates in one folder, and their scores as means with deviations.

OUTPUT/settings.json holds what all of its runs have in common; a command that differs in any of it is refused, one that only adds
seeds or rates resumes. Every run has a folder named by its rate and seed, and is not repeated once its result exists.

    OUTPUT/RUN/            as `megabert.finetune.run` leaves it
    OUTPUT/summary.json    the command, every learning rate, every run
"""

from __future__ import annotations

import gc
import json
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megabert import hf
from megabert.common import tables
from megabert.common.files import sha256_of
from megabert.distributed import run_lock
from megabert.distributed.ranks import World, on_main
from megabert.distributed.signals import Stop
from megabert.distributed.watchdog import Watchdog
from megabert.finetune.run import RESULT, Data, FineTuning, write_json
from megabert.finetune.settings import Settings
from megabert.hf import Pretrained

COMMON, SUMMARY = "settings.json", "summary.json"


def common_settings(
    data: Data, start: Pretrained, files: Mapping[str, Path], settings: Settings, limit: int
) -> dict[str, Any]:
    """What all runs of a folder have in common and decides their results: model, task, files, and settings."""
    task = data.task
    digests = {name: [sha256_of(part) for part in tables.files(path)] for name, path in files.items()}
    plain = {name: value for name, value in asdict(settings).items() if name not in ("seed", "lr")}
    return {
        "model_sha256": hf.fingerprint(start.weights),
        "task": task.name,
        "kind": task.kind,
        "text": list(task.text),
        "label": task.label,
        "labels": list(data.labels),
        "metrics": list(task.metrics),
        "files_sha256": digests,
        "limit": limit,
        **plain,
    }


def refuse(output: Path, common: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first setting in which the runs of `output` differ from `common`, or what else the folder
    holds. A folder that is empty or does not exist passes."""
    path = output / COMMON
    if path.is_file():
        try:
            there = json.loads(path.read_text())
        except ValueError:
            raise ValueError(f"{path}: is damaged; name another --output") from None
        for name in {**common, **there}:
            if common.get(name) != there.get(name):
                raise ValueError(
                    f"{output}: was made with {name}={there.get(name)!r}, this command says {common.get(name)!r}; "
                    "name another --output"
                )
    elif others := sorted(entry.name for entry in output.glob("*") if entry.name != "lock"):
        raise ValueError(f"{output}: holds {others[0]} and no {COMMON}; name an empty folder as --output")


def claim(output: Path, common: Mapping[str, Any], world: World) -> None:
    """Lock `output` and write what its runs have in common. A collective. Errors as of `refuse`, before anything is written."""

    def write() -> None:
        refuse(output, common)
        write_json(output / COMMON, common)

    on_main(world, lambda: refuse(output, common))
    run_lock.take(output, world)
    on_main(world, write)


def train_missing(
    output: Path,
    common: Mapping[str, Any],
    data: Data,
    start: Pretrained,
    runs: Mapping[str, Settings],
    world: World,
    stop: Stop,
    watchdog: Watchdog,
    log_interval: int,
) -> dict[str, Any] | None:
    """The summary of `runs` (settings by name) of a folder that is claimed, after training those that have no result; None: asked
    to stop, and saved. A collective."""
    results = []
    for name, settings in runs.items():
        path = output / name / RESULT
        result = world.broadcast(json.loads(path.read_text()) if world.is_main and path.is_file() else None)
        if result is None:
            label = name if data.task.name == "custom" else f"{data.task.name}/{name}"
            run = FineTuning(output / name, label, data, start, settings, world, log_interval)
            result = run.train(stop, watchdog)
            # DeepSpeed's engine refers to itself: it would stay on the device beside the next one.
            del run
            gc.collect()
        if result is None:
            return None
        results.append(result)
    points = summarise(results, data.task.metrics[0])
    tree = {"command": shlex.join(sys.argv), "settings": common, "points": points, "runs": results}
    if world.is_main:
        write_json(output / SUMMARY, tree)
    return tree


def summarise(results: Sequence[Mapping[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds (0 for one run) of each learning rate, the best mean of dev's `metric` first."""
    points = []
    for lr in dict.fromkeys(result["settings"]["lr"] for result in results):
        runs = [result for result in results if result["settings"]["lr"] == lr]
        scores: dict[str, dict[str, dict[str, float]]] = {}
        for split, figures in runs[0]["scores"].items():
            seen = {name: [run["scores"][split][name] for run in runs] for name in figures}
            scores[split] = {
                name: {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(runs) > 1 else 0.0}
                for name, values in seen.items()
            }
        seconds = round(statistics.fmean(run["seconds"] for run in runs), 3)
        points.append({"point": {"lr": lr}, "runs": len(runs), "scores": scores, "seconds": seconds})
    return sorted(points, key=lambda point: -point["scores"]["dev"][metric]["mean"])


def table(points: Sequence[Mapping[str, Any]]) -> str:
    """Learning rates as aligned lines: runs, each split's metrics as mean ± standard deviation, seconds a run."""
    names = [f"{split} {name}" for split, figures in points[0]["scores"].items() for name in figures]
    lines = [["lr", "runs", *names, "seconds"]]
    for point in points:
        cells = [f"{f['mean']:.4f} ± {f['std']:.4f}" for figures in point["scores"].values() for f in figures.values()]
        lines.append([f"{point['point']['lr']:g}", str(point["runs"]), *cells, f"{point['seconds']:.0f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)
