"""Preflight of a cluster: what the ranks of one launch are, and how fast their devices, network and files are.

Every measurement has a time limit that is the same on all ranks, so that a slow link makes fewer measurements and not a
longer preflight. Rates are a rank's own, so that the slow one is named.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megabert.common import environment
from megabert.common.errors import describe
from megabert.distributed.ranks import World

# Bytes of an all-reduce.
SIZES = [8, 2**12, 2**16, 2**20, 2**24, 2**28]
# Seconds that one all-reduce may take, by what the size before took.
LONGEST = 3.0
REPEATS = 3
# Seconds that a message to the next rank should take.
LINK_SECONDS = 0.5
FILE_BYTES, CHUNK = 64 * 2**20, 2**20
# For each of write, read and metadata.
FILE_SECONDS = 5.0
FILES = 100
# Until another node's file must be visible: network file systems cache listings for a while.
VISIBLE_SECONDS = 5.0
# Share of the median below which a rank is slow.
SLOW = {"device": 0.9, "link": 0.5, "files": 0.5}


@dataclass
class RankSurvey:
    """One rank: where it is and what it measured."""

    rank: int
    host: str
    device: str
    versions: dict[str, str]
    tflops: float = 0.0
    # Bytes a second that arrive from the rank before.
    link: float = 0.0
    # Write and read in bytes, metadata in operations a second.
    files: dict[str, float] = field(default_factory=dict)
    # With the files.
    problem: str = ""

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass
class Survey:
    """What all ranks measured; the same on each of them."""

    ranks: list[RankSurvey]
    backend: str
    launcher: str
    # (bytes, seconds)
    all_reduce: list[tuple[int, float]]


@dataclass(frozen=True)
class PreflightLine:
    """One line of the report; `state` as the doctor's."""

    name: str
    state: str
    value: str
    fix: str = ""


# -- measuring -------------------------------------------------------------------------------------------------------


def survey(world: World, folder: Path, tflops: Callable[[], float], done: Callable[[], None] = lambda: None) -> Survey:
    """Measure; files in `folder`, the device's product rate by `tflops`. `done` is called after each part. A collective."""
    local = RankSurvey(world.rank, socket.gethostname(), device_name(world.device), versions(), tflops=tflops())
    done()
    sums = all_reduce_seconds(world)
    done()
    local.link = link_rate(world, sums)
    done()
    measure_files(world, folder, local)
    done()
    return Survey([RankSurvey(**one) for one in world.gather(asdict(local))], world.backend, world.launcher, sums)


def device_name(device: torch.device) -> str:
    """Name and memory of a GPU; of a CPU the model and its cores."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return f"{environment.cpu_model()}, {environment.cores()} cores"


def versions() -> dict[str, str]:
    """Versions that must be the same on every node, and the kernel's, which should be."""
    installed = environment.versions() | {"megabert": environment.revision(), "kernel": platform.release()}
    if torch.version.cuda:
        installed |= {"CUDA": torch.version.cuda, "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return installed


def all_reduce_seconds(world: World) -> list[tuple[int, float]]:
    """(bytes, seconds) of all-reduces of fp32 where gradients are summed, the best of `REPEATS` on the slowest rank."""
    times: list[tuple[int, float]] = []
    for size in SIZES if world.size > 1 else ():
        if times and times[-1][1] * size / times[-1][0] > LONGEST and size > 2**16:
            break
        data = torch.ones(size // 4, device=world.device)
        best = _best_seconds(world, partial(dist.all_reduce, data))
        times.append((size, max(world.gather(best))))
    return times


def link_rate(world: World, sums: Sequence[tuple[int, float]]) -> float:
    """Bytes a second that arrive from the rank before, while every rank sends to the next; 0 for a lone rank."""
    if world.size == 1:
        return 0.0
    size = max(bytes_ for bytes_, seconds in sums if seconds < LINK_SECONDS or bytes_ == sums[0][0])
    sent, received = torch.ones(size // 4, device=world.device), torch.empty(size // 4, device=world.device)

    def shift() -> None:
        to, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        receive, send = dist.P2POp(dist.irecv, received, source), dist.P2POp(dist.isend, sent, to)
        for work in dist.batch_isend_irecv([receive, send]):
            work.wait()

    return size / _best_seconds(world, shift)


def _best_seconds(world: World, function: Callable[[], Any]) -> float:
    """Least seconds of `function`, which ranks enter together; the first call, which connects them, aside."""
    times = []
    for _ in range(REPEATS + 1):
        world.barrier()
        started = time.perf_counter()
        function()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def measure_files(world: World, folder: Path, local: RankSurvey) -> None:
    """Write, read what another node wrote, create and remove many files, all in a folder that is removed again. A
    collective."""
    shared = folder / world.broadcast(f".preflight-{os.getpid()}-{time.time_ns()}")
    hosts = world.gather(local.host)
    others = [rank for rank, host in enumerate(hosts) if host != local.host]
    source = others[world.rank % len(others)] if others else world.rank
    directory = shared / f"{world.rank}"
    steps = (
        lambda: _write(directory, local),
        lambda: _read(shared / f"{source}" / "data", hosts[source], local),
        lambda: _create_and_remove(directory, local),
    )
    try:
        for step in steps:  # a rank whose files fail still takes part in the barriers
            if not local.problem:
                try:
                    step()
                except OSError as error:
                    local.problem = describe(error)
            world.barrier()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):  # another rank's files are still in it, or it is gone
            shared.rmdir()


def _write(directory: Path, local: RankSurvey) -> None:
    directory.mkdir(parents=True)
    started, written = time.perf_counter(), 0
    with open(directory / "data", "wb") as file:
        chunk = os.urandom(CHUNK)
        while written < FILE_BYTES and time.perf_counter() - started < FILE_SECONDS:
            file.write(chunk)
            written += CHUNK
        file.flush()
        os.fsync(file.fileno())
        local.files["write"] = written / (time.perf_counter() - started)
        _drop_cache(file.fileno())


def _read(path: Path, host: str, local: RankSurvey) -> None:
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise OSError(f"{path.parents[1].parent} is not shared: what {host} wrote is not seen here")
        time.sleep(0.1)
    with open(path, "rb", buffering=0) as file:
        _drop_cache(file.fileno())
        started, read = time.perf_counter(), 0
        while time.perf_counter() - started < FILE_SECONDS and (chunk := file.read(CHUNK)):
            read += len(chunk)
        local.files["read"] = read / (time.perf_counter() - started)


def _create_and_remove(directory: Path, local: RankSurvey) -> None:
    started, created = time.perf_counter(), 0
    while created < FILES and time.perf_counter() - started < FILE_SECONDS:
        path = directory / f"{created}"
        path.touch()
        path.stat()
        path.unlink()
        created += 1
    local.files["metadata"] = 3 * created / (time.perf_counter() - started)


def _drop_cache(file: int) -> None:
    """Reads come from the disk and not from this machine's memory."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


# -- report ----------------------------------------------------------------------------------------------------------


def report(survey: Survey) -> list[PreflightLine]:
    """Lines of the report, the slowest rank of each measurement named."""
    ranks, size = survey.ranks, len(survey.ranks)
    on = Counter(one.host for one in ranks)
    hosts = ", ".join(f"{host} x{count}" for host, count in list(on.items())[:8])
    more = f" and {len(on) - 8} more" if len(on) > 8 else ""
    value = f"{size} on {len(on)} node(s) by {survey.launcher}, {survey.backend}: {hosts}{more}"
    lines = [PreflightLine("ranks", "ok", value), *_differences("device", {"device": [r.device for r in ranks]}, ranks)]
    names = sorted({name for one in ranks for name in one.versions})
    by_name = {name: [one.versions.get(name, "not installed") for one in ranks] for name in names}
    lines += _differences("kernel", {"kernel": by_name.pop("kernel")}, ranks)
    lines += _differences("versions", by_name, ranks, state="missing")
    lines.append(_slowest("product rate", {one.name: one.tflops for one in ranks}, "TFLOP/s", 1.0, SLOW["device"]))
    for bytes_, seconds in survey.all_reduce:
        moved = 2 * (size - 1) / size * bytes_ / seconds / 1e9
        value = f"{seconds * 1e3:,.2f} ms, {moved:,.3f} GB/s a rank"
        lines.append(PreflightLine(f"all-reduce {_size(bytes_)}", "ok", value))
    for name, inside in (("links in nodes", True), ("links between nodes", False)):
        links = {
            f"{ranks[i - 1].name} to {one.name}": one.link
            for i, one in enumerate(ranks)
            if size > 1 and (ranks[i - 1].host == one.host) == inside
        }
        if links:
            lines.append(_slowest(name, links, "MB/s", 1e6, SLOW["link"]))
    for one in ranks:
        if one.problem:
            value = f"{one.name}: {one.problem}"
            lines.append(PreflightLine("files", "missing", value, "all nodes need one file system"))
    for kind, unit, scale in (("write", "MB/s", 1e6), ("read", "MB/s", 1e6), ("metadata", "operations/s", 1.0)):
        rates = {one.name: one.files[kind] for one in ranks if kind in one.files}
        if rates:
            lines.append(_slowest(f"files, {kind}", rates, unit, scale, SLOW["files"]))
    return lines


def _differences(
    title: str, values: dict[str, list[str]], ranks: list[RankSurvey], state: str = "note"
) -> list[PreflightLine]:
    """One line where all ranks have the same values, otherwise one for each difference, with the nodes that have it."""
    lines = []
    for name, of_ranks in values.items():
        hosts: dict[str, list[str]] = {}
        for one, value in zip(ranks, of_ranks, strict=True):
            if one.host not in hosts.setdefault(value, []):
                hosts[value].append(one.host)
        if len(hosts) > 1:
            usual = max(hosts, key=lambda value: len(hosts[value]))
            odd = "; ".join(f"{value} on {', '.join(on)}" for value, on in hosts.items() if value != usual)
            fix = f"make {name} the same on all nodes" if state == "missing" else ""
            lines.append(PreflightLine(f"{title} differ", state, f"{name}: {odd}; {usual} elsewhere", fix))
    same = "; ".join(of[0] if len(values) == 1 else f"{name} {of[0]}" for name, of in values.items())
    return lines or [PreflightLine(title, "ok", same)]


def _slowest(title: str, rates: dict[str, float], unit: str, scale: float, least: float) -> PreflightLine:
    ordered = sorted(rates.values())
    median = ordered[len(ordered) // 2]
    slowest = min(rates, key=rates.__getitem__)
    text = f"median {_number(median / scale)} {unit}, slowest {slowest}: {_number(rates[slowest] / scale)} {unit}"
    return PreflightLine(title, "note" if rates[slowest] < least * median else "ok", text)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _size(size: int) -> str:
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size // scale} {unit}"
    return f"{size} B"
