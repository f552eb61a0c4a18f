"""Evaluation of a task whose runs are finished: the scores that are reported, and the predictions that are handed in.

TASK/RUN/…            each run, as `megabert finetune` leaves it
TASK/summary.json     every grid point, by the split that decides
TASK/predictions/     of the run that did best on that split
TASK/benchmark.json   written last: what the tables are made of
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megabert.distributed.process_group import World
from megabert.finetune import datasets, metrics, save, search
from megabert.finetune.benchmark import splits, summary
from megabert.finetune.benchmark.suites import Entry
from megabert.finetune.examples import Example
from megabert.finetune.prediction import logits_of, reshape
from megabert.finetune.run import write_json
from megabert.finetune.save import Finetuned
from megabert.finetune.tasks import Task
from megabert.finetune.training import SUFFIXES

EVALUATED, PREDICTIONS = "benchmark.json", "predictions"
Results = Mapping[str, Mapping[str, Any]]


def files_of(entry: Entry) -> dict[str, str]:
    """SHA-256 of each file (or saved dataset) that runs are trained or scored on."""
    return {name: datasets.digest(path) for name, path in {"train": entry.train, **entry.dev}.items()}


def load(folder: Path, world: World) -> Finetuned:
    """A run's best weights. Raises ValueError naming the run where they were discarded."""
    if not (folder / "best").is_dir():
        raise ValueError(f"{folder}: its weights were discarded (--discard); remove the folder to train it again")
    return save.load(folder / "best", world.device)


def predict(
    found: Finetuned,
    task: Task,
    examples: Sequence[Example],
    world: World,
    progress: Callable[[], None],
    null_threshold: float = 0.5,
) -> list[Any]:
    """One prediction an example, on every rank. A collective."""
    described, items = found.described, found.items(task, examples)
    progress()
    logits = logits_of(found.module, items, described.layout, world, progress=progress)
    shaped = [reshape(values, task.kind) for values in logits]
    return metrics.decode(task, examples, items, shaped, described.labels, null_threshold)


def threshold_of(result: Mapping[str, Any]) -> float:
    """The probability above which a question gets no answer: SQuAD 2.0's is the best one on the split that decides."""
    return float(result["scores"][splits.DECIDES].get("best_f1_threshold", 0.5))


def reported_scores(
    folder: Path,
    entry: Entry,
    result: Mapping[str, Any],
    split: str,
    examples: Sequence[Example],
    world: World,
    progress: Callable[[], None],
) -> dict[str, float]:
    """A run's scores on a split, with the threshold of `threshold_of` where the task has one. A collective."""
    scores: dict[str, float] = result["scores"][split]
    if "best_f1" in entry.task.metrics:
        found = load(folder, world)
        predictions = predict(found, entry.task, examples, world, progress, threshold_of(result))
        scores = metrics.score(entry.task, examples, predictions, found.described.labels)
    return {name: value for name, value in scores.items() if not name.startswith("best_f1")}


def write_predictions(
    folder: Path,
    output: Path,
    entry: Entry,
    result: Mapping[str, Any],
    reported: Mapping[str, Sequence[Example]],
    world: World,
    progress: Callable[[], None],
) -> list[str]:
    """A run's predictions of the entry's files without labels, for SQuAD without one of what is reported; their files'
    names in `output`. A collective."""
    task, names = entry.task, []
    unlabelled: dict[str, tuple[Task, Sequence[Example]]] = {}
    for name, path in entry.test.items():
        meant = datasets.for_prediction(task, path)
        unlabelled[name] = meant, datasets.read(meant, path, labelled=False)
    if task.kind == "span" and not unlabelled:
        unlabelled = {entry.name: (task, reported[""])}
    for name, (meant, examples) in unlabelled.items():
        found = load(folder, world)
        predictions = predict(found, meant, examples, world, progress, threshold_of(result))
        names.append(f"{name}.{SUFFIXES[task.kind]}")
        if world.is_main:
            metrics.write(meant, examples, predictions, output / names[-1])
    return names


def evaluate(
    folder: Path,
    entry: Entry,
    results: Results,
    axes: Sequence[str],
    examples: Mapping[str, Sequence[Example]],
    facts: Mapping[str, Any],
    world: World,
    progress: Callable[[], None],
) -> dict[str, Any]:
    """What the tables need of a task whose runs in `folder` have `results`; done once for the same runs and files.

    `examples` by split; `facts` are copied into what comes out. A collective.
    """
    rows = search.summarise(list(results.values()), axes, entry.task.metrics[0])
    unlabelled = {name: datasets.digest(path) for name, path in entry.test.items()}
    known = {"runs": sorted(results), "test_sha256": unlabelled, **facts}
    done = world.broadcast(read(folder / EVALUATED) if world.is_main else None)
    if done is not None and all(done.get(name) == value for name, value in known.items()):
        return done
    chosen = rows[0]["point"]
    seeds = {n: r for n, r in results.items() if all(r["settings"][k] == v for k, v in chosen.items())}
    best = max(seeds, key=lambda name: seeds[name]["scores"][splits.DECIDES][entry.task.metrics[0]])
    names = splits.reported(entry, facts["choose_on"])
    scores: dict[str, dict[str, Any]] = {}
    for part, split in names.items():
        seen = [
            reported_scores(folder / name, entry, result, split, examples[split], world, progress)
            for name, result in seeds.items()
        ]
        scores[entry.row(part)] = {m: summary.figures([run[m] for run in seen]) for m in seen[0]}
    reported = {part: examples[split] for part, split in names.items()}
    predictions = write_predictions(
        folder / best, folder / PREDICTIONS, entry, results[best], reported, world, progress
    )
    decides = len(examples[splits.DECIDES])
    same = splits.DECIDES in names.values()
    where = "dev" if entry.dev else "held out of train"
    tree = {
        **known,
        "point": chosen,
        "points": len(rows),
        "scores": scores,
        "reported_on": {entry.row(part): f"{where}, {len(given):,}" for part, given in reported.items()},
        "decided_on": "what is reported" if same else f"held out of train, {decides:,}",
        "published_way": same,
        "best_run": best,
        "predictions": predictions,
    }
    if world.is_main:
        write_json(folder / search.SUMMARY, {"points": rows, "runs": list(results.values())})
        write_json(folder / EVALUATED, tree)
    return tree


def read(path: Path) -> dict[str, Any] | None:
    """What `evaluate` has written; None where it has not."""
    return json.loads(path.read_text()) if path.is_file() else None
