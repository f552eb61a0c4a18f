"""Fine-tune a pre-trained model on a task, and predict with it.

megabert finetune --model RUN --task sst2 --train train.tsv --dev dev.tsv --output DIR
megabert finetune --model RUN --kind classify --text review --label stars --metric accuracy …
megabert finetune … --seeds 3 --grid lr=2e-5,3e-5,5e-5 batch=16,32
megabert finetune --model DIR/seed1/best --predict FILE --output PREDICTIONS
torchrun --nproc_per_node 8 -m megabert.finetune …          or: deepspeed --module megabert.finetune …

RUN is a run folder, one of its checkpoints, or a Hugging Face folder. The same command again resumes. Exit codes: 0 all runs are
finished; 2 a mistake in the command or the files; 3 training diverged; 4 I/O failed or a rank was lost; 85 stopped by TERM, USR1 or
USR2 with everything saved: start the same command again.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from megabert.__main__ import start

    sys.exit(start("finetune"))  # before the slow imports

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabert.common.arguments import Parser, called_as
from megabert.common.errors import OK
from megabert.common.logs import log
from megabert.finetune import settings as options
from megabert.finetune import tasks
from megabert.finetune.settings import AXES, Settings
from megabert.finetune.tasks import KINDS, Task

if TYPE_CHECKING:
    from megabert.distributed.session import Session
    from megabert.finetune.run import Data, FineTuning
    from megabert.hf import Pretrained

OF_TASK = "the task's"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog=called_as("megabert.finetune"), description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="pre-trained model; with --predict a fine-tuned one")
    add("--tokenizer", default="", metavar="FILE", help="its tokenizer, where the model's folder has none")
    add("--output", required=True, metavar="PATH", help="folder of the runs; with --predict the file to write")
    add("--predict", default="", metavar="FILE", help="write predictions for FILE (labels not needed); --text and --id name its "
        "columns where they differ from those of training; GLUE's test files are known")  # fmt: skip
    add("--scores", default="", metavar="FILE", help="with --predict: write the probabilities too, as JSON lines")
    add("--null-threshold", type=float, metavar="P",
        help="with --predict: no answer where its probability is above P; without: 0.5")  # fmt: skip
    add("--task", default="", metavar="NAME", help=f"known task: {', '.join(tasks.PRESETS)}")
    add("--kind", choices=KINDS, help="kind of a new task, in place of --task")
    add("--text", action="append", default=[], metavar="COLUMN",
        help="text column; twice for a pair; a.b is inside a, a+b are joined")  # fmt: skip
    add("--choices", nargs="+", default=[], metavar="COLUMN", help="of choose: columns of the choices")
    add("--label", default="", metavar="COLUMN", help="label column; several labels have commas between, or are a list")
    add("--labels", nargs="+", default=[], metavar="LABEL", help="in the order of the classes; F1 is of the last")
    add("--class-weights", nargs="+", default=[], metavar="W",
        help="of the labels in the loss, in their order, or: balanced")  # fmt: skip
    add("--id", default="", metavar="COLUMN", help="of the predictions file; without: numbered from 0")
    add("--metric", action="append", default=[], metavar="NAME", help="several times; the first decides what is best")
    add("--train", default="", metavar="FILE", help="texts and labels to train on")
    add("--dev", default="", metavar="FILE", help="decides about the best weights and early stopping")
    add("--test", default="", metavar="FILE", help="labelled too; scored with the best weights")
    add("--seeds", type=int, nargs="+", default=[1], help="how many, or which")
    add("--grid", nargs="+", default=[], metavar="NAME=A,B", help=f"over {', '.join(AXES)}")
    options.add_options(parser, unset={"max_length": OF_TASK, "stride": OF_TASK})
    return parser.parse_args(argv)


def task_of(args: argparse.Namespace) -> Task:
    """The task that is meant. Raises ValueError for none, two, or an unknown one."""
    if bool(args.task) == bool(args.kind):
        raise ValueError(f"name one --task ({', '.join(tasks.PRESETS)}), or describe one with --kind")
    if args.kind:
        return tasks.custom(args.kind, args.text, args.label, args.metric, args.id, args.labels, args.choices)
    given = {"text": tuple(args.text), "label": args.label, "metrics": tuple(args.metric)}
    given |= {"id": args.id, "labels": tuple(args.labels), "choices": tuple(args.choices)}
    return replace(tasks.preset(args.task), **{name: value for name, value in given.items() if value})


def settings_of(args: argparse.Namespace, task: Task, positions: int) -> Settings:
    """The options that are settings of a run; the task's lengths, as far as the model's `positions` allow. Raises ValueError naming
    one that is out of range."""
    lengths = {"max_length": min(task.max_length, positions), "stride": task.stride}
    settings = Settings(**(lengths | options.given_settings(args)))
    options.check(settings)
    return settings


def read(args: argparse.Namespace, task: Task, start: Pretrained, settings: Settings) -> Data:
    """The task's files, encoded. Raises ValueError naming file and line of what cannot be used."""
    from megabert.finetune import datasets, encoding, run

    paths = {"train": args.train, "dev": args.dev} | ({"test": args.test} if args.test else {})
    for name, path in paths.items():
        if not path:
            raise ValueError(f"--{name} is missing: name a file")
    examples = {name: datasets.read(task, path) for name, path in paths.items()}
    labels = encoding.labels_of(task, examples["train"])
    examples = {name: part[: args.limit or None] for name, part in examples.items()}
    data = run.encode_splits(task, examples, start.tokenizer, settings, labels)
    weights = run.class_weights_of(args.class_weights, task, labels, examples["train"])
    for name, split in data.splits.items():
        log.info(f"{name}: {len(split.examples):,} examples, {len(split.items):,} items")
    return replace(data, class_weights=weights)


def facts(args: argparse.Namespace, task: Task, start: Pretrained) -> dict[str, Any]:
    """What decides the results besides the settings, in a form that can be compared."""
    from megabert import hf
    from megabert.finetune import datasets

    known = {
        "task": task.name,
        "kind": task.kind,
        "text": list(task.text),
        "label": task.label,
        "metrics": list(task.metrics),
        "model_sha256": hf.fingerprint(start.weights),
        "limit": args.limit,
    }
    for name in ("labels", "choices", "class_weights"):
        if given := getattr(args, name):
            known[name] = given
    for name in ("train", "dev", "test"):
        if path := getattr(args, name):
            known[f"{name}_sha256"] = datasets.digest(Path(path))
    return known


def train(args: argparse.Namespace, ranks: Session) -> int:
    """Every combination that has no result yet, then the table and `summary.json`."""
    from megabert import hf
    from megabert.distributed.signals import REQUEUE
    from megabert.engine import precision
    from megabert.finetune import run, search

    stop, world = ranks.join(), ranks.world
    task, grid, seeds = task_of(args), options.parse_grid(args.grid), options.parse_seeds(args.seeds)
    args.precision = precision.choose(args.precision, world)
    start = hf.load(args.model, args.tokenizer)
    settings = settings_of(args, task, start.config.model.max_positions)
    runs = options.combinations(settings, grid, seeds)
    data = read(args, task, start, settings)
    # Whatever does not fit is reported before anything is written.
    for chosen in runs.values():
        options.check(chosen)
        run.describe(data, start, chosen, world.size)
    output, common = Path(args.output), search.common_settings(settings, grid, facts(args, task, start))
    watchdog = search.claim_folder(output, common, ranks)

    def begin(folder: Path, name: str, chosen: Settings) -> FineTuning:
        return run.FineTuning(folder, name, data, start, chosen, world, args.log_interval)

    results = search.train_missing(output, runs, begin, world, stop, watchdog)
    if results is None:
        return REQUEUE
    rows = search.summarise(list(results.values()), list(grid), task.metrics[0])
    log.info(search.table(rows))
    if world.is_main:
        tree = {"command": shlex.join(sys.argv), "settings": common, "points": rows, "runs": list(results.values())}
        run.write_json(output / search.SUMMARY, tree)
    return OK


def predict(args: argparse.Namespace, ranks: Session) -> int:
    """Write a fine-tuned model's predictions for a file."""
    from megabert.distributed.signals import REQUEUE
    from megabert.finetune import prediction

    if args.limit:
        raise ValueError("--limit: is for training, not for --predict")
    stop = ranks.join()
    count = prediction.predict_file(
        args.model,
        args.predict,
        args.output,
        ranks.world,
        null_threshold=0.5 if args.null_threshold is None else args.null_threshold,
        text=args.text,
        identity=args.id,
        choices=args.choices,
        probabilities=args.scores,
        precision="" if args.precision == "auto" else args.precision,
        stopped=lambda: stop.requested,
    )
    if count is None:
        return REQUEUE
    log.info(f"{args.output}: {count:,} predictions")
    return OK


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    from megabert.common.environment import keep_freed_memory
    from megabert.distributed import session

    keep_freed_memory()

    def command(ranks: Session) -> int:
        if args.predict:
            return predict(args, ranks)
        for option, given in (("--null-threshold", args.null_threshold is not None), ("--scores", args.scores)):
            if given:
                raise ValueError(f"{option}: is for --predict")
        return train(args, ranks)

    return session.run(command)
