"""Timing on a GPU, with a stand-in for CUDA whose clock is known: kernels are timed in graphs."""

from __future__ import annotations

import contextlib
import types
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from benchmarks.common import measure

# seconds between two replays, and that Python takes for a call outside a graph
OVERHEAD, LAUNCH = 4e-6, 30e-6


class Cuda:
    """Streams, graphs and events over a clock that only work moves."""

    def __init__(self, kernel: float) -> None:
        self.kernel, self.clock, self.captured, self.graphs = kernel, 0.0, None, []

    def call(self) -> None:
        if self.captured is None:
            self.clock += self.kernel + LAUNCH
        else:
            self.captured.calls += 1

    def CUDAGraph(self) -> Any:
        made = types.SimpleNamespace(calls=0)
        made.replay = lambda: setattr(self, "clock", self.clock + made.calls * self.kernel + OVERHEAD)
        self.graphs.append(made)
        return made

    @contextlib.contextmanager
    def graph(self, graph: Any) -> Any:
        self.captured = graph
        yield
        self.captured = None

    def Event(self, enable_timing: bool) -> Any:
        made = types.SimpleNamespace(at=0.0, elapsed_time=lambda other: (other.at - made.at) * 1e3)
        made.record = lambda: setattr(made, "at", self.clock)
        return made


@pytest.mark.parametrize(("kernel", "calls"), [(2e-6, 100), (20e-6, 42), (5e-3, 1)])
def test_a_kernel_is_timed_without_its_launch(monkeypatch: pytest.MonkeyPatch, kernel: float, calls: int) -> None:
    cuda = Cuda(kernel)
    for name in ("CUDAGraph", "graph", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    for name in ("Stream", "current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    times = measure.kernel_times({"call": cuda.call}, torch.device("cuda"), rounds=5, seconds=0.1)["call"]
    assert [graph.calls for graph in cuda.graphs] == [1, calls]
    assert 5 <= len(times) <= 200
    for seconds in times:
        assert kernel <= seconds <= kernel * 1.05, "neither Python's launches nor the gaps between replays"
