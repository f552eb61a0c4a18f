"""What a run's folder, its datasets and the results of its fine-tuning say; files of a folder that are missing are named."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megabert.commands.report.series import Metrics, objects, read_metrics
from megabert.common.run_files import METRICS, SAMPLES, STARTS, TROUBLE
from megabert.config import Config

OBJECTIVES = {"causal": "left to right", "masked": "masked LM"}
CONFIG, REPORT, MANIFEST, SUMMARY = "config.json", "report.json", "manifest.json", "summary.json"


@dataclass(frozen=True)
class Event:
    """Something that happened to a run after update `step`: what, and more about it."""

    step: int
    kind: str
    text: str


@dataclass(frozen=True)
class Data:
    """A dataset of a run: as it is named, where it was found, the report of its build ({} where there is none) and its
    manifest."""

    name: str
    share: str
    folder: Path | None
    report: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """All that is known of a run. `settings`: the configuration as `section.key` and value; `samples`: those of the
    beginning, the middle and the end, as lines of samples.jsonl; `missing`: what a report would have and why it has not."""

    folder: Path
    name: str
    provenance: dict[str, Any]
    settings: dict[str, Any]
    metrics: Metrics
    starts: list[dict[str, Any]]
    events: list[Event]
    samples: list[dict[str, Any]]
    data: list[Data]
    finetuned: list[tuple[Path, dict[str, Any]]]
    missing: list[str]

    @property
    def total_steps(self) -> int:
        return int(self.settings.get("schedule.total_steps", 0))


def names(folders: Sequence[Path]) -> list[str]:
    """What to call runs: the last part of each one's path, or so many as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts))):
        found = ["/".join(part[-count:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return ["/".join(part) for part in parts]


def read(folder: Path, name: str = "", data: Path | None = None, finetuned: Sequence[Path] = ()) -> Run:
    """Everything about the run in `folder`, called `name` (its folder's). `data`: its dataset, where that is no longer in its place; `finetuned`: outputs of
    fine-tuning besides those found beside the run that name it. Raises ValueError naming the file that cannot be used."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; name a run folder written by megabert train")
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder}: is no run folder (no {CONFIG}); name one written by megabert train")
    provenance = _json(folder / CONFIG)
    config = provenance.get("config")
    if not isinstance(config, dict):
        raise ValueError(f"{folder / CONFIG}: holds no configuration of a run; name a folder of megabert train")
    settings, metrics = dict(_flat(config)), read_metrics(folder / METRICS)
    starts = [line for line in objects(folder / STARTS) if line]
    samples = _three(folder / SAMPLES)
    datasets = [_data(folder, name, share, data if not share else None) for name, share in _folders(config)]
    found = [*map(_summary, finetuned), *_beside(folder, {path.resolve() for path in finetuned})]
    missing = []
    if not metrics.lines:
        missing.append(f"no curves: {METRICS} is not there or empty")
    if metrics.unreadable:
        missing.append(f"{metrics.unreadable:,} lines of {METRICS} cannot be read")
    if not starts:
        missing.append(f"no restarts, ranks and devices: {STARTS} is not there; an earlier version wrote none")
    if not samples:
        missing.append(
            f"no held-out samples: {SAMPLES} is not there; an earlier version or a dataset without a held-out split has none"
        )
    missing += [
        f"no data report: {d.name or 'data.path'} is not there as this run saw it; name it with --data"
        for d in datasets
        if d.folder is None
    ]
    missing += [f"no data report: {d.folder}/{REPORT} is not there" for d in datasets if d.folder and not d.report]
    return Run(
        folder=folder,
        name=name or folder.resolve().name,
        provenance=provenance,
        settings=settings,
        metrics=metrics,
        starts=starts,
        events=sorted(_events(folder, metrics, starts), key=lambda event: event.step),
        samples=samples,
        data=datasets,
        finetuned=found,
        missing=missing,
    )


def defaults() -> dict[str, Any]:
    """Every setting's default by its name."""
    return dict(_flat(Config().model_dump()))


def _json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError naming the file that holds none."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: is damaged ({' '.join(str(error).split())})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: is damaged (holds no object)")
    return found


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and (value or prefix + key != "data.mix"):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


# ---- events


def _events(folder: Path, metrics: Metrics, starts: Sequence[dict[str, Any]]) -> Iterator[Event]:
    for number, start in enumerate(starts):
        ranks = start.get("ranks", "?")
        text = f"{start.get('time', '')}, {ranks} rank{'s' * (ranks != 1)} on {start.get('device', '?')}"
        kind = "begun" if not number else "restart" if start["step"] else "begun anew"
        yield Event(start["step"], kind, text)
    seen = set()
    for line in objects(folder / TROUBLE):
        key = line and (line["step"], line.get("cursor"), line.get("kind"))
        if line and key not in seen:  # an update that was done again was noted again
            seen.add(key)
            text = f"loss {_short(line.get('train/loss'))}, gradient norm {_short(line.get('train/grad_norm'))}"
            done = {"warn": "applied", "skip": "not applied", "rollback": "rolled back"}
            yield Event(line["step"], str(line.get("kind")), f"{text}; {done.get(line.get('action', ''), '')}")
    for step, rows in metrics.damaged:
        yield Event(step, "damaged rows", f"{rows:,} left out since the log line before")
    for (_, before), (step, objective) in pairwise(metrics.objectives):
        text = f"{OBJECTIVES.get(before, before)} before, {OBJECTIVES.get(objective, objective)} by this log line"
        yield Event(step, "objective", text)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


# ---- samples


def _three(path: Path) -> list[dict[str, Any]]:
    """The first line of the samples, the one nearest the middle of the updates, and the last; fewer where there are fewer.
    Raises ValueError naming a line that is damaged."""
    steps = [line["step"] for line in objects(path) if line and isinstance(line.get("samples"), list)]
    if not steps:
        return []
    middle = min(steps, key=lambda step: abs(step - (steps[0] + steps[-1]) / 2))
    wanted = sorted({steps[0], middle, steps[-1]})
    lines = {line["step"]: line for line in objects(path) if line and line["step"] in wanted}
    for step, line in lines.items():
        if not _are_samples(line.get("samples")):
            raise ValueError(f"{path}: the line of step {step} is damaged; remove it")
    return [lines[step] for step in wanted]


def _are_samples(found: Any) -> bool:
    """Whether they are as `megabert.evaluation` has them."""
    try:
        return all(map(_is_sample, found))
    except (KeyError, TypeError, ValueError):
        return False


def _is_sample(sample: dict[str, Any]) -> bool:
    tokens, masks = sample["tokens"], sample["masks"]
    said = [pair for mask in masks for pair in mask["said"]]
    words = [*tokens, *(mask["shown"] for mask in masks), *(word for word, _ in said)]
    return (
        isinstance(sample["row"], int)
        and all(isinstance(word, str) for word in words)
        and all(isinstance(p, int | float) for _, p in said)
        and all(mask["said"] and 0 <= mask["at"] < len(tokens) for mask in masks)
    )


# ---- datasets


def _folders(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The run's datasets as its configuration names them, and the share of all rows of those of `data.mix`."""
    data = config.get("data", {})
    yield data.get("path", ""), ""
    for name, share in data.get("mix", {}).items():
        yield name, f"{share:.1%} of the rows"


def _data(run: Path, name: str, share: str, given: Path | None) -> Data:
    """A dataset where it is: as named, seen from here or from a folder above the run. Raises ValueError for one that is given
    and is none."""
    if given is not None and not (given / MANIFEST).is_file():
        raise ValueError(f"--data {given}: is no dataset (no {MANIFEST}); name a folder written by data_prep")
    folder = given or next((f for f in _places(name, run) if (f / MANIFEST).is_file()), None)
    if folder is None:
        return Data(name, share, None)
    report = _json(folder / REPORT) if (folder / REPORT).is_file() else {}
    return Data(name, share, folder, report, _json(folder / MANIFEST))


def _places(name: str, run: Path) -> Iterator[Path]:
    """Where a path that a command was given may lead: from here, and from each folder above the run."""
    if name:
        yield Path(name)
        if not Path(name).is_absolute():
            yield from (above / name for above in run.resolve().parents)


# ---- fine-tuning


def _summary(output: Path) -> tuple[Path, dict[str, Any]]:
    """The results of an output of fine-tuning. Raises ValueError for a folder without."""
    if not (output / SUMMARY).is_file():
        raise ValueError(f"--finetuned {output}: has no {SUMMARY}; name the --output of a finished megabert finetune")
    found = _json(output / SUMMARY)
    if not _is_summary(found):
        raise ValueError(f"{output / SUMMARY}: is not what megabert finetune writes")
    return output, found


def _is_summary(tree: dict[str, Any]) -> bool:
    rows = tree.get("points")
    return isinstance(rows, list) and all(isinstance(row, dict) and "scores" in row for row in rows)


def _beside(run: Path, given: Iterable[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Outputs of fine-tuning in the run's folder and beside it, two folders deep, whose command names the run as its model."""
    seen = {run.resolve(), *given}
    above = run.resolve().parent
    for place in (run.resolve(), above):
        for path in sorted([*place.glob(f"*/{SUMMARY}"), *place.glob(f"*/*/{SUMMARY}")]):
            if path.parent in seen:
                continue
            seen.add(path.parent)
            try:
                found = json.loads(path.read_bytes())
            except (OSError, ValueError):
                continue  # somebody else's file
            if isinstance(found, dict) and _is_summary(found) and _names(found, run, path.parent):
                yield path.parent, found


def _names(summary: dict[str, Any], run: Path, output: Path) -> bool:
    """Whether the command of a summary names the run, or one of its checkpoints, as its model."""
    try:
        words = shlex.split(str(summary.get("command", "")))
    except ValueError:
        return False
    models = [b for a, b in pairwise(words) if a == "--model"]
    models += [word.removeprefix("--model=") for word in words if word.startswith("--model=")]
    ours = run.resolve()
    return any(
        path.resolve() == ours or ours in path.resolve().parents for model in models for path in _places(model, output)
    )
