"""Native library of a measuring run: the pack's where it fits and runs, else the tree's, else built on the spot; and the machine's facts."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import hardware
from benchmarks.gpu.pack import NATIVE_SOURCES, Pack, digest
from benchmarks.gpu.runner import Absent
from megabert.common import environment
from megabert.common.atomic_io import sha256_of

ROOT = hardware.ROOT
LIBRARY = ROOT / "megabert" / "_native.abi3.so"
NEEDED = ("numpy", "pydantic")  # by the model and its data; DeepSpeed is not: there is a plain loop
# loads the library and runs one operation of it: a library may load and hold no code for the device
PROBE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
x = torch.ones(4, 64, dtype=torch.bfloat16, device=sys.argv[2])
y = torch.ops.megabert.bias_gelu(x, x[0])
assert abs(y.float().mean().item() - 1.9545) < 0.01, y
"""  # gelu(2) = 2 * Phi(2) = 1.9545


def facts(device: str) -> dict[str, Any]:
    """Device, versions and tools. Raises RuntimeError where torch sees no such device or a needed package is missing."""
    import torch

    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)}: not here, and not in the pack for this Python {platform.python_version()}; "
            "gpu_pack.py --python makes one for it"
        )

    found: dict[str, Any] = {
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()), "cores": environment.cores(), "threads": torch.get_num_threads(),
        "packages": {name: environment.version(name) for name in ("numpy", "triton", "deepspeed", "pydantic", "apex")},
        "nvcc": environment.output(["nvcc", "--version"]).splitlines()[-1:],
    }  # fmt: skip
    if device == "cpu":
        return {"device": "cpu", **found}
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device; --device cpu --small shows that the suite runs")
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name, "compute_capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count, "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": properties.L2_cache_size / 2**20, "cudnn": torch.backends.cudnn.version(),
        "driver": environment.output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]), **found,
    }  # fmt: skip


def healthy(device: str) -> bool:
    """Whether this process can still use the device: after an illegal access every call of it fails."""
    import torch

    try:
        return torch.ones(1, device=device).add(1).item() == 2
    except (RuntimeError, AssertionError):  # torch without CUDA asserts
        return False


def prepare(device: str, pack: str) -> dict[str, Any]:
    """Puts a library of this tree's sources that runs on the device into the tree.

    Raises Absent where there is none and none can be built; one of other sources is then put aside, so that nothing
    measures it.
    """
    tried: dict[str, str] = {}
    carried = Pack(Path(pack)).library() if pack else None
    if pack and carried is None:
        tried["the pack's"] = "its native sources are not this tree's"
    if carried is not None:
        tried["the pack's"] = probe(carried, device)
        if not tried["the pack's"]:
            part = LIBRARY.with_name(LIBRARY.name + ".part")
            part.write_bytes(carried.read_bytes())
            part.replace(LIBRARY)  # atomic: a running process keeps the library it has
            return {"library": "the pack's", "tried": tried}
    elif of_this_tree():
        tried["the tree's"] = probe(LIBRARY, device)
        if not tried["the tree's"]:
            return {"library": "the tree's", "tried": tried}
    failed = build(device)
    if failed and LIBRARY.is_file() and not of_this_tree():
        aside = LIBRARY.rename(LIBRARY.with_name(f"aside{LIBRARY.name}"))
        tried["the tree's"] = f"is of unknown sources, put aside as {aside.name}"
    tried["built here"] = failed or probe(LIBRARY, device)
    if tried["built here"]:
        raise Absent(f"no native library runs here: {tried}")
    return {"library": "built here", "tried": tried}


def of_this_tree() -> bool:
    """Whether the tree's library is what setup.py built last, and from the sources that are here now."""
    record = ROOT / "build" / "native" / "library.json"
    if not (record.is_file() and LIBRARY.is_file()):
        return False
    here = {"library": sha256_of(LIBRARY), "native_sources": digest(NATIVE_SOURCES)}
    return here == json.loads(record.read_text())


def probe(library: Path, device: str) -> str:
    """Why a library does not run on the device, or "". In a process of its own: a loaded library stays loaded."""
    command = [sys.executable, "-c", PROBE, str(library), device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        return "no answer in 90 s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]


def build(device: str) -> str:
    """Builds the library of this tree; why that failed, or ""."""
    env = os.environ | ({"MEGABERT_CUDA": "1"} if device == "cuda" else {})
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    return "" if done.returncode == 0 else "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])


def tests(device: str, end: float) -> dict[str, Any]:
    """The operations' own tests on the device, until `end` (seconds of the epoch) at most."""
    return run_pytest(["tests/csrc/test_philox.py"] if device == "cpu" else ["-m", "gpu", "tests/ops"], end)


def run_pytest(chosen: list[str], end: float) -> dict[str, Any]:
    """Exit code and last output of tests in a process of their own, which is ended at `end`."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout", *chosen]
    # the machine's own plugins may be of another pytest than the pack's
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as done:
        try:
            output, _ = done.communicate(timeout=max(1.0, end - time.time() - 2))
        except subprocess.TimeoutExpired:
            done.kill()
            output, _ = done.communicate()
            output += "\nended: the time was used up"
    return {"exit": done.returncode, "output": output[-6000:]}
