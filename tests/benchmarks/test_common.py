"""What benchmarks share: results belong to a revision, kernels are timed in graphs, every script starts as a user types it."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import runpy
import subprocess
import sys
import types
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from benchmarks.common import hardware, measure
from megabert.common import environment
from tests.conftest import ROOT
from tests.helpers.ranks import CONTEXT

# seconds between two replays, and that Python takes for a call outside a graph
OVERHEAD, LAUNCH = 4e-6, 30e-6


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with one commit, in place of ours."""
    (tmp_path / hardware.RESULTS).mkdir(parents=True)
    (tmp_path / "source.py").write_text("1\n")
    (tmp_path / hardware.RESULTS / "old.json").write_text("{}\n")
    for command in ("init -q", "add .", "-c user.name=n -c user.email=n@example.org commit -q -m first"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    for module in (hardware, environment):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    hardware.changes.cache_clear()
    yield tmp_path
    hardware.changes.cache_clear()


def test_only_a_clean_tree_writes_results_unless_allowed(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tree / hardware.RESULTS / "new.json"
    target.write_text("{}\n")  # results do not make it dirty
    parse = hardware.Parser("").parse
    hardware.write_json(parse(["--json", str(target)]).json, {"ratio": 2.0})
    about = json.loads(target.read_text())["about"]
    assert "+changes" not in about["revision"] and "changes" not in about
    (tree / "source.py").write_text("2\n")
    hardware.changes.cache_clear()
    with pytest.raises(SystemExit, match="2"):
        parse(["--json", str(target)])
    assert "source.py" in capsys.readouterr().err
    parse(["--json", str(tree / "elsewhere.json")])
    hardware.write_json(parse(["--json", str(target), "--allow-dirty"]).json, {})
    about = json.loads(target.read_text())["about"]
    assert about["revision"].endswith("+changes") and about["changes"] == [" M source.py"]


def test_a_folder_is_no_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        hardware.Parser("").parse(["--json", str(tmp_path)])
    assert f"error: --json {tmp_path}: is a folder" in capsys.readouterr().err


def test_a_mistake_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        hardware.run(lambda: int("x"))
    assert capsys.readouterr().err == "error: invalid literal for int() with base 10: 'x'\n"


class Cuda:
    """Streams, graphs and events over a clock that only work moves."""

    def __init__(self, kernel: float) -> None:
        self.kernel, self.clock, self.captured, self.graphs, self.replayed = kernel, 0.0, None, [], []

    def call(self) -> None:
        if self.captured is None:
            self.clock += self.kernel + LAUNCH
        else:
            self.captured.calls += 1

    def CUDAGraph(self) -> Any:
        made = types.SimpleNamespace(calls=0)
        number = len(self.graphs)

        def replay() -> None:
            self.clock += made.calls * self.kernel + OVERHEAD
            self.replayed.append(number)

        made.replay = replay
        self.graphs.append(made)
        return made

    @contextlib.contextmanager
    def graph(self, graph: Any) -> Any:
        self.captured = graph
        yield
        self.captured = None

    def rand(self, count: int, device: str) -> None:
        assert device == "cuda" and self.captured is None

    def Event(self, enable_timing: bool) -> Any:
        made = types.SimpleNamespace(at=0.0, elapsed_time=lambda other: (other.at - made.at) * 1e3)
        made.record = lambda: setattr(made, "at", self.clock)
        return made


@pytest.fixture
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda(getattr(request, "param", 2e-6))
    for name in ("CUDAGraph", "graph", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    for name in ("Stream", "current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch, "rand", made.rand)
    return made


@pytest.mark.parametrize("fault", ["graph", "rand"])
def test_a_side_that_spoils_the_device_is_named(cuda: Cuda, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """In its capture, or by what it leaves of the generator."""
    breaks = MagicMock(side_effect=RuntimeError("offset increment outside graph capture"))
    monkeypatch.setattr(torch if fault == "rand" else torch.cuda, fault, breaks)
    with pytest.raises(measure.CaptureFailed, match="RuntimeError: offset increment outside") as error:
        measure.kernel_times({"side": cuda.call}, torch.device("cuda"), rounds=5)
    assert error.value.side == "side"


@pytest.mark.parametrize(("cuda", "calls"), [(2e-6, 100), (20e-6, 42), (5e-3, 1)], indirect=["cuda"])
def test_a_kernel_is_timed_without_its_launch(cuda: Cuda, calls: int) -> None:
    times = measure.kernel_times({"call": cuda.call}, torch.device("cuda"), rounds=5, seconds=0.1)["call"]
    assert [graph.calls for graph in cuda.graphs] == [1, calls]
    assert 5 <= len(times) <= 200
    # neither Python's launches nor the gaps between replays
    assert all(cuda.kernel <= seconds <= cuda.kernel * 1.05 for seconds in times), times


def test_sides_alternate_on_a_gpu(cuda: Cuda) -> None:
    times = measure.kernel_times({"a": cuda.call, "b": cuda.call}, torch.device("cuda"), rounds=3)
    assert len(times["a"]) == len(times["b"]) >= 3
    # each captured twice, and warmed up
    assert [number for number, _ in groupby(cuda.replayed)] == [0, 1, 2, 3, 1, 3, 1]


def as_a_script(script: str, output: str) -> None:
    """`python benchmarks/SCRIPT --help` where torch and the package are imported already."""
    os.chdir(ROOT)
    os.environ["COLUMNS"] = "200"
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]  # the script finds them by itself
    sys.path[:] = [str(ROOT / "benchmarks"), *(name for name in sys.path if Path(name or ".").resolve() != ROOT)]
    sys.argv = [f"benchmarks/{script}", "--help"]
    with open(output, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.mark.slow
def test_every_script_starts_and_says_what_it_measures(tmp_path: Path) -> None:
    scripts = sorted((ROOT / "benchmarks").glob("*.py"))
    assert len(scripts) >= 10
    for script in scripts:
        process = CONTEXT.Process(target=as_a_script, args=(script.name, str(tmp_path / script.stem)))
        process.start()
        process.join(300)
        output = (tmp_path / script.stem).read_text()
        first = (ast.get_docstring(ast.parse(script.read_text())) or "").splitlines()[0]
        assert process.exitcode == 0, output
        assert " ".join(first.split()) in " ".join(output.split())
        # tables.py measures nothing
        assert script.stem == "tables" or ("--json FILE" in output and "--allow-dirty" in output)
