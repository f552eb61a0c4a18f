"""Time and tokens to a held-out loss: MegaBERT against Hugging Face's `BertForMaskedLM` in a plain loop.

    python -m data_prep build --input TEXT… --output DATA --no-nsp
    python benchmarks/bench_quality.py --data DATA --minutes 30 --json FILE --plot FILE.svg
    python benchmarks/bench_quality.py --data DATA --match-tokens --label "as many tokens" --json FILE --plot FILE.svg

Same text, tokenizer, size, threads and minutes of training (evaluation not counted). Both are scored by
`megabert.commands.evaluate`'s code on the same held-out rows under the same masks: Hugging Face's weights are mapped into our
model for it. The peer gets our learning rate, betas, epsilon, decay, clipping, dropout and about as many real tokens an
update, unless an option says otherwise; what differs is in the file under `differs`. It is not tuned unless
`--tune-minutes` asks for it.

`ratio` is their time over the time after which ours is as good as theirs in the end, `ratio_tokens` the same in real
tokens; above 1 is better. The first without the second is throughput. `--match-tokens` trains ours on as many tokens as the
peer in the file had, its learning rate decayed over just those. The file is written again after every evaluation, so a run
that is cut short keeps what it measured, and a run made later (`--system ours --label ours-12min --minutes 12`) joins the
others in the same file.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone need not be installed

from benchmarks.common import hardware
from benchmarks.common.curves import ACCURACY, LOSS, Result, compare, plot

WARM_UP = 0.06  # share of the budget, of both

if TYPE_CHECKING:
    from benchmarks.peers.hf_plain_loop import Recipe
    from megabert.config import Config


# --- ours -------------------------------------------------------------------------------------------------------------


def our_command(args: argparse.Namespace, run: Path, *more: str) -> list[str]:
    """The preset as its users run it, for the budget, without the next-sentence task that the peer has not."""
    command = [
        sys.executable,
        "megabert/train.py",
        "--config",
        args.config,
        "--data",
        str(args.data),
        "--run",
        str(run),
    ]
    command += ["model.nsp=false"]
    if args.updates:
        command += ["schedule.name=linear", f"schedule.total_steps={args.updates}"]
        command += [f"schedule.warmup_steps={round(WARM_UP * args.updates)}"]
    else:
        command += ["schedule.name=budget", f"schedule.budget_minutes={float(args.minutes)}"]
    return [*command, "checkpoint.interval=1000000", *shlex.split(args.ours), *more]


def lines_of(path: Path) -> list[Result]:
    """The whole lines of a metrics file that is still being written."""
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def steps_between(args: argparse.Namespace, run: Path, env: dict[str, str]) -> int:
    """Updates in `--eval-every` seconds, from a short trial."""
    trial = argparse.Namespace(**vars(args) | {"updates": 0})
    command = our_command(trial, run, "log.interval=5", "eval.interval=0", "--stop-after", "20")
    done = subprocess.run(command, cwd=hardware.ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {shlex.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    timed = [line for line in lines_of(run / "metrics.jsonl") if "perf/tokens_per_sec" in line]
    first, last = timed[0] if len(timed) > 1 else {"time/train_seconds": 0.0, "step": 0}, timed[-1]
    seconds = (last["time/train_seconds"] - first["time/train_seconds"]) / (last["step"] - first["step"])
    return max(1, round(args.eval_every / seconds))


def run_ours(args: argparse.Namespace) -> Iterator[Result]:
    """Trains with megabert/train.py in a process of its own; yields the result so far after each evaluation."""
    run = Path(args.run) / args.label
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads)}
    interval = steps_between(args, run / "trial", env)
    tokens = tokens_an_update(args)
    command = our_command(args, run / "run", f"eval.interval={interval}")
    result: Result = {
        "system": "megabert",
        "minutes": None if args.updates else args.minutes,
        "command": hardware.shown(command),
        "curve": [],
    }
    with open(run / "train.log", "w") as log:
        process = subprocess.Popen(command, cwd=hardware.ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                time.sleep(2)
                lines = lines_of(run / "run/metrics.jsonl")
                scored = [line for line in lines if LOSS in line]
                if len(scored) > len(result["curve"]):
                    result["curve"] = [
                        {
                            "seconds": line["time/train_seconds"],
                            "step": line["step"],
                            "tokens": round(line["step"] * tokens),
                        }
                        | scores(line)
                        for line in scored
                    ]
                    rates = sorted(line["perf/tokens_per_sec"] for line in lines if "perf/tokens_per_sec" in line)
                    result["tokens_per_second"] = round(rates[len(rates) // 2], 1) if rates else None
                    yield result
        finally:
            if process.poll() is None:  # we were interrupted: so is it
                process.terminate()
                process.wait()
    if process.returncode:
        sys.exit(f"error: training failed (exit {process.returncode}); its output is in {run / 'train.log'}")
    from megabert import checkpoint, config

    weights, state = checkpoint.load_weights(str(run / "run"))
    cfg = config.from_dict(state["config"])
    result["parameters"] = sum(value.numel() for value in weights.values())
    yield result | {"config": state["config"], "fp32": score(weights, cfg, args.data, "float32")}


def our_config(args: argparse.Namespace) -> Config:
    from megabert import config

    return config.load(args.config, ["model.nsp=false", *shlex.split(args.ours)])


def tokens_an_update(args: argparse.Namespace) -> float:
    """Real tokens of our updates, the mean over the dataset's rows."""
    from megabert.data.shards import Manifest

    manifest = Manifest.load(args.data)
    return our_config(args).batch.global_size * manifest.statistics["tokens"] / manifest.rows


# --- theirs -----------------------------------------------------------------------------------------------------------


def peer_config(args: argparse.Namespace) -> Config:
    """Our config of the peer's size: post-LN, as Hugging Face's BERT is; held-out rows and masks are those of ours."""
    from megabert import config
    from megabert.data.shards import Manifest

    fixed = [f"model.vocab_size={Manifest.load(args.data).vocab_size}", "model.nsp=false", "model.norm=post"]
    shared = [key for key in shlex.split(args.ours) if key.startswith(("eval.", "data.masking."))]
    return config.load(args.config, fixed + shared)


def run_theirs(args: argparse.Namespace) -> Iterator[Result]:
    """Trains the peer for the budget, with our settings or the best of a grid of short runs where `--tune-minutes` asks for one."""
    from benchmarks.peers.hf_plain_loop import Recipe
    from megabert.data.shards import Manifest

    statistics, ours = Manifest.load(args.data).statistics, our_config(args)
    batch = args.hf_batch or round(tokens_an_update(args) / (statistics["tokens"] / statistics["sequences"]))
    chosen, tried = (args.hf_lr or ours.optimizer.lr, batch), []
    settings: Result = {
        "dropout": ours.model.dropout if args.hf_dropout is None else args.hf_dropout,
        "weight_decay": ours.optimizer.weight_decay,
        "clip": ours.optimizer.clip,
        "beta1": args.hf_betas[0] if args.hf_betas else ours.optimizer.beta1,
        "beta2": args.hf_betas[1] if args.hf_betas else ours.optimizer.beta2,
        "eps": ours.optimizer.eps,
        "warmup": WARM_UP,
    }
    if args.tune_minutes:
        for lr in (5e-4, 1e-3, 2e-3):
            for size in sorted({batch, max(8, batch // 2), max(8, batch // 4)}):
                recipe = Recipe(minutes=args.tune_minutes, batch=size, lr=lr, **settings)
                *_, done = train_theirs(args, recipe)
                tried.append({"lr": lr, "batch": size, "minutes": args.tune_minutes} | done["curve"][-1])
                print(f"tuning hf: lr {lr:g}, batch {size}: loss {tried[-1][LOSS]:.4f}", flush=True)
        least = min(tried, key=lambda row: row[LOSS])
        chosen = (least["lr"], least["batch"])
    recipe = Recipe(minutes=args.minutes, lr=chosen[0], batch=chosen[1], **settings)
    about = {
        "name": "Hugging Face's BertForMaskedLM in a plain loop, " + ("tuned" if tried else "not tuned"),
        "differs": differs(recipe, ours),
        "tuning": tried,
    }
    for result in train_theirs(args, recipe):
        yield result | about


def differs(recipe: Recipe, ours: Config) -> dict[str, Result]:
    """Settings of the peer that are not those of our run, each with both values."""
    o = ours.optimizer
    known = {"lr": o.lr, "beta1": o.beta1, "beta2": o.beta2, "eps": o.eps, "clip": o.clip}
    known |= {"weight_decay": o.weight_decay, "dropout": ours.model.dropout}
    found: dict[str, Result] = {
        name: {"ours": value, "peer": getattr(recipe, name)}
        for name, value in known.items()
        if value != getattr(recipe, name)
    }
    rows = f"{ours.batch.global_size} packed rows"
    found["update"] = {"ours": rows, "peer": f"{recipe.batch} padded sequences, one a row"}
    if ours.model.norm != "post":
        found["norm"] = {"ours": ours.model.norm, "peer": "post"}
    return found


def train_theirs(args: argparse.Namespace, recipe: Recipe) -> Iterator[Result]:
    """Yields the result so far after each evaluation, and in the end once more with the figures in fp32."""
    import torch

    from benchmarks.peers import hf_plain_loop
    from megabert.data.tokenizer import Tokenizer
    from megabert.hf.hf_names import from_huggingface

    torch.set_num_threads(args.threads)
    cfg = peer_config(args)
    tokenizer = Tokenizer.load(args.data / "tokenizer.model")
    result: Result = {"system": "huggingface", "minutes": recipe.minutes, "recipe": asdict(recipe), "curve": []}
    every = args.eval_every / (60 * recipe.minutes)
    for point, model in hf_plain_loop.train(args.data, tokenizer, cfg.model, recipe, every):
        theirs = {name: value.detach().float().cpu() for name, value in model.state_dict().items()}
        weights = from_huggingface(theirs, cfg.model)
        result["curve"].append(point | score(weights, cfg, args.data, "bfloat16"))
        result["tokens_per_second"] = round(point["tokens"] / max(point["seconds"], 1e-9), 1)
        result["parameters"] = sum(value.numel() for value in model.parameters())
        yield result
    yield result | {"fp32": score(weights, cfg, args.data, "float32")}


# --- both -------------------------------------------------------------------------------------------------------------


def score(weights: dict[str, Any], cfg: Config, data: Path, dtype: str) -> dict[str, float]:
    """Held-out figures of weights under our names, by `megabert.commands.evaluate`'s own code, computed in `dtype`."""
    import torch

    from megabert import evaluation
    from megabert.data.tokenizer import Tokenizer
    from megabert.model import BertForPreTraining

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = BertForPreTraining(cfg.model, cfg.ops)
    model.load_state_dict(weights)
    tokenizer = Tokenizer.load(data / "tokenizer.model")
    batches = evaluation.fixed_batches(evaluation.held_out(str(data), cfg), tokenizer, cfg)
    return scores(evaluation.summary(evaluation.batch_sums(model.to(device, getattr(torch, dtype)), batches, device)))


def scores(figures: dict[str, float]) -> dict[str, float]:
    return {LOSS: round(figures[LOSS], 5), ACCURACY: round(figures[ACCURACY], 5)}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--system", choices=("ours", "hf", "both"), default="both")
    parser.add_argument(
        "--data", type=Path, required=True, help="dataset folder built with --no-nsp, with a held-out split"
    )
    parser.add_argument("--config", default="mini", help="preset of both: the size, held-out rows and masks")
    parser.add_argument("--minutes", type=float, default=30.0, help="training time of each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--eval-every", type=float, default=120.0, metavar="SECONDS", help="training time between evaluations"
    )
    hardware.add_json(parser, "runs in it already are kept", default=Path("runs/quality/quality.json"))
    parser.add_argument("--plot", type=Path, help=".svg or .png")
    parser.add_argument("--run", default="runs/quality", help="folder of our runs")
    parser.add_argument(
        "--match-tokens",
        action="store_true",
        help="train ours alone, on as many real tokens as the peer in the file had",
    )
    parser.add_argument("--label", default="megabert", help="name of our run in the file")
    parser.add_argument("--ours", default="", metavar="'section.key=value …'", help="overrides of our run")
    parser.add_argument("--hf-lr", type=float, help="of the peer; default: ours")
    parser.add_argument("--hf-betas", type=float, nargs=2, help="AdamW's; default: ours")
    parser.add_argument(
        "--hf-batch",
        type=int,
        default=0,
        help="sequences; 0 takes as many as hold the real tokens of an update of ours",
    )
    parser.add_argument("--hf-dropout", type=float, help="default: ours")
    parser.add_argument(
        "--tune-minutes", type=float, default=0.0, help="tune the peer on a grid of runs this long; 0 does not"
    )
    args = parser.parse_args(argv)
    hardware.refuse_dirty(parser, args)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    args.run, args.data = os.path.abspath(args.run), args.data.resolve()
    from megabert.data.shards import Manifest

    try:
        manifest = Manifest.load(args.data)
        if manifest.held_out is None:
            raise ValueError(f"{args.data}: no held-out split; build it with data_prep build --held-out SHARE")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report: Result = json.loads(args.json.read_text()) if args.json.is_file() else {}
    report.setdefault("runs", {})
    settings = {"config": args.config, "threads": args.threads, "dataset": manifest.fingerprint}
    if report.setdefault("settings", settings) != settings:
        print(f"error: {args.json} holds runs of {report['settings']}; give another --json", file=sys.stderr)
        return 2
    args.updates = 0
    if args.match_tokens:
        args.system = "ours"
        peer = report["runs"].get("huggingface")
        if not peer or args.label in report["runs"]:
            print(
                f"error: --match-tokens: {args.json} needs a run of the peer, and no run named {args.label!r}",
                file=sys.stderr,
            )
            return 2
        args.updates = round(peer["curve"][-1]["tokens"] / tokens_an_update(args))
    systems = {"ours": [(args.label, run_ours)], "hf": [("huggingface", run_theirs)]}
    for label, run in systems["ours"] + systems["hf"] if args.system == "both" else systems[args.system]:
        for result in run(args):
            report["runs"][label] = {"about": hardware.about()} | result
            compare(report)
            hardware.write_json(
                args.json,
                {"settings": settings} | {key: report[key] for key in ("ratio", "ratio_tokens", "comparisons", "runs")},
            )
            if args.plot:
                plot(report, args.plot)
            last = result["curve"][-1]
            print(
                f"{label}: {last['seconds'] / 60:6.1f} min  loss {last[LOSS]:.4f}  accuracy {last[ACCURACY]:.4f}",
                flush=True,
            )
    print(
        json.dumps(
            {"ratio": report["ratio"], "ratio_tokens": report["ratio_tokens"]}
            | {name: run["final"] for name, run in report["runs"].items()},
            indent=1,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
