"""Preflight of a cluster: hosts and versions of the ranks, speed of their devices and network, and a shared file system.

Rates are measured on each rank, so that the report names the slowest.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megabert.commands.doctor import Finding
from megabert.common import environment
from megabert.common.errors import describe
from megabert.distributed.ranks import World

# Bytes of a message; about two seconds at 20 Mbit/s.
MESSAGE = 4 * 2**20
REPEATS = 3
# Size of the file that each rank writes.
FILE_BYTES = 64 * 2**20
# Seconds until another node's file must be visible; network file systems cache listings.
VISIBLE_SECONDS = 5.0
# Fraction of the median below which a rank is slow.
SLOW = {"product rate": 0.9, "links in nodes": 0.5, "links between nodes": 0.5, "files": 0.5}
# Facts that may differ between nodes.
NOTED = ("device", "kernel")
# A line of the report.
Line = partial(Finding, "cluster")


@dataclass
class RankSurvey:
    """Host and measurements of one rank."""

    rank: int
    host: str
    # Device, kernel and versions by name.
    facts: dict[str, str]
    tflops: float = 0.0
    # Bytes per second received from the previous rank.
    link: float = 0.0
    # Bytes per second written.
    files: float = 0.0
    # Problem with the shared files, or "".
    problem: str = ""

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host})"


# -- measuring -------------------------------------------------------------------------------------------------------


def survey(
    world: World, folder: Path, tflops: Callable[[], float], done: Callable[[], None] = lambda: None
) -> tuple[list[RankSurvey], float]:
    """The measurements of every rank, and the seconds of an all-reduce of MESSAGE bytes on the slowest rank. A collective. `tflops`
    measures the device's matrix-product rate; `done` is called after each part."""
    local = RankSurvey(world.rank, socket.gethostname(), facts(world.device), tflops=tflops())
    done()
    sent, received = (torch.ones(MESSAGE // 4, device=world.device) for _ in range(2))
    all_reduce = max(world.gather(_best_seconds(world, lambda: dist.all_reduce(sent))))
    done()
    if world.size > 1:
        local.link = MESSAGE / _best_seconds(world, lambda: shift(world, sent, received))
    done()
    check_shared_files(world, folder, local)
    done()
    return [RankSurvey(**fields) for fields in world.gather(asdict(local))], all_reduce


def facts(device: torch.device) -> dict[str, str]:
    """Versions, which must be equal on all nodes, and device and kernel, which should be."""
    versions = environment.versions() | {"megabert": environment.revision(), "kernel": platform.release()}
    if device.type != "cuda":
        return versions | {"device": f"{environment.cpu_model()}, {environment.cores()} cores"}
    properties = torch.cuda.get_device_properties(device)
    name = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return versions | {"device": name, "CUDA": str(torch.version.cuda), "NCCL": nccl}


def shift(world: World, sent: torch.Tensor, received: torch.Tensor) -> None:
    """Every rank sends to the next one and receives from the previous one."""
    to, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, source), dist.P2POp(dist.isend, sent, to)]):
        work.wait()


def _best_seconds(world: World, function: Callable[[], Any]) -> float:
    """Minimum time of `function` in seconds, entered after a barrier. The first call, which opens connections, is not counted."""
    times = []
    for _ in range(REPEATS + 1):
        world.barrier()
        started = time.perf_counter()
        function()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def check_shared_files(world: World, folder: Path, local: RankSurvey) -> None:
    """Write and fsync a file, and look for another node's file, in a temporary folder in `folder`. Sets `files` and `problem` of
    `local`. A collective."""
    shared = folder / world.broadcast(f".preflight-{os.getpid()}-{time.time_ns()}")
    hosts = world.gather(local.host)
    others = [rank for rank, host in enumerate(hosts) if host != local.host]
    source = others[world.rank % len(others)] if others else world.rank
    try:
        shared.mkdir(exist_ok=True)
        data = os.urandom(FILE_BYTES)
        started = time.perf_counter()
        with open(shared / f"{world.rank}", "wb") as file:
            file.write(data)
            os.fsync(file.fileno())
        local.files = FILE_BYTES / (time.perf_counter() - started)
    except OSError as error:
        local.problem = describe(error)
    world.barrier()
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not local.problem and not (seen := (shared / f"{source}").exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    if not local.problem and not seen:
        local.problem = f"{folder} is not shared: a file that {hosts[source]} wrote is not visible"
    world.barrier()
    shutil.rmtree(shared, ignore_errors=True)


# -- report ----------------------------------------------------------------------------------------------------------


def report(world: World, ranks: list[RankSurvey], all_reduce: float) -> list[Finding]:
    """Lines of the report; each measurement names its slowest rank."""
    nodes = Counter(rank.host for rank in ranks)
    hosts = ", ".join(f"{host} x{count}" for host, count in list(nodes.items())[:8])
    more = f" and {len(nodes) - 8} more" if len(nodes) > 8 else ""
    value = f"{len(ranks)} on {len(nodes)} node(s) by {world.launcher}, {world.backend}: {hosts}{more}"
    lines = [Line("ranks", "ok", value), *_facts(ranks)]
    lines.append(_slowest("product rate", {rank.name: rank.tflops for rank in ranks}, "TFLOP/s", 1.0))
    if len(ranks) > 1:
        moved = 2 * (len(ranks) - 1) / len(ranks) * MESSAGE / all_reduce / 1e9
        value = f"{all_reduce * 1e3:,.2f} ms, {moved:,.3f} GB/s a rank"
        lines.append(Line("all-reduce of 4 MiB", "ok", value))
    for name, inside in (("links in nodes", True), ("links between nodes", False)):
        pairs = [(ranks[i - 1], rank) for i, rank in enumerate(ranks) if len(ranks) > 1]
        links = {f"{a.name} to {b.name}": b.link for a, b in pairs if (a.host == b.host) == inside}
        if links:
            lines.append(_slowest(name, links, "MB/s", 1e6))
    problems = [f"{rank.name}: {rank.problem}" for rank in ranks if rank.problem]
    lines += [Line("files", "missing", text, "all nodes need one file system") for text in problems]
    return lines if problems else [*lines, _slowest("files", {rank.name: rank.files for rank in ranks}, "MB/s", 1e6)]


def _facts(ranks: list[RankSurvey]) -> list[Finding]:
    """One line of the facts that all ranks share, and one for each difference, with its hosts."""
    same: dict[str, str] = {}
    lines = []
    for name in sorted({name for rank in ranks for name in rank.facts}):
        hosts: dict[str, set[str]] = {}
        for rank in ranks:
            hosts.setdefault(rank.facts.get(name, "not installed"), set()).add(rank.host)
        usual, *others = sorted(hosts, key=lambda value: -len(hosts[value]))
        if not others:
            same[name] = usual
        else:
            odd = "; ".join(f"{value} on {', '.join(sorted(hosts[value]))}" for value in others)
            state, fix = ("note", "") if name in NOTED else ("missing", f"make {name} the same on all nodes")
            lines.append(Line(f"{name} differs", state, f"{odd}; {usual} elsewhere", fix))
    return [Line("the same on all", "ok", "; ".join(f"{name} {same[name]}" for name in same)), *lines]


def _slowest(title: str, rates: dict[str, float], unit: str, scale: float) -> Finding:
    median = sorted(rates.values())[len(rates) // 2]
    slowest = min(rates, key=rates.__getitem__)
    text = f"median {_number(median / scale)} {unit}, slowest {slowest}: {_number(rates[slowest] / scale)} {unit}"
    return Line(title, "note" if rates[slowest] < SLOW[title] * median else "ok", text)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
