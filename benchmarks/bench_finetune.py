"""Scores of tasks fine-tuned from a pre-trained model and from random initialisation.

    python benchmarks/bench_finetune.py --model RUN --tasks ../shared/data/tasks --work runs/finetune --json FILE

Both starts have the same shape, tokenizer, files, seeds and settings, by `python -m megabert.finetune` itself; WNUT-17 also
by fixed features under a BiLSTM. ratio is the pre-trained mean over the random one, above 1 is better; `helps` says whether
the means differ by more than both standard deviations together. The file is written after each row, and a repeated command
goes on where it was.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware

DEV_SHARE = 10  # every 10th article or sentence is development data where there is no such file
SQUAD_TRAIN, SQUAD_DEV = 4_000, 800  # questions: all 87,599 take hours on two cores


@dataclass(frozen=True)
class Case:
    """A task: its options of `megabert.finetune`, the metric to compare, and where its files come from.

    `files(tasks folder, scratch folder)` gives the training and the development file. `fixed`: options of a row by fixed
    features in addition.
    """

    name: str
    options: str
    metric: str
    files: Callable[[Path, Path], tuple[Path, Path]]
    fixed: str = ""


def given(folder: str, train: str, dev: str) -> Callable[[Path, Path], tuple[Path, Path]]:
    """Files that are there as they are."""
    return lambda tasks, scratch: (tasks / folder / train, tasks / folder / dev)


def polarity(tasks: Path, scratch: Path) -> tuple[Path, Path]:
    """Pang and Lee's sentences as tables: one file a class, every 10th sentence for development."""
    parts: dict[str, list[str]] = {"train": ["label\tsentence"], "dev": ["label\tsentence"]}
    for label, ending in (("0", "neg"), ("1", "pos")):
        (source,) = sorted((tasks / "sentence_polarity").rglob(f"*{ending}*"))[-1:]
        for number, line in enumerate(source.read_text(encoding="utf-8").splitlines()):
            name = "dev" if number % DEV_SHARE == 0 else "train"
            if line.strip():
                parts[name].append(f"{label}\t{' '.join(line.split())}")
    for name, lines in parts.items():
        (scratch / f"polarity-{name}.tsv").write_text("\n".join(lines) + "\n")
    return scratch / "polarity-train.tsv", scratch / "polarity-dev.tsv"


def squad(tasks: Path, scratch: Path) -> tuple[Path, Path]:
    """SQuAD 1.1's training articles, every 10th for development, both cut to a number of questions."""
    with gzip.open(tasks / "squad1.1/train-v1.1.json.gz", "rt") as file:
        articles = json.load(file)["data"]
    for name, most in (("train", SQUAD_TRAIN), ("dev", SQUAD_DEV)):
        chosen = [a for n, a in enumerate(articles) if (n % DEV_SHARE == 0) == (name == "dev")]
        share = most / sum(len(p["qas"]) for a in chosen for p in a["paragraphs"])
        for article in chosen:  # the first paragraphs of each article
            article["paragraphs"] = article["paragraphs"][: max(1, round(share * len(article["paragraphs"])))]
        (scratch / f"squad-{name}.json").write_text(json.dumps({"version": "1.1", "data": chosen}))
    return scratch / "squad-train.json", scratch / "squad-dev.json"


CASES = (
    Case("SST-2", "--task sst2 --epochs 2 --batch 64", "accuracy", given("sst2", "train.tsv", "dev.tsv")),
    Case("RTE", "--task rte --epochs 3 --max-length 128", "accuracy", given("rte", "train.tsv", "dev.tsv")),
    Case(
        "WNUT-17",
        "--kind tag --epochs 15",
        "f1",
        given("wnut17", "wnut17train.conll", "emerging.dev.conll"),
        fixed="--freeze --head bilstm --lr 1e-3",
    ),
    Case(
        "sentence polarity",
        "--kind classify --text sentence --label label --metric accuracy --epochs 4",
        "accuracy",
        polarity,
    ),
    Case("SQuAD 1.1", "--task squad1.1 --epochs 2 --max-length 128 --stride 96", "f1", squad),
)
STARTS = {"random": "--from-scratch", "pre-trained": "", "fixed features": None}


def finetune(
    case: Case, start: str, extra: str, files: tuple[Path, Path], args: argparse.Namespace
) -> dict[str, Any]:
    """One row: mean, deviation and every seed's scores. Raises CalledProcessError when a run fails."""
    output = args.work / f"{case.name.replace(' ', '-').lower()}-{start.replace(' ', '-')}"
    settings = f"--lr {args.lr} --batch {args.batch} --seeds {args.seeds} {case.options} {extra}"
    command = [sys.executable, "-m", "megabert.finetune", "--model", str(args.model), *shlex.split(settings)]
    command += ["--train", str(files[0]), "--dev", str(files[1]), "--output", str(output)]
    subprocess.run(command, env=hardware.clone_environment(), check=True)
    summary = json.loads((output / "summary.json").read_text())
    (point,) = summary["points"]
    figures = point["scores"]["dev"]
    runs = [run["scores"]["dev"] for run in summary["runs"]]
    return {
        "command": hardware.shown(command),
        "metric": case.metric,
        "scores": figures,
        "runs": runs,
        "seconds_a_run": point["seconds"],
    }


def described(model: Path) -> dict[str, Any]:
    """How the model was pre-trained, and what that run measured of it."""
    from megabert import pretrained
    from megabert.pretrained import model_card

    found = pretrained.load(model)
    return model_card.recipe(found) | model_card.figures(found)


def compare(rows: dict[str, Any], metric: str) -> dict[str, Any]:
    """Pre-trained against random, where both are there."""
    if not {"random", "pre-trained"} <= rows.keys():
        return {}
    before, after = (rows[name]["scores"][metric] for name in ("random", "pre-trained"))
    gain = after["mean"] - before["mean"]
    return {
        "gain": gain,
        "helps": gain > before["std"] + after["std"],
        "ratio": after["mean"] / before["mean"] if before["mean"] else None,
    }


def table(results: dict[str, Any]) -> str:
    """Markdown: a task a line, starts across."""
    lines = [f"| task | metric | {' | '.join(STARTS)} | helps |", "|---|---|" + "---|" * (len(STARTS) + 1)]
    for name, result in results.items():
        cells = []
        for start in STARTS:
            row = result["rows"].get(start)
            figure = row and row["scores"][row["metric"]]
            cells.append(f"{100 * figure['mean']:.1f} ± {100 * figure['std']:.1f}" if figure else "")
        helps = {True: "yes", False: "no", None: ""}[result.get("helps")]
        lines.append(f"| {name} | {result['metric']} | {' | '.join(cells)} | {helps} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="run folder, checkpoint or Hugging Face folder")
    add(
        "--tasks", type=Path, required=True, help="folder with sst2, rte, wnut17, sentence_polarity, squad1.1"
    )
    add("--work", type=Path, default=hardware.ROOT / "runs/finetune", help="folder of the runs")
    add("--only", nargs="+", choices=[case.name for case in CASES], help="these tasks alone")
    add("--seeds", type=int, default=3)
    add("--lr", default="3e-4")
    add("--batch", type=int, default=32)
    hardware.add_json(parser, "write the result here; other tasks in it stay")
    args = parser.parse_args()
    hardware.refuse_dirty(parser, args)
    args.work.mkdir(parents=True, exist_ok=True)
    model = described(args.model)
    results: dict[str, Any] = {}
    if args.json and args.json.exists():
        written = json.loads(args.json.read_text())
        for what, value in (("model", model), ("seeds", args.seeds)):
            if written[what] != value:
                parser.error(f"--json {args.json}: holds rows of another {what}; name another file")
        results = written["tasks"]
    for case in CASES:
        if args.only and case.name not in args.only:
            continue
        files, rows = case.files(args.tasks, args.work), {}
        for start, extra in (STARTS | {"fixed features": case.fixed or None}).items():
            if extra is None:
                continue
            rows[start] = finetune(case, start, extra, files, args)
            results[case.name] = {"metric": case.metric, "rows": rows} | compare(rows, case.metric)
            if args.json:
                hardware.write_json(args.json, {"model": model, "seeds": args.seeds, "tasks": results})
    print(table(results))


if __name__ == "__main__":
    main()
