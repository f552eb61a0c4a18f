"""Fine-tune a pre-trained model on a task, and predict with it.

megabert finetune --model RUN --task sst2 --train train.tsv --dev dev.tsv --output DIR
megabert finetune --model RUN --kind classify --text review --label stars --metric accuracy …
megabert finetune --model RUN --kind rank --text query --choices better worse --train pairs.parquet …
megabert finetune … --seeds 3 --grid lr=2e-5,3e-5,5e-5 batch=16,32
megabert finetune --model DIR/seed1/best --predict FILE --output PREDICTIONS
torchrun --nproc_per_node 8 -m megabert.finetune …          or: deepspeed --module megabert.finetune …

RUN is a run folder, one of its checkpoints, or a Hugging Face folder. The same command again goes on where it was.
Exit codes: 0 all runs are finished; 2 a mistake in the command or the files, said in one line; 3 training diverged; 4 I/O
failed or a rank was lost; 85 stopped by TERM, USR1 or USR2 with everything saved: start the same command again.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from megabert.__main__ import start

    sys.exit(start("finetune"))  # before the slow imports

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from megabert import hf as pretrained
from megabert.common.arguments import Parser, called_as
from megabert.common.environment import keep_freed_memory
from megabert.common.errors import OK
from megabert.common.logs import log
from megabert.distributed import session
from megabert.distributed.preemption import REQUEUE
from megabert.distributed.session import Session
from megabert.engine import precision
from megabert.finetune import datasets, encoding, prediction, preparation, search, tasks
from megabert.finetune.class_weights import weights_of
from megabert.finetune.encoding import LONG
from megabert.finetune.heads import HEADS, KINDS
from megabert.finetune.run import check, check_counts
from megabert.finetune.tasks import LENGTHS, Task
from megabert.finetune.training import Data, FineTuning, Settings, describe
from megabert.hf import Pretrained

SQUAD = LENGTHS["squad1.1"]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser, d = Parser(prog=called_as("megabert.finetune"), description=__doc__), Settings()
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="pre-trained model; with --predict a fine-tuned one")
    add("--tokenizer", default="", metavar="FILE", help="its tokenizer, where the model's folder has none")
    add("--output", required=True, metavar="PATH", help="folder of the runs; with --predict the file to write")
    add("--predict", default="", metavar="FILE", help="write predictions for FILE (labels not needed); --text and --id name its columns where "
        "they are not those of training, GLUE's test files are known")  # fmt: skip
    add("--scores", default="", metavar="FILE",
        help="with --predict: write probabilities too, of labels, of each word's tags, of answers, as JSON lines")  # fmt: skip
    add(
        "--null-threshold",
        type=float,
        metavar="P",
        help="with --predict: no answer where that is likelier than P (default: 0.5)",
    )
    add("--task", default="", metavar="NAME", help=f"known task: {', '.join(tasks.PRESETS)}")
    add("--kind", choices=KINDS, help="kind of a new task, in place of --task")
    add("--text", action="append", default=[], metavar="COLUMN",
        help="text column; twice for a pair; a.b is inside a, a+b are joined")  # fmt: skip
    add("--choices", nargs="+", default=[], metavar="COLUMN",
        help="of choose: columns of the choices; of rank: of the better and the worse text")  # fmt: skip
    add("--label", default="", metavar="COLUMN", help="label column; of several labels with commas between, or a list")
    add("--labels", nargs="+", default=[], metavar="LABEL", help="in the order of the classes; F1 is of the last")
    add("--class-weights", nargs="+", default=[], metavar="W",
        help="of the labels in the loss, in their order, or: balanced")  # fmt: skip
    add("--id", default="", metavar="COLUMN", help="of the predictions file (without: numbered from 0)")
    add("--metric", action="append", default=[], metavar="NAME", help="several times; the first decides what is best")
    add("--train", default="", metavar="FILE", help="texts and labels to learn from")
    add("--dev", default="", metavar="FILE", help="decides about the best weights and early stopping")
    add("--test", default="", metavar="FILE", help="labelled too; scored with the best weights")
    add("--limit", type=int, default=0, help="use so many examples of each file, for trying out; 0: all")
    add("--seeds", type=int, nargs="+", default=[1], help="how many, or which")
    add("--grid", nargs="+", default=[], metavar="NAME=A,B", help=f"over {', '.join(search.AXES)}")
    add("--lr", type=float, default=d.lr, help="peak learning rate")
    add("--batch", type=int, default=d.batch, help="texts (windows of long ones) an update")
    add("--micro-batch", type=int, default=d.micro_batch,
        help="of one forward pass on one rank; 0: all of a rank's share")  # fmt: skip
    add("--epochs", type=int, default=d.epochs, help="times that every text is learned from")
    add("--dropout", type=float, default=d.dropout, help="of the encoder and of the added layers")
    add("--warmup", type=float, default=d.warmup, help="share of the updates")
    add("--weight-decay", type=float, default=d.weight_decay, help="of AdamW")
    add("--max-length", type=int, metavar="TOKENS",
        help=f"of a text or window (default: {d.max_length}, for SQuAD {SQUAD[0]}; no more than the model has positions)")  # fmt: skip
    add("--stride", type=int, metavar="TOKENS",
        help=f"from one window to the next (default: {d.stride}, for SQuAD {SQUAD[1]})")  # fmt: skip
    add("--long", choices=LONG, default=d.long,
        help="texts that are longer: cut, or windows averaged")  # fmt: skip
    add("--evaluations", type=int, default=d.evaluations, help="an epoch")
    add("--patience", type=int, default=d.patience,
        help="evaluations without improvement that end a run; 0: never")  # fmt: skip
    add("--freeze", action="store_true", help="fixed features: only the added layers learn")
    add("--head", choices=HEADS, default=d.head, help="bilstm: two layers over the words of fixed features")
    add("--width", type=int, default=d.width, help="of the BiLSTM, both directions together")
    add("--from-scratch", action="store_true", help="same shape, random weights")
    add("--precision", choices=("auto", "bf16", "fp32"),
        help=f"of forward and backward; auto: bf16 where the device multiplies it; with --predict that of training, unless named (default: {d.precision})")  # fmt: skip
    add("--zero", type=int, choices=(0, 1, 2), default=d.zero, help="DeepSpeed ZeRO stage")
    add("--log-interval", type=int, default=20, metavar="UPDATES", help="between progress lines")
    add("--local_rank", type=int, metavar="N", help="set by launchers")
    args = parser.parse_args(argv)
    if not args.predict:
        args.precision = args.precision or d.precision
    return args


def settings_of(args: argparse.Namespace, task: Task) -> Settings:
    """The options that are settings of a run, and the task's lengths. Raises ValueError naming one that is out of range."""
    given = {f.name: getattr(args, f.name) for f in fields(Settings) if hasattr(args, f.name)}
    lengths = LENGTHS.get(task.name, (Settings.max_length, Settings.stride))
    for name, default in zip(("max_length", "stride"), lengths, strict=True):
        given[name] = default if given[name] is None else given[name]
    settings = Settings(**given)
    check(settings)
    check_counts(args)
    return settings


def task_of(args: argparse.Namespace) -> Task:
    """The task that is meant. Raises ValueError for none, two, or an unknown one."""
    if bool(args.task) == bool(args.kind):
        raise ValueError(f"name one --task ({', '.join(tasks.PRESETS)}), or describe one with --kind")
    if args.kind:
        return tasks.custom(args.kind, args.text, args.label, args.metric, args.id, args.labels, args.choices)
    given = {"text": tuple(args.text), "label": args.label, "metrics": tuple(args.metric)}
    given |= {"id": args.id, "labels": tuple(args.labels), "choices": tuple(args.choices)}
    return replace(tasks.preset(args.task), **{name: value for name, value in given.items() if value})


def read(args: argparse.Namespace, task: Task, start: Pretrained, settings: Settings) -> Data:
    """The task's files, encoded. Raises ValueError naming file and line of what cannot be used."""
    paths = {"train": args.train, "dev": args.dev} | ({"test": args.test} if args.test else {})
    for name, path in paths.items():
        if not path:
            raise ValueError(f"--{name} is missing: name a file")
    examples = {name: datasets.read(task, path) for name, path in paths.items()}
    labels = encoding.labels_of(task, examples["train"])
    examples = {name: part[: args.limit or None] for name, part in examples.items()}
    return preparation.encoded(task, examples, start.tokenizer, settings, labels)


def facts(args: argparse.Namespace, task: Task, start: Pretrained) -> dict[str, Any]:
    """What decides the results besides the settings, in a form that can be compared."""
    found = {
        "task": task.name,
        "kind": task.kind,
        **{"text": list(task.text), "label": task.label, "metrics": list(task.metrics)},
        "model_sha256": pretrained.fingerprint(start.weights),
        "limit": args.limit,
    }
    for name in ("labels", "choices", "class_weights"):
        if given := getattr(args, name):
            found[name] = given
    for name in ("train", "dev", "test"):
        if path := getattr(args, name):
            found[f"{name}_sha256"] = datasets.digest(Path(path))
    return found


def run_all(args: argparse.Namespace, ranks: Session) -> int:
    """Every combination that has no result yet, then the table."""
    stop, world = ranks.join(), ranks.world
    task = task_of(args)
    args.precision = precision.choose(args.precision, world)
    settings = settings_of(args, task)
    grid, seeds = search.parse_grid(args.grid), search.parse_seeds(args.seeds)
    for chosen in search.combinations(settings, grid, seeds).values():
        check(chosen)
    start = pretrained.load(args.model, args.tokenizer)
    if args.max_length is None:
        positions = start.config.model.max_positions
        settings = replace(settings, max_length=min(settings.max_length, positions))
    runs = search.combinations(settings, grid, seeds)
    data = read(args, task, start, settings)
    train = data.splits["train"].examples
    data = replace(data, class_weights=weights_of(args.class_weights, task, data.labels, train))
    for name, split in data.splits.items():
        log.info(f"{name}: {len(split.examples):,} examples, {len(split.items):,} items")
    common = search.common_settings(settings, grid, facts(args, task, start))
    for chosen in runs.values():  # whatever does not fit is said before anything is written
        describe(data, start, chosen, world.size)

    def begin(folder: Path, name: str, chosen: Settings) -> FineTuning:
        return FineTuning(folder, name, data, start, chosen, world, args.log_interval)

    return search.train_all(Path(args.output), runs, begin, common, list(grid), task.metrics[0], ranks, stop)


def predict(args: argparse.Namespace, ranks: Session) -> int:
    """Write a fine-tuned model's predictions for a file; the same command goes on after a kill."""
    stop = ranks.join()
    chosen: dict[str, Any] = {
        "text": args.text,
        "identity": args.id,
        "choices": args.choices,
        "scores": args.scores,
        "precision": args.precision or "",
    }
    if args.null_threshold is not None:
        chosen["null_threshold"] = args.null_threshold
    count = prediction.predict_file(
        args.model, args.predict, args.output, ranks.world, stopped=lambda: stop.requested, **chosen
    )
    if count is None:
        return REQUEUE
    log.info(f"{args.output}: {count:,} predictions")
    return OK


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    keep_freed_memory()

    def command(ranks: Session) -> int:
        if args.predict:
            if args.limit:
                raise ValueError("--limit: is for training, not for --predict")
            return predict(args, ranks)
        for option, given in (("--null-threshold", args.null_threshold is not None), ("--scores", args.scores)):
            if given:
                raise ValueError(f"{option}: is for --predict")
        return run_all(args, ranks)

    return session.run(command)
