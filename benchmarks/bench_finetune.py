"""Scores of tasks fine-tuned from several pre-trained models and from random weights, on the same files.

    python benchmarks/bench_finetune.py --models winner=RUN control=RUN --tasks ../shared/data/tasks --seeds 5 --json FILE

All starts are fine-tuned by `megabert finetune` with the same files, seeds and settings; random weights have the first model's
shape. The best weights are chosen on every 10th row, sentence or article of the training file; figures are of other items.
`gains`: difference of the first model to each other start, with the central 95% of a paired bootstrap over items and seeds. The
file is written after each row, and the same command resumes.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import random
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

import numpy as np

from benchmarks.common import hardware

RANDOM = "random weights"
# one in this many members of a training file is used to choose the best weights
EVERY = 10
# most training rows of a table: all 67,349 phrases of SST-2 take five minutes a run on two cores
TRAIN_ROWS = 20_000
# questions to train on, to choose on and to report: all 87,599 take hours
SQUAD = {"train": 4_000, "chosen-on": 400, "reported": 800}
DRAWS, MIDDLE = 10_000, 0.95
# largest difference between a run's score and that computed here from its predictions
NEAR = 1e-6
# terms of an item in numerator and denominator of a metric that is a ratio of sums
Tally = tuple[float, float]


@dataclass(frozen=True)
class TaskFiles:
    """Files to train on, to choose the best weights on, and to report."""

    train: Path
    chosen_on: Path
    reported: Path


@dataclass(frozen=True)
class TaskCase:
    """A task: its options of `megabert finetune`, the metric to compare, `files(tasks folder, scratch folder)`, and
    `tally(reported file, predictions file)`, the terms of each item in the metric."""

    name: str
    options: str
    metric: str
    files: Callable[[Path, Path], TaskFiles]
    tally: Callable[[Path, Path], list[Tally]]


def hold_out(members: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The members to keep, and every 10th."""
    return [member for n, member in enumerate(members) if n % EVERY], list(members[::EVERY])


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tables(name: str, tasks: Path, scratch: Path) -> TaskFiles:
    """The tables of sst2 or rte; a longer training file is sampled once."""
    head, *rows = (tasks / name / "train.tsv").read_text(encoding="utf-8").splitlines()
    train, chosen_on = hold_out(rows)
    if len(train) > TRAIN_ROWS:
        train = random.Random(0).sample(train, TRAIN_ROWS)
    return TaskFiles(
        train=write_lines(scratch / f"{name}-train.tsv", [head, *train]),
        chosen_on=write_lines(scratch / f"{name}-chosen-on.tsv", [head, *chosen_on]),
        reported=tasks / name / "dev.tsv",
    )


def sentences(tasks: Path, scratch: Path) -> TaskFiles:
    """WNUT-17's sentences of tagged words."""
    text = (tasks / "wnut17/wnut17train.conll").read_text(encoding="utf-8")
    whole = "\n".join(line.strip() for line in text.splitlines())
    train, chosen_on = hold_out([block for block in whole.split("\n\n") if block.strip()])
    return TaskFiles(
        train=write_lines(scratch / "wnut17-train.conll", ["\n\n".join(train)]),
        chosen_on=write_lines(scratch / "wnut17-chosen-on.conll", ["\n\n".join(chosen_on)]),
        reported=tasks / "wnut17/emerging.dev.conll",
    )


def questions(tasks: Path, scratch: Path) -> TaskFiles:
    """SQuAD 1.1's training articles, limited to a number of questions: the first paragraphs of each article."""
    with gzip.open(tasks / "squad1.1/train-v1.1.json.gz", "rt") as file:
        rest, reported = hold_out(json.load(file)["data"])
    train, chosen_on = hold_out(rest)
    paths = {}
    for (name, most), articles in zip(SQUAD.items(), (train, chosen_on, reported), strict=True):
        share = most / sum(len(p["qas"]) for a in articles for p in a["paragraphs"])
        for article in articles:
            article["paragraphs"] = article["paragraphs"][: max(1, round(share * len(article["paragraphs"])))]
        paths[name] = scratch / f"squad-{name}.json"
        paths[name].write_text(json.dumps({"version": "1.1", "data": articles}))
    return TaskFiles(paths["train"], paths["chosen-on"], paths["reported"])


def label_tallies(reported: Path, predictions: Path) -> list[Tally]:
    """Tallies of a table with a column `label`: whether each row is correct."""
    both = zip(column(reported, "label"), column(predictions, "prediction"), strict=True)
    return [(float(truth == predicted), 1.0) for truth, predicted in both]


def column(path: Path, name: str) -> list[str]:
    """A column of a table separated by tabs, without quoting."""
    with path.open(encoding="utf-8", newline="") as file:
        return [row[name] for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]


def entity_tallies(reported: Path, predictions: Path) -> list[Tally]:
    """Tallies of sentences with lines of word, true tag, predicted tag: the terms of F1 over entities."""
    from seqeval.metrics.sequence_labeling import get_entities

    tallies = []
    for sentence in predictions.read_text(encoding="utf-8").strip("\n").split("\n\n"):
        fields = [line.split("\t" if "\t" in line else " ") for line in sentence.split("\n")]
        truth, predicted = (set(get_entities([field[column] for field in fields])) for column in (1, 2))
        tallies.append((2.0 * len(truth & predicted), float(len(truth) + len(predicted))))
    return tallies


def answer_tallies(reported: Path, predictions: Path) -> list[Tally]:
    """Tallies of SQuAD's JSON: each question's F1 by SQuAD's rule, the best over its answers."""
    from megabert.finetune.scores import overlap

    predicted = json.loads(predictions.read_text(encoding="utf-8"))
    articles = json.loads(reported.read_text(encoding="utf-8"))["data"]
    asked = [q for a in articles for p in a["paragraphs"] for q in p["qas"]]
    return [(max(overlap(predicted.get(q["id"], ""), a["text"], False) for a in q["answers"]), 1.0) for q in asked]


CASES = (
    TaskCase("SST-2", "--task sst2 --epochs 4 --batch 64", "accuracy", partial(tables, "sst2"), label_tallies),
    TaskCase("RTE", "--task rte --epochs 8", "accuracy", partial(tables, "rte"), label_tallies),
    TaskCase("WNUT-17", "--kind tag --epochs 8", "f1", sentences, entity_tallies),
    TaskCase("SQuAD 1.1", "--task squad1.1 --epochs 3 --max-length 128 --stride 96", "f1", questions, answer_tallies),
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


def finetune(
    case: TaskCase, name: str, start: Path, files: TaskFiles, args: argparse.Namespace
) -> tuple[dict[str, Any], list[list[Tally]]]:
    """A row (command, mean and deviation, scores by seed), and the tallies by seed.

    Raises CalledProcessError if a run fails, ValueError if the predictions do not yield the runs' scores.
    """
    output = args.work / f"{case.name}-{name}".replace(" ", "-").lower()
    command = [sys.executable, "-m", "megabert", "finetune", "--model", str(start), "--lr", args.lr]
    command += ["--batch", str(args.batch), "--seeds", str(args.seeds), *shlex.split(case.options)]
    command += ["--from-scratch"] if name == RANDOM else []
    command += ["--train", str(files.train), "--dev", str(files.chosen_on), "--test", str(files.reported)]
    command += ["--output", str(output)]
    subprocess.run(command, env=hardware.clone_environment(), check=True)
    summary = json.loads((output / "summary.json").read_text())
    (point,) = summary["points"]
    runs = [run["scores"]["test"] for run in summary["runs"]]
    paths = [path for seed in range(1, args.seeds + 1) for path in output.glob(f"seed{seed}/predictions-test.*")]
    tallies = [case.tally(files.reported, path) for path in paths]
    scored, counted = sorted(run[case.metric] for run in runs), sorted(map(ratio, tallies))
    if len(counted) != len(scored) or any(abs(a - b) > NEAR for a, b in zip(counted, scored, strict=True)):
        raise ValueError(f"{output}: its runs score {scored}, their predictions {counted}")
    row = {"command": hardware.shown(command), "metric": case.metric, "scores": point["scores"]["test"], "runs": runs}
    return row | {"seconds_a_run": point["seconds"]}, tallies


def described(model: Path) -> dict[str, Any]:
    """Pre-training of a model, and the final figures of that run."""
    from megabert import hf as pretrained
    from megabert.hf import model_card

    loaded = pretrained.load(model)
    return model_card.recipe(loaded) | model_card.figures(loaded)


def table(results: dict[str, Any]) -> str:
    """A Markdown table: tasks by starts, each with the difference of the first model to it."""
    starts = list(dict.fromkeys(name for result in results.values() for name in result["rows"]))
    lines = [f"| task | metric | {' | '.join(starts)} |", "|---|---|" + "---|" * len(starts)]
    for task, result in results.items():
        cells = []
        for start in starts:
            figure = result["rows"][start]["scores"][result["metric"]]
            cell = f"{100 * figure['mean']:.1f} ± {100 * figure['std']:.1f}"
            if gain := result["gains"].get(start):
                cell += f" ({100 * gain['gain']:+.1f}, {100 * gain['low']:+.1f} to {100 * gain['high']:+.1f})"
            cells.append(cell)
        lines.append(f"| {task} | {result['metric']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def named(text: str) -> tuple[str, Path]:
    """NAME=RUN. Raises ArgumentTypeError for anything else."""
    name, _, path = text.partition("=")
    if not name or not path or name == RANDOM:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=RUN, a name and the model's folder")
    return name, Path(path)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", type=named, nargs="+", required=True, metavar="NAME=RUN",
        help="run folders, checkpoints or Hugging Face folders; the first is compared with all others")  # fmt: skip
    add("--tasks", type=Path, required=True, help="folder with sst2, rte, wnut17, squad1.1")
    add("--work", type=Path, default=hardware.ROOT / "runs/finetune", help="folder of the runs")
    add("--only", nargs="+", choices=[case.name for case in CASES], help="only these tasks")
    add("--seeds", type=int, default=3)
    add("--lr", default="3e-4")
    add("--batch", type=int, default=32)
    hardware.add_json(parser)
    args = parser.parse_args(argv)
    hardware.refuse_dirty(parser, args)
    if len(dict(args.models)) < len(args.models):
        parser.error("--models: two of one name")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    first, path = args.models[0]
    about, results = {name: described(model) for name, model in args.models}, {}
    for case in CASES:
        if args.only and case.name not in args.only:
            continue
        files = case.files(args.tasks, args.work)
        result: dict[str, Any] = {"metric": case.metric, "rows": {}, "gains": {}}
        results[case.name], ours = result, list[list[Tally]]()
        for name, start in (*args.models, (RANDOM, path)):
            result["rows"][name], tallies = finetune(case, name, start, files, args)
            if name == first:
                ours = tallies
            else:
                result["gains"][name] = interval(ours, tallies)
            if args.json:
                hardware.write_json(args.json, {"models": about, "seeds": args.seeds, "tasks": results})
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
