"""Resources of the CUDA kernels, read without a GPU: registers, shared memory, resident blocks, loads and stores, instructions.

Compiles every .cu file of csrc/ and reads what ptxas reports, the launch bounds in the PTX and the machine code (nvdisasm: in the
CUDA toolkit, or `pip install nvidia-cuda-nvdisasm`). Resident blocks of a multiprocessor follow from registers, shared memory and
threads by the limits of NVIDIA's CUDA C++ Programming Guide (compute capabilities) and occupancy calculator. Instructions are
those of the longest loop of a kernel, or of the whole where there is none, both sides of branches counted; an element is one
column of one row.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.conftest import ROOT

FILES = sorted((ROOT / "csrc").rglob("*.cu"))
# of a multiprocessor, and the most that a block can have
REGISTERS = 65_536
# bytes of shared memory of a multiprocessor, and those that the system takes for each block
SHARED, RESERVED = {"80": 164 << 10, "90": 228 << 10, "100": 228 << 10}, 1 << 10
# that a multiprocessor holds at most
WARPS, BLOCKS = 64, 32
# columns that a thread takes at a time (csrc/common/device.cuh)
GROUP = 8
# kernel -> position of its template argument `Groups`, where it has one; those whose instructions an element are counted
ELEMENT_WISE = {
    "bias_geglu_forward": None,
    "bias_geglu_gradient": None,
    "bias_gelu_forward": None,
    "bias_gelu_gradient": None,
    "dropout_forward": None,
    "layer_norm_forward": 2,
    "layer_norm_gradient": 2,
    "rotate_heads": None,
}


@dataclass
class Kernel:
    """One kernel for one architecture."""

    file: str
    name: str  # with its template arguments
    architecture: str  # "80", "90"
    registers: int
    shared: int  # bytes, static
    stack: int  # bytes, of arrays that are not in registers
    spilled: int  # bytes, of spill stores and loads
    threads: int = 0  # of a block at most, by __launch_bounds__; 0: not given
    instructions: int = 0  # of the code that is counted; 0: not read
    loads: dict[str, int] = field(default_factory=dict)  # in it: bytes a thread -> instructions
    stores: dict[str, int] = field(default_factory=dict)

    @property
    def function(self) -> str:
        return self.name.partition("<")[0]

    @property
    def arguments(self) -> list[str]:
        return self.name.partition("<")[2].removesuffix(">").split(", ")

    @property
    def whole(self) -> bool:
        """Whether this is the variant for rows of whole, aligned groups."""
        return self.function in ELEMENT_WISE and self.arguments[-1] == "true"

    @property
    def blocks(self) -> int:
        return resident_blocks(self.architecture, self.threads, self.registers, self.shared)

    @property
    def an_element(self) -> float | None:
        """Instructions an element; None where they are not counted."""
        if not self.instructions or not self.whole:
            return None
        position = ELEMENT_WISE[self.function]
        groups = int(self.arguments[position]) if position is not None else 1
        return self.instructions / (GROUP * groups)


def resident_blocks(architecture: str, threads: int, registers: int, shared: int) -> int:
    """Blocks that one multiprocessor holds: registers come by the warp in units of 256, in groups of four warps."""
    warps = -(-threads // 32)
    by_registers = REGISTERS // (-(-registers * 32 // 256) * 256) // 4 * 4 // warps
    by_shared = SHARED[architecture] // (-(-shared // 128) * 128 + RESERVED)
    return min(by_registers, by_shared, WARPS // warps, BLOCKS)


def find(tool: str) -> str | None:
    """A program of the CUDA toolkit: on PATH, beside nvcc, or from NVIDIA's packages for pip."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    packages = sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob("*/bin"))
    places = [os.environ.get("PATH", ""), f"{home}/bin", *map(str, packages)]
    return next(filter(None, (shutil.which(tool, path=place) for place in places)), None)


def compile_file(source: Path, architectures: Sequence[str], folder: Path) -> str:
    """Compiles as setup.py does, leaves PTX and machine code in `folder`, and returns what ptxas says of every kernel."""
    from torch.utils import cpp_extension

    command = [
        find("nvcc") or "nvcc", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "-DMEGABERT_CUDA", "-DUSE_CUDA",
        "-DTORCH_TARGET_VERSION=0x020B000000000000", f"-I{ROOT / 'csrc'}", "-Xptxas=-v", "--threads=2",
        "--keep", f"--keep-dir={folder}",
    ]  # fmt: skip
    for path in cpp_extension.include_paths():
        command += ["-isystem", path]
    for number in architectures:
        command += [f"-gencode=arch=compute_{number},code=sm_{number}"]
    command += ["-c", str(source), "-o", str(folder / "object.o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def read_ptxas(output: str) -> dict[tuple[str, str], dict[str, int]]:
    """(mangled name, architecture) -> registers, shared, stack, spilled."""
    pattern = (
        r"Compiling entry function '(\S+)' for 'sm_(\w+)'[\s\S]*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads[\s\S]*?Used (\d+) registers(.*)"
    )
    found = {}
    for name, architecture, stack, stored, loaded, registers, rest in re.findall(pattern, output):
        shared = re.search(r"(\d+) bytes smem", rest)
        found[name, architecture] = {
            "registers": int(registers),
            "shared": int(shared[1]) if shared else 0,
            "stack": int(stack),
            "spilled": int(stored) + int(loaded),
        }
    return found


def read_bounds(ptx: str) -> dict[str, int]:
    """Mangled name -> threads of a block at most, of the kernels that say so."""
    found = {}
    for entry in ptx.split(".entry ")[1:]:
        bound = re.search(r"\.maxntid ([\d, ]+)", entry.partition("{")[0])  # for sm_100 without dimensions of 1
        if bound:
            found[entry.partition("(")[0]] = math.prod(map(int, bound[1].split(",")))
    return found


def read_code(disassembly: str) -> dict[str, list[str]]:
    """Mangled name -> the instructions of its longest loop, or of all of it where it has none (nvdisasm -c)."""
    found = {}
    for section in disassembly.split("\n\t.section\t.text.")[1:]:
        instructions: list[str] = []
        labels: dict[str, int] = {}
        for line in section.splitlines():
            if label := re.match(r"(\.L_x_\d+):", line):
                labels[label[1]] = len(instructions)
            elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?) *;", line):
                instructions.append(instruction[1])
        loops = []
        for place, text in enumerate(instructions):
            jump = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", text)
            if jump and labels[jump[1]] < place:
                loops.append((labels[jump[1]], place + 1))
        ends = [place + 1 for place, text in enumerate(instructions) if "EXIT" in text]
        begin, end = max(loops, key=lambda loop: loop[1] - loop[0]) if loops else (0, max(ends))
        found[section.partition(",")[0]] = instructions[begin:end]
    return found


def widths(instructions: Sequence[str], operation: str) -> dict[str, int]:
    """Bytes a thread -> how many instructions LDG or STG move so many."""
    sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
    counted: Counter[int] = Counter()
    for text in instructions:
        parts = text.removeprefix(text.split()[0]).split() if text.startswith("@") else text.split()
        name, *modifiers = parts[0].split(".")
        if name == operation:
            counted[next((sizes[m] for m in modifiers if m in sizes), 4)] += 1
    return {str(size): counted[size] for size in sorted(counted)}


def demangle(names: Sequence[str]) -> list[str]:
    """`megabert::f<__half, 4>(…)` as f<half, 4>."""
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    plain = []
    for line in done.stdout.splitlines():
        name = line.partition("(")[0].removeprefix("void ").replace("megabert::", "")
        plain.append(name.replace("__nv_bfloat16", "bf16").replace("__half", "half"))
    return plain


def kernels_of(source: Path, architectures: Sequence[str]) -> list[Kernel]:
    """Every kernel of a file for each architecture; loads, stores and instructions only where nvdisasm is."""
    with tempfile.TemporaryDirectory() as folder:
        output = compile_file(source, architectures, Path(folder))
        found = []
        for architecture in architectures:
            several = f".compute_{architecture}" if len(architectures) > 1 else ""
            stem = Path(folder, f"{source.stem}{several}")
            bounds = read_bounds(stem.with_name(f"{stem.name}.ptx").read_text())
            code: dict[str, list[str]] = {}
            if nvdisasm := find("nvdisasm"):
                command = [nvdisasm, "-c", f"{stem}.cubin"]
                code = read_code(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            numbers = {name: n for (name, number), n in read_ptxas(output).items() if number == architecture}
            for mangled, name in zip(numbers, demangle(list(numbers)), strict=True):
                counted = code.get(mangled, [])
                found.append(
                    Kernel(
                        file=source.relative_to(ROOT).as_posix(),
                        name=name,
                        architecture=architecture,
                        threads=bounds.get(mangled, 0),
                        loads=widths(counted, "LDG"),
                        stores=widths(counted, "STG"),
                        instructions=len(counted),
                        **numbers[mangled],
                    )
                )
    return found


def all_kernels(architectures: Sequence[str]) -> list[Kernel]:
    with ThreadPoolExecutor(2) as pool:
        lists = list(pool.map(partial(kernels_of, architectures=architectures), FILES))
    return [kernel for part in lists for kernel in part]
