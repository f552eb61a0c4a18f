"""Timing on a GPU, with a stand-in for CUDA whose clock is known: kernels are timed in graphs."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch

from benchmarks.common import measure

OVERHEAD = 4e-6  # seconds between two replays
LAUNCH = 30e-6  # seconds that Python takes for a call outside a graph


class Cuda:
    """Streams, graphs and events over a clock that only work moves."""

    def __init__(self, kernel: float) -> None:
        self.kernel, self.clock, self.captured, self.graphs, self.waits = kernel, 0.0, None, [], 0

    def call(self) -> None:
        if self.captured is None:
            self.clock += self.kernel + LAUNCH
        else:
            self.captured.calls += 1

    def CUDAGraph(self) -> Any:
        made = types.SimpleNamespace(calls=0)

        def replay() -> None:
            self.clock += made.calls * self.kernel + OVERHEAD

        made.replay = replay
        self.graphs.append(made)
        return made

    @contextlib.contextmanager
    def graph(self, graph: Any) -> Any:
        self.captured = graph
        yield
        self.captured = None

    def Event(self, enable_timing: bool) -> Any:
        made = types.SimpleNamespace(at=0.0)
        made.record = lambda: setattr(made, "at", self.clock)
        made.elapsed_time = lambda other: (other.at - made.at) * 1e3
        return made

    def Stream(self) -> Any:
        return types.SimpleNamespace(wait_stream=lambda other: None)

    current_stream = Stream

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def synchronize(self, device: Any = None) -> None:
        self.waits += 1


def installed(monkeypatch: pytest.MonkeyPatch, kernel: float) -> Cuda:
    cuda = Cuda(kernel)
    for name in ("CUDAGraph", "graph", "Event", "Stream", "current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    return cuda


@pytest.mark.parametrize(("kernel", "calls"), [(2e-6, 100), (20e-6, 42), (5e-3, 1)])
def test_a_kernel_is_timed_without_its_launch(monkeypatch: pytest.MonkeyPatch, kernel: float, calls: int) -> None:
    cuda = installed(monkeypatch, kernel)
    times = measure.kernel_times({"call": cuda.call}, torch.device("cuda"), rounds=5, seconds=0.1)["call"]
    assert [graph.calls for graph in cuda.graphs] == [1, calls]
    assert 5 <= len(times) <= 200
    for seconds in times:
        assert kernel <= seconds <= kernel * 1.05, "neither Python's launches nor the gaps between replays"
