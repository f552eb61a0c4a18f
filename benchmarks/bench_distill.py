"""A student against its teacher: speed on the same packed text, held-out figures, and a task's scores where there are any.

    python benchmarks/bench_distill.py --teacher RUN --student RUN --data DATA --json FILE
        [--teacher-scores DIR/summary.json --student-scores DIR/summary.json]

The summaries are those of `python -m megabert.finetune` on the same task, from the one and from the other. `ratio` is
the student's sequences a second over the teacher's, in a forward pass without heads; above 1 is better.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware, measure

Result = dict[str, Any]
FIGURES = {"eval/mlm_loss": "held-out MLM loss", "eval/mlm_accuracy": "held-out MLM accuracy"}


def score_of(path: str) -> Result | None:
    """Dev score of a fine-tuning's best grid point; None without a file. Raises ValueError for what is no summary."""
    if not path:
        return None
    try:
        tree = json.loads(Path(path).read_text())
        task, metric, best = tree["settings"]["task"], tree["settings"]["metrics"][0], tree["points"][0]
        return {"task": task, "metric": metric, "runs": best["runs"], **best["scores"]["dev"][metric]}
    except (ValueError, KeyError, IndexError, TypeError):
        raise ValueError(f"{path}: is no summary.json of megabert.finetune") from None


def compare(args: argparse.Namespace) -> Result:
    """Both models on the same held-out rows. Raises ValueError when they have not the same tokenizer or task."""
    import torch

    from megabert import pretrained
    from megabert.training import evaluation
    from megabert.training.distillation import ENCODED

    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.precision]
    found = {"teacher": pretrained.load(args.teacher), "student": pretrained.load(args.student)}
    tokenizer, cfg = found["teacher"].tokenizer, found["student"].config
    if tokenizer.sha256 != found["student"].tokenizer.sha256:
        raise ValueError(f"{args.student}: its tokenizer is not that of {args.teacher}")
    scores = {"teacher": score_of(args.teacher_scores), "student": score_of(args.student_scores)}
    tasks = {(s["task"], s["metric"]) for s in scores.values() if s}
    if len(tasks) > 1:
        raise ValueError("--teacher-scores and --student-scores are of different tasks")
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
            "score": scores[name],
        }
    teacher, student = result["sides"]["teacher"], result["sides"]["student"]
    middle = [side["sequences_per_second"]["p50"] for side in (student, teacher)]
    result["ratio"] = round(middle[0] / middle[1], 3)
    if student["score"] and teacher["score"]:
        result["kept"] = round(student["score"]["mean"] / teacher["score"]["mean"], 4)
    return result


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
    known = teacher["score"] or student["score"]
    name = f"{known['task']} {known['metric']}, dev" if known else "fine-tuned score"
    scores = [
        f"{side['score']['mean']:.4f} ± {side['score']['std']:.4f}" if side["score"] else "not measured"
        for side in (teacher, student)
    ]
    rows.append([name, *scores, f"{result['kept']:.4f}" if "kept" in result else "not measured"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--teacher", required=True, help="run folder")
    add("--student", required=True, help="run folder")
    add("--data", required=True, help="dataset with a held-out split")
    add("--teacher-scores", default="", metavar="SUMMARY", help="of the fine-tuned teacher")
    add("--student-scores", default="", metavar="SUMMARY", help="of the fine-tuned student")
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
