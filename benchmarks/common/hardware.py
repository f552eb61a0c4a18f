"""Description of the machine, command, git revision and package versions in every result file, and who may write one.

Benchmarks call `write_json(path, result)`; the description is added under `"about"`, so a figure can always be traced
back to the command that gives it again. A file among the committed results is refused when the tree has uncommitted
changes: such a figure belongs to no revision. Nothing here needs a GPU or any package but the standard library.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "benchmarks/results"
PACKAGES = ("torch", "deepspeed", "transformers", "webdataset", "sentencepiece", "numpy")


def _output(command: list[str]) -> str:
    """A command's standard output, stripped; empty when it is not installed or fails."""
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    return match.group(1) if match else platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    """CPU feature names as the kernel reports them, e.g. `avx2`, `avx512_bf16`, `amx_bf16`."""
    info = Path("/proc/cpuinfo")
    match = re.search(r"flags\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    return set(match.group(1).split()) if match else set()


def cores() -> int:
    """Cores this process may use, which in a container or under taskset is fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gib() -> float:
    info = Path("/proc/meminfo")
    match = re.search(r"MemTotal:\s*(\d+) kB", info.read_text()) if info.is_file() else None
    return round(int(match.group(1)) / 2**20, 1) if match else 0.0


def gpus() -> list[str]:
    """Name and memory of each NVIDIA device, from nvidia-smi."""
    return _output(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]).splitlines()


@functools.cache
def changes() -> tuple[str, ...]:
    """Lines of `git status` for what is not committed, results aside; as they were when this was called first."""
    pathspec = ["--", ".", f":(exclude){RESULTS}"]
    return tuple(_output(["git", "status", "--porcelain", *pathspec]).splitlines())


def revision() -> str:
    """Short git revision, with `+changes` when the tree differs from it."""
    short = _output(["git", "rev-parse", "--short=12", "HEAD"])
    return f"{short}{'+changes' if changes() else ''}" if short else "unknown"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def label() -> str:
    """Short name of the machine for file names, e.g. `cpu2` (2 cores) or `h200x1`."""
    devices = gpus()
    if devices:
        word = re.search(r"[A-Z]+\d+\w*", devices[0])
        return f"{(word.group(0) if word else 'gpu').lower()}x{len(devices)}"
    return f"cpu{cores()}"


def about() -> dict[str, Any]:
    """Description of this machine and this command, ready for JSON. Memory in GiB, date in UTC."""
    fast = {"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "avx512_vnni"}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "revision": revision(),
        **({"changes": list(changes())} if changes() else {}),
        "hardware": {
            "cpu": cpu_model(),
            "cpu_features": sorted(cpu_flags() & fast),
            "cores": cores(),
            "memory_gib": memory_gib(),
            "gpus": gpus(),
            "system": f"{platform.system()} {platform.release()}",
        },
        "versions": versions(),
    }


def describe() -> str:
    """One line for a table or a plot's caption: cores, processor, devices."""
    devices = gpus()
    return f"{cores()} cores, {cpu_model()}" + (f"; {len(devices)} x {devices[0]}" if devices else "; no GPU")


def environment(**more: str) -> dict[str, str]:
    """The environment in which a command finds megabert, also in a clone that is not installed."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path} | more


def shown(command: list[str]) -> str:
    """A command as one would type it in the clone's folder."""
    return shlex.join(command).replace(sys.executable, "python").replace(f"{ROOT}/", "")


def add_json(parser: argparse.ArgumentParser, what: str = "write all figures there", **more: Any) -> None:
    """The options that every benchmark writes its result by."""
    parser.add_argument("--json", type=Path, metavar="FILE", help=what, **more)
    parser.add_argument(
        "--allow-dirty", action="store_true",
        help=f"write into {RESULTS} from a tree with uncommitted changes too; the file lists them",
    )  # fmt: skip


def refuse_dirty(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the command, before it measures, where its result would lie among the committed ones and belong to no revision."""
    if args.allow_dirty or not args.json or not changes():
        return
    if args.json.resolve().is_relative_to(ROOT / RESULTS):
        parser.error(
            f"--json {args.json}: {len(changes())} uncommitted changes, the first: {changes()[0]}; "
            "commit them, write elsewhere, or say --allow-dirty"
        )


def write_json(path: str | os.PathLike[str], result: dict[str, Any]) -> None:
    """Write `result` with `about()` added, through a temporary file, so that a reader never sees half of it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    part.write_text(json.dumps({"about": about(), **result}, indent=1) + "\n")
    part.replace(target)
