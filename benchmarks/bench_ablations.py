"""Ablations of the recipe: named variants of one training run, each with the same budget, in one table and plot.

    python benchmarks/bench_ablations.py --data DATA --set objective --minutes 20 --json FILE --plot FILE.svg
    python benchmarks/bench_ablations.py … --tasks 'sst2 train.tsv dev.tsv --text content' 'rte train.tsv dev.tsv'

Every variant is trained by megabert/train.py from the same preset and data, evaluated on the same held-out rows, and
fine-tuned by `python -m megabert.finetune` on each of `--tasks`: a known task, its files, and options of that command.
Variants predict different tokens, so their own held-out losses cannot be compared; beside them stand those of every
masked model under one mask (15% single tokens), which can. The file is written after each step, and the same command
again goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware
from benchmarks.common.commands import call, fine_tune, task_label

Result = dict[str, Any]
LOSS, ACCURACY = "eval/mlm_loss", "eval/mlm_accuracy"
UNKNOWN = "not measured"
CAUSAL = ("model.nsp=false", "data.masking.strategy=causal")
SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "objective": {"MLM + NSP": (), "MLM": ("model.nsp=false",), "left to right": CAUSAL},
    "masking": {name: (f"data.masking.strategy={name}",) for name in ("token", "word", "span")},
    "rate": {rate: (f"data.masking.rate={rate}",) for rate in ("0.15", "0.3", "0.4")},
    "precision": {name: (f"precision={name}",) for name in ("bf16", "fp8")},
}
NOTE = (
    "Loss and accuracy are those of each variant's own objective on held-out rows and cannot be compared across rows of "
    "the table; those at token 15% are, all masked variants being evaluated under that one mask."
)


def folder_of(args: argparse.Namespace, variant: str) -> Path:
    return Path(args.run) / args.set / variant.replace(" ", "")


def command_of(args: argparse.Namespace, variant: str) -> list[str]:
    """The training command of a variant."""
    if args.minutes:
        budget = ["schedule.name=budget", f"schedule.budget_minutes={args.minutes}"]
    else:
        budget = ["schedule.name=linear", f"schedule.total_steps={args.steps}"]
        budget.append(f"schedule.warmup_steps={round(0.06 * args.steps)}")
    head = [sys.executable, str(hardware.ROOT / "megabert/train.py"), "--config", args.config]
    head += ["--data", args.data, "--run", str(folder_of(args, variant))]
    return [*head, *budget, *SETS[args.set][variant], *args.overrides]


def train(args: argparse.Namespace, variant: str) -> Result:
    """Trains a variant, or finishes what was begun; its curve and final figures."""
    run, command = folder_of(args, variant), command_of(args, variant)
    call(command, args.threads, run.with_name(f"{run.name}.log"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [
        {"seconds": line["time/train_seconds"], "step": line["step"], LOSS: line[LOSS], ACCURACY: line[ACCURACY]}
        for line in lines
        if LOSS in line
    ]
    rates = sorted(line["perf/tokens_per_sec"] for line in lines if "perf/tokens_per_sec" in line)
    return {
        "command": hardware.shown(command),
        "curve": curve,
        "final": curve[-1],
        "tokens_per_second": round(rates[len(rates) // 2], 1) if rates else None,
        "token15": under_one_mask(args, run),
        "tasks": {},
    }


def under_one_mask(args: argparse.Namespace, run: Path) -> Result | None:
    """Held-out figures with 15% of the single tokens masked; None for a model that has never seen a [MASK]."""
    import torch

    from megabert import evaluation
    from megabert import hf as pretrained
    from megabert.config import MaskingConfig

    torch.set_num_threads(args.threads)
    found = pretrained.load(run)
    if found.config.data.masking.causal:
        return None
    data = found.config.data.model_copy(update={"masking": MaskingConfig()})
    cfg = found.config.model_copy(update={"data": data})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches = evaluation.fixed_batches(evaluation.held_out(args.data, cfg), found.tokenizer, cfg)
    figures = evaluation.summary(evaluation.batch_sums(found.model(device), batches, device))
    return {key: figures[key] for key in (LOSS, ACCURACY)}


def table(report: Result) -> str:
    """The variants as a Markdown table; a last row says what was not measured."""
    tasks = [task_label(spec) for spec in report["settings"]["tasks"]]
    head = ["variant", "updates", "minutes", "tokens/s", "held-out loss", "accuracy"]
    head += ["loss at token 15%", "accuracy at token 15%", *tasks]
    rows = []
    for variant in SETS[report["settings"]["set"]]:
        found = report["variants"].get(variant)
        if found is None:
            rows.append([variant] + [UNKNOWN] * (len(head) - 1))
            continue
        final, one = found["final"], found["token15"]
        cells = [variant, f"{final['step']:,}", f"{final['seconds'] / 60:.1f}"]
        cells += [f"{found['tokens_per_second']:,.0f}" if found["tokens_per_second"] else UNKNOWN]
        cells += [f"{final[LOSS]:.4f}", f"{final[ACCURACY]:.4f}"]
        cells += [f"{one[LOSS]:.4f}", f"{one[ACCURACY]:.4f}"] if one else ["none: never sees a [MASK]", "none"]
        for task in tasks:
            score = found["tasks"].get(task)
            cells.append(f"{score['metric']} {score['mean']:.4f} ± {score['std']:.4f}" if score else UNKNOWN)
        rows.append(cells)
    missing = "tasks after fine-tuning" if not tasks else "tasks other than those here"
    rows.append([f"{UNKNOWN}: {missing}; other sizes and seeds"] + [""] * (len(head) - 1))
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{NOTE}"


def plot(report: Result, path: Path) -> None:
    """Each variant's own held-out loss and accuracy over the minutes of training, and its scores on the tasks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks, settings = [task_label(spec) for spec in report["settings"]["tasks"]], report["settings"]
    count = 3 if tasks else 2
    figure, panels = plt.subplots(1, count, figsize=(5 * count, 3.8), layout="constrained")
    for index, (variant, found) in enumerate(report["variants"].items()):
        minutes = [point["seconds"] / 60 for point in found["curve"]]
        for panel, key in zip(panels, (LOSS, ACCURACY), strict=False):
            panel.plot(minutes, [p[key] for p in found["curve"]], marker="o", markersize=3, label=variant)
        scored = [(i, found["tasks"][task]) for i, task in enumerate(tasks) if task in found["tasks"]]
        if scored:
            places = [i + 0.8 * (index + 0.5) / len(report["variants"]) - 0.4 for i, _ in scored]
            means, spread = ([score[key] for _, score in scored] for key in ("mean", "std"))
            panels[2].bar(places, means, 0.7 / len(report["variants"]), yerr=spread, label=variant)
    for panel, title in zip(panels, ("held-out loss, own objective", "held-out accuracy, own objective"), strict=False):
        panel.set(xlabel="minutes of training", title=title)
    if tasks:
        panels[2].set(title="dev score after fine-tuning", xticks=range(len(tasks)), xticklabels=tasks)
    for panel in panels:
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend()
    figure.suptitle(
        f"{settings['set']}: {settings['config']}, {settings['budget']}, {settings['threads']} threads, "
        f"{hardware.describe()}",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", required=True, help="dataset folder with pairs and a held-out split")
    add("--set", choices=SETS, required=True, help="; ".join(f"{k}: {', '.join(v)}" for k, v in SETS.items()))
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, default=0.0, help="training time of each variant")
    budget.add_argument("--steps", type=int, default=0, help="or updates of each variant")
    add("--tasks", nargs="+", default=[], metavar="SPEC", help="'TASK TRAIN DEV [options]', each in quotes")
    add("--config", default="mini", help="preset that the variants change")
    add("--threads", type=int, default=2)
    add("--run", default="runs/ablations", help="folder of the runs")
    hardware.add_json(parser, "results; variants in it already are kept", required=True)
    add("--plot", type=Path, help=".svg or .png")
    add(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="configuration of all variants; first, as --tasks takes what follows",
    )
    args = parser.parse_intermixed_args(argv)
    hardware.refuse_dirty(parser, args)
    return args


def run_set(args: argparse.Namespace) -> None:
    """All of a set's variants that the file does not have yet. Raises ValueError naming what is wrong."""
    from megabert.data.shards import Manifest

    manifest = Manifest.load(args.data)
    if manifest.held_out is None:
        raise ValueError(f"{args.data}: no held-out split; build it with data_prep build --held-out SHARE")
    if min(args.minutes, args.steps) < 0 or not (args.minutes or args.steps):
        raise ValueError("--minutes or --steps must be above 0")
    settings: Result = {
        "set": args.set,
        "config": args.config,
        "overrides": args.overrides,
        "budget": f"{args.minutes:g} minutes" if args.minutes else f"{args.steps} updates",
        "threads": args.threads,
        "dataset": manifest.fingerprint,
    }
    report: Result = json.loads(args.json.read_text()) if args.json.is_file() else {"variants": {}}
    before = {k: v for k, v in report.get("settings", settings).items() if k != "tasks"}
    if before != settings:
        different = next(key for key in settings if before.get(key) != settings[key])
        raise ValueError(
            f"{args.json}: was made with {different}={before.get(different)!r}, this command says "
            f"{settings[different]!r}; name another --json and --run"
        )
    variants: Result = report["variants"]
    scored = {label for found in variants.values() for label in found["tasks"]}
    known = [spec for spec in report.get("settings", {}).get("tasks", []) if task_label(spec) in scored]
    by_label: dict[str, str] = {}
    for spec in [*known, *args.tasks]:
        if by_label.setdefault(task_label(spec), spec) != spec:
            raise ValueError(f"--tasks {spec!r}: {by_label[task_label(spec)]!r} has its name; use another --json")
    report = {"settings": settings | {"tasks": [*known, *(t for t in args.tasks if t not in known)]}}
    report |= {"note": NOTE, "variants": variants}

    def keep() -> None:
        hardware.write_json(args.json, report)
        if args.plot:
            plot(report, args.plot)

    for variant in SETS[args.set]:
        if variant not in variants:
            print(f"{variant}: training …", file=sys.stderr, flush=True)
            variants[variant] = train(args, variant)
            keep()
        for spec in args.tasks:
            if task_label(spec) not in variants[variant]["tasks"]:
                print(f"{variant}: {task_label(spec)} …", file=sys.stderr, flush=True)
                run, label = folder_of(args, variant), task_label(spec)
                output = run.with_name(f"{run.name}-{label.replace(' ', '-')}")
                variants[variant]["tasks"][label] = fine_tune(run, spec, output, args.threads)
                keep()
    keep()
    print(table(report))


def main(argv: list[str] | None = None) -> int:
    try:
        run_set(parse(argv))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
