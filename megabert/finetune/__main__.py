"""Fine-tune a pre-trained model on a task, and predict with it.

megabert finetune --model RUN --task sst2 --train train.tsv --dev dev.tsv --output DIR
megabert finetune --model RUN --kind classify --text review --label stars --metric accuracy …
megabert finetune … --seeds 3 --lr 2e-5 3e-5 5e-5
megabert finetune --model DIR/seed1/best --predict FILE --output PREDICTIONS
torchrun --nproc_per_node 8 -m megabert.finetune …          or: deepspeed --module megabert.finetune …

RUN may also be a Hugging Face folder or the name of a model on its hub. The same command resumes. Exit codes: 0 all runs are
finished; 2 a mistake in the command or the files; 3 training diverged; 4 I/O failed or a rank was lost; 85 stopped by Ctrl-C,
TERM, HUP, USR1 or USR2 with everything saved, to be resumed by the same command; 130 predictions were stopped by these, and nothing
is written.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from megabert.__main__ import start

    sys.exit(start("finetune"))  # before the slow imports

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabert.common.arguments import MODEL, Parser, called_as, refuse_missing, refuse_replacing
from megabert.common.errors import OK
from megabert.common.files import refuse_url
from megabert.common.logs import log
from megabert.finetune import settings as options
from megabert.finetune import tasks
from megabert.finetune.tasks import KINDS, Task
from megabert.hf.hub import model_folder

if TYPE_CHECKING:
    from megabert.distributed.session import Session

# Options that have a use with --predict.
PREDICTING = ("model", "output", "predict", "lines", "probabilities", "text", "id", "precision", "local_rank")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog=called_as("megabert.finetune"), description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL", help=f"{MODEL}; or a fine-tuned model's folder or name, to predict "
        "with (--predict) or to train its encoder on another task")  # fmt: skip
    add("--output", required=True, metavar="PATH", help="folder of the runs; with --predict the file to write")
    add("--predict", default="", metavar="FILE", help="write predictions for FILE (labels not needed); --text and --id name its "
        "columns where they differ from those of training")  # fmt: skip
    add("--lines", action="store_true", help="with --predict: each line of FILE that is not blank is a text, numbered from 0; "
        "of a tag task the spans of its characters are written, as JSON lines")  # fmt: skip
    add("--probabilities", action="store_true",
        help="with --predict of classify or multilabel: also each label's probability")  # fmt: skip
    add("--task", default="", metavar="NAME", help=f"known task: {', '.join(tasks.PRESETS)}")
    add("--kind", choices=KINDS, help="kind of a new task, instead of --task")
    add("--text", action="append", default=[], metavar="COLUMN",
        help="text column; twice for a pair; a.b is nested, a+b joins two")  # fmt: skip
    add("--label", default="", metavar="COLUMN", help="label column; several labels are separated by commas, or a list")
    add("--labels", nargs="+", default=[], metavar="LABEL", help="in the order of the classes; F1 is of the last")
    add("--id", default="", metavar="COLUMN", help="id column for the predictions file; default: with --predict that of training "
        "if FILE has it, else numbered from 0")  # fmt: skip
    add("--metric", action="append", default=[], metavar="NAME", help="several times; the first selects the best model")
    add("--train", default="", metavar="FILE", help="texts and labels for training")
    add("--dev", default="", metavar="FILE", help="for the choice of the best weights and learning rate")
    add("--test", default="", metavar="FILE", help="also labelled; scored with the best weights")
    options.add_options(parser, seeds=1, rates=1)
    return parser.parse_args(argv)


def parse_task(args: argparse.Namespace) -> Task:
    """The task given by the options. Raises ValueError for none, two, or an unknown one."""
    if bool(args.task) == bool(args.kind):
        raise ValueError(f"name one --task ({', '.join(tasks.PRESETS)}), or describe one with --kind")
    given: dict[str, Any] = {"text": tuple(args.text), "label": args.label, "metrics": tuple(args.metric)}
    given |= {"id": args.id, "labels": tuple(args.labels)}
    if args.kind:
        return tasks.custom(args.kind, **given)
    return replace(tasks.preset(args.task), **{name: value for name, value in given.items() if value})


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for mistakes in the options and missing packages."""
    options.require_metrics()
    refuse_url(args.output)
    refuse_missing(args, "train", "dev", "test", "predict", "tokenizer")
    if args.predict:
        usual = vars(parse(["--model=", "--output="]))
        for name, value in vars(args).items():
            if name not in PREDICTING and value != usual[name]:
                raise ValueError(f"--{name.replace('_', '-')}: is for training, not for --predict")
        if args.lines and (args.text or args.id):
            raise ValueError(f"--{'text' if args.text else 'id'}: names a column, and with --lines the file has none")
        refuse_replacing("--output", args.output)
        tasks.located_finetuned(args.model)
        return
    task = parse_task(args)
    for name in ("lines", "probabilities"):
        if getattr(args, name):
            raise ValueError(f"--{name}: is for --predict, not for training")
    for name in ("train", "dev"):
        if not getattr(args, name):
            raise ValueError(f"--{name} is missing: name a file")
    options.list_runs(args, task.max_length, task.stride)
    model_folder(args.model)


def train(args: argparse.Namespace, ranks: Session) -> int:
    """Train every run without a result, then write the table and `summary.json`."""
    from megabert.finetune import files, run

    task = parse_task(args)
    paths = {name: Path(path) for name in ("train", "dev", "test") if (path := getattr(args, name))}
    return run.train_tasks(
        args,
        ranks,
        tasks=[(task, paths, Path(args.output))],
        read=lambda task, paths: {name: files.read(task, path) for name, path in paths.items()},
        show=lambda summary: f"{run.table(summary['points'])}\n{run.closing(summary['best'])}",
    )


def predict(args: argparse.Namespace) -> int:
    """Write a fine-tuned model's predictions for a file."""
    from megabert.distributed import signals
    from megabert.finetune import prediction

    signals.install_handlers(signals.interrupt)
    precision = "" if args.precision == "auto" else args.precision
    count = prediction.predict_file(
        args.model, args.predict, args.output, args.text, args.id, precision,
        lines=args.lines, probabilities=args.probabilities,
    )  # fmt: skip
    log.info(f"{args.output}: {count:,} predictions")
    return OK


def main(argv: list[str] | None = None) -> int:
    return options.run(parse(argv), check, lambda args, ranks: predict(args) if args.predict else train(args, ranks))
