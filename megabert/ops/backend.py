"""Backends of the operations: exactly one each, chosen once, by name, with its reason.

An explicit choice that cannot run here is a ValueError; only `auto` picks, and it says why. Nothing falls back silently.
The native library is built by `python setup.py build_ext --inplace` (or an install) and needs no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch

LIBRARY = Path(__file__).resolve().parents[1] / "_native.abi3.so"
NATIVE_DTYPES = {"cpu": (torch.bfloat16, torch.float32), "cuda": (torch.bfloat16, torch.float16, torch.float32)}
# role -> its backends and, for those in the native library, the operation of it that must have a kernel for them to run.
# A role is a field of `Backends` and of OpsConfig (config/schema.py), in this order; its first backend always runs.
ROLES: dict[str, dict[str, str]] = {
    "attention": {"sdpa": "", "varlen": "", "cudnn": "", "native": "attention", "fused_softmax": "softmax_mask"},
    "mlm_loss": {"torch": "", "native": "mlm_loss"},
    "layer": {"torch": "", "native": "bias_gelu", "compiled": "", "apex": ""},
}
FLASH = {"varlen": "variable-length flash attention", "cudnn": "cuDNN's attention"}  # tensor cores of 16-bit types only
BACKENDS = {role: tuple(backends) for role, backends in ROLES.items()}


class Choice(NamedTuple):
    name: str  # the backend that runs
    reason: str  # one line for the log and for megabert.commands.doctor


class Backends(NamedTuple):
    """What a model's operations run on."""

    attention: Choice
    mlm_loss: Choice
    layer: Choice


def _load() -> str:
    """Loads the native library; returns why it is not there, or an empty string."""
    if not LIBRARY.is_file():
        return "native library not built (python setup.py build_ext --inplace)"
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        return f"native library {LIBRARY} does not load ({error}); rebuild it with python setup.py build_ext --inplace"
    return ""


MISSING = _load()  # why there is no native library; empty when it is loaded


def choose(
    op: str,
    requested: str = "auto",
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = False,
    head_size: int = 64,
) -> Choice:
    """Backend of `op` (of `ROLES`) on a device type in a compute type, with the reason.

    `causal`: the key ranges of a sequence's tokens differ. `head_size`: columns of an attention head. Raises ValueError when
    `requested` is unknown or cannot run there.
    """
    if requested != "auto" and requested not in BACKENDS[op]:
        raise ValueError(f"ops.{op}={requested!r}: choose one of auto, {', '.join(BACKENDS[op])}")
    obstacle = obstacles(op, device, dtype, causal, head_size)
    if requested != "auto":
        if obstacle[requested]:
            raise ValueError(f"ops.{op}={requested} cannot run on {device} in {_short(dtype)}: {obstacle[requested]}")
        return Choice(requested, "asked for")
    if op == "attention" and not obstacle["varlen"]:
        return Choice("varlen", f"flash attention over packed sequences on {device}")
    fused = "native" if "native" in obstacle else BACKENDS[op][-1]
    if obstacle[fused]:
        return Choice(BACKENDS[op][0], obstacle[fused])
    if device == "cuda":
        return Choice(BACKENDS[op][0], "runs everywhere; pre-training measures at its start instead")
    return Choice(fused, f"fused {device} code for {_short(dtype)}")


def obstacles(op: str, device: str, dtype: torch.dtype, causal: bool = False, head_size: int = 64) -> dict[str, str]:
    """Why each backend of `op` cannot run there; "" where it can."""
    found = {name: _obstacle(op, name, device, dtype, head_size) for name in BACKENDS[op]}
    if op == "attention" and causal:
        found["varlen"] = "it attends to whole sequences, a left-to-right model must not"
    return found


def _obstacle(op: str, name: str, device: str, dtype: torch.dtype, head_size: int) -> str:
    """Why a backend cannot run, or an empty string."""
    if kernel := ROLES[op][name]:
        if MISSING:
            return MISSING
        if not has_kernel(kernel, device):
            return f"the native library has no {device} code for it"
        if dtype not in NATIVE_DTYPES[device]:
            return f"native code takes {', '.join(map(_short, NATIVE_DTYPES[device]))}, not {_short(dtype)}"
    if name in FLASH and device != "cuda":
        return f"{FLASH[name]} needs a CUDA device"
    if name in FLASH or (op == "attention" and name == "native" and device == "cuda"):  # on tensor cores
        kind = FLASH.get(name, "native attention")
        if dtype not in (torch.bfloat16, torch.float16):
            return f"{kind} takes bfloat16 and float16, not {_short(dtype)}"
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8:
            return f"{kind} needs compute capability 8.0 or newer"
        if name == "native" and (head_size > 64 or head_size % 8):
            return f"native attention takes heads of at most 64 columns, a multiple of 8, not {head_size}"
    if name == "compiled":
        return _compiler(device)
    if name == "apex":
        if device != "cuda":
            return "NVIDIA's apex needs a CUDA device"
        try:
            import apex.normalization.fused_layer_norm  # noqa: F401
        except ImportError as error:
            return f"NVIDIA's apex does not import ({error})"
    return ""


def _compiler(device: str) -> str:
    """Why torch.compile cannot run, or an empty string."""
    if device == "cuda":
        return "" if importlib.util.find_spec("triton") else "torch.compile needs the package triton on cuda"
    compiler = os.environ.get("CXX", "g++")  # as torch looks for it
    return "" if shutil.which(compiler) else f"torch.compile needs a C++ compiler; there is no {compiler}"


def has_kernel(op: str, device: str) -> bool:
    """Whether the library is loaded and has code of an operation for a device type ("cpu", "cuda")."""
    return not MISSING and torch._C._dispatch_has_kernel_for_dispatch_key(f"megabert::{op}", device.upper())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
