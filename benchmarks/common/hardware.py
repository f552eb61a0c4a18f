"""What all benchmarks share: arguments, result files with machine and revision, commands that they run.

`write_json(path, result)` adds command, revision, hardware and package versions under `"about"`. A file among the committed
results is refused if the tree has uncommitted changes, since its figures would belong to no revision. Only the standard library.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import random
import re
import shlex
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megabert.common import environment
from megabert.common.environment import cores, cpu_flags, cpu_model, gpus, memory_gib, versions
from megabert.common.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "benchmarks/results"
_carried: tuple[str, tuple[str, ...]] = "unknown", ()  # revision and changes of a copy without git


def carry(revision: str, changes: Sequence[str]) -> None:
    """Set the revision and changes of a copy of the tree; they are used if it has no git."""
    global _carried
    _carried = (revision.removesuffix("+changes"), tuple(changes))


@functools.cache
def changes() -> tuple[str, ...]:
    """Lines of `git status` for uncommitted files except results, at the time of the first call."""
    return _carried[1] if environment.revision() == "unknown" else tuple(environment.changes([RESULTS]))


def revision() -> str:
    """Short git revision, with `+changes` when the tree differs from it."""
    short = environment.revision(["."]).removesuffix("+changes")
    return f"{_carried[0] if short == 'unknown' else short}{'+changes' if changes() else ''}"


def label() -> str:
    """Short name of the machine for file names, e.g. `cpu2` (2 cores) or `h200x1`."""
    if devices := gpus():
        word = re.search(r"[A-Z]+\d+\w*", devices[0])
        return f"{(word.group(0) if word else 'gpu').lower()}x{len(devices)}"
    return f"cpu{cores()}"


def now() -> str:
    """Date and time in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def about() -> dict[str, Any]:
    """Description of this machine and this command for JSON. Memory in GiB, date in UTC."""
    return {
        "date": now(),
        "command": environment.command(),
        "revision": revision(),
        **({"changes": list(changes())} if changes() else {}),
        "hardware": {
            "cpu": cpu_model(), "cpu_features": sorted(cpu_flags() & environment.VECTOR_FLAGS), "cores": cores(),
            "memory_gib": memory_gib(), "gpus": gpus(), "system": f"{platform.system()} {platform.release()}",
        },
        "versions": versions(),
    }  # fmt: skip


def describe() -> str:
    """One line for a table or a plot's caption: cores, processor, devices."""
    devices = gpus()
    return f"{cores()} cores, {cpu_model()}" + (f"; {len(devices)} x {devices[0]}" if devices else "; no GPU")


def clone_environment(**more: str) -> dict[str, str]:
    """The environment for a command that imports megabert, also in a clone that is not installed."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])} | more


def shown(command: list[str]) -> str:
    """A command as typed in the clone's folder."""
    return shlex.join(command).replace(sys.executable, "python").replace(f"{ROOT}/", "")


def call(command: list[str], threads: int, log: Path) -> None:
    """Run a command with its output in `log`. Raises ValueError if it fails."""
    env = clone_environment(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        code = subprocess.run(command, env=env, stdout=file, stderr=subprocess.STDOUT).returncode
    if code:
        last = (log.read_text().splitlines() or [""])[-1]
        raise ValueError(f"{shown(command)} failed (exit {code}: {last:.200}); its output is in {log}")


def output_of(command: list[str], timeout: float | None = None, **more: str) -> str:
    """A command's output. Raises ValueError with its last lines if it fails, and TimeoutError."""
    how: dict[str, Any] = {"cwd": ROOT, "env": clone_environment(**more), "text": True, "timeout": timeout}
    try:
        done = subprocess.run(command, capture_output=True, **how)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{shown(command)}: no end after {timeout:.0f} s") from None
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise ValueError(f"{shown(command)} failed (exit {done.returncode}):\n{last}")
    return done.stdout


def logged(run: Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def build_data(output: Path, *options: object) -> Path:
    """Build a dataset with these options. Raises ValueError if that fails; the output is beside the folder, in NAME.log."""
    command = [sys.executable, "-m", "data_prep", "build", "--output", str(output), "--quiet", *map(str, options)]
    call(command, threads=1, log=output.with_name(f"{output.name}.log"))
    return output


def rank_places(ranks: int) -> list[dict[str, str]]:
    """The environment variables of each of so many ranks that meet on this machine."""
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def free_port() -> int:
    """A free port below the range of outgoing connections, which could take it first."""
    while True:
        port = random.SystemRandom().randrange(12_000, 30_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


class Parser(argparse.ArgumentParser):
    """Arguments of a script, with its docstring as help, `--json` (more of its fields: `json`) and `--allow-dirty`."""

    def __init__(self, doc: str | None, **json: Any) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        fields: dict[str, Any] = {"type": Path, "metavar": "FILE", "help": "write all figures there"} | json
        self.add_argument("--json", **fields)
        text = f"write into {RESULTS} from a tree with uncommitted changes too; the file lists them"
        self.add_argument("--allow-dirty", action="store_true", help=text)

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """The arguments; ends the command where `refuse_dirty` does."""
        args = self.parse_args(argv)
        self.refuse_dirty(args)
        return args

    def refuse_dirty(self, args: argparse.Namespace) -> None:
        """End the command before it measures if its result could not be written, or would be a committed one of no revision."""
        if args.json and args.json.is_dir():
            self.error(f"--json {args.json}: is a folder; name a file")
        if args.allow_dirty or not args.json or not changes():
            return
        if args.json.resolve().is_relative_to(ROOT / RESULTS):
            self.error(
                f"--json {args.json}: {len(changes())} uncommitted changes, the first: {changes()[0]}; "
                "commit them, write elsewhere, or say --allow-dirty"
            )


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a script: end with the code that `main` returns, or with 2 and one line where it raises ValueError or OSError."""
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def over_seeds(values: Sequence[float]) -> dict[str, float]:
    """Mean, and standard deviation of two values or more."""
    return {"mean": statistics.fmean(values)} | ({"std": statistics.stdev(values)} if len(values) > 1 else {})


def show(value: Any, form: str, scale: float = 1.0) -> str:
    """A number, or mean and deviation over seeds."""
    if not isinstance(value, dict):
        return format(value * scale, form)
    deviation = f" ± {value['std'] * scale:{form.lstrip('+')}}" if "std" in value else ""
    return format(value["mean"] * scale, form) + deviation


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of these cells."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def print_ratios(comparisons: Iterable[Mapping[str, Any]]) -> None:
    """A line for each comparison of a result."""
    for c in comparisons:
        print(f"  ratio {c['ratio']:.2f}   {c['what']}: {c['ours']} against {c['peer']}", flush=True)


def write_json(path: str | os.PathLike[str] | None, result: dict[str, Any]) -> None:
    """Write `result` with `about()`, atomically; nothing where no path is given."""
    if path is None:
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, (json.dumps({"about": about(), **result}, indent=1) + "\n").encode())
