"""Clocks, memory readings and quantiles of a benchmark, on the CPU or a GPU."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch

from megabert.common.environment import match_in

Call = Callable[[], object]
Times = dict[str, list[float]]


class Memory:
    """Bytes of this process (or of the device): current, and peak since `restart`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _status(self, field: str) -> int:
        return 1024 * int(match_in("/proc/self/status", rf"{field}:\s*(\d+)"))

    def now(self) -> int:
        gc.collect()
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        ctypes.CDLL(None).malloc_trim(0)
        return self._status("VmRSS")

    def restart(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else self._status("VmHWM")


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quantiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values * 9
    return {"p20": cuts[1], "p50": cuts[4], "p80": cuts[7]}


def seconds_of(call: Call, device: torch.device, calls: int = 1) -> float:
    """Seconds of a call, the mean of so many, until the device has done them."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronise(device)
    return (time.perf_counter() - start) / calls


def order_of(names: Iterable[str], number: int) -> list[str]:
    """The names in the order of a round: the other way round in every second one."""
    return list(names)[:: 1 if number % 2 else -1]


def take_turns(sides: Iterable[str], rounds: int, measure: Callable[[str], Any]) -> dict[str, list[Any]]:
    """What `measure` finds for each side in each round."""
    found: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in order_of(found, number):
            found[name].append(measure(name))
    return found


class CaptureFailed(RuntimeError):
    """A side could not be captured or replayed. The device's context may be unusable, so the process has to be restarted."""

    def __init__(self, side: str, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.side = side


def kernel_times(sides: Mapping[str, Call], device: torch.device, rounds: int, seconds: float = 0.2) -> Times:
    """Seconds of a call of each side on the device, without the time of Python's launches.

    On CUDA as many calls as take about a millisecond are in a CUDA graph, and its replays are timed by events, which measures the
    kernels and the gaps between them. Raises CaptureFailed for a call that cannot be captured because it waits for the device; its
    wall-clock time would measure Python. On the CPU a time is over enough calls to take `seconds`. Sides alternate on each.
    """
    if device.type != "cuda":
        counts = {}
        for name, side in sides.items():
            seconds_of(side, device, 2)  # warm-up of kernels and memory
            counts[name] = max(1, round(seconds / max(seconds_of(side, device), 1e-6)))
        return take_turns(sides, rounds, lambda name: seconds_of(sides[name], device, counts[name]))
    graphs: dict[str, Callable[[], list[float]]] = {}

    def replay(name: str) -> list[float]:
        try:
            if name not in graphs:
                once = statistics.median(_capture(sides[name], 1)(5))
                calls = max(1, min(100, round(1e-3 / max(once, 1e-7))))
                a_round = max(1, round(min(200, seconds / (calls * once)) / rounds))
                graphs[name] = partial(_capture(sides[name], calls), a_round)
            return graphs[name]()
        except Exception as error:
            raise CaptureFailed(name, error) from error

    for name in sides:  # captured in this order; the times of this round do not count
        replay(name)
    return {name: list(chain(*times)) for name, times in take_turns(sides, rounds, replay).items()}


def copy_bandwidth(device: torch.device, elements: int) -> float:
    """Bytes a second of a copy of int32 elements, counting reads and writes."""
    source = torch.zeros(elements, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    times = kernel_times({"copy": lambda: target.copy_(source)}, device, 3)["copy"]
    return 2 * source.numel() * source.element_size() / min(times)


def _capture(call: Call, calls: int) -> Callable[[int], list[float]]:
    """A graph of so many calls, as a function of a number of replays: seconds of one call in each of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm-up: kernels and workspaces of libraries are set up outside the graph
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()

    def replay(replays: int) -> list[float]:
        graph.replay()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        marks[0].record()
        for mark in marks[1:]:
            graph.replay()
            mark.record()
        torch.rand(1, device="cuda")  # raises if the capture has made the generator unusable
        torch.cuda.synchronize()
        return [first.elapsed_time(last) / 1e3 / calls for first, last in pairwise(marks)]

    return replay


def costliest_kernels(call: Call, device: torch.device, flops: Mapping[str, float]) -> list[dict[str, Any]]:
    """Milliseconds, calls, name and TFLOP/s of the 40 costliest kernels (on the CPU: operations) of a call. FLOPs are the
    profiler's, of matrix products, and `flops` of the call by the names of other operations; without any, TFLOP/s are None."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    call()
    synchronise(device)
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU], with_flops=True) as record:
        call()
        synchronise(device)
    kernels = []
    for event in record.key_averages():
        microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
        work = event.flops or flops.get(event.key)
        rate = work / microseconds / 1e6 if work and microseconds else None
        kernels.append({"ms": microseconds / 1e3, "calls": event.count, "name": event.key[:160], "tflops": rate})
    return sorted(kernels, key=lambda kernel: -kernel["ms"])[:40]
