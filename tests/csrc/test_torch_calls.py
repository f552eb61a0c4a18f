"""Calls of torch in the CUDA sources are calls of the CPU sources too, so that the tests of the CPU run them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "csrc"
# A wrong argument of torch_call_dispatcher shows only when it is called: it is not called by hand.
DISPATCHER = r"\b(?:aoti_)?torch_call_dispatcher\b"
CALLS = rf"torch::stable::(?:accelerator::)?\w+(?=[ ({{<;]|\s\w)|\baoti_torch_\w+|{DISPATCHER}"
CUDA_ONLY = {"torch::stable::accelerator::DeviceGuard", "aoti_torch_get_current_cuda_stream"}  # common/cuda.h


def code(path: Path) -> str:
    return re.sub(r"//[^\n]*", "", path.read_text())


def includes(path: Path) -> set[Path]:
    """A source and the headers of csrc that it includes, directly or not."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        found.add(at := waiting.pop())
        named = {ROOT / name for name in re.findall(r'#include "([^"]+)"', at.read_text())}
        waiting += [header for header in named - found if header.is_file()]
    return found


def calls(sources: Iterable[Path]) -> dict[str, set[str]]:
    """Call -> the files in which a source or what it includes makes it."""
    found: dict[str, set[str]] = {}
    for path in set().union(*map(includes, sources)):
        for name in re.findall(CALLS, code(path)):
            found.setdefault(name, set()).add(path.relative_to(ROOT).as_posix())
    return found


def test_cuda_sources_call_what_cpu_tests_run() -> None:
    on_cpu, on_cuda = calls(ROOT.rglob("*.cpp")), calls(ROOT.rglob("*.cu"))
    assert {"torch::stable::new_empty", "torch::stable::narrow", "aoti_torch_cpu_mm_out"} <= on_cpu.keys()
    by_hand = {name for name in (on_cpu | on_cuda) if re.fullmatch(DISPATCHER, name)}
    assert not by_hand, f"{by_hand}: torch_call_dispatcher cannot pass Scalars, see common/products.h"
    unknown = {name: files for name, files in on_cuda.items() if name not in on_cpu.keys() | CUDA_ONLY}
    assert not unknown, f"no test runs these without a GPU: {unknown}; see common/products.h"
