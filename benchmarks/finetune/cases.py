"""Tasks of bench_finetune.py: their options, and the files that are learnt from, chosen on and reported on.

What is reported decides nothing: the best weights are chosen on a part that is cut from the training file, every 10th
row, sentence or article of it.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.finetune import tallies
from benchmarks.finetune.tallies import Tally

EVERY = 10  # of these one is held out
TRAIN_ROWS = 20_000  # of a table: all 67,349 phrases of SST-2 take five minutes a run on two cores
SQUAD_TRAIN, SQUAD_CHOSEN, SQUAD_REPORTED = 4_000, 400, 800  # questions: all 87,599 take hours


@dataclass(frozen=True)
class Files:
    """What is learnt from, what decides about the best weights, and what the figures are of."""

    train: Path
    chosen_on: Path
    reported: Path


@dataclass(frozen=True)
class Case:
    """A task: its options of `megabert.finetune`, the metric to compare, where its files come from, and what a predictions
    file counts by that metric. `files(tasks folder, scratch folder)`; `fixed`: options of a row by fixed features."""

    name: str
    options: str
    metric: str
    files: Callable[[Path, Path], Files]
    tally: Callable[[Path, Path], list[Tally]]
    fixed: str = ""


def hold_out(members: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The members to keep, and every 10th."""
    kept = [member for n, member in enumerate(members) if n % EVERY]
    return kept, list(members[::EVERY])


def rows_of(folder: str) -> Callable[[Path, Path], Files]:
    """train.tsv and dev.tsv of a folder; of a longer training file so many rows as are learnt from, drawn once."""

    def cut(tasks: Path, scratch: Path) -> Files:
        head, *rows = (tasks / folder / "train.tsv").read_text(encoding="utf-8").splitlines()
        train, chosen_on = hold_out(rows)
        if len(train) > TRAIN_ROWS:
            train = random.Random(0).sample(train, TRAIN_ROWS)
        return Files(
            train=write_lines(scratch / f"{folder}-train.tsv", [head, *train]),
            chosen_on=write_lines(scratch / f"{folder}-chosen-on.tsv", [head, *chosen_on]),
            reported=tasks / folder / "dev.tsv",
        )

    return cut


def polarity(tasks: Path, scratch: Path) -> Files:
    """Pang and Lee's sentences as tables, from one file a class: every 10th is reported on."""
    parts: dict[str, list[str]] = {"train": [], "chosen-on": [], "reported": []}
    for label, ending in (("0", "neg"), ("1", "pos")):
        (source,) = sorted((tasks / "sentence_polarity").rglob(f"*{ending}*"))[-1:]
        lines = [" ".join(line.split()) for line in source.read_text(encoding="utf-8").splitlines()]
        rest, reported = hold_out([f"{label}\t{line}" for line in lines if line])
        for name, of in zip(parts, (*hold_out(rest), reported), strict=True):
            parts[name] += of
    paths = {
        name: write_lines(scratch / f"polarity-{name}.tsv", ["label\tsentence", *rows]) for name, rows in parts.items()
    }
    return Files(paths["train"], paths["chosen-on"], paths["reported"])


def sentences(tasks: Path, scratch: Path) -> Files:
    """WNUT-17's sentences of tagged words."""
    text = (tasks / "wnut17/wnut17train.conll").read_text(encoding="utf-8")
    whole = "\n".join(line.strip() for line in text.splitlines())
    parts = hold_out([block for block in whole.split("\n\n") if block.strip()])
    train, chosen_on = (
        write_lines(scratch / f"wnut17-{name}.conll", ["\n\n".join(part)])
        for name, part in zip(("train", "chosen-on"), parts, strict=True)
    )
    return Files(train, chosen_on, tasks / "wnut17/emerging.dev.conll")


def squad(tasks: Path, scratch: Path) -> Files:
    """SQuAD 1.1's training articles, cut to so many questions: the first paragraphs of each article."""
    with gzip.open(tasks / "squad1.1/train-v1.1.json.gz", "rt") as file:
        rest, reported = hold_out(json.load(file)["data"])
    train, chosen_on = hold_out(rest)
    paths = {}
    for name, articles, most in (
        ("train", train, SQUAD_TRAIN), ("chosen-on", chosen_on, SQUAD_CHOSEN), ("reported", reported, SQUAD_REPORTED)
    ):  # fmt: skip
        share = most / sum(len(p["qas"]) for a in articles for p in a["paragraphs"])
        for article in articles:
            article["paragraphs"] = article["paragraphs"][: max(1, round(share * len(article["paragraphs"])))]
        paths[name] = scratch / f"squad-{name}.json"
        paths[name].write_text(json.dumps({"version": "1.1", "data": articles}))
    return Files(paths["train"], paths["chosen-on"], paths["reported"])


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


CASES = (
    Case("SST-2", "--task sst2 --epochs 4 --batch 64", "accuracy", rows_of("sst2"), tallies.labels),
    Case("RTE", "--task rte --epochs 3 --max-length 128", "accuracy", rows_of("rte"), tallies.labels),
    Case(
        "WNUT-17", "--kind tag --epochs 8", "f1", sentences, tallies.entities, fixed="--freeze --head bilstm --lr 1e-3"
    ),
    Case(
        "sentence polarity",
        "--kind classify --text sentence --label label --metric accuracy --epochs 4",
        "accuracy",
        polarity,
        tallies.labels,
    ),
    Case("SQuAD 1.1", "--task squad1.1 --epochs 3 --max-length 128 --stride 96", "f1", squad, tallies.answers),
)
