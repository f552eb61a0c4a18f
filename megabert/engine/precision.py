"""Precision by device: the meaning of `precision=auto`, emulated 16-bit products, and bit for bit reproducible updates.

Processors without AVX512-BF16 or AMX emulate products of bf16: on one core of an AMD EPYC of the third generation, 1 to 7
GFLOP/s instead of 65 in fp32.
"""

from __future__ import annotations

import os

import torch

from megabert.common import environment
from megabert.common.logs import log
from megabert.distributed.ranks import World

AUTO = "auto"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
AMPERE = (8, 0)  # compute capability of the first GPUs with bf16 products
CUBLAS_WORKSPACE = ":4096:8"  # workspaces of cuBLAS that streams do not share: 8 of 4 MiB


def usual(device: torch.device) -> str:
    """The fastest precision of a device for training: bf16 if it has bf16 products, else fp32."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= AMPERE else "fp32"
    return "bf16" if environment.has_native_bf16() else "fp32"


def dtype_on(device: torch.device, precision: str) -> torch.dtype:
    """The type for inference with a model trained in `precision`: fp32 if the device would emulate that."""
    fast = usual(device)
    return DTYPES[fast if fast == "fp32" or precision == AUTO else precision]


def choose(asked: str, world: World, saved: str = "") -> str:
    """The precision for `auto`: that of the checkpoint to resume from (`saved`), else the one that is fast on all ranks. Warns of
    emulated bf16. A collective."""
    common = "fp32" if world.agree_any(usual(world.device) == "fp32") else "bf16"
    chosen = (common if saved in ("", AUTO) else saved) if asked == AUTO else asked
    if (chosen, common) == ("bf16", "fp32") and world.is_main:
        log.warning(
            "precision=bf16: a device without bf16 products emulates them, a CPU 10 to 60 times slower than fp32; a new run "
            "with precision=auto or fp32 is faster"
        )
    return chosen


def make_deterministic(fill: bool = False) -> None:
    """Make updates reproducible bit for bit on CUDA too: torch uses only deterministic algorithms from now on, and a RuntimeError
    names an operation without one. docs/reproducibility.md lists them.

    Affects the whole process; call it before the first matrix product on CUDA. `fill`: new tensors are filled with NaN, which
    shows reads of unwritten values and costs a pass over each.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def make_debuggable() -> None:
    """Updates as of `make_deterministic`, with anomaly detection and NaN in new tensors."""
    make_deterministic(fill=True)
    torch.autograd.set_detect_anomaly(True)
