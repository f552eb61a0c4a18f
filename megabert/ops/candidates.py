"""Candidates of each operation, checked and timed at a run's own shapes: the fastest right one is what `auto` runs.

A candidate is right when its forward and backward pass keep the tolerance rule (tolerance.py) on the run's shapes, and
with dropout when its mask is the reference's or, where torch draws it, when all is finite. Times are medians of one forward
and backward pass, candidates in turn: on CUDA replays of a graph between two events, on the CPU by the wall clock. A
candidate that cannot run, fails, is wrong or cannot be captured is a row of the table with its reason.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabert.ops.backend import BACKENDS, Choice, obstacles
from megabert.ops.problems import PROBLEMS, SEED, Problem, Shapes
from megabert.ops.tolerance import Function, run, verdict

SECONDS = 10.0  # of timing for all operations together; checks, and what torch.compile takes, come on top
ROUNDS = 50  # replays of each candidate at most
CHECKED = 1 << 27  # elements of the largest tensor of a check: its reference is in fp32 or fp64
SEEDED = ("native", "fused_softmax")  # backends whose dropout mask is reference.keep_mask's


class Candidate(NamedTuple):
    """One way to run an operation. `obstacle`: why it cannot run here; `seeded`: its dropout mask is the reference's."""

    name: str
    make: Callable[[Problem], Function]
    obstacle: str = ""
    seeded: bool = False


class Row(NamedTuple):
    """A line of the table: the median milliseconds of forward and backward, or why there are none."""

    role: str
    name: str
    ms: float | None = None
    low: float | None = None  # the 20th percentile, and the 80th
    high: float | None = None
    reason: str = ""


class Measured(NamedTuple):
    choice: Choice
    rows: list[Row]


class NoneRight(ValueError):
    """No candidate of an operation gives right results."""

    def __init__(self, role: str, rows: list[Row]) -> None:
        said = "; ".join(f"{row.name}: {row.reason}" for row in rows)
        super().__init__(
            f"ops.{role}=auto: no candidate gives right results here ({said}); name the one that shall run"
        )
        self.rows = rows


class DeviceLost(RuntimeError):
    """A candidate after which the device answers nothing any more."""

    def __init__(self, role: str, name: str, reason: str) -> None:
        super().__init__(f"ops.{role}={name} broke the device ({reason})")
        self.role, self.name = role, name


def candidates(role: str, shapes: Shapes, device: torch.device) -> list[Candidate]:
    """Every backend of an operation as a candidate, the first of which always runs first."""
    reasons = obstacles(role, device.type, shapes.dtype, shapes.causal, shapes.hidden // shapes.heads)
    return [Candidate(name, _named(name), reasons[name], name in SEEDED) for name in BACKENDS[role]]


def _named(name: str) -> Callable[[Problem], Function]:
    return lambda problem: problem.call(name)


def time_all(
    shapes: Shapes,
    device: torch.device | str,
    seconds: float = SECONDS,
    roles: Iterable[str] = tuple(BACKENDS),
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """The table: every candidate of every operation, as JSON; `ms` is None where `reason` says why. `on_row` gets each line
    once its operation is done."""
    table, roles, device = [], tuple(roles), torch.device(device)
    for role in roles:
        try:
            rows = measure(role, shapes, device, seconds / len(roles)).rows
        except NoneRight as error:
            rows = error.rows
        for row in rows:
            table.append(row._asdict())
            on_row(table[-1])
    return table


def measure(
    role: str,
    shapes: Shapes,
    device: torch.device,
    seconds: float = SECONDS / len(BACKENDS),
    reasons: Mapping[str, str] | None = None,
    among: Sequence[Candidate] | None = None,
) -> Measured:
    """Checks and times the candidates of `role` (`among`: these) that have no obstacle and none in `reasons`; the fastest
    right one, and the table.

    Torch's generators are left as they were. Raises NoneRight, a ValueError with every reason, and DeviceLost.
    """
    among = candidates(role, shapes, device) if among is None else among
    among = [c._replace(obstacle=c.obstacle or (reasons or {}).get(c.name, "")) for c in among]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(SEED)
        checked = _check(role, shapes, device, among)
        measured = _timed(role, shapes, device, seconds, {c.name: c.make for c in among}, checked)
    _forget(device)
    return measured


def _timed(
    role: str,
    shapes: Shapes,
    device: torch.device,
    seconds: float,
    makers: Mapping[str, Callable[[Problem], Function]],
    reasons: Mapping[str, str],
) -> Measured:
    problem = PROBLEMS[role](shapes, device, shapes.rows, True)
    return compare(role, reasons, lambda name: _pass(makers[name], problem), device, seconds)


def compare(
    role: str,
    reasons: Mapping[str, str],
    prepare: Callable[[str], Callable[[], object]],
    device: torch.device,
    seconds: float,
) -> Measured:
    """Times what `prepare(name)` gives for each candidate without a reason against it; the fastest, and the table."""
    reasons, passes = dict(reasons), {}
    right = [name for name, reason in reasons.items() if not reason]
    for name in right:
        try:
            passes[name] = replayed(prepare(name), device)
        except Exception as error:  # a row of the table, as in a check
            if not _well(device):
                raise DeviceLost(role, name, _line(error)) from error
            reasons[name] = f"right, but cannot be timed: {_line(error)}"
    times = in_turn(passes, device, seconds)
    rows = [_row(role, name, times.get(name), reason) for name, reason in reasons.items()]
    return Measured(decide(role, rows, right), rows)


def decide(role: str, rows: list[Row], right: Sequence[str]) -> Choice:
    """The fastest of the rows; where none was timed the first right one. Raises NoneRight."""
    timed = sorted((row.ms, row.name) for row in rows if row.ms is not None)
    if timed:
        others = "".join(f", {name} {ms:.3g}" for ms, name in timed[1:])
        return Choice(timed[0][1], f"measured: {timed[0][0]:.3g} ms{others}")
    if right:
        return Choice(right[0], "right, and nothing could be timed")
    raise NoneRight(role, rows)


# -- checking --------------------------------------------------------------------------------------------------------


def _check(role: str, shapes: Shapes, device: torch.device, among: Sequence[Candidate]) -> dict[str, str]:
    """Why a candidate must not run, by name; "" where it may."""
    reasons = {candidate.name: candidate.obstacle for candidate in among}
    exact_type = torch.float64 if shapes.dtype == torch.float32 else torch.float32
    largest = max(shapes.seq_len * shapes.ffn, shapes.predictions * shapes.vocab)
    rows = max(1, min(shapes.rows, shapes.rows if role == "attention" else CHECKED // largest))
    drops = {"attention": shapes.attention_dropout, "layer": shapes.dropout}.get(role, 0.0) > 0
    for dropout in (False, True) if drops else (False,):
        problem = PROBLEMS[role](shapes, device, rows, dropout)
        inputs, grads = (
            [t[problem.sample] if t.dim() > 1 else t for t in tensors] for tensors in (problem.inputs, problem.grads)
        )
        with device:  # the reference makes its ranges and masks where the default says
            exact = run(problem.exact, inputs, exact_type, grads)
            plain = run(problem.plain, inputs, shapes.dtype, grads)
        for candidate in among:
            if not reasons[candidate.name]:
                known = not dropout or candidate.seeded
                judge = partial(_judge, candidate, problem, plain if known else None, exact)
                reasons[candidate.name] = attempt(role, candidate.name, device, judge)
        del problem, inputs, grads, exact, plain
        _forget(device)
    return reasons


def _judge(candidate: Candidate, problem: Problem, plain: list[Tensor] | None, exact: list[Tensor]) -> str:
    """What is wrong with a candidate's results; with dropout of an unknown mask (`plain` is None) only whether they are
    finite."""
    dtype = problem.inputs[0].dtype
    found = run(candidate.make(problem), problem.inputs, dtype, problem.grads)
    found = [t[problem.sample] if t.dim() > 1 else t for t in found]
    if plain is not None:
        return verdict(found, plain, exact, dtype, problem.multiple)
    broken = [i for i, t in enumerate(found) if not torch.isfinite(t).all()]
    return f"with dropout result {broken[0]} is not finite" if broken else ""


def attempt(role: str, name: str, device: torch.device, judge: Callable[[], str]) -> str:
    """What `judge` says, or raises: whatever a candidate raises is its row of the table. Raises DeviceLost."""
    try:
        return judge()
    except Exception as error:
        if not _well(device):
            raise DeviceLost(role, name, _line(error)) from error
        return f"{type(error).__name__}: {_line(error)}"


def _well(device: torch.device) -> bool:
    """Whether the device still answers: after an illegal access no call of this process will be answered again."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return False
    return True


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def _forget(device: torch.device) -> None:
    """What was compiled for a check must not make the run's own compilation one for any shape; memory goes back."""
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# -- timing ----------------------------------------------------------------------------------------------------------


def _pass(make: Callable[[Problem], Function], problem: Problem) -> Callable[[], object]:
    """One forward and backward pass."""
    leaves = [t.detach().requires_grad_() for t in problem.inputs]
    function = make(problem)

    def call() -> object:
        outputs = [o for o in function(*leaves) if o.requires_grad]
        grads = [g.to(o.dtype) for g, o in zip(problem.grads, outputs, strict=True)]
        return torch.autograd.grad(outputs, leaves, grads)

    return call


def replayed(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """What is timed for `call`: on CUDA the replay of a graph of it. Raises RuntimeError where it cannot be captured."""
    if device.type != "cuda":
        call()
        return call
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries choose their kernels and workspaces before the capture
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        graph.replay()
        torch.cuda.synchronize()
    return graph.replay


def in_turn(passes: Mapping[str, Callable[[], object]], device: torch.device, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of single calls of each, in turn until `seconds` are over: at least 3 each, at most ROUNDS."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    place: AbstractContextManager[Any] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with place:
        # As between two layers of a model, nothing of the last call is in the device's cache.
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
        flush = torch.empty(size, dtype=torch.uint8, device=device)
        end = time.perf_counter() + seconds
        for number in range(ROUNDS):
            if number >= 3 and time.perf_counter() > end:
                break
            for name, call in passes.items():
                if device.type == "cuda":
                    flush.zero_()
                    begin, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    call()
                    stop.record()
                    stop.synchronize()
                    times[name].append(begin.elapsed_time(stop))
                else:
                    started = time.perf_counter()
                    call()
                    times[name].append(1e3 * (time.perf_counter() - started))
    return times


def _row(role: str, name: str, times: list[float] | None, reason: str) -> Row:
    if not times:
        return Row(role, name, reason=reason)
    cuts = [round(ms, 6) for ms in statistics.quantiles(times, n=10, method="inclusive")]
    return Row(role, name, ms=cuts[4], low=cuts[1], high=cuts[7])
