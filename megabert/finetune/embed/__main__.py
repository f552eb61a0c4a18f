"""Train a model whose vectors of texts can be searched, and judge one.

megabert embed train --model RUN --text question --text paragraph --train pairs.tsv --dev dev.tsv --output DIR
megabert embed train --model RUN --train train-v1.1.json --dev dev-v1.1.json --output DIR       SQuAD: question, paragraph
megabert embed train … --text sentence1 --text sentence2 --label label --positive entailment     RTE's entailed pairs
megabert embed train … --text query --text answer --negative wrong --negative wrong2             with hard negatives
megabert embed train --model RUN --train lines.txt --dev sts-dev.tsv --dev-text sentence1 --dev-text sentence2
                     --score score --output DIR                                     SimCSE on plain texts, judged by STS-B
megabert embed evaluate --model DIR --test FILE [--text … --score …]
megabert features --model DIR --pool sentence --input lines.txt --output vectors.npz                    vectors of texts
torchrun --nproc_per_node 8 -m megabert embed train …

RUN is a run folder, one of its checkpoints, or a Hugging Face folder; DIR/seed1/best is a sentence-transformers folder. The
same command again goes on where it was. Exit codes are those of `megabert finetune`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from megabert.__main__ import start

    sys.exit(start("embed"))  # before the slow imports

import argparse
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from megabert import hf as pretrained
from megabert.common.arguments import Parser, called_as
from megabert.common.errors import OK
from megabert.common.logs import log
from megabert.common.malloc import keep_freed_memory
from megabert.distributed import session
from megabert.distributed.session import Session
from megabert.engine import precision
from megabert.finetune import datasets, search
from megabert.finetune.embed import metrics, pairs, training
from megabert.finetune.embed.model import POOLS
from megabert.finetune.embed.pairs import Columns, Pairs, Scored
from megabert.finetune.embed.training import Data, EmbeddingRun, Settings
from megabert.finetune.run import check, check_counts
from megabert.hf import Pretrained, hf_tokenizer


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser, d = Parser(prog=called_as("megabert embed"), description=__doc__), Settings()
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="train | evaluate",
        help="`embed train --help` and `embed evaluate --help` show their options",
    )
    train = commands.add_parser(
        "train", help="learn from pairs", description=__doc__, formatter_class=parser.formatter_class
    )
    evaluate = commands.add_parser(
        "evaluate", description="Figures of a model on a file, as one JSON line.",
        formatter_class=parser.formatter_class,
    )  # fmt: skip
    for add in (train.add_argument, evaluate.add_argument):
        add("--model", required=True, metavar="DIR", help="pre-trained model, or what `embed train` made")
        add("--tokenizer", default="", metavar="FILE", help="its tokenizer, where the model's folder has none")
        add("--text", action="append", metavar="COLUMN", help="column of the texts; twice for a pair. None: lines, or SQuAD's JSON")  # fmt: skip
        add("--label", default="", metavar="COLUMN", help="with --positive: the column that says which pairs belong together")  # fmt: skip
        add("--positive", default="", metavar="LABEL", help="label of pairs that do; others are left out")
        add("--negative", action="append", metavar="COLUMN", help="texts that look as if they belonged to the first one (hard negatives); several times; in JSON lines also a list")  # fmt: skip
        add("--score", default="", metavar="COLUMN", help="how alike the texts of a pair are (STS-B): judged by correlation instead of search; of --dev, --test")  # fmt: skip
        add("--limit", type=int, default=0, help="use so many pairs of each file, for trying out; 0: all")
    evaluate.add_argument("--test", required=True, metavar="FILE", help="pairs to judge by: each first text searches all second ones and negatives")  # fmt: skip
    evaluate.add_argument("--pool", choices=POOLS, default="", help="default: the model's own, else mean")
    evaluate.add_argument("--max-length", type=int, default=0, metavar="N", help="tokens of a text; 0: the model's own")  # fmt: skip
    add = train.add_argument
    add("--output", required=True, metavar="DIR", help="folder of the runs")
    add("--train", required=True, metavar="FILE", help="pairs, or texts alone (SimCSE)")
    add("--dev", required=True, metavar="FILE", help="decides about the best weights and early stopping")
    add("--test", default="", metavar="FILE", help="scored with the best weights")
    add("--dev-text", action="append", metavar="COLUMN", help="columns of --dev and --test, where they are not those of --train")  # fmt: skip
    add("--pool", choices=POOLS, default=d.pool, help="a text's vector: the mean of its tokens', or that of [CLS] (left to right: of [SEP])")  # fmt: skip
    add("--temperature", type=float, default=d.temperature, help="of the cosines in the loss")
    add("--batch", type=int, default=d.batch, help="pairs an update, each the others' negatives, on all ranks")
    add("--micro-batch", type=int, default=d.micro_batch, help="texts of one forward pass on one rank; 0: all. Fewer take less memory and compute each forward pass twice; the update is the same but for the draws of dropout")  # fmt: skip
    add("--seeds", type=int, nargs="+", default=[1], help="how many, or which")
    add("--grid", nargs="+", default=[], metavar="NAME=A,B", help=f"over {', '.join(search.AXES)}")
    add("--lr", type=float, default=d.lr, help="peak learning rate")
    add("--epochs", type=int, default=d.epochs, help="times that every pair is learned from")
    add("--dropout", type=float, default=d.dropout, help="of the encoder")
    add("--warmup", type=float, default=d.warmup, help="share of the updates")
    add("--weight-decay", type=float, default=d.weight_decay, help="of AdamW")
    add("--max-length", type=int, default=d.max_length, help="tokens of a text; longer ones are cut")
    add("--evaluations", type=int, default=d.evaluations, help="an epoch")
    add("--patience", type=int, default=d.patience, help="evaluations without improvement that end a run; 0: never")  # fmt: skip
    add("--from-scratch", action="store_true", help="same shape, random weights")
    add("--precision", choices=("auto", "bf16", "fp32"), default=d.precision, help="of forward and backward; auto: bf16 where the device multiplies it")  # fmt: skip
    add("--zero", type=int, choices=(0, 1, 2), default=d.zero, help="DeepSpeed ZeRO stage")
    add("--log-interval", type=int, default=20, metavar="UPDATES", help="between progress lines")
    add("--local_rank", type=int, metavar="N", help="set by launchers")
    return parser.parse_args(argv)


def settings_of(args: argparse.Namespace) -> Settings:
    """The options that are settings of a run. Raises ValueError naming one that is out of range."""
    settings = Settings(**{f.name: getattr(args, f.name) for f in fields(Settings) if hasattr(args, f.name)})
    check(settings)
    if not 0 < settings.temperature < float("inf"):
        raise ValueError(f"--temperature {settings.temperature:g}: must be above 0")
    if settings.batch < 2:
        raise ValueError(f"--batch {settings.batch}: a pair alone has no negatives; 2 at least")
    return settings


def columns_of(args: argparse.Namespace) -> tuple[Columns, Columns]:
    """Of the file that is learned from, and of those that are judged by."""
    text, judged = (tuple(given or ()) for given in (args.text, getattr(args, "dev_text", None) or args.text))
    label, negative = {"label": args.label, "positive": args.positive}, tuple(args.negative or ())
    # Labels and negatives are of the columns that --text names, or of the only pairs there are.
    of_text, same = len(text) == 2 or not judged, judged == text
    mine, theirs = (label if of_text else {}), (label if same or not of_text else {})
    return Columns(text, negative, **mine), Columns(
        judged, negative if same and not args.score else (), score=args.score, **theirs
    )


def read(args: argparse.Namespace) -> Data:
    """The files of a run. Raises ValueError naming file and line of what cannot be used."""
    learned, judged = columns_of(args)
    train = pairs.read(args.train, learned, args.limit)
    assert isinstance(train, Pairs)
    found = {
        name: read_judged(getattr(args, name), judged, args.limit) for name in ("dev", "test") if getattr(args, name)
    }
    return Data(train, found)


def read_judged(path: str, columns: Columns, limit: int) -> Pairs | Scored:
    """A file to judge by. Raises ValueError where it has texts alone, or the package that counts is missing."""
    found = pairs.read(path, columns, limit)
    if isinstance(found, Pairs):
        if (found.first == found.second).all():
            raise ValueError(
                f"{path}: texts alone cannot be judged by; name the two columns of pairs, and --score where they have one"
            )
        metrics.require()
    return found


def facts(args: argparse.Namespace, start: Pretrained) -> dict[str, Any]:
    """What decides the results besides the settings, in a form that can be compared."""
    learned, judged = (asdict(columns) for columns in columns_of(args))
    found = {"task": "embeddings", "columns": learned, "judged_columns": judged, "limit": args.limit}
    found["model_sha256"] = pretrained.fingerprint(start.weights)
    for name in ("train", "dev", "test"):
        if path := getattr(args, name):
            found[f"{name}_sha256"] = datasets.digest(Path(path))
    return found


def train(args: argparse.Namespace, ranks: Session) -> int:
    """Every combination that has no result yet, then the table."""
    stop, world = ranks.join(), ranks.world
    args.precision = precision.choose(args.precision, world)
    settings, grid = settings_of(args), search.parse_grid(args.grid)
    runs = search.combinations(settings, grid, search.parse_seeds(args.seeds))
    data = read(args)
    start = pretrained.load(args.model, args.tokenizer)
    hf_tokenizer.build(start.tokenizer)  # what cannot be saved is not trained
    alone = bool((data.train.first == data.train.second).all())
    for chosen in runs.values():  # whatever does not fit is said before anything is written
        check(chosen)
        training.configured(start.config, chosen, len(data.train), world.size, args.log_interval)
        if alone and not chosen.dropout:
            raise ValueError("--dropout 0: texts alone are learned from by two dropout masks; give some")
    log.info(f"train: {len(data.train):,} {'texts' if alone else 'pairs'}, {len(data.train.texts):,} distinct texts")
    for name, part in data.judged.items():
        log.info(f"{name}: {len(part):,} pairs, {len(part.texts):,} distinct texts")
    common = search.common_settings(settings, grid, facts(args, start))

    def begin(folder: Path, name: str, chosen: Settings) -> EmbeddingRun:
        return EmbeddingRun(folder, name, data, start, chosen, world, args.log_interval)

    figure = training.figure_of(data.judged["dev"])
    return search.train_all(Path(args.output), runs, begin, common, list(grid), figure, ranks, stop)


def evaluate(args: argparse.Namespace, ranks: Session) -> int:
    """Figures of a model on a file, as one JSON line."""
    ranks.join()
    given = read_judged(args.test, columns_of(args)[1], args.limit)
    module, found, pooling = training.load(
        args.model, ranks.world, torch.float32, args.pool, args.max_length, args.tokenizer
    )
    scores = training.judge(module, given, found.tokenizer, pooling.max_length, ranks.world)
    if scores is None:
        raise ValueError(f"{args.model}: a vector is not finite; its training diverged")
    if ranks.world.is_main:
        about = {"pairs": len(given), "texts": len(given.texts), "pool": pooling.pool, "max_length": pooling.max_length}
        print(json.dumps(about | scores))
    return OK


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    keep_freed_memory()

    def command(ranks: Session) -> int:
        check_counts(args)
        return train(args, ranks) if args.command == "train" else evaluate(args, ranks)

    return session.run(command)
