"""Backends of the operations: one for each, chosen once, by name, with the reason.

An explicit choice that cannot run is a ValueError; `auto` chooses and gives its reason. There are no silent fallbacks.
The native library is built by `python setup.py build_ext --inplace` (or an install) and needs no GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

LIBRARY = Path(__file__).resolve().parents[1] / "_native.abi3.so"
NATIVE_DTYPES = (torch.bfloat16, torch.float32)
# role -> its backends, with the operation of the native library whose kernel they need, if any. A role is a field of `Backends`
# and of OpsConfig (config/schema.py), in this order; its first backend runs everywhere.
ROLES: dict[str, dict[str, str]] = {
    "attention": {"sdpa": "", "varlen": "", "flash3": "", "native": "attention", "fused_softmax": "softmax_mask"},
    "mlm_loss": {"torch": "", "native": "mlm_loss"},
    "layer": {"torch": "", "native": "bias_gelu", "compiled": ""},
}
BACKENDS = {role: tuple(backends) for role, backends in ROLES.items()}
# attention's kernels for a GPU alone (native: there)
KERNELS = {"varlen": "variable-length flash attention", "flash3": "FlashAttention-3", "native": "native attention"}


class Backend(NamedTuple):
    """A backend and the reason for it: one line for the log and for `megabert doctor`."""

    name: str
    reason: str


class Backends(NamedTuple):
    """The backends of a model's operations."""

    attention: Backend
    mlm_loss: Backend
    layer: Backend


def _load() -> str:
    """Load the native library; returns why it is unavailable, or ""."""
    if not LIBRARY.is_file():
        return "native library not built (python setup.py build_ext --inplace)"
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        return f"native library {LIBRARY} does not load ({error}); rebuild it with python setup.py build_ext --inplace"
    return ""


MISSING = _load()  # why there is no native library; "" when it is loaded


def register(
    op: str, shapes: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any],
    backward_shapes: Callable[..., Any] | None = None,
) -> None:  # fmt: skip
    """Tell torch the gradient of a native operation, and the shapes of its results and of `op`_backward's, if there is a library. `shapes`
    return empty tensors; `save` and `backward` are those of torch.library.register_autograd. Schemas: csrc/registration.cpp."""
    if not MISSING:
        torch.library.register_fake(f"megabert::{op}", shapes)
        torch.library.register_autograd(f"megabert::{op}", backward, setup_context=save)
        if backward_shapes is not None:
            torch.library.register_fake(f"megabert::{op}_backward", backward_shapes)


def choose_all(asked: Any, device: str, dtype: torch.dtype, causal: bool = False, head_size: int = 64) -> Backends:
    """`choose` for every role; `asked` has a field for each, as OpsConfig."""
    return Backends(*(choose(role, getattr(asked, role), device, dtype, causal, head_size) for role in ROLES))


def choose(
    op: str, requested: str = "auto", device: str = "cpu", dtype: torch.dtype = torch.bfloat16,
    causal: bool = False, head_size: int = 64,
) -> Backend:  # fmt: skip
    """Backend of `op` (of `ROLES`) on a device type in a compute type, with the reason.

    `auto` is native where the library was built for the device, else torch's flash attention over sequences, else the first of its
    role. `causal`: the key ranges of a sequence's tokens differ, and batches do not say so. `head_size`: columns of an attention
    head. Raises ValueError when `requested` is unknown or cannot run there.
    """
    if requested != "auto" and requested not in BACKENDS[op]:
        raise ValueError(f"ops.{op}={requested!r}: choose one of auto, {', '.join(BACKENDS[op])}")
    blocked = obstacles(op, device, dtype, head_size)
    if requested != "auto":
        if blocked[requested]:
            raise ValueError(f"ops.{op}={requested} cannot run on {device} in {_short(dtype)}: {blocked[requested]}")
        return Backend(requested, "asked for")
    if not blocked["native"]:
        return Backend("native", f"fused {device} code for {_short(dtype)}")
    if op == "attention" and not blocked["varlen"] and not causal:
        return Backend("varlen", blocked["native"])
    return Backend(BACKENDS[op][0], blocked["native"])


def obstacles(op: str, device: str, dtype: torch.dtype, head_size: int = 64) -> dict[str, str]:
    """Why each backend of `op` cannot run there; "" if it can."""
    return {name: _obstacle(op, name, device, dtype, head_size) for name in BACKENDS[op]}


def _obstacle(op: str, name: str, device: str, dtype: torch.dtype, head_size: int) -> str:
    """Why a backend cannot run, or ""."""
    if kernel := ROLES[op][name]:
        if reason := missing_kernels(device, kernel):
            return reason
        if dtype not in NATIVE_DTYPES:
            return f"native code takes {', '.join(map(_short, NATIVE_DTYPES))}, not {_short(dtype)}"
    kind = KERNELS.get(name, "") if op == "attention" else ""
    if kind and name != "native" and device != "cuda":
        return f"{kind} needs a CUDA device"
    if kind and device == "cuda":
        if dtype != torch.bfloat16:
            return f"{kind} takes bfloat16, not {_short(dtype)}"
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        if capability and capability[0] < 8:
            return f"{kind} needs compute capability 8.0 or newer"
        if name == "flash3":
            if capability and capability[0] != 9:
                return f"{kind} is for compute capability 9, not {capability[0]}"
            if not importlib.util.find_spec("flash_attn_interface"):
                return f"{kind} needs flash_attn_interface, which its project's hopper/ folder builds"
        most = 64 if name == "native" else 256
        if head_size > most or head_size % 8:
            return f"{kind} takes heads of at most {most} columns, a multiple of 8, not {head_size}"
    return _compiler(device) if name == "compiled" else ""


def _compiler(device: str) -> str:
    """Why torch.compile cannot run, or ""."""
    if device == "cuda":
        if not importlib.util.find_spec("triton"):
            return "torch.compile needs the package triton on cuda"
        found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # as triton looks it up
        return "" if found else "torch.compile needs a C compiler for triton; there is neither gcc nor clang"
    compiler = os.environ.get("CXX", "g++")  # as torch looks it up
    return "" if shutil.which(compiler) else f"torch.compile needs a C++ compiler; there is no {compiler}"


def has_kernel(op: str, device: str) -> bool:
    """Whether the library is loaded and has code of an operation for a device type ("cpu", "cuda")."""
    return not MISSING and torch._C._dispatch_has_kernel_for_dispatch_key(f"megabert::{op}", device.upper())


def missing_kernels(device: str, op: str = "bias_gelu") -> str:
    """Why native operations cannot run on a device type, and what to do; "" if they can."""
    if MISSING:
        return MISSING
    if device == "cuda" and torch.version.hip:
        return "the native kernels are CUDA's, and this torch is the build for ROCm"
    if not has_kernel(op, device):
        return f"the native library has no {device} code (MEGABERT_CUDA=1 make venv builds it)"
    if device == "cuda" and torch.cuda.is_available():
        library, driver = cuda_releases()
        if driver < library // 1000 * 1000:  # within a major release older drivers run newer kernels
            built, known = (f"{release // 1000}.{release % 1000 // 10}" for release in (library, driver))
            return f"the native kernels are of CUDA {built}, the driver is of {known}: update it, or build by its CUDA's nvcc"
    return ""


def cuda_releases() -> tuple[int, int]:
    """CUDA release of the library, and the newest one that the driver supports: 1000 * major + 10 * minor."""
    library, driver = ctypes.c_int(), ctypes.c_int()
    ctypes.CDLL(str(LIBRARY)).megabert_cuda_releases(ctypes.byref(library), ctypes.byref(driver))
    return library.value, driver.value


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
