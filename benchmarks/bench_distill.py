"""Speed, held-out figures and task scores of a student, its teacher, and the rows that say what distillation was worth.

    python benchmarks/bench_distill.py --teacher RUN --student RUN --data DATA --json FILE
        [--task 'sst2 train.tsv dev.tsv --lr 3e-4 --seeds 3' --work runs/distill]
        [--teacher-scores DIR/summary.json --student-scores DIR/summary.json]

`ratio` is the student's sequences a second over the teacher's, in a forward pass without heads; above 1 is better.
`--task` fine-tunes teacher and student and, as `kept` says little alone, the rows beside them, all in the same way:

- `student's start`: the layers of the teacher that the student began from, as they are
- `trained without the teacher`: the same start and the same updates with the masked-language-model loss alone
- `random, student's size` and `random, teacher's size`: the same shapes from random weights

`kept` is the student's score over the teacher's, `random_keeps` that of random weights of the student's size;
`gain_kept` is the share of what pre-training gives the teacher over random weights that the student has over random
weights of its own size. Summaries of `python -m megabert.finetune` that are there already may be given in place of --task.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware, measure
from benchmarks.common.commands import call, fine_tune, score_of, task_label

Result = dict[str, Any]
START, ALONE = "student's start", "trained without the teacher"
RANDOM, RANDOM_TEACHER = "random, student's size", "random, teacher's size"
ROWS = ("teacher", "student", START, ALONE, RANDOM, RANDOM_TEACHER)
FIGURES = {"eval/mlm_loss": "held-out MLM loss", "eval/mlm_accuracy": "held-out MLM accuracy"}


def start_of(teacher: Any, student: Any, folder: Path) -> Path:
    """A run folder that holds the student before its first update."""
    from megabert import checkpoint
    from megabert.distillation import first_weights

    if not (folder / "checkpoints").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        shape = student.config.model
        weights = first_weights(teacher.weights, teacher.config.model.layers, shape)
        checkpoint.write_start(folder, weights, student.state | {"step": 0})
        (folder / student.tokenizer.file_name).write_bytes(student.tokenizer.data)
    return folder


def without_teacher(args: argparse.Namespace, student: Any, folder: Path) -> Path:
    """A run folder of the student's own training with the teacher's losses off: same start, data and updates."""
    from megabert.distillation import student_overrides

    settings = student_overrides(student.config, str(Path(args.teacher).resolve()), student.config.model.layers)
    command = [sys.executable, str(hardware.ROOT / "megabert/train.py"), "--data", args.data, "--run"]
    command += [str(folder), *settings, "distill.mlm=1", "distill.soft=0", "distill.cosine=0"]
    call(command, args.threads, folder.with_name(f"{folder.name}.log"))
    return folder


def scores(args: argparse.Namespace, found: dict[str, Any]) -> dict[str, Result | None]:
    """Score by row; None for a row that was not measured. Raises ValueError when they are of different tasks."""
    rows: dict[str, Result | None] = dict.fromkeys(ROWS)
    given = {"teacher": args.teacher_scores, "student": args.student_scores}
    rows |= {name: score_of(Path(path)) for name, path in given.items() if path}
    if args.task:
        task_label(args.task)
        work = args.work.resolve()
        models: dict[str, Callable[[], Path]] = {
            "teacher": lambda: Path(args.teacher),
            "student": lambda: Path(args.student),
            START: lambda: start_of(found["teacher"], found["student"], work / "start"),
            ALONE: lambda: without_teacher(args, found["student"], work / "alone"),
            RANDOM: lambda: Path(args.student),
            RANDOM_TEACHER: lambda: Path(args.teacher),
        }
        for name in args.rows:
            if rows[name] is None:
                output = work / f"{name.replace(' ', '-').replace(chr(39), '').replace(',', '')}-scores"
                random = ["--from-scratch"] if name in (RANDOM, RANDOM_TEACHER) else []
                print(f"{name} …", file=sys.stderr, flush=True)
                rows[name] = fine_tune(models[name](), args.task, output, args.threads, *random)
    if len({(row["task"], row["metric"]) for row in rows.values() if row}) > 1:
        raise ValueError("--task, --teacher-scores and --student-scores are of different tasks")
    return rows


def worth(rows: dict[str, Result | None]) -> Result:
    """What the student keeps of its teacher's score, beside what random weights keep; only what was measured."""
    mean = {name: row["mean"] for name, row in rows.items() if row}
    result: Result = {}
    if {"teacher", "student"} <= mean.keys() and mean["teacher"]:
        result["kept"] = round(mean["student"] / mean["teacher"], 4)
        if RANDOM in mean:
            result["random_keeps"] = round(mean[RANDOM] / mean["teacher"], 4)
        if {RANDOM, RANDOM_TEACHER} <= mean.keys() and mean["teacher"] != mean[RANDOM_TEACHER]:
            gains = (mean["student"] - mean[RANDOM], mean["teacher"] - mean[RANDOM_TEACHER])
            result["gain_kept"] = round(gains[0] / gains[1], 4)
    return result


def compare(args: argparse.Namespace) -> Result:
    """Both models on the same held-out rows. Raises ValueError when they have not the same tokenizer or task."""
    import torch

    from megabert import evaluation
    from megabert import hf as pretrained
    from megabert.distillation import ENCODED

    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.precision]
    found = {"teacher": pretrained.load(args.teacher), "student": pretrained.load(args.student)}
    tokenizer, cfg = found["teacher"].tokenizer, found["student"].config
    if tokenizer.sha256 != found["student"].tokenizer.sha256:
        raise ValueError(f"{args.student}: its tokenizer is not that of {args.teacher}")
    rows = evaluation.held_out(args.data, cfg)
    batch = next(iter(evaluation.fixed_batches(rows, tokenizer, cfg))).to(device)
    inputs = {name: batch.inputs()[name] for name in ENCODED}
    models, sides = {}, {}
    for name, one in found.items():
        models[name] = one.model(device).to(dtype)

    def side(name: str) -> Any:
        return lambda: models[name].encode(**inputs)

    sides = {name: side(name) for name in models}
    with torch.no_grad():
        seconds = measure.in_turn(sides, device, args.rounds)
    result: Result = {"precision": args.precision, "threads": args.threads, "sides": {}}
    for name, one in found.items():
        speed = {k: batch.sequences / s for k, s in measure.quantiles(seconds[name]).items()}
        figures = evaluation.summary(
            evaluation.batch_sums(models[name], evaluation.fixed_batches(rows, tokenizer, cfg), device)
        )
        result["sides"][name] = {
            "layers": one.config.model.layers,
            "parameters": sum(p.numel() for p in models[name].parameters()),
            "step": one.step,
            "sequences_per_second": {k: round(v, 2) for k, v in sorted(speed.items())},
            **{key: round(figures[key], 5) for key in FIGURES},
        }
    teacher, student = result["sides"]["teacher"], result["sides"]["student"]
    middle = [side["sequences_per_second"]["p50"] for side in (student, teacher)]
    result["ratio"] = round(middle[0] / middle[1], 3)
    result["scores"] = scores(args, found)
    return result | worth(result["scores"])


def table(result: Result) -> str:
    """Teacher, student, and what the student has of the teacher's, in Markdown."""
    teacher, student = result["sides"]["teacher"], result["sides"]["student"]
    rows = [["", "teacher", "student", "student / teacher"], ["---"] * 4]

    def add(name: str, form: str, of_teacher: float, of_student: float) -> None:
        share = f"{of_student / of_teacher:.3f}" if of_teacher else "-"
        rows.append([name, format(of_teacher, form), format(of_student, form), share])

    for key in ("layers", "parameters"):
        add(key, ",", teacher[key], student[key])
    add("sequences/s, forward", ",.1f", *(side["sequences_per_second"]["p50"] for side in (teacher, student)))
    for key, name in FIGURES.items():
        add(name, ".4f", teacher[key], student[key])
    measured = next((row for row in result["scores"].values() if row), None)
    rows += [
        ["", "", "", ""],
        [f"{measured['task']} {measured['metric']}, dev" if measured else "task score", "", "", "over the teacher's"],
    ]
    of_teacher = result["scores"]["teacher"]
    for name, row in result["scores"].items():
        shown = f"{row['mean']:.4f} ± {row['std']:.4f}" if row else "not measured"
        share = f"{row['mean'] / of_teacher['mean']:.4f}" if row and of_teacher else ""
        rows.append([name, shown, "", share])
    if "gain_kept" in result:
        rows.append(["kept of the gain over random weights", f"{result['gain_kept']:.4f}", "", ""])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--teacher", required=True, help="run folder")
    add("--student", required=True, help="run folder")
    add("--data", required=True, help="dataset with a held-out split")
    add("--teacher-scores", default="", metavar="SUMMARY", help="of the fine-tuned teacher")
    add("--student-scores", default="", metavar="SUMMARY", help="of the fine-tuned student")
    add("--task", default="", metavar="SPEC", help="'TASK TRAIN DEV [options of megabert.finetune]', in quotes")
    add("--rows", nargs="+", choices=ROWS, default=ROWS, metavar="ROW", help=f"of --task: {'; '.join(ROWS)}")
    add("--work", type=Path, default=hardware.ROOT / "runs/distill", help="folder of the rows' runs")
    add("--precision", choices=("bf16", "fp32"), default="bf16")
    add("--threads", type=int, default=2)
    add("--rounds", type=int, default=15)
    hardware.add_json(parser)
    args = parser.parse_args(argv)
    hardware.refuse_dirty(parser, args)
    try:
        result = compare(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        hardware.write_json(args.json, result)
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
