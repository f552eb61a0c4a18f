"""Every result file says what made it: the machine, the date, the command, the git revision, the package versions.

Benchmarks call `write_json(path, result)`; the description is added under `"about"`, so a figure can always be traced
back to the command that gives it again. Nothing here needs a GPU or any package but the standard library.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a clone that is not installed works too

from megabert.common.atomic_io import write_whole  # noqa: E402
from megabert.common.environment import cores, cpu_flags, cpu_model, gpus, memory_gib, output, versions  # noqa: E402


def revision() -> str:
    """Short git revision, with `+changes` when tracked files differ from it."""
    short = output(["git", "rev-parse", "--short=12", "HEAD"])
    return (
        f"{short}+changes"
        if short and output(["git", "status", "--porcelain", "-uno"])
        else short or "unknown"
    )


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


def write_json(path: str | os.PathLike[str], result: dict[str, Any]) -> None:
    """Write `result` with `about()` added; a reader never sees half of it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, (json.dumps({"about": about(), **result}, indent=1) + "\n").encode())
