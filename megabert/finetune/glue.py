"""Fine-tune a model on every task of GLUE, to one table of results.

megabert glue --model RUN --data DIR --output OUT                         what exists of GLUE's nine tasks
megabert glue … --tasks sst2 rte --seeds 5 --grid lr=5e-5,3e-4 batch=16,32
torchrun --nproc_per_node 8 -m megabert.finetune.glue …

DIR has GLUE's folders as its download makes them (SST-2/train.tsv, dev.tsv, …) or named as the tasks are (sst2/). Tables may be
.tsv, .csv or .jsonl; every file may be gzipped. Every task runs over the seeds and the grid. A tenth of the training examples
(2,000 at most) is held out and decides the epoch and the grid point; dev is reported and decides nothing. The same command
resumes; more seeds and tasks are added. Exit codes as of `megabert finetune`.

    OUT/results.md, results.json    the table; the same as data
    OUT/TASK/RUN/…                  each run, as `megabert finetune` leaves it
    OUT/TASK/summary.json           every grid point, by the split that decides
    OUT/TASK/benchmark.json         the task's rows of the table
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from megabert.__main__ import start

    sys.exit(start("glue"))  # before the slow imports

import argparse
import hashlib
import json
import math
import re
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabert.common import tables
from megabert.common.arguments import Parser, called_as
from megabert.common.errors import OK
from megabert.common.files import write_whole
from megabert.common.logs import log
from megabert.finetune import settings as options
from megabert.finetune import tasks
from megabert.finetune.settings import AXES, Settings
from megabert.finetune.tasks import Task

if TYPE_CHECKING:
    from megabert.distributed.ranks import World
    from megabert.distributed.session import Session
    from megabert.distributed.signals import Stop
    from megabert.distributed.watchdog import Watchdog
    from megabert.finetune.datasets import TextExample
    from megabert.finetune.run import Data, FineTuning
    from megabert.hf import Pretrained

# Name of the task -> of its folder and of its row.
GLUE = {
    **{"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "qqp": "QQP"},
    **{"mnli": "MNLI", "qnli": "QNLI", "rte": "RTE", "wnli": "WNLI"},
}
# Part of MNLI's dev set -> ending of its file.
MNLI_PARTS = {"m": "_matched", "mm": "_mismatched"}
ENDINGS = tuple(ending + packed for ending in tables.ENDINGS for packed in ("", ".gz"))
# Devlin et al. 2019, section 4.1.
LEARNING_RATES = [5e-5, 4e-5, 3e-5, 2e-5]
# Share of the training examples that decides, and their largest number.
SHARE, MOST = 0.1, 2_000
# The split by which `FineTuning` chooses the best weights.
DECIDES = "dev"
# Of the intervals over seeds.
CONFIDENCE = 0.95
RESULTS, PAGE, EVALUATED = "results.json", "results.md", "benchmark.json"


# ---- the tasks of a folder, and their splits


@dataclass(frozen=True)
class GlueTask:
    """A task with its files: `dev` by part, "" where there is only one; {}: a part of `train` is reported."""

    task: Task
    train: Path
    dev: dict[str, Path]

    @property
    def title(self) -> str:
        return GLUE[self.task.name]

    @property
    def reported(self) -> dict[str, str]:
        """Row of the table -> the split that its scores are of."""
        endings = [f"-{part}" if part else "" for part in self.dev or ("",)]
        return {f"{self.title}{ending}": f"reported{ending}" for ending in endings}


def find_tasks(data: Path, only: Sequence[str] = ()) -> list[GlueTask]:
    """GLUE's tasks that are in the folder, in the benchmark's order; of `only`, all of them.

    Raises ValueError naming what is missing.
    """
    if not data.is_dir():
        raise ValueError(f"{data}: no such folder; name the folder of the tasks as --data")
    tasks_there = {name: entry for name in GLUE if (entry := _find_task(data, name))}
    for name in only:
        if name not in GLUE:
            near = get_close_matches(name, GLUE, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"--tasks {name}: is none of {', '.join(GLUE)}{hint}")
        if name not in tasks_there:
            raise ValueError(f"{data}: has no {name}; {LAYOUT}")
    if not tasks_there:
        raise ValueError(f"{data}: has no task of GLUE; {LAYOUT}")
    return [entry for name, entry in tasks_there.items() if not only or name in only]


LAYOUT = "each is a folder with train.tsv and dev.tsv, CoLA, SST-2, …, as GLUE's download has them"


def _find_task(data: Path, name: str) -> GlueTask | None:
    folders = [f for f in sorted(data.iterdir()) if f.is_dir() and re.sub(r"[-_ ]", "", f.name).lower() == name]
    if not folders:
        return None
    if len(folders) > 1:
        raise ValueError(f"{data}: holds {GLUE[name]} twice, {folders[0].name} and {folders[1].name}; keep one")
    train = _file(folders[0], "train")
    if train is None:
        raise ValueError(f"{folders[0]}: has no train.tsv (nor .csv, .jsonl, or one of them as .gz)")
    parts = MNLI_PARTS if name == "mnli" else {}
    dev = {part: _file(folders[0], f"dev{ending}") for part, ending in parts.items()}
    if not any(dev.values()):
        dev = {"": _file(folders[0], "dev")}
    return GlueTask(tasks.preset(name), train, {part: path for part, path in dev.items() if path})


def _file(folder: Path, stem: str) -> Path | None:
    paths = (folder / f"{stem}{ending}" for ending in ENDINGS)
    return next((path for path in paths if path.is_file()), None)


def hold_out(
    examples: Sequence[TextExample], purpose: str, share: float = SHARE, most: int = MOST
) -> tuple[list[TextExample], list[TextExample]]:
    """(the rest, what is held out) of `examples`, in their order: a function of the texts and `purpose` alone.

    All pairs of one first text stay together. At most twice the wanted number is held out; where the first texts' groups do not come
    to half of it, groups of equal pairs are taken. Raises ValueError where these are too few for two parts.
    """
    wanted = max(1, min(most, round(share * len(examples))))
    held = _draw([example.a for example in examples], purpose, wanted)
    if 2 * len(held) < wanted and examples[0].b is not None:
        held = _draw([f"{example.a}\0{example.b}" for example in examples], purpose, wanted)
    if not held:
        where = examples[0].where.partition(", ")[0]
        raise ValueError(f"{where}: its examples share too few texts, so none can be held out; give more of them")
    parts: tuple[list[TextExample], list[TextExample]] = ([], [])
    for number, example in enumerate(examples):
        parts[number in held].append(example)
    return parts


def _draw(keys: Sequence[str], purpose: str, wanted: int) -> set[int]:
    """The numbers of `wanted` examples, or as many more as their groups of one key need: at most twice as many, never all."""
    members: dict[str, list[int]] = {}
    for number, key in enumerate(keys):
        members.setdefault(key, []).append(number)
    limit = min(2 * wanted, len(keys) - 1)
    held: set[int] = set()
    for key in sorted(members, key=lambda key: hashlib.sha256(f"{purpose}\0{key}".encode()).digest()):
        if len(held) >= wanted:
            break
        if len(held) + len(members[key]) <= limit:
            held.update(members[key])
    return held


@dataclass(frozen=True)
class GlueExamples:
    """A task's splits: "train", DECIDES and what is reported; and the labels of its training file."""

    splits: dict[str, list[TextExample]]
    labels: tuple[str, ...]


def read_splits(entry: GlueTask, limit: int = 0) -> GlueExamples:
    """The first `limit` examples of each split, 0: all. Raises ValueError naming file and line of what cannot be used."""
    from megabert.finetune import datasets, encoding

    train = datasets.read(entry.task, entry.train)
    labels = encoding.labels_of(entry.task, train)
    reported = zip(entry.reported.values(), entry.dev.values(), strict=False)
    splits = {split: datasets.read(entry.task, path) for split, path in reported}
    if not entry.dev:
        train, splits["reported"] = hold_out(train, "reported")
    train, splits[DECIDES] = hold_out(train, "decides")
    splits = {name: part[: limit or None] for name, part in {"train": train, **splits}.items()}
    for part in splits.values():
        encoding.check_labels(entry.task, part, labels)
    return GlueExamples(splits, labels)


# ---- the runs of a task


@dataclass(frozen=True)
class GluePlan:
    """A task and its runs, by name."""

    entry: GlueTask
    settings: Settings
    grid: dict[str, list[Any]]
    runs: dict[str, Settings]


def plan(args: argparse.Namespace, entry: GlueTask, start: Pretrained) -> GluePlan:
    """Raises ValueError naming an option that is out of range."""
    given = options.given_settings(args)
    lengths = {"max_length": min(entry.task.max_length, start.config.model.max_positions)}
    settings = Settings(**(lengths | given))
    grid = options.parse_grid(args.grid) if args.grid else {} if "lr" in given else {"lr": LEARNING_RATES}
    runs = options.combinations(settings, grid, options.parse_seeds(args.seeds))
    for chosen in runs.values():
        options.check(chosen)
    return GluePlan(entry, settings, grid, runs)


def common_of(one: GluePlan, limit: int) -> dict[str, Any]:
    """What all runs of a task share."""
    from megabert.finetune import datasets, search

    files = {name: datasets.digest(path) for name, path in {"train": one.entry.train, **one.entry.dev}.items()}
    facts = {"metrics": list(one.entry.task.metrics), "files": files, "limit": limit}
    return search.common_settings(one.settings, one.grid, facts)


def train(
    one: GluePlan,
    folder: Path,
    examples: GlueExamples,
    start: Pretrained,
    world: World,
    stop: Stop,
    watchdog: Watchdog,
    log_interval: int = 100,
) -> dict[str, dict[str, Any]] | None:
    """The results of all runs of a task, after training those that have none; None: asked to stop, and saved."""
    from megabert.finetune import run, search

    # Only where a run is missing.
    @cache
    def data() -> Data:
        return run.encode_splits(one.entry.task, examples.splits, start.tokenizer, one.settings, examples.labels)

    def begin(place: Path, name: str, chosen: Settings) -> FineTuning:
        encoded = data()
        watchdog.progress()
        return run.FineTuning(place, f"{one.entry.task.name}/{name}", encoded, start, chosen, world, log_interval)

    return search.train_missing(folder, one.runs, begin, world, stop, watchdog)


# ---- the table


def rows_of(
    one: GluePlan, results: Mapping[str, Mapping[str, Any]], examples: GlueExamples, limit: int
) -> dict[str, Any]:
    """What the table needs of a task whose runs have `results`; and under "summary" every grid point."""
    from megabert.finetune import search

    metric = one.entry.task.metrics[0]
    points = search.summarise(list(results.values()), list(one.grid), metric)
    chosen = points[0]["point"]
    seeds = {n: r for n, r in results.items() if all(r["settings"][k] == v for k, v in chosen.items())}
    scores, reported_on = {}, {}
    for row, split in one.entry.reported.items():
        seen = [result["scores"][split] for result in seeds.values()]
        scores[row] = {name: over_seeds([run_scores[name] for run_scores in seen]) for name in seen[0]}
        reported_on[row] = f"{'dev' if one.entry.dev else 'held out of train'}, {len(examples.splits[split]):,}"
    return {
        "task": one.entry.task.name,
        "title": one.entry.title,
        "limit": limit,
        "runs": sorted(results),
        "point": chosen,
        "points": len(points),
        "scores": scores,
        "reported_on": reported_on,
        "decided_on": f"held out of train, {len(examples.splits[DECIDES]):,}",
        "best_run": max(seeds, key=lambda name: seeds[name]["scores"][DECIDES][metric]),
        "summary": points,
    }


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Mean, sample deviation and the bounds of Student's t interval, both None for one value alone."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"values": list(values), "mean": mean, "std": None, "interval": None}
    from scipy import stats

    std = statistics.stdev(values)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * std / math.sqrt(len(values))
    return {"values": list(values), "mean": mean, "std": std, "interval": [mean - half, mean + half]}


def page_of(model: str, finished: Sequence[Mapping[str, Any]]) -> str:
    """The results page of the tasks that are finished, in percent."""
    lines = ["| task | metric | mean | deviation | 95% interval | seeds | grid point | reported on | decided on |"]
    lines.append("|---|---|--:|--:|--:|--:|---|---|---|")
    for task in finished:
        point = ", ".join(f"{axis} {value:g}" for axis, value in task["point"].items()) or "no grid"
        tried = f" ({task['points']} tried)" if task["points"] > 1 else ""
        for row, by_metric in task["scores"].items():
            for metric, figure in by_metric.items():
                std, interval = figure["std"], figure["interval"]
                cells = [
                    row,
                    metric,
                    f"{100 * figure['mean']:.1f}",
                    "" if std is None else f"{100 * std:.1f}",
                    "" if interval is None else "{:.1f} to {:.1f}".format(*(100 * bound for bound in interval)),
                    str(len(figure["values"])),
                    point + tried,
                    task["reported_on"][row],
                    task["decided_on"],
                ]
                lines.append(f"| {' | '.join(cells)} |")
    notes = [
        "Percent; correlations times 100. The deviation is the sample's over seeds; the interval is Student's t over the "
        "same seeds, which says nothing about another draw of examples."
    ]
    if any(task["limit"] for task in finished):
        notes.append("**Each split was cut (`--limit`): a trial, not for comparison.**")
    return "\n\n".join([f"# GLUE: {model}", "\n".join(lines), *notes]) + "\n"


def publish(output: Path, model: str) -> str:
    """Write the table of the tasks that are finished; the page."""
    from megabert.finetune import run

    paths = (output / name / EVALUATED for name in GLUE)
    trees = [json.loads(path.read_text()) for path in paths if path.is_file()]
    run.write_json(output / RESULTS, {"model": model, "tasks": trees})
    page = page_of(model, trees)
    write_whole(output / PAGE, page.encode())
    return page


# ---- the command


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog=called_as("megabert.finetune.glue"), description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="run folder, checkpoint or Hugging Face folder")
    add("--tokenizer", default="", metavar="FILE", help="its tokenizer, where the model's folder has none")
    add("--data", required=True, metavar="DIR", help="folder of the tasks")
    add("--output", required=True, metavar="DIR", help="folder of the runs and tables")
    add("--tasks", nargs="+", default=[], metavar="NAME", help="only these: cola, sst2, …; without: all that exist")
    add("--seeds", type=int, nargs="+", default=[3], help="how many, or which")
    rates = ",".join(f"{rate:g}" for rate in LEARNING_RATES)
    add("--grid", nargs="+", default=[], metavar="NAME=A,B",
        help=f"values of {', '.join(AXES)}; without, and without --lr: lr={rates}")  # fmt: skip
    add("--discard", action="store_true", help="keep only each task's best weights")
    options.add_options(parser, unset={"lr": "the grid's", "max_length": "128, or the model's positions"})
    return parser.parse_args(argv)


def run_all(args: argparse.Namespace, ranks: Session) -> int:
    """Every task in turn: its runs, then the table of what exists so far."""
    from megabert import hf
    from megabert.distributed.ranks import on_main
    from megabert.distributed.signals import REQUEUE
    from megabert.engine import precision
    from megabert.finetune import run, search

    stop, world = ranks.join(), ranks.world
    args.precision = precision.choose(args.precision, world)
    entries = find_tasks(Path(args.data), args.tasks)
    start = hf.load(args.model, args.tokenizer)
    plans = [plan(args, entry, start) for entry in entries]
    # Whatever does not fit is reported before anything is written.
    for one in plans:
        examples = read_splits(one.entry, args.limit)
        for chosen in one.runs.values():
            run.configure(start.config, chosen, len(examples.splits["train"]), world.size)
    output, commons = Path(args.output), {one.entry.task.name: common_of(one, args.limit) for one in plans}
    for name, common in commons.items():
        on_main(world, partial(search.refuse, output / name, common))
    watchdog = search.claim_folder(output, {"model_sha256": hf.fingerprint(start.weights)}, ranks)
    page = ""
    for one in plans:
        folder = output / one.entry.task.name
        on_main(world, partial(claim_task, folder, commons[one.entry.task.name]))
        examples = read_splits(one.entry, args.limit)
        log.info(f"{one.entry.title}: " + ", ".join(f"{name} {len(part):,}" for name, part in examples.splits.items()))
        results = train(one, folder, examples, start, world, stop, watchdog, args.log_interval)
        if results is None:
            return REQUEUE
        if world.is_main:
            tree = rows_of(one, results, examples, args.limit)
            run.write_json(folder / search.SUMMARY, {"points": tree.pop("summary"), "runs": list(results.values())})
            run.write_json(folder / EVALUATED, tree)
            if args.discard:
                discard(folder, tree)
            page = publish(output, args.model)
    if world.is_main:
        log.info(page)
    return OK


def claim_task(folder: Path, common: Mapping[str, Any]) -> None:
    """A task's own folder, with what all of its runs have in common."""
    from megabert.finetune import search

    folder.mkdir(exist_ok=True)
    search.claim(folder, common)


def discard(folder: Path, tree: Mapping[str, Any]) -> None:
    """Remove the weights of all runs but the best."""
    for path in sorted(folder.glob("*/best")):
        if path.parent.name != tree["best_run"]:
            shutil.rmtree(path)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    from megabert.common.environment import keep_freed_memory
    from megabert.distributed import session

    keep_freed_memory()
    return session.run(lambda ranks: run_all(args, ranks))
