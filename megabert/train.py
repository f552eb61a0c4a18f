"""Pre-train BERT: batch, step, meter, log, evaluate, agree to stop, save.

    deepspeed megabert/train.py --config large_phase1 --data DIR --run DIR [section.key=value …]

Exit codes: 0 the run is finished or reached --stop-after; 2 a mistake in the command, configuration or data, said in
one line; 3 training went wrong (non-finite updates); 85 stopped by a signal with everything saved: start it again.
"""

from __future__ import annotations

import os
import sys

if __package__ in (None, ""):  # run as a script: the package's parent, not the package, belongs on the path
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import json
import platform
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megabert import config as configuration
from megabert import distributed, evaluate, schedule
from megabert.checkpoint import Checkpoints, check_compatible, load_weights
from megabert.config import Config
from megabert.data import Loader, Update
from megabert.distributed import World
from megabert.engine import DTYPES, Engine
from megabert.memory import keep_freed_memory
from megabert.metrics import JsonLines, Meter, TensorBoard, duration, matmul_tflops, progress_line
from megabert.model import BertForPreTraining
from megabert.shards import Dataset
from megabert.tokenizer import Tokenizer

OK, USER_ERROR, BAD_TRAINING, REQUEUE = 0, 2, 3, 85


class BadTraining(RuntimeError):
    """Non-finite updates in a row: going on would waste the machine."""


@dataclass
class Run:
    """Everything a training loop needs, and the run's state: `step`, `seconds` of training, `bad` updates in a row."""

    config: Config
    world: World
    dataset: Dataset
    tokenizer: Tokenizer
    engine: Engine
    loader: Loader
    checkpoints: Checkpoints
    meter: Meter
    sinks: list[Any]
    provenance: dict[str, Any]
    step: int = 0
    seconds: float = 0.0
    bad: int = 0
    skipped: int = 0
    stop_after: int = sys.maxsize
    last_save: int = -1
    last_eval: dict[str, float] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds besides the engine's own tensors."""
        progress = {"step": self.step, "seconds": self.seconds, "bad": self.bad, "skipped": self.skipped}
        return self.provenance | progress


def train(run: Run, stop: Stop) -> int:
    """Runs updates until the schedule ends, `stop_after` is reached or every rank agrees that a signal came."""
    config, first = run.config, run.step
    if first == 0:
        validate(run)
    started = time.perf_counter()  # waiting for data is training time, evaluating and saving are not
    for update in run.loader:
        if complete(run) or run.step >= run.stop_after:
            break
        lr = schedule.learning_rate(config.schedule, config.optimizer.lr, run.step, run.seconds / 60)
        result = run.engine.train_update(update, lr)
        elapsed = run.world.max_float(time.perf_counter() - started)
        run.step += 1
        run.seconds += elapsed
        run.meter.add(result, update, elapsed)
        refuse_bad(run, update, result)
        if run.step % config.log.interval == 0 or complete(run):
            log(run, lr)
        if config.eval.interval and run.step % config.eval.interval == 0 and not complete(run):
            validate(run)
        if run.world.agree_any(stop.requested):
            save(run)
            return REQUEUE
        if run.step % config.checkpoint.interval == 0:
            save(run)
        started = time.perf_counter()
    if complete(run) and run.step > first:
        validate(run)
    if run.last_save != run.step:
        save(run)
    return OK


def complete(run: Run) -> bool:
    """True when the schedule has no update left."""
    return schedule.finished(run.config.schedule, run.step, run.seconds / 60)


def refuse_bad(run: Run, update: Update, result: Any) -> None:
    """Counts non-finite updates; raises BadTraining, naming the rows, after `max_bad_steps` in a row."""
    if not result.skipped:
        run.bad = 0
        return
    run.skipped += 1
    run.bad += 0 if result.overflow else 1
    say(run.world, f"step {run.step}: non-finite loss or gradient; the update is skipped on every rank")
    if run.bad >= run.config.max_bad_steps:
        rows = run.world.gather_ints([int(r) for batch in update.batches for r in batch.row_ids])
        path = Path(run.checkpoints.run_dir) / "bad_rows.json"
        if run.world.rank == 0:
            path.write_text(json.dumps({"step": run.step, "epoch": update.epoch, "row_ids": rows}))
        first = ", ".join(map(str, rows[:8]))
        raise BadTraining(
            f"{run.bad} non-finite updates in a row; the last one's row ids ({first}, …) are in {path}"
        )


def log(run: Run, lr: float) -> None:
    values: dict[str, Any] = {"step": run.step, "time/train_seconds": round(run.seconds, 3), "train/lr": lr}
    values |= run.meter.drain() | {"train/skipped": run.skipped}
    emit(run, values)
    if run.world.rank == 0 and "train/loss" in values:
        left = run.config.schedule.total_steps - run.step
        eta = left * run.seconds / run.step
        if run.config.schedule.name == "budget":
            eta = min(eta, run.config.schedule.budget_minutes * 60 - run.seconds)
        print(progress_line(values, run.config.schedule.total_steps, max(eta, 0)), flush=True)


def validate(run: Run) -> None:
    """Held-out figures, outside the training time. A dataset without a held-out split is said once, at the start."""
    if run.dataset.manifest.held_out is None:
        if run.step == 0:
            say(run.world, "this dataset has no held-out split: the run is not evaluated")
        return
    held_out = evaluate.held_out(run.config.data.path, run.config)
    batches = evaluate.fixed_batches(held_out, run.tokenizer, run.config, run.world.rank, run.world.size)
    run.last_eval = evaluate.summary(run.engine.eval_sums(batches))
    emit(run, {"step": run.step, "time/train_seconds": round(run.seconds, 3)} | run.last_eval)
    shown = "  ".join(f"{k.removeprefix('eval/')} {v:.4f}" for k, v in run.last_eval.items() if v < 1e4)
    say(run.world, f"step {run.step:>7,}  held-out  {shown}")


def save(run: Run) -> None:
    run.checkpoints.save(run.engine, run.state())
    run.checkpoints.finish()
    run.last_save = run.step


def emit(run: Run, values: dict[str, Any]) -> None:
    for sink in run.sinks:
        sink.write(values)


def say(world: World, text: str) -> None:
    if world.rank == 0:
        print(text, flush=True)


class Stop:
    """Set by TERM, USR1 or USR2; saving happens at a step's end, when all ranks agree. A second signal exits at once."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._request)

    def _request(self, number: int, frame: Any) -> None:
        if self.requested:
            os._exit(128 + number)
        self.requested = True


def build(args: argparse.Namespace, config: Config, world: World) -> Run:
    """Opens data, model, engine and sinks, and resumes from the newest whole checkpoint of the run folder."""
    dataset = Dataset(config.data.path)
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    config = fill_in(config, dataset, tokenizer)
    run_dir = Path(args.run)
    checkpoints = Checkpoints(run_dir, world, config.checkpoint)
    torch.manual_seed(config.seed)
    extra = json.loads(Path(args.deepspeed_config).read_text()) if args.deepspeed_config else None
    engine = Engine(
        config,
        lambda: BertForPreTraining(config.model, config.ops, world.device.type, DTYPES[config.precision]),
        world,
        extra,
    )
    provenance = describe(config, dataset, tokenizer)
    state = resume(checkpoints, engine, provenance)
    if state is None and config.init_from:
        weights, origin = load_weights(config.init_from)
        engine.load_weights(weights)
        say(world, f"starting from the weights of {config.init_from} at step {origin['step']}")
    progress = {k: state[k] for k in ("step", "seconds", "bad", "skipped")} if state else {}
    loader = Loader.from_config(
        config, dataset, tokenizer, rank=world.rank, world=world.size, start_step=progress.get("step", 0)
    )
    peak = config.peak_tflops or matmul_tflops(world.device, engine.dtype)
    sinks: list[Any] = []
    if world.rank == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.json").write_text(json.dumps(provenance, indent=1, sort_keys=True) + "\n")
        sinks.append(JsonLines(run_dir / "metrics.jsonl", progress.get("step", -1)))
        if config.log.tensorboard:
            sinks.append(TensorBoard(run_dir / "tensorboard", config, progress.get("step", 0)))
    meter = Meter(world, config.model, peak)
    run = Run(
        config, world, dataset, tokenizer, engine, loader, checkpoints, meter, sinks, provenance, **progress
    )
    run.last_save = run.step if state else -1
    if args.stop_after is not None:
        run.stop_after = args.stop_after
    say(world, engine.describe() + f"; matrix-product ceiling {peak:.2f} TFLOP/s a device")
    return run


def fill_in(config: Config, dataset: Dataset, tokenizer: Tokenizer) -> Config:
    """The config with what the data decides; raises ValueError naming the field where the two disagree."""
    tree = config.model_dump()
    if config.model.vocab_size not in (0, tokenizer.vocab_size):
        raise ValueError(
            f"model.vocab_size={config.model.vocab_size} but the tokenizer has {tokenizer.vocab_size}; remove it"
        )
    tree["model"]["vocab_size"] = tokenizer.vocab_size
    if dataset.manifest.seq_len > config.model.max_positions:
        raise ValueError(
            f"model.max_positions={config.model.max_positions} is below the dataset's seq_len={dataset.manifest.seq_len}"
        )
    if config.model.nsp and not dataset.manifest.options.get("nsp", True):
        raise ValueError("model.nsp=true but the dataset was built with --no-nsp; set model.nsp=false")
    return configuration.from_dict(tree)


def resume(checkpoints: Checkpoints, engine: Engine, provenance: dict[str, Any]) -> dict[str, Any] | None:
    """State of the newest whole checkpoint, loaded into the engine; None when the run has none yet."""
    newest = checkpoints.latest()
    if newest is None:
        return None
    check_compatible(checkpoints.read_state(newest), provenance)
    state = checkpoints.load(engine, newest)
    say(
        checkpoints.world,
        f"resuming from {newest} at step {state['step']}, {duration(state['seconds'])} trained",
    )
    return state


def describe(config: Config, dataset: Dataset, tokenizer: Tokenizer) -> dict[str, Any]:
    """Where a checkpoint comes from: config and its hash, data and tokenizer fingerprints, versions, revision, command."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        revision = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        revision = "unknown"  # an installed copy without its repository, or no git
    return {
        "config": config.model_dump(),
        "config_sha256": config.digest(),
        "dataset": dataset.manifest.fingerprint,
        "tokenizer": tokenizer.sha256,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **distributed.versions(),
        },
        "revision": revision,
        "command": " ".join(sys.argv),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megabert/train.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", default="", help=f"preset ({', '.join(configuration.presets())}) or TOML file"
    )
    parser.add_argument("--data", default="", help="dataset folder written by data_prep")
    parser.add_argument(
        "--run",
        default="",
        help="run folder: checkpoints, metrics.jsonl, TensorBoard; resumed if it holds any",
    )
    parser.add_argument(
        "--stop-after", type=int, metavar="STEP", help="save and exit 0 at this step; the schedule stays"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved configuration and exit"
    )
    parser.add_argument(
        "--deepspeed", action="store_true", help="accepted for DeepSpeed's launcher; always on"
    )
    parser.add_argument("--deepspeed_config", default="", help="JSON with further DeepSpeed keys")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by launchers")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="configuration overrides")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    world, training = None, False
    try:
        world = distributed.discover()
        data = [f"data.path={args.data}"] if args.data else []
        config = configuration.load(args.config, data + args.overrides)
        if args.print_config:
            print(json.dumps(config.model_dump(), indent=2))
            return OK
        for name, value in (("--data", config.data.path), ("--run", args.run)):
            if not value:
                raise ValueError(f"{name} is missing: name a folder")
        keep_freed_memory()
        distributed.init(world)
        config = configuration.fit_micro_size(config, world.size)
        configuration.accumulation(config, world.size)
        stop = Stop()
        run = build(args, config, world)
        training = True
        code = train(run, stop)
        if code == OK and world.rank == 0 and config.log.tensorboard and run.last_eval:
            run.sinks[-1].hparams(run.last_eval)
        for sink in run.sinks:
            sink.close()
        run.loader.close()
        return code
    except (ValueError, OSError) as error:
        if world is None or world.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        elif training:  # it may be this rank's alone: a damaged row, an unreadable file
            print(f"rank {world.rank}: error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
    except BadTraining as error:
        if world is None or world.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return BAD_TRAINING
    finally:
        distributed.shutdown()


if __name__ == "__main__":
    sys.exit(main())
