"""Folder with the files that a bare GPU machine (torch and numpy, no network) lacks: wheels, native library, two datasets.

The machine needs this Python's version. The library is compiled here by nvcc (stable ABI: one for all torch versions from 2.11
on). The revision is included for a copy of the tree without git.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import hardware

ROOT = hardware.ROOT
FOLDER = ROOT / "build" / "gpu_pack"
# written empty first, and with content at the end
RECORD = "pack.json"
LIBRARY, TREES_LIBRARY = "native/_native.abi3.so", ROOT / "megabert" / "_native.abi3.so"
NATIVE_SOURCES = ("csrc/**/*.cpp", "csrc/**/*.cu", "csrc/**/*.cuh", "csrc/**/*.h", "csrc/**/*.inl", "setup.py")
PACKAGES = ("deepspeed", "pydantic", "safetensors", "sentencepiece", "tqdm", "webdataset", "zstandard", "pytest")
# packages of the machine
THERE = {"torch", "numpy", "triton", "setuptools", "pip"}
# symbol versions that torch's wheels need (manylinux_2_28): glibc 2.28 and the libstdc++ of GCC 8
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
# load a library and run an operation, gelu(2), since a library may load without code for the device
PROBE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
x = torch.ones(4, 64, dtype=torch.bfloat16, device=sys.argv[2])
y = torch.ops.megabert.bias_gelu(x, x[0])
assert abs(y.float().mean().item() - 1.9545) < 0.01, y
"""


def run(command: list[str], timeout: float | None = None, **env: str) -> str:
    """A command's output. Raises ValueError with its last lines if it fails."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=hardware.clone_environment(**env), capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{hardware.shown(command)}: no end after {timeout:.0f} s") from None
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise ValueError(f"{hardware.shown(command)} failed (exit {done.returncode}):\n{last}")
    return done.stdout


def native_digest() -> str:
    """SHA-256 over names and bytes of the sources of the native library."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in NATIVE_SOURCES for path in ROOT.glob(pattern)}):
        name = path.relative_to(ROOT).as_posix()
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def newer_symbols(library: Path) -> list[str]:
    """NAME@VERSION of symbols of a library that machines with torch may lack."""
    needed = re.findall(r"\*UND\*.*\((GLIBC|GLIBCXX|CXXABI)_([\d.]+)\) +(\w+)", run(["objdump", "-T", str(library)]))
    return [f"{n}@{kind}_{v}" for kind, v, n in needed if tuple(map(int, v.split("."))) > NEWEST[kind]]


def requirements(packages: Sequence[str]) -> list[str]:
    """NAME==VERSION of packages and their dependencies, as installed here, without those of the machine."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    waiting, versions = list(packages), dict[str, str]()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in versions or name in THERE:
            continue
        versions[name] = importlib.metadata.version(name)
        needs = (Requirement(line) for line in importlib.metadata.requires(name) or ())
        waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return [f"{name}=={version}" for name, version in sorted(versions.items())]


def make(
    folder: Path, corpus: Sequence[str], vocabulary: int, library: Path | None = None, wheels: bool = True
) -> dict[str, Any]:
    """Write the pack; `library`: a library already built from this tree. Raises ValueError."""
    if folder.exists() and not (folder / RECORD).is_file():
        raise ValueError(f"{folder}: is there and is no pack; name another folder")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / LIBRARY).parent.mkdir(parents=True)
    (folder / RECORD).write_text("{}")
    if library is None:
        run([sys.executable, "setup.py", "build_ext", "--inplace"], MEGABERT_CUDA="1")
    if newer := newer_symbols(library or TREES_LIBRARY):
        raise ValueError(
            f"{library or TREES_LIBRARY} does not load on glibc 2.28, for which setup.py builds: {', '.join(newer)}"
        )
    shutil.copy2(library or TREES_LIBRARY, folder / LIBRARY)
    build = [sys.executable, "-m", "data_prep", "build", "--output", str(folder / "data"), "--quiet", "--held-out", "0"]
    run([*build, "--nsp", "--vocab-size", str(vocabulary), "--seq-len", "128", "512", "--input", *corpus])
    needed = requirements(PACKAGES) if wheels else []
    if needed:
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
        run([*pip, "-w", str(folder / "wheels"), *needed], DS_BUILD_OPS="0")
    record = {"about": hardware.about(), "python": python_version()}
    record |= {"native_sources": native_digest(), "wheels": needed}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return record


def python_version() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def read(folder: Path) -> dict[str, Any]:
    """The record of a finished pack; {} if there is none."""
    path = folder / RECORD
    return json.loads(path.read_text()) if path.is_file() else {}


def unpack_wheels(folder: Path, site: Path) -> str:
    """Unpack the wheels into `site`, for PYTHONPATH; returns a line about it.

    This equals an installation except for scripts, which are not used here (PEP 427).
    """
    wheels = sorted((folder / "wheels").glob("*.whl"))
    if wheels and (meant := read(folder)["python"]) != python_version():
        return f"wheels not used: they are of Python {meant}, this is {python_version()}"
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return f"{len(wheels)} wheels unpacked"


def place_library(folder: Path, device: str) -> None:
    """Copy the pack's library into the tree. Raises ValueError if it is from other sources or does not run on the device."""
    if read(folder)["native_sources"] != native_digest():
        raise ValueError(f"{folder}: its library was built from other native sources than this tree's; make it again")
    run([sys.executable, "-c", PROBE, str(folder / LIBRARY), device], timeout=90)
    part = TREES_LIBRARY.with_name(f"{TREES_LIBRARY.name}.part")
    shutil.copy2(folder / LIBRARY, part)
    os.replace(part, TREES_LIBRARY)
