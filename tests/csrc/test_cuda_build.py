"""Every CUDA file compiles for each architecture, and what its kernels need is what their launches assume; no GPU runs here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from megabert import ops
from tests.helpers import cuda_kernels
from tests.helpers.cuda_kernels import FILES, REGISTERS, ROOT, Kernel

needs_nvcc = pytest.mark.skipif(cuda_kernels.find("nvcc") is None, reason="no nvcc on this machine")
needs_nvdisasm = pytest.mark.skipif(
    cuda_kernels.find("nvdisasm") is None,
    reason="no nvdisasm on this machine (CUDA toolkit, or pip install nvidia-cuda-nvdisasm)",
)


@pytest.fixture(
    scope="module",
    params=[pytest.param(architectures, marks=pytest.mark.slow) for architectures in (("90",), ("80", "100"))],
    ids="-".join,
)
def kernels(request: pytest.FixtureRequest) -> list[Kernel]:
    """Every kernel, from one compilation of all files."""
    architectures: Sequence[str] = request.param
    found = cuda_kernels.all_kernels(architectures)
    for path in FILES:
        here = {k.architecture for k in found if k.file == path.relative_to(ROOT).as_posix()}
        assert here == set(architectures), path
    return found


def test_the_readers_read_what_the_tools_say() -> None:
    text = (
        "ptxas info    : Compiling entry function '_Z1kPf' for 'sm_90'\nptxas info    : Function properties for _Z1kPf\n"
        "    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 128 bytes smem\n"
    )
    assert cuda_kernels.read_ptxas(text) == {
        ("_Z1kPf", "90"): {"registers": 40, "shared": 128, "stack": 16, "spilled": 12}
    }
    ptx = ".visible .entry _Z1kPf(\n.param .u64 p\n)\n.maxntid 32, 4, 1\n{\n}\n.visible .entry _Z1gPf(\n)\n{\n}\n"
    ptx += ".visible .entry _Z1hPf(\n)\n.maxntid 256\n.minnctapersm 4\n{\n}\n"
    assert cuda_kernels.read_bounds(ptx) == {"_Z1kPf": 128, "_Z1hPf": 256}
    code = (
        '\n\t.section\t.text._Z1kPf,"ax",@progbits\n        /*0000*/                   S2R R0, SR_TID.X ;\n'
        ".L_x_0:\n        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;\n"
        "        /*0020*/              @!P0 STG.E.U16 desc[UR4][R2.64], R4 ;\n"
        "        /*0030*/              @P0 BRA `(.L_x_0) ;\n        /*0040*/                   EXIT ;\n"
    )
    loop = cuda_kernels.read_code(code)["_Z1kPf"]
    assert len(loop) == 3
    assert cuda_kernels.widths(loop, "LDG") == {"16": 1} and cuda_kernels.widths(loop, "STG") == {"2": 1}


def test_occupancy_is_that_of_nvidias_calculator() -> None:
    """Registers come in units of 256 a warp: at 85 of them 5 blocks of 128 threads are resident, not 6."""
    assert cuda_kernels.resident_blocks("90", 128, 85, 16) == 5
    assert cuda_kernels.resident_blocks("90", 128, 80, 16) == 6
    assert cuda_kernels.resident_blocks("90", 1024, 80, 128) == 0  # more registers than there are
    assert cuda_kernels.resident_blocks("80", 128, 32, 0) == 16  # warps
    assert cuda_kernels.resident_blocks("80", 32, 16, 0) == 32  # blocks
    assert cuda_kernels.resident_blocks("80", 256, 32, 48 << 10) == 3  # shared memory


@needs_nvcc
def test_no_kernel_spills(kernels: list[Kernel]) -> None:
    bad = [
        f"{k.name} on sm_{k.architecture}: stack {k.stack}, spilled {k.spilled} bytes"
        for k in kernels
        if k.stack or k.spilled
    ]
    assert not bad, bad


@needs_nvcc
def test_every_shape_can_be_launched(kernels: list[Kernel]) -> None:
    """A block's registers are at most 65,536, and every kernel says by __launch_bounds__ how many threads it has."""
    missing = {k.name for k in kernels if not k.threads}
    assert not missing, f"no __launch_bounds__: {missing}"
    bad = [
        f"{k.name} on sm_{k.architecture}: {k.threads} threads of {k.registers} registers, {k.blocks} resident blocks"
        for k in kernels
        if k.threads * k.registers > REGISTERS or k.blocks < 1
    ]
    assert not bad, bad


def test_launchers_ask_for_the_resident_blocks() -> None:
    """A number of blocks a multiprocessor that is written down is wrong as soon as the kernel takes another register."""
    for path in (ROOT / "csrc").rglob("*.[ch]*"):
        code = path.read_text()
        processors = code.count("cudaDevAttrMultiProcessorCount")
        assert processors == code.count("cudaOccupancyMaxActiveBlocksPerMultiprocessor"), path


@needs_nvcc
@needs_nvdisasm
def test_loads_and_stores_are_of_16_bytes(kernels: list[Kernel]) -> None:
    """Of rows of whole groups; besides them only a row's two statistics (4 bytes), the seed and the place in the update (8)."""
    checked = [k for k in kernels if k.whole]
    assert {k.function for k in checked} == cuda_kernels.ELEMENT_WISE.keys()
    for kernel in checked:
        narrow = [{s: n for s, n in moved.items() if s != "16"} for moved in (kernel.loads, kernel.stores)]
        allowed = narrow[0].get("4", 0) <= 2 and narrow[0].get("8", 0) <= 2 and narrow[1].get("4", 0) <= 2
        assert allowed and narrow[0].keys() <= {"4", "8"} and narrow[1].keys() <= {"4"}, (
            f"{kernel.name} on sm_{kernel.architecture}: loads {kernel.loads}, stores {kernel.stores}"
        )
        assert kernel.loads.get("16") and kernel.stores.get("16")


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
