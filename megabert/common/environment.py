"""The environment of a process: processor, memory, GPUs, package versions, git revision, command, allocator.

Only the standard library: packages are not imported to read their versions, and no GPU is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import ipaddress
import math
import os
import platform
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megabert.common.logs import hide_secrets

ROOT = Path(__file__).resolve().parents[2]  # folder of a clone
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
# CPU features by which libraries choose their kernels
VECTOR_FLAGS = {"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "avx512_vnni", "sve", "bf16"}
# constants of glibc's malloc.h; other C libraries have no mallopt
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# variables set by launchers of several processes
LAUNCHED = {"RANK", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}
BACKLOG = 4096  # connections that may wait to be accepted: one of each rank
PACKAGES = ("torch", "deepspeed", "transformers", "webdataset", "sentencepiece", "numpy", "mpi4py")


def output(command: Sequence[str], otherwise: str = "") -> str:
    """A command's standard output, run in the clone's folder; `otherwise` if it is not installed, fails or takes 20 s."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return otherwise
    return done.stdout.rstrip() if done.returncode == 0 else otherwise


def match_in(file: str, pattern: str) -> str:
    """The first group of the first match in a file's text; "" without a match, or if the file cannot be read."""
    try:
        match = re.search(pattern, Path(file).read_text())
    except OSError:  # none, or disabled in the kernel, as pressure stall information on RHEL 8
        return ""
    return match[1] if match else ""


def cpu_model() -> str:
    return match_in("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    """CPU feature names by the kernel, e.g. `avx2`, `avx512_bf16`, `amx_bf16`; on Arm `bf16`."""
    return set(match_in("/proc/cpuinfo", r"(?:flags|Features)\s*:\s*(.+)").split())


def processor() -> str:
    """The processor's name, and the vector instructions by which libraries choose their kernels."""
    return f"{cpu_model()} ({' '.join(sorted(cpu_flags() & VECTOR_FLAGS))})"


def has_native_bf16() -> bool:
    """Whether the processor has bf16 products, which others emulate."""
    return bool(cpu_flags() & BF16_FLAGS)


def nvidia_driver() -> str:
    """Release of NVIDIA's driver; "" if none is loaded."""
    return match_in("/proc/driver/nvidia/version", r"(\d+(?:\.\d+)+)")


def cores() -> int:
    """Cores that this process may use: under taskset, or by a container's limit (`docker --cpus`), fewer than the machine has."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = match_in(f"{control_group()}/cpu.max", r"(\d+ \d+)").partition(" ")  # microseconds
    return min(allowed, math.ceil(int(quota) / int(period))) if quota else allowed


def control_group() -> str:
    """Folder of this process' control group (version 2)."""
    return "/sys/fs/cgroup" + match_in("/proc/self/cgroup", r"0::(/\S*)")


def host_name() -> str:
    """Name of this machine, under SLURM its node name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def address_to_bind(host: str) -> str:
    """The address at which a socket of this machine listens for those who connect to `host`, a name or an address of it. "" (all
    interfaces) for a name that is the loopback interface here, as in Debian's /etc/hosts: other hosts resolve it differently. Raises
    ValueError for the address of another machine."""
    for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            own = str(address[0])
            named = host not in (own, "localhost")
            return "" if named and ipaddress.ip_address(own.partition("%")[0]).is_loopback else own
    raise ValueError(
        f"the rendezvous address {host} is not an address of {socket.gethostname()}, where rank 0 runs; unset MASTER_ADDR or set "
        "it to one of them"
    )


def listening_socket(address: str, port: int) -> socket.socket:
    """A socket that listens at an `address_to_bind`; port 0 is any free one."""
    every = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if every or ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG, dualstack_ipv6=every)


def launched() -> bool:
    """Whether a launcher may have started this process as one of several."""
    return bool(LAUNCHED & os.environ.keys())


def limit_openmp_spinning() -> None:
    """Let OpenMP's threads sleep after 1,000 spins at a barrier, in torch and the kernels loaded afterwards.

    libgomp spins 300,000 times by default. If other processes compute too, that blocks the core which the last thread
    needs: next to one such process the default halves the throughput of two threads (docs/measurements.md).
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def cpu_pressure_seconds() -> float | None:
    """Seconds so far in which a process of this control group, or of the machine, was ready and had no core; None without the
    kernel's pressure stall information."""
    files = (f"{control_group()}/cpu.pressure", "/proc/pressure/cpu")
    totals = (match_in(file, r"some .*total=(\d+)") for file in files)
    return next((int(total) / 1e6 for total in totals if total), None)


def memory_gib() -> float:
    return round(int(match_in("/proc/meminfo", r"MemTotal:\s*(\d+) kB") or 0) / 2**20, 1)


def gpus() -> list[str]:
    """Name and memory of each NVIDIA device, from nvidia-smi."""
    return output(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]).splitlines()


def version(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def require_packages(what: str, extra: str, *modules: str) -> None:
    """Raises ValueError if any of `modules` is not installed; names `what` needs them, and the extra that installs
    them."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        verb = "is" if len(missing) == 1 else "are"
        raise ValueError(f"{what}: {', '.join(missing)} {verb} not installed; pip install 'megabert[{extra}]'")


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that affect a run."""
    installed = {name: version(name) for name in PACKAGES}
    return {"python": platform.python_version()} | {name: text for name, text in installed.items() if text}


def changes(exclude: Sequence[str] = ()) -> list[str]:
    """Lines of `git status` for uncommitted files in the clone, without the paths `exclude`."""
    paths = [".", *(f":(exclude){path}" for path in exclude)]
    failed = "?? git status failed" if (ROOT / ".git").exists() else ""
    return output(["git", "status", "--porcelain", "--", *paths], failed).splitlines()


def revision(exclude: Sequence[str] = ()) -> str:
    """Short git revision, with `+changes` when the tree differs from it; "unknown" in an installed copy or without git."""
    repository = output(["git", "rev-parse", "--show-toplevel"])
    if repository != os.fspath(ROOT):  # a clone into which this copy was installed
        return "unknown"
    short = output(["git", "rev-parse", "--short=12", "HEAD"])
    return f"{short}{'+changes' if changes(exclude) else ''}" if short else "unknown"


@functools.cache  # a start compares it between the ranks, and records it
def source(*folders: str) -> str:
    """SHA-256 of the Python files of `folders` (the package without any), the same in a clone and in an installed copy."""
    sha256 = hashlib.sha256()
    for folder in (ROOT / name for name in folders or ("megabert",)):
        for path in sorted(folder.rglob("*.py")):
            sha256.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return sha256.hexdigest()


def command() -> str:
    """This process' command line."""
    return hide_secrets(shlex.join(["python", *sys.argv]))


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files, usually 1,024, to the hard limit, and return it: each of 512 ranks has a socket to every
    other one and maps hundreds of shards, and its loader workers inherit both."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def end_with_parent() -> None:
    """On Linux, have this process killed when its parent ends."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def disable_malloc_trimming() -> bool:
    """Set malloc to reuse freed memory, up to the process's peak. False if the C library has no such setting.

    Arrays of megabytes are allocated and freed for every batch and layer. With glibc's defaults each is a new mapping, whose page
    faults cost up to half of the loader's time and a fifth of a training step's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # no mappings, no trimming; all are set, even if one is refused
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 64 << 20))
    return min([mallopt(name, value) for name, value in settings]) == 1
