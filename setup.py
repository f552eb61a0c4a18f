"""One wheel, one native library.

Every C++ file under csrc/ (and every CUDA file, where nvcc is found) becomes the single library `megabert/_native.abi3.so`.
It uses PyTorch's stable ABI and no Python symbol, so one binary serves several torch and Python versions. Nothing under
csrc/ means no native library and no compiler; the package then runs on its torch implementations. Everything else about
the package is in pyproject.toml.

Environment: MEGABERT_CUDA=0|1 forces the CUDA part off or on (1 without nvcc is an error), TORCH_CUDA_ARCH_LIST picks the
architectures, CXX and CXXFLAGS the compiler, MAX_JOBS the number of compilers run at once.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
WRAPPERS = ("ccache", "sccache", "distcc")  # of a compiler in CXX
OBJECTS = ROOT / "build" / "native"  # kept between installs, so that an edit recompiles one file
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020B000000000000"  # stable ABI of torch 2.11
CUDA_HINT = "; MEGABERT_CUDA=0 leaves the CUDA part out"
GLIBC = (2, 28)  # that torch's wheels run on
ARCHITECTURES = ("8.0", "8.9", "9.0", "10.0")  # A100, L4 and L40, H100 and H200, B200


def output_of(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def find_nvcc() -> str | None:
    """nvcc on PATH, else in the folder CUDA_HOME or CUDA_PATH names, else in /usr/local/cuda, else of NVIDIA's wheels."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvidia = importlib.util.find_spec("nvidia")  # what its wheels share
    wheels = [Path(place) for place in (nvidia and nvidia.submodule_search_locations) or ()]
    candidates = [Path(home, "bin/nvcc"), *(path for place in wheels for path in sorted(place.glob("cu*/bin/nvcc")))]
    return shutil.which("nvcc") or next((str(path) for path in candidates if path.is_file()), None)


def architectures(nvcc: str) -> str:
    """What is compiled for by default: as many of ARCHITECTURES as this nvcc knows, and PTX of the newest, which newer
    devices compile at first use."""
    listed = output_of([nvcc, "--list-gpu-arch"]).split()
    return ";".join(name for name in ARCHITECTURES if f"compute_{name.replace('.', '')}" in listed) + "+PTX"


def native_sources() -> tuple[list[str], list[str]]:
    """(C++ files, CUDA files) to compile, relative to the repository. Exits when CUDA is demanded without nvcc."""
    wanted = os.environ.get("MEGABERT_CUDA", "")
    if wanted not in ("", "0", "1"):
        sys.exit(f"error: MEGABERT_CUDA={wanted}: set it to 0 or 1, or leave it out")
    if wanted == "1" and find_nvcc() is None:
        sys.exit("error: MEGABERT_CUDA=1 and no nvcc: MEGABERT_CUDA=1 make venv brings NVIDIA's; or set CUDA_HOME")
    files = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "csrc").rglob("*"))]
    cpp = [name for name in files if name.endswith(".cpp")]
    cuda = [name for name in files if name.endswith(".cu")]
    return cpp, cuda if wanted == "1" or (wanted == "" and find_nvcc()) else []


def gencode(architectures: str) -> list[str]:
    """nvcc flags for a TORCH_CUDA_ARCH_LIST such as `8.0;9.0a+PTX` (separated by `;` or spaces)."""
    flags = []
    for entry in architectures.replace(";", " ").split():
        number = entry.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if entry.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def glibc_stub(cxx: list[str], folder: Path) -> list[str]:
    """A library to link in front of glibc: functions that got a newer version after GLIBC, under the one of before.

    Without it CUDA's static runtime would need glibc 2.34, which gave every function of threads a new version. Only names
    whose code is the same under both are in it. Empty where the C library is another one.
    """
    libc = output_of([*cxx, "-print-file-name=libc.so.6"]).strip()
    if not Path(libc).is_file():
        return []
    table = output_of(["objdump", "-T", libc])
    versions: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for place, version, name in re.findall(r"^(\w+) .*DF \.text.*?GLIBC_([\d.]+)\)?\s+(\w+)$", table, re.M):
        versions.setdefault((name, place), []).append(tuple(map(int, version.split("."))))
    names: dict[str, list[str]] = {}
    for (name, _), known in versions.items():
        if min(known) <= GLIBC < max(known):
            names.setdefault(".".join(map(str, max(v for v in known if v <= GLIBC))), []).append(name)
    source, script, stub = (folder / f"glibc.{suffix}" for suffix in ("c", "map", "so"))
    source.write_text("".join(f"void {name}(void) {{}}\n" for group in names.values() for name in group))
    script.write_text("".join(f"GLIBC_{version} {{ {'; '.join(group)}; }};\n" for version, group in names.items()))
    link = ["-shared", "-nostdlib", "-Wl,-soname,libc.so.6", f"-Wl,--version-script={script}", "-o", str(stub)]
    run([*cxx, "-w", "-fPIC", "-fno-builtin", "-x", "c", str(source), *link], "linking the older names of glibc")
    return [str(stub)]


def run(command: list[str], what: str, hint: str = "") -> None:
    print(f"{what}\n  {shlex.join(command)}", flush=True)
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.stdout:
        print(result.stdout, flush=True)
    if result.returncode:
        sys.exit(f"error: {what} failed (exit {result.returncode}); its message is above{hint}")


class BuildNative(build_ext):
    """Compiles each changed source, several at once, links them into one library and loads it once as a check."""

    def build_extension(self, ext: Extension) -> None:
        try:
            import torch
            from torch.utils import cpp_extension
        except ImportError:
            sys.exit("error: building the native library needs torch: pip install torch, then --no-build-isolation")
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        if not jobs.isdecimal() or not int(jobs):
            sys.exit(f"error: MAX_JOBS={jobs}: set it to a number of compilers from 1 on, or leave it out")
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        includes = [f"-I{ROOT / 'csrc'}"]
        for path in cpp_extension.include_paths():
            includes += ["-isystem", path]
        cxx = shlex.split(os.environ.get("CXX") or ("c++" if shutil.which("c++") else "g++"))
        if shutil.which(cxx[0]) is None:
            sys.exit(f"error: no C++ compiler ({cxx[0]}): apt-get install g++, or set CXX")
        compiler = next((word for word in cxx if Path(word).name not in WRAPPERS), cxx[0])
        nvcc, host = find_nvcc(), ["-ccbin", compiler] if os.environ.get("CXX") else []
        arch = gencode(os.environ.get("TORCH_CUDA_ARCH_LIST") or architectures(nvcc)) if nvcc and cuda else []

        def compile_one(source: str) -> Path:
            made = OBJECTS / f"{source}.o"
            made.parent.mkdir(parents=True, exist_ok=True)
            if source.endswith(".cu"):
                assert nvcc is not None
                command = [nvcc, *host, "-O3", "-std=c++17", "-Xcompiler=-fPIC,-fopenmp", *arch]
                command += ["--expt-relaxed-constexpr", "-DMEGABERT_CUDA", "-DUSE_CUDA"]
            else:
                command = [*cxx, "-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall"]
                command += shlex.split(os.environ.get("CXXFLAGS", ""))
            command += [TORCH_TARGET, *includes, "-MMD", "-MF", f"{made}.d", "-c", source, "-o", str(made)]
            if not up_to_date(made, command):
                run(command, f"compiling {source}", CUDA_HINT if source.endswith(".cu") else "")
                Path(f"{made}.cmd").write_text(shlex.join(command))
            return made

        with ThreadPoolExecutor(int(jobs)) as pool:
            compiled = [str(path) for path in pool.map(compile_one, ext.sources)]
        libraries = [*glibc_stub(cxx, OBJECTS), *(f"-L{path}" for path in cpp_extension.library_paths())]
        if any(source.endswith(".cu") for source in ext.sources):
            assert nvcc is not None  # nvcc links: it knows where its own runtime is
            link = [nvcc, *host, "-shared", "-cudart", "static", "-Xcompiler=-fopenmp"]
            # of NVIDIA's wheels, where nvcc expects lib64
            libraries.append(f"-L{Path(nvcc).resolve().parents[1] / 'lib'}")
            # libtorch.so is kept though nothing in it is used: it brings torch's CUDA library, where torch has one. nvcc
            # moves linker options in front of all libraries, so that the option cannot be taken back behind this one.
            libraries += ["-Xlinker=--no-as-needed", "-ltorch", "-ltorch_cpu"]
        else:
            link = [*cxx, "-shared", "-fopenmp", "-Wl,--as-needed"]
            libraries += ["-ltorch", "-ltorch_cpu"]
        part = target.with_name(target.name + ".part")
        run([*link, *compiled, *libraries, "-o", str(part)], f"linking {target.name}")
        check = f"import ctypes, torch; torch.ops.load_library({str(part)!r})"
        if cuda:  # found in torch's CUDA library, which a library of ours has to bring along
            check += f"; torch.version.cuda and ctypes.CDLL({str(part)!r}).aoti_torch_get_current_cuda_stream"
        run([sys.executable, "-c", check], f"loading {target.name} with torch {torch.__version__}")
        part.replace(target)  # atomic: a running process keeps the library it has


class BuildPython(build_py):
    """build_py without the copies of an earlier build: setuptools packages deleted modules too, and keeps copies newer than their source."""

    def run(self) -> None:
        if Path(self.build_lib).resolve().parent == ROOT / "build":
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


def up_to_date(made: Path, command: list[str]) -> bool:
    """Whether an object is newer than all it was made from and was made by the same command."""
    record, listing = Path(f"{made}.cmd"), Path(f"{made}.d")
    if not (made.is_file() and record.is_file() and listing.is_file()) or record.read_text() != shlex.join(command):
        return False
    inputs = shlex.split(listing.read_text().replace("\\\n", " ").partition(": ")[2])
    paths = [ROOT / name for name in inputs]
    return all(path.is_file() and path.stat().st_mtime <= made.stat().st_mtime for path in paths)


def wheel_options(with_cuda: bool) -> dict[str, str]:
    """The wheel's tags: any Python from 3.11 on and any glibc from GLIBC on, and a build of its own with CUDA kernels."""
    options = {"py_limited_api": "cp311"}
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        options["plat_name"] = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{platform.machine()}"
    return options | ({"build_number": "1cuda"} if with_cuda else {})


cpp, cuda = native_sources()
setup(
    ext_modules=[Extension("megabert._native", cpp + cuda, py_limited_api=True)] if cpp else [],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPython},
    options={"bdist_wheel": wheel_options(bool(cuda))} if cpp else {},
)
