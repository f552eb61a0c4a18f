"""Every CUDA file compiles for each architecture, spills nothing, keeps its arrays in registers, and checks its launches."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "csrc").rglob("*.cu"))
HOME = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path=f"{HOME}/bin")


def compile_for(source: Path, architectures: Sequence[str]) -> str:
    """What ptxas says of every kernel of a file. Fails with the compiler's message."""
    command = [
        NVCC or "nvcc",
        "-O3",
        "-std=c++17",
        "--expt-relaxed-constexpr",
        "-DMEGABERT_CUDA",
        "-DUSE_CUDA",
    ]
    command += [
        "-DTORCH_TARGET_VERSION=0x020B000000000000",
        f"-I{ROOT / 'csrc'}",
        "-Xptxas=-v",
        "--threads=2",
    ]
    for path in cpp_extension.include_paths():
        command += ["-isystem", path]
    for number in architectures:
        command += [f"-gencode=arch=compute_{number},code=sm_{number}"]
    done = subprocess.run(
        [*command, "-c", str(source), "-o", "/dev/null"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def kernels(said: str) -> dict[str, tuple[int, int, int]]:
    """Kernel and architecture -> bytes of stack, of spill stores, of spill loads."""
    found = {}
    pattern = (
        r"Compiling entry function '(\S+)' for '(\w+)'[\s\S]*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    )
    for name, architecture, *numbers in re.findall(pattern, said):
        found[f"{name} {architecture}"] = tuple(map(int, numbers))
    return found


def test_the_parser_reads_what_ptxas_says() -> None:
    said = (
        "ptxas info    : Compiling entry function '_Z1kPf' for 'sm_90'\nptxas info    : Function properties for _Z1kPf\n"
        "    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\nptxas info    : Used 40 registers\n"
    )
    assert kernels(said) == {"_Z1kPf sm_90": (16, 8, 4)}


@pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")
@pytest.mark.parametrize(
    "architectures", [("90",), pytest.param(("80", "100"), marks=pytest.mark.slow)], ids="-".join
)
def test_every_file_compiles_and_no_kernel_spills(architectures: Sequence[str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        outputs = dict(
            zip(FILES, pool.map(partial(compile_for, architectures=architectures), FILES), strict=True)
        )
    for path, said in outputs.items():
        found = kernels(said)
        assert {name.split()[-1] for name in found} == {f"sm_{number}" for number in architectures}, path
        bad = {name: numbers for name, numbers in found.items() if any(numbers)}
        assert not bad, f"{path.name}: (stack, spill stores, spill loads) of {bad}"


@pytest.mark.parametrize("path", [*FILES, ROOT / "csrc/common/cuda.h"], ids=lambda path: path.parent.name)
def test_every_launch_is_checked(path: Path) -> None:
    """The statement after each launch is check_launch."""
    code = re.sub(r"//[^\n]*", "", path.read_text())
    launches = [match.start() for match in re.finditer(r"<<<", code)]
    assert launches, "no launch in a CUDA file"
    for at in launches:
        rest, depth = code[code.index(">>>", at) :], 0
        for place, character in enumerate(rest):
            depth += (character == "(") - (character == ")")
            if character == ";" and depth == 0:
                rest = rest[place + 1 :]
                break
        following = rest.lstrip()
        assert following.startswith("check_launch("), f"{path.name}: unchecked launch: {code[at - 60 : at]!r}"
