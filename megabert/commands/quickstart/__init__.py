"""From text to a trained and evaluated BERT on one machine, in a few minutes and any folder: build shards, train the preset
`quickstart` on two ZeRO ranks, stop half way and resume, evaluate, and fill in three held-out sentences before and after training.

megabert quickstart [section.key=value …] [--output DIR] [--input PATH…]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from megabert.common.arguments import Parser
from megabert.common.environment import cores
from megabert.common.errors import FAILED, OK, BadTraining, Failed, command, interrupted
from megabert.common.files import refuse_url
from megabert.common.run_files import METRICS, json_lines

# the folder that is replaced without a question, and the file in another that quickstart made
USUAL, MARK = "runs/quickstart", ".quickstart"
COLUMNS = ("mlm_loss", "mlm_accuracy", "perplexity")


def section(text: str) -> None:
    print(f"\n== {text}", flush=True)


def run(*words: object, **env: str) -> None:
    """A command of this package, in a process of its own. Raises SystemExit with its code if it fails, after its own message, and
    KeyboardInterrupt when it has ended at Ctrl-C, which it gets too."""
    with subprocess.Popen([sys.executable, "-m", *map(str, words)], env=os.environ | env) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.wait()
            raise
    if code:
        sys.exit(code if code > 0 else FAILED)


def output(*words: object) -> str:
    """The output of a command of this package. Raises Failed."""
    done = subprocess.run([sys.executable, "-m", "megabert", *map(str, words)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise Failed(f"megabert {words[0]} ended with {done.returncode}")
    return done.stdout


def claim(folder: Path) -> None:
    """Make and mark the folder, whose data and run may be those of an earlier quickstart. Raises ValueError for somebody else's."""
    for path in (folder / "data", folder / "run"):
        if path.exists() and not (folder / MARK).exists() and folder != Path(USUAL):
            raise ValueError(f"--output {folder}: {path} exists and was not made by quickstart; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def table(run_dir: Path, half: dict[str, float]) -> str:
    """Held-out metrics at the start, half way, and at the end. Raises BadTraining if the loss did not fall."""
    evaluated = [line for line in json_lines(run_dir / METRICS) if "eval/mlm_loss" in line]
    rows = [("untrained", evaluated[0]), ("stopped", half), ("resumed and finished", evaluated[-1])]
    lines = [" " * 30 + "".join(f"{name:>16}" for name in COLUMNS)]
    for name, row in rows:
        values = "".join(f"{row[f'eval/{column}']:16.4f}" for column in COLUMNS)
        lines.append(f"{f'{name}, step ' + str(row['step']):30}{values}")
    if rows[-1][1]["eval/mlm_loss"] >= rows[0][1]["eval/mlm_loss"]:
        raise BadTraining("the held-out loss did not fall")
    return "\n".join(lines)


def settings(args: argparse.Namespace) -> list[str]:
    """The overrides of the preset, the user's last."""
    own = [f"schedule.total_steps={args.steps}", f"schedule.warmup_steps={args.steps // 20}", "zero.stage=2"]
    return [*own, f"data.seq_len={args.seq_len}", *args.overrides]


def quickstart(args: argparse.Namespace) -> None:
    import torch

    gpus, out, started = torch.cuda.device_count(), Path(args.output), time.monotonic()
    data, run_dir = out / "data", out / "run"
    ranks = args.ranks or (1 if gpus == 1 else 2)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // ranks))
    cpu = {} if gpus else {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": threads}

    def train(*more: object) -> None:
        launcher = ["deepspeed.launcher.runner", "--quiet", "--num_gpus", ranks, "--master_port", free_port()]
        config = ["--config", "quickstart", "--data", data, "--run", run_dir, *settings(args)]
        run(*launcher, "--module", "megabert.train", *config, *more, TF_CPP_MIN_LOG_LEVEL="3", **cpu)

    claim(out)
    text = "the English documentation installed on this machine" if args.input == ["pydoc"] else " ".join(args.input)
    section(f"1/4 shards from {text}")
    sizes = ["--seq-len", args.seq_len, "--vocab-size", args.vocab_size, "--held-out", "0.02"]
    quiet = [] if sys.stderr.isatty() else ["--quiet"]  # no progress bar in a log
    # refuses wrong text and sizes before it replaces earlier data
    run("data_prep", "build", "--input", *args.input, "--output", data, "--overwrite", *sizes, *quiet)
    shutil.rmtree(run_dir, ignore_errors=True)  # of an earlier quickstart
    half = args.steps // 2
    section(f"2/4 BERT-Tiny on {ranks} ranks, ZeRO stage 2, stopped at step {half} of {args.steps}")
    train("--stop-after", half)
    evaluated = json.loads(output("evaluate", "--model", run_dir, "--data", data))
    section(f"3/4 the same command again: resumed to step {args.steps}")
    train()
    section(f"4/4 held-out text, the same masked positions each time ({time.monotonic() - started:.0f} s so far)")
    print(table(run_dir, evaluated), end="\n\n", flush=True)
    run("megabert.commands.quickstart.results", run_dir, data)
    section("the run on one page")
    run("megabert", "report", run_dir)
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    board = shutil.which("tensorboard", path=places) or "tensorboard"
    view = shlex.join([board, "--logdir", str(run_dir / "tensorboard")])
    print(f"\neverything is in {out}; to view it:\n  {view}")


@command
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    text = "text; pydoc is the English documentation on this machine"
    add("--input", nargs="+", default=["pydoc"], metavar="PATH", help=text)
    add("--output", default=USUAL, metavar="DIR", help="folder of everything")
    add("--steps", type=int, default=600, help="updates")
    add("--ranks", type=int, default=0, help="ranks; 0: two, or one on a machine with one GPU")
    add("--seq-len", type=int, default=128, help="tokens of a row")
    add("--vocab-size", type=int, default=8000, help="tokens of the vocabulary")
    add("overrides", nargs="*", metavar="section.key=value", help="configuration overrides")
    args = parser.parse_intermixed_args(argv)
    if args.steps < 2 or args.ranks < 0:
        raise ValueError(f"--steps {args.steps}, --ranks {args.ranks}: give at least 2 updates, and 1 rank or more")
    refuse_url(args.output)
    from megabert.config import load

    config = load("quickstart", settings(args))  # refuses a wrong one before anything is made
    if config.schedule.total_steps != args.steps:
        raise ValueError(
            f"schedule.total_steps={config.schedule.total_steps}: give --steps, which is also when to stop"
        )
    try:
        quickstart(args)
    except KeyboardInterrupt:
        return interrupted(f"{args.output} is unfinished; the same command begins again")
    return OK
