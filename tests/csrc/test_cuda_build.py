"""CUDA sources without a GPU: they compile, no kernel spills registers or adds atomically, launches are checked, and what they
call of torch is called by the CPU sources too, so that tests of the CPU run it."""

import math
import re
import runpy
import subprocess
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import patch

import pytest
from torch.utils import cpp_extension

from megabert import ops
from tests.conftest import ROOT

with patch("setuptools.setup"):  # the machine's, or that of NVIDIA's wheels
    NVCC = runpy.run_path(str(ROOT / "setup.py"))["find_nvcc"]()
CSRC = ROOT / "csrc"
FILES = sorted(CSRC.rglob("*.cu"))
REGISTERS = 65_536  # of a multiprocessor, and the most that a block can have
# what ptxas says of a kernel: name, stack, spill stores, spill loads, registers
PTXAS = (
    r"Compiling entry function '(\S+)' for[\s\S]*?"
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads[\s\S]*?Used (\d+) registers"
)


def code(path: Path) -> str:
    return re.sub(r"//[^\n]*", "", path.read_text())


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")
@pytest.mark.parametrize("architecture", ["80", "89", "90", "100"])
@pytest.mark.parametrize("source", FILES, ids=lambda path: path.parent.name)
def test_kernels_do_not_spill_and_can_be_launched(source: Path, architecture: str, tmp_path: Path) -> None:
    """A block's registers are at most 65,536, and every kernel says by __launch_bounds__ how many threads it has."""
    command = [
        str(NVCC), "-O3", "-std=c++17", "--expt-relaxed-constexpr", "-DMEGABERT_CUDA", "-DUSE_CUDA", "-Xptxas=-v",
        "-DTORCH_TARGET_VERSION=0x020B000000000000", f"-I{ROOT / 'csrc'}", "--keep", f"--keep-dir={tmp_path}",
        f"-gencode=arch=compute_{architecture},code=sm_{architecture}", "-c", str(source), "-o", str(tmp_path / "o"),
        *(word for path in cpp_extension.include_paths() for word in ("-isystem", path)),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    threads = {}
    for entry in (tmp_path / f"{source.stem}.ptx").read_text().split(".entry ")[1:]:
        bound = re.search(r"\.maxntid ([\d, ]+)", entry.partition("{")[0])  # for sm_100 without dimensions of 1
        assert bound, f"no __launch_bounds__: {entry[:200]}"
        threads[entry.partition("(")[0]] = math.prod(map(int, bound[1].split(",")))
    kernels = re.findall(PTXAS, done.stderr)
    assert {kernel[0] for kernel in kernels} == threads.keys() != set()
    for name, *spilled, registers in kernels:
        assert spilled == ["0", "0", "0"], f"{name}: stack, spill stores and loads of {spilled} bytes"
        assert threads[name] * int(registers) <= REGISTERS, f"{name}: {threads[name]} threads of {registers} registers"


@pytest.mark.skipif(
    bool(ops.MISSING) or not ops.has_kernel("bias_gelu", "cuda"), reason="the native library has no CUDA part"
)
def test_the_library_brings_torchs_cuda_library() -> None:
    """It needs libtorch.so, which has nothing but torch's own libraries, the CUDA one where there is one: the linker
    drops it unless an option keeps it, and then torch's stream and products are not found on a GPU."""
    needed = {name for name in (b"libtorch.so", b"libtorch_cpu.so") if b"\0" + name + b"\0" in ops.LIBRARY.read_bytes()}
    assert needed == {b"libtorch.so", b"libtorch_cpu.so"}


@pytest.mark.parametrize("path", [*FILES, ROOT / "csrc/common/cuda.h"], ids=lambda path: path.parent.name)
def test_every_launch_is_checked(path: Path) -> None:
    """The statement after each launch is check_launch."""
    launches = code(path).split("<<<")[1:]
    assert launches, "no launch in a CUDA file"
    for launch in launches:
        # the arguments hold blocks of code in parentheses: the statement ends at the first semicolon outside them
        rest, ends = launch.partition(">>>")[2], 0
        while rest[:ends].count("(") != rest[:ends].count(")") or not rest[:ends].endswith(";"):
            ends += 1
        assert rest[ends:].lstrip().startswith("check_launch("), f"{path.name}: unchecked launch: {rest[:60]!r}"


def test_our_kernels_add_nothing_atomically() -> None:
    sources = [path for path in CSRC.rglob("*.*") if path.suffix in (".cu", ".cuh", ".h")]
    assert len(sources) > 10
    atomic = [path.name for path in sources if re.search(r"\batomic\w*\(|\bred\.\w+", code(path))]
    assert not atomic, f"{atomic}: sums are taken in a fixed order (docs/reproducibility.md)"


# A wrong argument of torch_call_dispatcher shows only when it is called: it is not called by hand.
DISPATCHER = r"\b(?:aoti_)?torch_call_dispatcher\b"
CALLS = rf"torch::stable::(?:accelerator::)?\w+(?=[ ({{<;]|\s\w)|\baoti_torch_\w+|{DISPATCHER}"
CUDA_ONLY = {"torch::stable::accelerator::DeviceGuard", "aoti_torch_get_current_cuda_stream"}  # common/cuda.h


def includes(path: Path) -> set[Path]:
    """A source and the headers of csrc that it includes, directly or not."""
    found, waiting = set[Path](), [path]
    while waiting:
        found.add(at := waiting.pop())
        named = {CSRC / name for name in re.findall(r'#include "([^"]+)"', at.read_text())}
        waiting += [header for header in named - found if header.is_file()]
    return found


def calls(sources: Iterable[Path]) -> dict[str, set[str]]:
    """Call -> the files in which a source or what it includes makes it."""
    found: dict[str, set[str]] = {}
    for path in set().union(*map(includes, sources)):
        for name in re.findall(CALLS, code(path)):
            found.setdefault(name, set()).add(path.relative_to(CSRC).as_posix())
    return found


def test_cuda_sources_call_what_cpu_tests_run() -> None:
    on_cpu, on_cuda = calls(CSRC.rglob("*.cpp")), calls(CSRC.rglob("*.cu"))
    assert {"torch::stable::new_empty", "torch::stable::narrow", "aoti_torch_cpu_mm_out"} <= on_cpu.keys()
    by_hand = {name for name in (on_cpu | on_cuda) if re.fullmatch(DISPATCHER, name)}
    assert not by_hand, f"{by_hand}: torch_call_dispatcher cannot pass Scalars, see common/products.h"
    unknown = {name: files for name, files in on_cuda.items() if name not in on_cpu.keys() | CUDA_ONLY}
    assert not unknown, f"no test runs these without a GPU: {unknown}; see common/products.h"
