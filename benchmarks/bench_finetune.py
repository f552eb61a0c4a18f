"""Scores of tasks fine-tuned from several pre-trained models and from random initialisation, on the same files.

    python benchmarks/bench_finetune.py --models winner=RUN control=RUN --tasks ../shared/data/tasks --seeds 5 \
        --work runs/finetune --json FILE

All starts are fine-tuned by `python -m megabert.finetune` with the same files, seeds and settings; random weights have the
first model's shape; fixed features are the first model's, under a BiLSTM. The best weights are chosen on a part of the
training file, the figures are of other items. `gains`: what the first model is above each other start, with the middle 95% of
a paired bootstrap over items and seeds. The file is written after each row, and a repeated command goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware
from benchmarks.finetune.cases import CASES, Case, Files
from benchmarks.finetune.tallies import Tally, interval, ratio

RANDOM, FIXED = "random weights", "fixed features"
NEAR = 1e-6  # between a run's own score and its tallies'


def finetune(
    case: Case, name: str, start: Path, extra: str, files: Files, args: argparse.Namespace
) -> tuple[dict[str, Any], list[list[Tally]]]:
    """A row, with the mean, deviation and every seed's scores, and each seed's tallies.

    Raises CalledProcessError when a run fails.
    """
    output = args.work / f"{case.name}-{name}".replace(" ", "-").lower()
    settings = f"--lr {args.lr} --batch {args.batch} --seeds {args.seeds} {case.options} {extra}"
    command = [sys.executable, "-m", "megabert.finetune", "--model", str(start), *shlex.split(settings)]
    command += ["--train", str(files.train), "--dev", str(files.chosen_on), "--test", str(files.reported)]
    command += ["--output", str(output)]
    subprocess.run(command, env=hardware.clone_environment(), check=True)
    summary = json.loads((output / "summary.json").read_text())
    (point,) = summary["points"]
    runs = [run["scores"]["test"] for run in summary["runs"]]
    seeds = range(1, args.seeds + 1)
    predictions = [path for seed in seeds for path in output.glob(f"seed{seed}/predictions-test.*")]
    tallies = [case.tally(files.reported, path) for path in predictions]
    seen = sorted(ratio(run) for run in tallies)
    scored = sorted(run[case.metric] for run in runs)
    if len(seen) != len(scored) or any(abs(a - b) > NEAR for a, b in zip(seen, scored, strict=True)):
        raise ValueError(f"{output}: its runs score {scored}, their predictions {seen}")
    row = {
        "command": hardware.shown(command),
        "metric": case.metric,
        "scores": point["scores"]["test"],
        "runs": runs,
        "seconds_a_run": point["seconds"],
    }
    return row, tallies


def described(model: Path) -> dict[str, Any]:
    """How the model was pre-trained, and what that run measured of it."""
    from megabert import hf as pretrained
    from megabert.hf import model_card

    found = pretrained.load(model)
    return model_card.recipe(found) | model_card.figures(found)


def table(results: dict[str, Any]) -> str:
    """Markdown: a task a line, starts across, each with what the first model is above it."""
    starts = list(dict.fromkeys(name for result in results.values() for name in result["rows"]))
    lines = [f"| task | metric | {' | '.join(starts)} |", "|---|---|" + "---|" * len(starts)]
    for task, result in results.items():
        cells = []
        for start in starts:
            row, gain = result["rows"].get(start), result["gains"].get(start)
            figure = row and row["scores"][row["metric"]]
            cell = f"{100 * figure['mean']:.1f} ± {100 * figure['std']:.1f}" if figure else ""
            if gain:
                cell += f" ({100 * gain['gain']:+.1f}, {100 * gain['low']:+.1f} to {100 * gain['high']:+.1f})"
            cells.append(cell)
        lines.append(f"| {task} | {result['metric']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def named(text: str) -> tuple[str, Path]:
    """NAME=RUN. Raises ArgumentTypeError for anything else."""
    name, _, path = text.partition("=")
    if not name or not path or name in (RANDOM, FIXED):
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=RUN, a name of your own and the model's folder")
    return name, Path(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", type=named, nargs="+", required=True, metavar="NAME=RUN",
        help="run folders, checkpoints or Hugging Face folders; the first is compared with all others")  # fmt: skip
    add("--tasks", type=Path, required=True,
        help="folder with sst2, rte, wnut17, sentence_polarity, squad1.1")  # fmt: skip
    add("--work", type=Path, default=hardware.ROOT / "runs/finetune", help="folder of the runs")
    add("--only", nargs="+", choices=[case.name for case in CASES], help="these tasks alone")
    add("--no-random", action="store_true", help="without the row of random weights, which takes as long as a model's")
    add("--fixed", action="store_true", help="a row by fixed features where the task has one")
    add("--seeds", type=int, default=3)
    add("--lr", default="3e-4")
    add("--batch", type=int, default=32)
    hardware.add_json(parser, "write the result here; other tasks in it stay")
    args = parser.parse_args()
    hardware.refuse_dirty(parser, args)
    models = dict(args.models)
    if len(models) < len(args.models):
        parser.error("--models: two of one name")
    args.work.mkdir(parents=True, exist_ok=True)
    about = {name: described(path) for name, path in models.items()}
    results: dict[str, Any] = {}
    if args.json and args.json.exists():
        written = json.loads(args.json.read_text())
        for what, value in (("models", about), ("seeds", args.seeds)):
            if written[what] != value:
                parser.error(f"--json {args.json}: holds rows of other {what}; name another file")
        results = written["tasks"]
    first = next(iter(models))
    starts = {name: (path, "") for name, path in models.items()}
    if not args.no_random:
        starts[RANDOM] = (models[first], "--from-scratch")
    for case in CASES:
        if args.only and case.name not in args.only:
            continue
        files = case.files(args.tasks, args.work)
        rows: dict[str, Any] = {}
        gains: dict[str, Any] = {}
        fixed = {FIXED: (models[first], case.fixed)} if args.fixed and case.fixed else {}
        for name, (start, extra) in (starts | fixed).items():
            rows[name], counted = finetune(case, name, start, extra, files, args)
            if name == first:
                ours = counted
            else:
                gains[name] = interval(ours, counted)
            results[case.name] = {"metric": case.metric, "rows": rows, "gains": gains}
            if args.json:
                hardware.write_json(args.json, {"models": about, "seeds": args.seeds, "tasks": results})
    print(table(results))


if __name__ == "__main__":
    main()
