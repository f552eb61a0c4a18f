"""csrc's CUDA kernels compiled for the CPU (see cuda.h) and called from Python.

Arguments are copied to memory that ends before a page which cannot be touched, so an access past an argument's end is found.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.conftest import ROOT

TYPES = {torch.bfloat16: 0, torch.float32: 1}


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("c++", "g++"))), None)


def compile_once(source: Path, includes: Iterable[Path], *options: str) -> ctypes.CDLL:
    """The library of a C++ file, compiled once for a state of csrc/ and `includes`; safe in several test processes."""
    paths = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cuh", ".h", ".inl")] + [*includes]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths) if path.is_file())).hexdigest()[:16]
    folder = ROOT / "build" / "cuda_on_cpu"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{source.stem}-{digest}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            part = library.with_suffix(".part")
            options = (*options, "-U_FORTIFY_SOURCE", "-std=c++17", "-fPIC", "-shared", "-w", f"-I{ROOT / 'csrc'}")
            command = [compiler() or "c++", *options, str(source), "-o", str(part)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-4000:]
            os.replace(part, library)
    return ctypes.CDLL(str(library))


class Guarded:
    """A copy of a tensor in guarded memory; `read` copies it back."""

    def __init__(self, library: ctypes.CDLL, tensor: Tensor) -> None:
        self.library, self.like = library, tensor.contiguous()
        self.bytes = max(self.like.numel() * self.like.element_size(), 1)
        self.address = library.guarded(self.bytes)
        assert self.address
        ctypes.memmove(self.address, self.like.data_ptr(), self.like.numel() * self.like.element_size())

    def read(self) -> Tensor:
        result = torch.empty_like(self.like)
        ctypes.memmove(result.data_ptr(), self.address, result.numel() * result.element_size())
        return result

    def __del__(self) -> None:
        self.library.release(self.address, self.bytes)


class Result(NamedTuple):
    """An argument that a kernel writes and `run` gives back."""

    tensor: Tensor


class Kernels:
    """`run("name", …)` calls a function of kernels.cpp in both orders of threads and wants the same bits from both."""

    def __init__(self) -> None:
        here = Path(__file__).parent
        self.library = compile_once(here / "kernels.cpp", here.iterdir(), "-O1")
        self.library.guarded.restype = ctypes.c_void_p
        self.library.guarded.argtypes = [ctypes.c_size_t]
        self.library.release.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def run(self, name: str, dtype: torch.dtype, *arguments: Any) -> list[Tensor]:
        """The results; arguments are tensors (None: a null pointer), results, numbers, ctypes structures."""
        outputs = [i for i, a in enumerate(arguments) if isinstance(a, Result)]
        plain = [a.tensor if isinstance(a, Result) else a for a in arguments]
        results = []
        for backwards in (False, True):
            held = [Guarded(self.library, a) if isinstance(a, Tensor) else a for a in plain]
            message = self.call(name, TYPES[dtype], backwards, *held)
            assert message == "", f"{name}: {message}"
            results.append([held[i].read() for i in outputs])
        for first, second in zip(*results, strict=True):
            same = first.equal(second) or (first.isnan() == second.isnan()).all()
            assert same, f"{name}: the result depends on the order of the threads"
        return results[0]

    @contextlib.contextmanager
    def lines_of_a_row(self, lines: int) -> Iterator[None]:
        """Inside, seeds have a second element, the place of the batch's first row, and a row so many lines of the mask."""
        self.library.set_lines_of_a_row(ctypes.c_int64(lines))
        try:
            yield
        finally:
            self.library.set_lines_of_a_row(ctypes.c_int64(0))

    def call(self, name: str, *arguments: Any) -> str:
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        return function(*map(self._passed, arguments)).decode()

    @staticmethod
    def _passed(a: Any) -> Any:
        if isinstance(a, ctypes.Structure):
            return ctypes.byref(a)
        if a is None or isinstance(a, Guarded):
            return ctypes.c_void_p(a and a.address)
        return {bool: ctypes.c_bool, float: ctypes.c_double, int: ctypes.c_int64}[type(a)](a)
