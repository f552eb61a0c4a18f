"""Fine-tune a model on every task of GLUE, with a table of results.

megabert glue --model RUN --data DIR --output OUT                         those of GLUE's nine tasks that DIR has
megabert glue … --tasks sst2 rte --seeds 5 --lr 5e-5 3e-4
torchrun --nproc_per_node 8 -m megabert.finetune.glue …

DIR has GLUE's folders as its download makes them (SST-2/train.tsv, dev.tsv, …) or as the hub's nyu-mll/glue has them
(sst2/train-00000-of-00001.parquet, validation-…). Tables may be .tsv, .csv, .jsonl or .parquet, and gzipped. Every task is trained
with all seeds and learning rates. A tenth of the training examples (2,000 at most) is held out to choose the epoch and the rate;
scores on dev are reported and select nothing. The same command resumes; a later one may add seeds, rates and tasks. Exit codes as
of `megabert finetune`.

    OUT/results.md            the table
    OUT/TASK/RUN/…            each run, as of `megabert finetune`
    OUT/TASK/summary.json     every learning rate, best first on the held-out examples
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from megabert.__main__ import start

    sys.exit(start("glue"))  # before the slow imports

import argparse
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megabert.common.arguments import MODEL, Parser, called_as, refuse_missing
from megabert.common.files import refuse_url, write_atomically
from megabert.common.logs import hide_secrets, log
from megabert.finetune import settings as options
from megabert.finetune import tasks
from megabert.finetune.tasks import Task
from megabert.hf.hub import model_folder

if TYPE_CHECKING:
    from megabert.distributed.session import Session
    from megabert.finetune.files import TextExample

# Name of the task -> names of its folder and of its row.
GLUE = {"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "qqp": "QQP"}
GLUE |= {"mnli": "MNLI", "qnli": "QNLI", "rte": "RTE", "wnli": "WNLI"}
# Ending of a dev file's name -> that of its row: MNLI has two.
PARTS = {"": "", "_matched": "-m", "_mismatched": "-mm"}
ENDINGS = r"\.(tsv|csv|jsonl|parquet)(\.gz)?"
FILE = re.compile(r"(train|dev|validation)(_matched|_mismatched)?(-00000-of-00001)?" + ENDINGS)
# Share of the training examples to hold out, and their largest number.
SHARE, MOST = 0.1, 2_000
PAGE = "results.md"
# fields of a summary's settings in which tasks of one page differ
OF_A_TASK = ("task", "kind", "text", "label", "id", "labels", "metrics", "files_sha256", "separators")


# A task with its files: "train" and "reported", for MNLI "reported-m" and "reported-mm".
GlueTask = tuple[Task, dict[str, Path]]


def find_tasks(data: Path, only: Sequence[str] = ()) -> list[GlueTask]:
    """GLUE's tasks in the folder, in the benchmark's order; with `only` exactly those.

    Raises ValueError naming a missing task of `only`, or if there is none.
    """
    if not data.is_dir():
        raise ValueError(f"{data}: no such folder; name the folder of the tasks as --data")
    folders = {re.sub(r"[-_ ]", "", f.name).lower(): f for f in sorted(data.iterdir()) if f.is_dir()}
    files = {name: _files_in(folders[name]) for name in GLUE if name in folders}
    missing = [name for name in (only or GLUE) if not files.get(name)]
    if missing and (only or len(missing) == len(GLUE)):
        what = missing[0] if only else "task of GLUE"
        raise ValueError(f"{data}: has no {what}; each is a folder with train.tsv and dev.tsv, CoLA, SST-2, …")
    if missing:
        log.info(f"{data}: has no {', '.join(GLUE[name] for name in missing)} (no train or no dev file): left out")
    return [(tasks.preset(name), files[name]) for name in GLUE if name in (only or GLUE) and name not in missing]


def _files_in(folder: Path) -> dict[str, Path]:
    """The files of a task's folder by split, a .tsv before others; {} without a training or a dev file."""
    files = {}
    for path in sorted(folder.iterdir(), key=lambda path: (".tsv" in path.suffixes, path)):
        if match := FILE.fullmatch(path.name):
            files["train" if match[1] == "train" else f"reported{PARTS[match[2] or '']}"] = path
    return {"train": files["train"]} | files if "train" in files and len(files) > 1 else {}


def hold_out(examples: Sequence[TextExample]) -> tuple[list[TextExample], list[TextExample]]:
    """(the rest, the held-out part) of `examples`, in order: a function of the texts alone.

    All pairs with the same first text stay together. Raises ValueError if there are too few first texts for two parts.
    """
    wanted = max(1, min(MOST, round(SHARE * len(examples))))
    counts = Counter(example.a for example in examples)
    held: set[str] = set()
    number = 0
    for text in sorted(counts, key=lambda text: hashlib.sha256(f"decides\0{text}".encode()).digest()):
        if number < wanted and number + counts[text] <= min(2 * wanted, len(examples) - 1):
            held.add(text)
            number += counts[text]
    if not held:
        where = examples[0].where.partition(", ")[0]
        raise ValueError(f"{where}: its examples share too few texts, so none can be held out; give more of them")
    return [e for e in examples if e.a not in held], [e for e in examples if e.a in held]


def read_splits(task: Task, files: Mapping[str, Path]) -> dict[str, list[TextExample]]:
    """The examples of each split; "dev" is the held-out part. Raises ValueError naming file and line of unusable data."""
    from megabert.finetune.files import read

    splits = {name: read(task, path) for name, path in files.items()}
    splits["train"], splits["dev"] = hold_out(splits["train"])
    return splits


def render_page(model: str, summaries: Sequence[Mapping[str, Any]]) -> str:
    """The results page of the finished tasks (`run.train_missing`), in percent."""
    lines = ["| task | metric | mean | deviation | seeds | learning rate |", "|---|---|--:|--:|--:|---|"]
    for summary in summaries:
        points = summary["points"]
        tried = f" ({len(points)} tried)" if len(points) > 1 else ""
        for split, metrics in points[0]["scores"].items():
            row = GLUE[summary["settings"]["task"]] + split.removeprefix("reported")
            for metric, score in metrics.items() if split != "dev" else ():
                deviation = f"{100 * score['std']:.1f}" if points[0]["runs"] > 1 else "–"
                cells = [row, metric, f"{100 * score['mean']:.1f}", deviation]
                cells += [str(points[0]["runs"]), f"{points[0]['point']['lr']:g}{tried}"]
                lines.append(f"| {' | '.join(cells)} |")
    notes = ["Percent, of the dev files; correlations times 100. The deviation is the sample's over seeds. Epoch and rate were "
             "chosen on examples held out of the training files."]  # fmt: skip
    if any(summary["settings"]["limit"] for summary in summaries):
        notes.append("**Each split was cut (`--limit`): a trial, not for comparison.**")
    return "\n\n".join([f"# GLUE: {hide_secrets(model)}", "\n".join(lines), *notes]) + "\n"


def publish(output: Path, model: str, summary: Mapping[str, Any]) -> str:
    """Write the table of the finished tasks of the model of `summary`, which is one of them; returns the page and its
    path. Tasks of other models or settings are left out with a warning."""
    from megabert.finetune.run import SUMMARY, read_json

    paths = (output / name / SUMMARY for name in GLUE)
    finished = [
        read_json(path, "remove it; a command with its task writes it again") for path in paths if path.is_file()
    ]

    def common(task: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in task["settings"].items() if name not in OF_A_TASK}

    same = [task for task in finished if common(task) == common(summary)]
    if others := [task["settings"]["task"] for task in finished if task not in same]:
        log.warning(f"{output}: {PAGE} leaves out {', '.join(others)}, which are of another model or of other settings")
    page = render_page(model, same)
    write_atomically(output / PAGE, page.encode())
    return f"{page}\n{output / PAGE}; the best model of a task is named in its {SUMMARY}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog=called_as("megabert.finetune.glue"), description=__doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL", help=MODEL)
    add("--data", required=True, metavar="DIR", help="folder of the tasks")
    add("--output", required=True, metavar="DIR", help="folder of the runs and tables")
    add("--tasks", nargs="+", default=[], choices=list(GLUE), metavar="NAME",
        help="only these: cola, sst2, …; default: all existing ones")  # fmt: skip
    options.add_options(parser, seeds=3, rates=4)
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    """Put the existing tasks into `args.tasks`. Raises ValueError for mistakes in the options and missing packages."""
    options.require_metrics()
    refuse_url(args.output)
    refuse_missing(args, "tokenizer")
    options.list_runs(args, Task.max_length, Task.stride)
    model_folder(args.model)
    args.tasks = [task.name for task, _ in find_tasks(Path(args.data), args.tasks)]


def run_all(args: argparse.Namespace, ranks: Session) -> int:
    """The runs of every task in turn, and the table of the finished ones after each."""
    from megabert.finetune import run

    output = Path(args.output)
    tasks = [(task, files, output / task.name) for task, files in find_tasks(Path(args.data), args.tasks)]
    return run.train_tasks(args, ranks, tasks, read_splits, lambda summary: publish(output, args.model, summary))


def main(argv: list[str] | None = None) -> int:
    return options.run(parse(argv), check, run_all)
