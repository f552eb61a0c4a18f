"""Fine-tune a model on every task of a benchmark: one table of results, and the files that are handed in.

megabert glue --model RUN --data DIR --output OUT                         what is there of GLUE's nine tasks
megabert glue --model RUN --data DIR --output OUT --suite squad           SQuAD 1.1 and 2.0
megabert glue --model RUN --data DIR --output OUT --suite own             a task for each DIR/NAME.toml
megabert glue … --tasks sst2 rte --seeds 5 --grid lr=5e-5,3e-4 batch=16,32
torchrun --nproc_per_node 8 -m megabert.finetune.benchmark …

Every task runs over the seeds and the grid. A tenth of the training examples (2,000 at most) is held out and decides the
epoch, the grid point and SQuAD 2.0's threshold; what is reported (dev) decides nothing, unless --choose-on dev asks for it,
and then the table says so. OUT/results.md has the table and published scores beside it, results.json the same as data,
OUT/submission/ what GLUE's site takes. The same command goes on where it was; more seeds and tasks are added.
Exit codes as of `megabert finetune`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from megabert.__main__ import start

    sys.exit(start("glue"))  # before the slow imports

import argparse
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

from megabert import hf as pretrained
from megabert.common.arguments import Parser, called_as
from megabert.common.environment import keep_freed_memory
from megabert.common.errors import OK
from megabert.common.files import write_whole
from megabert.common.logs import log
from megabert.config import WatchdogConfig
from megabert.distributed import run_lock, session
from megabert.distributed.preemption import REQUEUE, Stop
from megabert.distributed.process_group import World
from megabert.distributed.session import Session
from megabert.distributed.together import together
from megabert.distributed.watchdog import Watchdog
from megabert.engine import precision
from megabert.finetune import datasets, encoding, preparation, search, training
from megabert.finetune.benchmark import evaluation, splits, submission, suites, summary
from megabert.finetune.benchmark.suites import Entry
from megabert.finetune.examples import Example
from megabert.finetune.run import check as check_settings
from megabert.finetune.run import check_counts, write_json
from megabert.finetune.training import Data, FineTuning, Settings
from megabert.hf import Pretrained

RESULTS, PAGE, HANDED_IN = "results.json", "results.md", "submission"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser, d = Parser(prog=called_as("megabert.finetune.benchmark"), description=__doc__), Settings()
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="run folder, checkpoint or Hugging Face folder")
    add("--tokenizer", default="", metavar="FILE", help="its tokenizer, where the model's folder has none")
    add("--data", required=True, metavar="DIR", help="folder of the tasks")
    add("--output", required=True, metavar="DIR", help="folder of the runs, tables and predictions")
    add("--suite", choices=tuple(suites.READERS), default="glue", help="which tasks are looked for")
    add(
        "--tasks", nargs="+", default=[], metavar="NAME", help="these alone: cola, sst2, …; without: all that are there"
    )
    add("--seeds", type=int, nargs="+", default=[3], help="how many, or which")
    add("--grid", nargs="+", default=["published"], metavar="NAME=A,B",
        help=f"{', '.join(suites.GRIDS)} (learning rates; SQuAD's settings are one point), or values of {', '.join(search.AXES)}")  # fmt: skip
    add("--choose-on", choices=(splits.ON_TRAIN, splits.ON_DEV), default=splits.ON_TRAIN,
        help="what decides: examples held out of train, or, as published dev scores often have it, dev itself")  # fmt: skip
    add("--limit", type=int, default=0, metavar="N", help="so many examples of each split, for trying out; 0: all")
    add("--discard", action="store_true", help="keep each task's best weights alone")
    own = "; without: the suite's, or the task's TOML file's"
    add("--lr", type=float, help="peak learning rate, in place of the named grid's")
    add("--batch", type=int, help="texts (windows of long ones) an update" + own)
    add("--epochs", type=int, help="times that every text is learned from" + own)
    add("--max-length", type=int, help="tokens of a text or window" + own)
    add("--stride", type=int, help="tokens from one window to the next" + own)
    add("--micro-batch", type=int, default=d.micro_batch,
        help="of one forward pass on one rank; 0: all of a rank's share")  # fmt: skip
    add("--evaluations", type=int, help="an epoch" + own)
    add("--from-scratch", action="store_true", help="same shape, random weights")
    add("--precision", choices=("auto", "bf16", "fp32"), default=d.precision, help="of forward and backward; auto: bf16 where the device multiplies it")  # fmt: skip
    add("--zero", type=int, choices=(0, 1, 2), default=d.zero, help="DeepSpeed ZeRO stage")
    add("--log-interval", type=int, default=100, metavar="UPDATES", help="between progress lines")
    add("--local_rank", type=int, metavar="N", help="set by launchers")
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Plan:
    """A task and its runs, by name. `facts`: what decides their results besides settings off the grid."""

    entry: Entry
    settings: Settings
    grid: dict[str, list[Any]]
    runs: dict[str, Settings]
    facts: dict[str, Any]


def plan(args: argparse.Namespace, entry: Entry, start: Pretrained) -> Plan:
    """Raises ValueError naming an option that is out of range."""
    own = {f.name for f in fields(Settings)}
    given = {k: v for k, v in vars(args).items() if k in own and v is not None}
    usual = entry.settings
    for name in ("max_length", "stride"):  # of published models, which have 512
        if name in usual:
            usual = usual | {name: min(usual[name], start.config.model.max_positions)}
    settings = Settings(**(usual | given))
    if len(args.grid) == 1 and args.grid[0] in suites.GRIDS:
        grid = {axis: v for axis, v in suites.GRIDS[args.grid[0]].items() if entry.searched and axis not in given}
    else:
        grid = search.parse_grid(args.grid)
    runs = search.combinations(settings, grid, search.parse_seeds(args.seeds))
    for chosen in runs.values():
        check_settings(chosen)
    facts = {"title": entry.title, "limit": args.limit, "choose_on": args.choose_on}
    return Plan(entry, settings, grid, runs, facts)


@dataclass(frozen=True)
class Examples:
    """A task's splits, and the labels of its training file."""

    splits: dict[str, list[Example]]
    labels: tuple[str, ...]


def read(plan: Plan) -> Examples:
    """The task's examples, each split cut to the limit. Raises ValueError naming file and line of what cannot be used."""
    found, labels = splits.read(plan.entry, plan.facts["choose_on"])
    return Examples({name: part[: plan.facts["limit"] or None] for name, part in found.items()}, labels)


def check(plan: Plan, suite: str, start: Pretrained, ranks: int) -> None:
    """Everything that can be wrong with a task before it is trained on. Raises ValueError."""
    entry, examples = plan.entry, read(plan)
    for part in examples.splits.values():
        encoding.check_labels(entry.task, part, examples.labels)
    for name, path in entry.test.items():
        unlabelled = datasets.read(datasets.for_prediction(entry.task, path), path, labelled=False)
        if suite == "glue":
            submission.indices(name, [example.id for example in unlabelled])
    for chosen in plan.runs.values():
        training.configure(start.config, chosen, len(examples.splits["train"]), ranks)


def train(
    plan: Plan,
    folder: Path,
    examples: Examples,
    start: Pretrained,
    world: World,
    stop: Stop,
    watchdog: Watchdog,
    log_interval: int = 100,
) -> dict[str, dict[str, Any]] | None:
    """The results of all runs of a task, those that are not there yet trained; None: asked to stop, and saved."""

    @cache
    def data() -> Data:  # only where a run is not there yet
        task = plan.entry.task
        return preparation.encoded(task, examples.splits, start.tokenizer, plan.settings, examples.labels)

    def begin(place: Path, name: str, chosen: Settings) -> FineTuning:
        encoded = data()
        watchdog.progress()
        return FineTuning(place, f"{plan.entry.name}/{name}", encoded, start, chosen, world, log_interval)

    return search.train_missing(folder, plan.runs, begin, world, stop, watchdog)


def finished(output: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The finished tasks of `output`, folder and figures, in the order of their suite."""
    found = [(path.parent, evaluation.read(path)) for path in sorted(output.glob(f"*/{evaluation.EVALUATED}"))]
    order = [*suites.GLUE.values(), *suites.SQUAD.values()]
    there = [(folder, tree) for folder, tree in found if tree]
    return sorted(there, key=lambda f: order.index(f[1]["title"]) if f[1]["title"] in order else len(order))


def publish(output: Path, suite: str, model: str) -> str:
    """Write the tables of the tasks that are finished; the page."""
    trees = [tree for _, tree in finished(output)]
    write_json(output / RESULTS, {"model": model, "suite": suite, "tasks": trees})
    page = summary.page(suite, model, trees)
    write_whole(output / PAGE, page.encode())
    return page


def hand_in(output: Path, suite: str) -> None:
    """Write the submission of the tasks that are finished, where any has predictions."""
    predictions = {
        name.removesuffix(".tsv") if suite == "glue" else name: folder / evaluation.PREDICTIONS / name
        for folder, tree in finished(output)
        for name in tree["predictions"]
    }
    if predictions and suite == "glue":
        missing = submission.write_glue(output / HANDED_IN, predictions)
        also = f"; GLUE's site also wants {', '.join(missing)}" if missing else ""
        log.info(f"{output / HANDED_IN / submission.ZIP}: {len(predictions)} files{also}")
    elif predictions:
        submission.write_plain(output / HANDED_IN, predictions)


def run_all(args: argparse.Namespace, ranks: Session) -> int:
    """Every task in turn: its runs, their evaluation, the tables of what is there so far."""
    stop, world = ranks.join(), ranks.world
    check_counts(args)
    args.precision = precision.choose(args.precision, world)
    entries = suites.find(args.suite, Path(args.data), args.tasks)
    start = pretrained.load(args.model, args.tokenizer)
    plans = [plan(args, entry, start) for entry in entries]
    for one in plans:  # whatever does not fit is said before anything is written
        check(one, args.suite, start, world.size)
    output = Path(args.output)
    model = pretrained.fingerprint(start.weights)
    whole = {"suite": args.suite, "choose_on": args.choose_on, "model_sha256": model}
    commons = {}
    for one in plans:
        task = one.entry.task
        own: dict[str, Any] = {
            "kind": task.kind,
            "text": list(task.text),
            "label": task.label,
            "labels": list(task.labels),
        }
        own |= {
            "metrics": list(task.metrics),
            "choices": list(task.choices),
            "files": evaluation.files_of(one.entry),
            **one.facts,
        }
        commons[one.entry.name] = search.common_settings(one.settings, one.grid, own)
    together(world, lambda: refuse(output, whole, commons))
    run_lock.take(output, world)
    together(world, lambda: search.claim(output, whole))
    watchdog = ranks.watch(output, WatchdogConfig().timeout_seconds)
    ranks.apart = True
    for one in plans:
        folder = output / one.entry.name
        together(world, partial(claim, folder, commons[one.entry.name]))
        examples = read(one)
        log.info(f"{one.entry.title}: " + ", ".join(f"{name} {len(part):,}" for name, part in examples.splits.items()))
        results = train(one, folder, examples, start, world, stop, watchdog, args.log_interval)
        if results is None:
            return REQUEUE
        tree = evaluation.evaluate(
            folder, one.entry, results, list(one.grid), examples.splits, one.facts, world, watchdog.progress
        )
        if args.discard and world.is_main:
            discard(folder, tree)
        world.barrier()
        if world.is_main:
            page = publish(output, args.suite, args.model)
    together(world, lambda: hand_in(output, args.suite))
    if world.is_main:
        log.info(page)
    return OK


def refuse(output: Path, whole: Mapping[str, Any], commons: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ValueError where `output` holds something else, or runs of other settings or files."""
    search.refuse(output, whole)
    for name, common in commons.items():
        search.refuse(output / name, common)


def claim(folder: Path, common: Mapping[str, Any]) -> None:
    """A task's own folder, with what all of its runs have in common."""
    folder.mkdir(exist_ok=True)
    search.claim(folder, common)


def discard(folder: Path, tree: Mapping[str, Any]) -> None:
    """Remove the weights of all runs but the best."""
    for path in sorted(folder.glob("*/best")):
        if path.parent.name != tree["best_run"]:
            shutil.rmtree(path)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    keep_freed_memory()
    return session.run(lambda ranks: run_all(args, ranks))
