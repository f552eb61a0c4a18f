"""Scores of tasks fine-tuned from several pre-trained models and from random weights, or by Hugging Face's Trainer beside ours.

    python benchmarks/bench_finetune.py --models winner=RUN control=RUN --tasks ../shared/data/tasks --seeds 5 --json FILE
    python benchmarks/bench_finetune.py --models modern=RUN bert=HF_DIR --peer --rows 8000 --only SST-2 RTE WNUT-17 --seeds 5 --json FILE

All sides have the same files, seeds and settings; random weights have the first model's shape. Ours choose the best weights on every
10th row or sentence of the training file; figures are of other items. `gains`: difference of the first model to each other
start, with the central 95% of a paired bootstrap over items and seeds.

With `--peer` a model is compared with the Trainer on its export instead (`benchmarks/peers/hf_finetune.py`): fp32, equal learning rate,
warm-up, epochs, batch and length, and each side's own defaults for the rest: ours has dropout 0.1, weight decay 0.01 and the best
epoch's weights, the Trainer the dropout of the model's config, no weight decay and the last weights. Seconds are those of a whole process of one seed, from
start to predictions, and of its training alone.

Sides take turns, a seed at a time. Each finished run is kept in --work; the same command resumes there, with more seeds or tasks too.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed
import numpy as np

from benchmarks.common import hardware
from benchmarks.common.hardware import over_seeds, show
from benchmarks.race.records import circumstances
from megabert.common.files import write_atomically

RANDOM = "random weights"
EVERY = 10  # one in this many members of a training file is used to choose the best weights
OURS, PEER = ("megabert", "finetune"), ("benchmarks.peers.hf_finetune",)
FP32 = ("--precision", "fp32")  # options of both sides with --peer
KEPT = "benchmark.json"  # file of a finished run in its folder
DRAWS, MIDDLE = 10_000, 0.95
NEAR = 1e-6  # largest difference between a run's score and that computed here from its predictions
Tally = tuple[float, float]  # terms of an item in numerator and denominator of a metric that is a ratio of sums
Run = dict[str, Any]


@dataclass(frozen=True)
class TaskFiles:
    """Files to train on, to choose the best weights on, and to report."""

    train: Path
    chosen_on: Path
    reported: Path


@dataclass(frozen=True)
class TaskCase:
    """A task: its options of `megabert finetune`, the metric to compare, `files(tasks folder, scratch folder, most training rows)`,
    and `tally(reported file, predictions file)`, the terms of each item in the metric."""

    name: str
    options: str
    metric: str
    files: Callable[[Path, Path, int], TaskFiles]
    tally: Callable[[Path, Path], list[Tally]]


@dataclass(frozen=True)
class Side:
    """A start, the SHA-256 of its weights, the Python module and options that fine-tune it; `against`: the side it is compared with."""

    name: str
    start: Path
    weights: str
    module: tuple[str, ...] = OURS
    options: tuple[str, ...] = ()
    against: str = ""


def split_file(reported: Path, to: Path, name: str, items: list[str], most: int, gap: str, head: str = "") -> TaskFiles:
    """Files in `to` of `items` after a head, with gaps: every 10th to choose on, and at most so many others to train on."""
    train = [item for n, item in enumerate(items) if n % EVERY]
    if len(train) > most:
        train = random.Random(0).sample(train, most)
    paths = [to / f"{name}-{part}{reported.suffix}" for part in (f"train-{len(train)}", "chosen-on")]
    for path, chosen in zip(paths, (train, items[::EVERY]), strict=True):
        path.write_text(head + gap.join(chosen) + "\n", encoding="utf-8")
    return TaskFiles(paths[0], paths[1], reported)


def tables(name: str, tasks: Path, scratch: Path, most: int) -> TaskFiles:
    """The tables of sst2 or rte."""
    head, *rows = (tasks / name / "train.tsv").read_text(encoding="utf-8").splitlines()
    return split_file(tasks / name / "dev.tsv", scratch, name, rows, most, "\n", f"{head}\n")


def sentences(tasks: Path, scratch: Path, most: int) -> TaskFiles:
    """WNUT-17's sentences of tagged words."""
    text = (tasks / "wnut17/wnut17train.conll").read_text(encoding="utf-8")
    whole = "\n".join(line.strip() for line in text.splitlines())
    blocks = [block for block in whole.split("\n\n") if block.strip()]
    return split_file(tasks / "wnut17/emerging.dev.conll", scratch, "wnut17", blocks, most, "\n\n")


def label_tallies(reported: Path, predictions: Path) -> list[Tally]:
    """Tallies of a table separated by tabs, without quoting, with a column `label`: whether each row is correct."""
    with reported.open(encoding="utf-8", newline="") as truth, predictions.open(encoding="utf-8", newline="") as found:
        tables = (csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE) for file in (truth, found))
        return [(float(row["label"] == predicted["prediction"]), 1.0) for row, predicted in zip(*tables, strict=True)]


def entity_tallies(reported: Path, predictions: Path) -> list[Tally]:
    """Tallies of sentences with lines of word, true tag, predicted tag: the terms of F1 over entities."""
    from seqeval.metrics.sequence_labeling import get_entities

    tallies = []
    for sentence in predictions.read_text(encoding="utf-8").strip("\n").split("\n\n"):
        fields = [line.split("\t" if "\t" in line else " ") for line in sentence.split("\n")]
        truth, predicted = (set(get_entities([field[column] for field in fields])) for column in (1, 2))
        tallies.append((2.0 * len(truth & predicted), float(len(truth) + len(predicted))))
    return tallies


CASES = (
    TaskCase("SST-2", "--task sst2 --epochs 4 --batch 64", "accuracy", partial(tables, "sst2"), label_tallies),
    TaskCase("RTE", "--task rte --epochs 8 --batch 32", "accuracy", partial(tables, "rte"), label_tallies),
    TaskCase("WNUT-17", "--kind tag --epochs 8 --batch 32", "f1", sentences, entity_tallies),
)


def ratio(tallies: Sequence[Tally]) -> float:
    above, below = map(sum, zip(*tallies, strict=True))
    return above / below if below else 0.0


def interval(ours: Sequence[Sequence[Tally]], theirs: Sequence[Sequence[Tally]]) -> dict[str, float]:
    """Difference of the means over seeds, and its central 95% by a paired bootstrap: items are resampled, the same for both and for
    every seed, and seeds of each separately (Efron and Tibshirani 1993, chapter 13).

    `ours[s][i]`: tally of item i with seed s; both have the same items in the same order.
    """
    assert len({len(run) for run in (*ours, *theirs)}) == 1, "other items"
    generator, items = np.random.default_rng(0), len(ours[0])
    counts = generator.multinomial(items, np.full(items, 1 / items), size=DRAWS).astype(np.float64)

    def drawn(runs: Sequence[Sequence[Tally]]) -> tuple[np.ndarray, float]:
        """Mean over resampled seeds and items [DRAWS], and without resampling."""
        above, below = np.moveaxis(np.array(runs), -1, 0)  # [seeds, items] each
        with np.errstate(invalid="ignore"):
            scores = np.nan_to_num((counts @ above.T) / (counts @ below.T))  # [DRAWS, seeds]
        seeds = generator.integers(len(runs), size=(DRAWS, len(runs)))
        return np.take_along_axis(scores, seeds, 1).mean(1), float(np.mean([ratio(run) for run in runs]))

    (our_draws, our_mean), (their_draws, their_mean) = drawn(ours), drawn(theirs)
    low, high = np.quantile(our_draws - their_draws, [(1 - MIDDLE) / 2, (1 + MIDDLE) / 2])
    return {"gain": our_mean - their_mean, "low": float(low), "high": float(high)}


def finetune(case: TaskCase, side: Side, files: TaskFiles, seed: int, args: Any) -> tuple[Run, list[Tally]]:
    """The kept run of a seed (command, scores, seconds of the process and of its training) and its tallies; runs it if there is none.

    Raises ValueError if it fails, if the kept one is another command's, or if the predictions do not yield its score.
    """
    output = args.work / f"{case.name}-{side.name}".replace(" ", "-").replace(",", "").lower()
    # a number of seeds: those before are finished
    command = [sys.executable, "-m", *side.module, "--model", str(side.start), "--lr", args.lr, "--seeds", str(seed)]
    command += [*case.options.split(), *side.options]
    for name in ("epochs", "batch"):
        command += [f"--{name}", str(given)] if (given := getattr(args, name)) else []
    command += ["--train", str(files.train), "--dev", str(files.chosen_on), "--test", str(files.reported)]
    command += ["--output", str(output)]
    folder, made = output / f"seed{seed}", {"command": hardware.shown(command), "start_sha256": side.weights}
    kept = folder / KEPT
    if not kept.is_file():
        # an interrupted run would resume, and its seconds would be those of a part
        shutil.rmtree(folder, ignore_errors=True)
        about = {"seed": seed} | circumstances()
        began = time.perf_counter()
        hardware.call(command, args.threads, output.with_name(f"{output.name}.log"))
        about["seconds"] = round(time.perf_counter() - began, 3)
        result = json.loads((folder / "result.json").read_text())
        about |= {"training_seconds": result["seconds"], "scores": result["scores"]["test"]}
        write_atomically(kept, json.dumps(made | about).encode())
    run = json.loads(kept.read_text())
    if other := [f"{name} {run[name]!r}, not {made[name]!r}" for name in made if run[name] != made[name]]:
        raise ValueError(f"{folder}: is a run of {other[0]}; name another --work, or remove {output}")
    (predictions,) = folder.glob("predictions-test.*")
    tallies = case.tally(files.reported, predictions)
    scored, counted = run["scores"][case.metric], ratio(tallies)
    if abs(scored - counted) > NEAR:
        raise ValueError(f"{folder}: its run scores {scored}, its predictions {counted}")
    return run, tallies


def row_of(runs: Sequence[Run]) -> dict[str, Any]:
    """Mean and deviation over the seeds of each metric and of the seconds, and the runs."""
    scores = {of: over_seeds([run["scores"][of] for run in runs]) for of in runs[0]["scores"]}
    seconds = {of: over_seeds([run[of] for run in runs]) for of in ("seconds", "training_seconds")}
    return {"command": runs[-1]["command"], "scores": scores} | seconds | {"runs": list(runs)}


def described(model: Path) -> dict[str, Any]:
    """Pre-training of a model, and the final figures of that run."""
    from megabert import hf as pretrained
    from megabert.hf import model_card

    loaded = pretrained.load(model)
    weights = {"weights_sha256": pretrained.fingerprint(loaded.weights)}
    return model_card.recipe(loaded) | model_card.metrics(loaded) | weights


def exported(name: str, model: Path, work: Path) -> Path:
    """A Hugging Face folder of a model: itself, or one made here."""
    from megabert.commands.export import export
    from megabert.hf.hub import is_model_folder

    if is_model_folder(model):
        return model
    export(model, folder := work / f"{name}-hf", overwrite=True)
    return folder


def sides_of(args: argparse.Namespace, about: dict[str, dict[str, Any]]) -> list[Side]:
    """What is compared, in the order of the runs."""
    (first, path), weights = args.models[0], {name: about[name]["weights_sha256"] for name, _ in args.models}
    if not args.peer:
        starts = [Side(name, start, weights[name], against=first * (name != first)) for name, start in args.models]
        return [*starts, Side(RANDOM, path, weights[first], options=("--from-scratch",), against=first)]
    sides: list[Side] = []
    for name, start in args.models:
        hub = exported(name, start, args.work)
        sides.append(Side(name, start, weights[name], options=FP32))
        sides.append(Side(f"{name}, Trainer", hub, weights[name], module=PEER, options=FP32, against=name))
        if args.control:
            options = (*FP32, "--dropout", str(about[name]["model.dropout"]), "--weight-decay", "0")
            sides.append(Side(f"{name}, as the Trainer", start, weights[name], options=options, against=name))
    return sides


def table(results: dict[str, Any]) -> str:
    """A Markdown table: tasks by starts, each with the difference to it, and seconds a run."""
    starts, rows = list(dict.fromkeys(name for result in results.values() for name in result["rows"])), []
    for task, result in results.items():
        rows.append([task, result["metric"]])
        for start in starts:
            row = result["rows"][start]
            cell = show(row["scores"][result["metric"]], ".1f", 100)
            if gain := result["gains"].get(start):
                cell += f" ({100 * gain['gain']:+.1f}, {100 * gain['low']:+.1f} to {100 * gain['high']:+.1f})"
            rows[-1].append(f"{cell}, {row['seconds']['mean']:.0f} s")
    return hardware.markdown(("task", "metric", *starts), rows)


def named(text: str) -> tuple[str, Path]:
    """NAME=RUN. Raises ArgumentTypeError for anything else."""
    name, _, path = text.partition("=")
    if not name or not path or name == RANDOM:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=RUN, a name and the model's folder")
    return name, Path(path)


def main(argv: list[str] | None = None) -> None:
    parser = hardware.Parser(__doc__)
    add, names = parser.add_argument, [case.name for case in CASES]
    starts = "run folders, checkpoints or Hugging Face folders; the first is compared with all others"
    add("--models", type=named, nargs="+", required=True, metavar="NAME=RUN", help=starts)
    add("--tasks", type=Path, required=True, help="folder with sst2, rte, wnut17")
    add("--work", type=Path, default=hardware.ROOT / "runs/finetune", help="folder of the runs")
    add("--only", nargs="+", choices=names, default=names, help="only these tasks")
    add("--peer", action="store_true", help="compare with Hugging Face's Trainer, not with random weights")
    add("--control", action="store_true", help="with --peer: also ours with the Trainer's dropout and weight decay")
    add("--seeds", type=int, default=3)
    add("--rows", type=int, default=20_000, help="most training rows of a table, or sentences of words")
    add("--epochs", type=int, default=0, help="of all tasks; 0: the task's")
    add("--lr", default="3e-4")
    add("--batch", type=int, default=0, help="of all tasks; 0: the task's")
    add("--threads", type=int, default=hardware.cores(), help="threads of a run")
    args = parser.parse(argv)
    if len(dict(args.models)) < len(args.models):
        parser.error("--models: two of one name")
    if args.control and not args.peer:
        parser.error("--control: is for --peer")
    args.work.mkdir(parents=True, exist_ok=True)
    about, results = {name: described(model) for name, model in args.models}, {}
    sides = sides_of(args, about)
    for case in (case for case in CASES if case.name in args.only):
        files = case.files(args.tasks, args.work, args.rows)
        runs: dict[str, list[Run]] = {side.name: [] for side in sides}
        tallies: dict[str, list[list[Tally]]] = {side.name: [] for side in sides}
        for seed in range(1, args.seeds + 1):
            for side in sides:
                run, counted = finetune(case, side, files, seed, args)
                runs[side.name].append(run)
                tallies[side.name].append(counted)
                score = f"{case.metric} {run['scores'][case.metric]:.4f}"
                print(f"{case.name}, {side.name}, seed {seed}: {score}, {run['seconds']:.0f} s", flush=True)
            rows = {name: row_of(of) for name, of in runs.items()}
            gains = {s.name: interval(tallies[s.against], tallies[s.name]) for s in sides if s.against}
            results[case.name] = {"metric": case.metric, "rows": rows, "gains": gains}
            setting = {"models": about, "seeds": args.seeds, "threads": args.threads}
            hardware.write_json(args.json, setting | {"tasks": results})
    print(table(results))


if __name__ == "__main__":
    hardware.run(main)
