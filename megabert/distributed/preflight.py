"""Preflight of a cluster: what the ranks of one launch are, and how fast their devices, network and files are.

Every measurement has a time limit that all ranks keep alike, so that a slow link makes fewer measurements and not a longer
preflight. Rates are a rank's own: who is slow is seen at once.
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

SIZES = [8, 2**12, 2**16, 2**20, 2**24, 2**28]  # bytes of an all-reduce
LONGEST = 3.0  # seconds that one all-reduce may take by what the size before took
REPEATS = 3
LINK_SECONDS = 0.5  # that a message to the next rank should take
CLOCK_LOOKS = 20
FILE_BYTES, PIECE = 64 * 2**20, 2**20
FILE_SECONDS = 5.0  # for each of write, read and metadata
FILES = 100
SEEN_SECONDS = 5.0  # until another node's file must be visible: network file systems keep listings for a while
LATE_CLOCK = 1.0  # seconds that matter: file times, run locks, logs
SLOW = {"device": 0.9, "link": 0.5, "files": 0.5}  # of the median, below which a rank is worth a look


@dataclass
class Place:
    """One rank: where it is and what it measured."""

    rank: int
    host: str
    device: str
    versions: dict[str, str]
    clock: float = 0.0  # seconds ahead of rank 0's
    tflops: float = 0.0
    link: float = 0.0  # bytes a second that arrive from the rank before
    files: dict[str, float] = field(default_factory=dict)  # write and read in bytes, metadata in operations a second
    problem: str = ""  # with the files

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass
class Survey:
    """What all ranks measured; the same on each of them."""

    places: list[Place]
    backend: str
    launcher: str
    clock_error: float  # seconds
    all_reduce: list[tuple[int, float]]  # (bytes, seconds)


@dataclass(frozen=True)
class Line:
    """One line of the report; `state` as the doctor's."""

    name: str
    state: str
    value: str
    fix: str = ""


# -- measuring -------------------------------------------------------------------------------------------------------


def survey(world: World, folder: Path, tflops: Callable[[], float], done: Callable[[], None] = lambda: None) -> Survey:
    """Measure; files in `folder`, the device's product rate by `tflops`. `done` is called after each part. A collective."""
    place = Place(world.rank, socket.gethostname(), device_name(world.device), versions(), tflops=tflops())
    done()
    place.clock, error = clock_skew(world)
    sums = all_reduce_seconds(world)
    done()
    place.link = link_rate(world, sums)
    done()
    measure_files(world, folder, place)
    done()
    places = [Place(**its) for its in world.gather(asdict(place))]
    return Survey(places, world.backend, world.launcher, error, sums)


def device_name(device: torch.device) -> str:
    """Name and memory of a GPU; of a CPU the model and its cores."""
    if device.type == "cuda":
        its = torch.cuda.get_device_properties(device)
        return f"{its.name}, {its.total_memory / 2**30:.0f} GiB"
    return f"{environment.cpu_model()}, {environment.cores()} cores"


def versions() -> dict[str, str]:
    """What must be the same on every node."""
    found = environment.versions() | {"megabert": environment.revision(), "kernel": platform.release()}
    if torch.version.cuda:
        found |= {"CUDA": torch.version.cuda, "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def clock_skew(world: World) -> tuple[float, float]:
    """Seconds by which this rank's clock is ahead of rank 0's, and how far that may be off. Every rank looks at its clock as it
    leaves a barrier: all of them between the moment when the last one came and the moment when the last one left."""
    looks = []
    for _ in range(CLOCK_LOOKS if world.size > 1 else 1):
        started = time.perf_counter()
        world.barrier()
        looks.append([time.perf_counter() - started, time.time()])
    everybody = world.gather(looks)
    longest = [max(its[look][0] for its in everybody) for look in range(len(looks))]
    best = longest.index(min(longest))
    return everybody[world.rank][best][1] - everybody[0][best][1], longest[best]


def all_reduce_seconds(world: World) -> list[tuple[int, float]]:
    """(bytes, seconds) of all-reduces of fp32 where gradients are summed, the best of `REPEATS` on the slowest rank."""
    found: list[tuple[int, float]] = []
    for size in SIZES if world.size > 1 else ():
        if found and found[-1][1] * size / found[-1][0] > LONGEST and size > 2**16:
            break
        data = torch.ones(size // 4, device=world.device)
        best = _best(world, partial(dist.all_reduce, data))
        found.append((size, max(world.gather(best))))
    return found


def link_rate(world: World, sums: Sequence[tuple[int, float]]) -> float:
    """Bytes a second that arrive from the rank before, while every rank sends to the next; 0 for a lone rank."""
    if world.size == 1:
        return 0.0
    size = max(bytes_ for bytes_, seconds in sums if seconds < LINK_SECONDS or bytes_ == sums[0][0])
    sent, got = torch.ones(size // 4, device=world.device), torch.empty(size // 4, device=world.device)

    def pass_on() -> None:
        to, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, got, source), dist.P2POp(dist.isend, sent, to)]):
            work.wait()

    return size / _best(world, pass_on)


def _best(world: World, function: Callable[[], Any]) -> float:
    """Least seconds of `function`, which ranks begin together; the first call, which connects them, aside."""
    times = []
    for _ in range(REPEATS + 1):
        world.barrier()
        started = time.perf_counter()
        function()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def measure_files(world: World, folder: Path, place: Place) -> None:
    """Write, read what another node wrote, make and remove many files, all in a folder that is removed again. A collective."""
    shared = folder / world.broadcast(f".preflight-{os.getpid()}-{time.time_ns()}")
    hosts = world.gather(place.host)
    others = [rank for rank, host in enumerate(hosts) if host != place.host]
    source = others[world.rank % len(others)] if others else world.rank
    own = shared / f"{world.rank}"
    steps = (
        lambda: _write(own, place),
        lambda: _read(shared / f"{source}" / "data", hosts[source], place),
        lambda: _make_and_remove(own, place),
    )
    try:
        for step in steps:  # a rank whose files fail takes part in the barriers still
            if not place.problem:
                try:
                    step()
                except OSError as error:
                    place.problem = describe(error)
            world.barrier()
    finally:
        shutil.rmtree(own, ignore_errors=True)
        with contextlib.suppress(OSError):  # another rank's files are still in it, or it is gone
            shared.rmdir()


def _write(own: Path, place: Place) -> None:
    own.mkdir(parents=True)
    started, written = time.perf_counter(), 0
    with open(own / "data", "wb") as file:
        piece = os.urandom(PIECE)
        while written < FILE_BYTES and time.perf_counter() - started < FILE_SECONDS:
            file.write(piece)
            written += PIECE
        file.flush()
        os.fsync(file.fileno())
        place.files["write"] = written / (time.perf_counter() - started)
        _forget(file.fileno())


def _read(path: Path, host: str, place: Place) -> None:
    deadline = time.monotonic() + SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise OSError(f"{path.parents[1].parent} is not shared: what {host} wrote is not seen here")
        time.sleep(0.1)
    with open(path, "rb", buffering=0) as file:
        _forget(file.fileno())
        started, read = time.perf_counter(), 0
        while time.perf_counter() - started < FILE_SECONDS and (piece := file.read(PIECE)):
            read += len(piece)
        place.files["read"] = read / (time.perf_counter() - started)


def _make_and_remove(own: Path, place: Place) -> None:
    started, made = time.perf_counter(), 0
    while made < FILES and time.perf_counter() - started < FILE_SECONDS:
        path = own / f"{made}"
        path.touch()
        path.stat()
        path.unlink()
        made += 1
    place.files["metadata"] = 3 * made / (time.perf_counter() - started)


def _forget(file: int) -> None:
    """Reads come from the disk and not from this machine's memory."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


# -- report ----------------------------------------------------------------------------------------------------------


def report(found: Survey) -> list[Line]:
    """Lines of the report, the slowest rank of each measurement named."""
    places, size = found.places, len(found.places)
    on = Counter(place.host for place in places)
    hosts = ", ".join(f"{host} x{count}" for host, count in list(on.items())[:8])
    more = f" and {len(on) - 8} more" if len(on) > 8 else ""
    value = f"{size} on {len(on)} node(s) by {found.launcher}, {found.backend}: {hosts}{more}"
    lines = [Line("ranks", "ok", value), *_same("device", [(p, {"device": p.device}) for p in places], "note")]
    strict = [(p, {k: v for k, v in p.versions.items() if k != "kernel"}) for p in places]
    lines += _same("versions", strict, "missing")
    lines += _same("kernel", [(p, {"kernel": p.versions.get("kernel", "")}) for p in places], "note")
    lines.append(_clocks(found))
    lines.append(_rates("product rate", {p.name: p.tflops for p in places}, "TFLOP/s", 1.0, SLOW["device"]))
    for bytes_, seconds in found.all_reduce:
        moved = 2 * (size - 1) / size * bytes_ / seconds / 1e9
        lines.append(Line(f"all-reduce {_size(bytes_)}", "ok", f"{seconds * 1e3:,.2f} ms, {moved:,.3f} GB/s a rank"))
    for name, inside in (("links in nodes", True), ("links between nodes", False)):
        links = {
            f"{places[rank - 1].name} to {place.name}": place.link
            for rank, place in enumerate(places)
            if size > 1 and (places[rank - 1].host == place.host) == inside
        }
        if links:
            lines.append(_rates(name, links, "MB/s", 1e6, SLOW["link"]))
    for place in places:
        if place.problem:
            lines.append(Line("files", "missing", f"{place.name}: {place.problem}", "all nodes need one file system"))
    for kind, unit, scale in (("write", "MB/s", 1e6), ("read", "MB/s", 1e6), ("metadata", "operations/s", 1.0)):
        rates = {p.name: p.files[kind] for p in places if kind in p.files}
        if rates:
            lines.append(_rates(f"files, {kind}", rates, unit, scale, SLOW["files"]))
    return lines


def _same(name: str, its: list[tuple[Place, dict[str, str]]], state: str) -> list[Line]:
    """One line where all are alike, otherwise one for each difference, with the nodes that have it."""
    lines = []
    for key in sorted({key for _, values in its for key in values}):
        by_value: dict[str, list[str]] = {}
        for place, values in its:
            hosts = by_value.setdefault(values.get(key, "not installed"), [])
            if place.host not in hosts:
                hosts.append(place.host)
        if len(by_value) > 1:
            usual = max(by_value, key=lambda value: len(by_value[value]))
            odd = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in by_value.items() if value != usual)
            fix = f"make {key} the same on all nodes" if state == "missing" else ""
            lines.append(Line(f"{name} differ", state, f"{key}: {odd}; {usual} elsewhere", fix))
    alike = "; ".join(f"{key} {value}" if len(its[0][1]) > 1 else value for key, value in its[0][1].items())
    return lines or [Line(name, "ok", alike)]


def _clocks(found: Survey) -> Line:
    worst = max(found.places, key=lambda place: abs(place.clock))
    value = f"within {max(p.clock for p in found.places) - min(p.clock for p in found.places):.3f} s"
    value += f", to {found.clock_error:.3f} s; furthest from rank 0: {worst.name} {worst.clock:+.3f} s"
    late = abs(worst.clock) > LATE_CLOCK + found.clock_error
    return Line("clocks", "note" if late else "ok", value, "set the clocks by NTP" if late else "")


def _rates(name: str, rates: dict[str, float], unit: str, scale: float, least: float) -> Line:
    ordered = sorted(rates.values())
    median = ordered[len(ordered) // 2]
    slowest = min(rates, key=rates.__getitem__)
    text = f"median {_number(median / scale)} {unit}, slowest {slowest}: {_number(rates[slowest] / scale)} {unit}"
    return Line(name, "note" if rates[slowest] < least * median else "ok", text)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _size(size: int) -> str:
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size // scale} {unit}"
    return f"{size} B"
