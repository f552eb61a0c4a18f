"""Backends of the operations: exactly one each, chosen once, by name, with its reason.

An explicit choice that cannot run here is a ValueError; only `auto` picks, and it says why. Nothing falls back silently.
The native library is built by `python setup.py build_ext --inplace` (or an install) and needs no GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

LIBRARY = Path(__file__).resolve().parents[2] / "_native.abi3.so"
NATIVE_DTYPES = {
    "cpu": (torch.bfloat16, torch.float32),
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
}
# role -> its backends and, for those in the native library, the operation of it that must have a kernel for them to run.
# A role is a field of `Backends` and of OpsConfig (config/schema.py), in this order; its first backend always runs.
ROLES: dict[str, dict[str, str]] = {
    "attention": {"sdpa": "", "varlen": "", "native": "attention", "fused_softmax": "softmax_mask"},
    "mlm_loss": {"torch": "", "native": "mlm_loss"},
    "layer": {"torch": "", "native": "bias_gelu"},
}
BACKENDS = {role: tuple(backends) for role, backends in ROLES.items()}


class Choice(NamedTuple):
    name: str  # the backend that runs
    reason: str  # one line for the log and for megabert.doctor


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
) -> Choice:
    """Backend of `op` ("attention", "mlm_loss" or "layer") on a device type in a compute type, with the reason.

    `causal`: the key ranges of a sequence's tokens differ. Raises ValueError when `requested` is unknown or cannot run there.
    """
    if requested != "auto" and requested not in BACKENDS[op]:
        raise ValueError(f"ops.{op}={requested!r}: choose one of auto, {', '.join(BACKENDS[op])}")
    obstacle = {name: _obstacle(op, name, device, dtype) for name in BACKENDS[op]}
    if op == "attention" and causal:
        obstacle["varlen"] = "it attends to whole sequences, a left-to-right model must not"
    if requested != "auto":
        if obstacle[requested]:
            raise ValueError(
                f"ops.{op}={requested} cannot run on {device} in {_short(dtype)}: {obstacle[requested]}"
            )
        return Choice(requested, "asked for")
    if op == "attention" and not obstacle["varlen"]:
        return Choice("varlen", f"flash attention over packed sequences on {device}")
    if obstacle["native"]:
        return Choice(BACKENDS[op][0], obstacle["native"])
    if device == "cuda":
        return Choice(BACKENDS[op][0], f"no benchmark shows yet that ops.{op}=native pays on cuda")
    return Choice("native", f"fused {device} code for {_short(dtype)}")


def _obstacle(op: str, name: str, device: str, dtype: torch.dtype) -> str:
    """Why a backend cannot run, or an empty string."""
    if kernel := ROLES[op][name]:
        if MISSING:
            return MISSING
        if not has_kernel(kernel, device):
            return f"the native library has no {device} code for it"
        if dtype not in NATIVE_DTYPES[device]:
            return f"native code takes {', '.join(map(_short, NATIVE_DTYPES[device]))}, not {_short(dtype)}"
    if name == "varlen":
        if device != "cuda":
            return "variable-length flash attention needs a CUDA device"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"flash attention takes bfloat16 and float16, not {_short(dtype)}"
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8:
            return "flash attention needs compute capability 8.0 or newer"
    return ""


def has_kernel(op: str, device: str) -> bool:
    """Whether the library was built with code of an operation for a device type ("cpu", "cuda")."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"megabert::{op}", device.upper())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
