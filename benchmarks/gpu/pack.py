"""Folder with what the GPU machine (`machine.txt`) lacks: wheels, native library, two datasets.

Wheels are those of pyproject.toml's dependencies that the machine's packages do not meet, for its Python. The library is compiled
here by nvcc (stable ABI: one for all torch versions from 2.11 on). The revision is included for a copy of the tree without git.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.common import hardware
from benchmarks.common.hardware import output_of

ROOT = hardware.ROOT
FOLDER = ROOT / "build" / "gpu_pack"
RECORD = "pack.json"  # written empty first, and with content at the end
LIBRARY, TREES_LIBRARY = "native/_native.abi3.so", ROOT / "megabert" / "_native.abi3.so"
NATIVE_SOURCES = ("csrc/**/*.cpp", "csrc/**/*.cu", "csrc/**/*.cuh", "csrc/**/*.h", "csrc/**/*.inl", "setup.py")
# packages of the machine, its Python, and the glibc tags of wheels that run there
MACHINE, PYTHON = Path(__file__).with_name("machine.txt"), "3.12"
PLATFORMS = [f"manylinux{tag}_x86_64" for tag in ("_2_28", "_2_27", "_2_17", "2014", "_2_12", "2010", "1")]
# tests' packages beside the dependencies
TEST_TOOLS = ("pytest>=8.0", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100")
Record = dict[str, Any]
LIMIT = 64 << 20  # most bytes of tree and pack together, in one transfer
# symbol versions that torch's wheels need (manylinux_2_28): glibc 2.28 and the libstdc++ of GCC 8
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
# seconds for PROBE, of which the first import of torch on a fresh machine has taken more than 90, and for compiling there
PROBE_SECONDS, BUILD_SECONDS = 180, 150
# load a library and run an operation, gelu(2), since a library may load without code for the device
PROBE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
x = torch.ones(4, 64, dtype=torch.bfloat16, device=sys.argv[2])
y = torch.ops.megabert.bias_gelu(x, x[0])
assert abs(y.float().mean().item() - 1.9545) < 0.01, y
"""


def native_digest() -> str:
    """SHA-256 over names and bytes of the sources of the native library."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in NATIVE_SOURCES for path in ROOT.glob(pattern)}):
        name = path.relative_to(ROOT).as_posix()
        digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def newer_symbols(library: Path) -> list[str]:
    """NAME@VERSION of symbols of a library that machines with torch may lack."""
    symbols = output_of(["objdump", "-T", str(library)])
    needed = re.findall(rf"\*UND\*.*\(({'|'.join(NEWEST)})_([\d.]+)\) +(\w+)", symbols)
    return [f"{n}@{kind}_{v}" for kind, v, n in needed if tuple(map(int, v.split("."))) > NEWEST[kind]]


# -- packages --------------------------------------------------------------------------------------------------------


def of_the_machine() -> dict[str, str]:
    """Versions of the machine's packages by name; "" if not known."""
    lines = [line.partition("==") for line in MACHINE.read_text().split("\n") if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in lines}


def dependencies() -> list[Requirement]:
    """pyproject.toml's dependencies, and what the tests need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in (*project["dependencies"], *TEST_TOOLS)]


def requirements(there: dict[str, str], roots: Iterable[Requirement]) -> list[Requirement]:
    """The requirements `roots` and, of packages that are not `there` or do not fit, the requirements of the version here."""
    environment = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0", "extra": ""}
    found, waiting = dict[str, Requirement](), list(roots)
    while waiting:
        need = waiting.pop()
        if str(need) in found:
            continue
        found[str(need)] = need
        if not meets(there, need):
            needs = map(Requirement, importlib.metadata.requires(need.name) or ())
            waiting += [n for n in needs if n.marker is None or n.marker.evaluate(environment)]
    return list(found.values())


def meets(versions: dict[str, str], need: Requirement) -> bool:
    """Whether a package is among `versions` and fits; one of unknown version fits."""
    version = versions.get(canonicalize_name(need.name))
    return version is not None and (not version or need.specifier.contains(version, prereleases=True))


def fetch(need: Requirement, folder: Path) -> None:
    """The wheel of the version here, for the machine. Raises ValueError if there is none."""
    version = f"{need.name}=={importlib.metadata.version(need.name)}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    tags = [f"--platform={platform}" for platform in PLATFORMS]
    only = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", *tags, "--no-deps"]
    try:
        output_of([*pip, "download", "--quiet", *only, "-d", str(folder), version])
    except ValueError:  # released as source only
        built = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder), version]
        output_of(built, DS_BUILD_OPS="0")
    (wheel,) = folder.glob(f"{need.name.replace('-', '_')}-*.whl")
    if not re.search(rf"-(py3|py2\.py3|cp{PYTHON.replace('.', '')}|cp3\d*-abi3)-", wheel.name):
        raise ValueError(f"{wheel.name}: is not for Python {PYTHON}")


# -- here ------------------------------------------------------------------------------------------------------------


def make(folder: Path, text: list[str], vocabulary: int, library: Path | None = None, wheels: bool = True) -> Record:
    """Write the pack; `library`: a library already built from this tree. Raises ValueError."""
    if folder.exists() and not (folder / RECORD).is_file():
        raise ValueError(f"{folder}: exists and is not a pack; name another folder")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / LIBRARY).parent.mkdir(parents=True)
    (folder / RECORD).write_text("{}")
    if library is None:
        output_of([sys.executable, "setup.py", "build_ext", "--inplace"], MEGABERT_CUDA="1")
        library = TREES_LIBRARY
    if newer := newer_symbols(library):
        raise ValueError(f"{library} does not load on glibc 2.28, for which setup.py builds: {', '.join(newer)}")
    shutil.copy2(library, folder / LIBRARY)
    lengths = ("--held-out", 0.02, "--nsp", "--vocab-size", vocabulary, "--seq-len", 128, 512)
    hardware.build_data(folder / "data", *lengths, "--input", *text)
    there, carried, needs = of_the_machine(), set[str](), list[Requirement]()
    if wheels:
        needs = requirements(there, dependencies())
        for need in needs:
            if not meets(there, need) and need.name not in carried:
                fetch(need, folder / "wheels")
                carried.add(need.name)
    record = {"about": hardware.about(), "python": PYTHON if wheels else python_version()}
    record |= {"native_sources": native_digest(), "wheels": sorted(carried), "needs": sorted(map(str, needs))}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    if (mib := transfer_size(folder) / 2**20) > LIMIT >> 20:
        raise ValueError(f"{folder}: with the tree {mib:.1f} MiB, a transfer takes {LIMIT >> 20}; give less text")
    return record


def transfer_size(folder: Path) -> int:
    """Bytes of the tree's committed files and of the pack."""
    tree = [ROOT / name for name in output_of(["git", "ls-files", "-z"]).split("\0") if name]
    return sum(path.stat().st_size for path in (*tree, *folder.rglob("*")) if path.is_file())


# -- there -----------------------------------------------------------------------------------------------------------


def python_version() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def read(folder: Path) -> Record:
    """The record of a finished pack; {} if there is none."""
    path = folder / RECORD
    return json.loads(path.read_text()) if path.is_file() else {}


def unpack_wheels(folder: Path, site: Path) -> str:
    """Unpack the wheels into `site`, for PYTHONPATH; returns a line about it. Another version than asked is named in
    it. Raises ValueError naming what the machine lacks then.

    This equals an installation except for scripts, which are not used here (PEP 427).
    """
    record, wheels = read(folder), sorted((folder / "wheels").glob("*.whl"))
    if record["python"] != python_version():
        raise ValueError(f"{folder}: is for Python {record['python']}, this is {python_version()}")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    found = importlib.metadata.distributions(path=[str(site), *sys.path])
    versions: dict[str, str] = {
        canonicalize_name(one.metadata["Name"]): one.version for one in reversed(list(found)) if one.metadata["Name"]
    }  # the first counts
    needs = map(Requirement, record["needs"])
    lacking = {str(need): versions.get(canonicalize_name(need.name)) for need in needs if not meets(versions, need)}
    if missing := [need for need, version in lacking.items() if version is None]:
        raise ValueError(f"this machine and {folder} lack {', '.join(missing)}")
    others = ", ".join(f"{version} for {need}" for need, version in lacking.items())
    return f"{len(wheels)} wheels unpacked, {len(record['needs'])} requirements{f' but {others}' * bool(others)} met"


def place_library(folder: Path, device: str) -> str:
    """Copy the pack's library into the tree, or build one there if it does not run on the device; returns a line about it. Raises
    ValueError if it is from other sources, or if none runs, and TimeoutError."""
    if read(folder)["native_sources"] != native_digest():
        raise ValueError(f"{folder}: its library was built from other native sources than this tree's; make it again")
    probe = [sys.executable, "-c", PROBE]
    try:
        output_of([*probe, str(folder / LIBRARY), device], PROBE_SECONDS)
    except ValueError as error:
        if device == "cpu":
            raise
        began, reason = time.monotonic(), f"the pack's: {str(error).splitlines()[-1]}"
        try:
            find = "import torch; print(*torch.cuda.get_device_capability(), sep='.')"
            capability = output_of([sys.executable, "-c", find], PROBE_SECONDS).strip()
            architecture = {"MEGABERT_CUDA": "1", "TORCH_CUDA_ARCH_LIST": capability}
            output_of([sys.executable, "setup.py", "build_ext", "--inplace"], BUILD_SECONDS, **architecture)
            output_of([*probe, str(TREES_LIBRARY), device], PROBE_SECONDS)
        except (ValueError, TimeoutError) as other:
            raise ValueError(f"no library runs; {reason}; building one here: {other}") from None
        return f"library built here in {time.monotonic() - began:.0f} s; {reason}"
    part = TREES_LIBRARY.with_name(f"{TREES_LIBRARY.name}.part")
    shutil.copy2(folder / LIBRARY, part)
    os.replace(part, TREES_LIBRARY)
    return "the pack's library runs"
