"""Precision that a device computes in: what `precision=auto` means on it, where 16-bit products are only emulated, and
updates that repeat bit for bit.

Processors without AVX512-BF16 or AMX emulate products of bf16: on one core of an AMD EPYC of the third generation, 1 to 7
GFLOP/s where fp32 does 65.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabert.common import environment
from megabert.common.logs import log
from megabert.config import Config
from megabert.distributed.ranks import World

AUTO = "auto"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.bfloat16}
# Compute capability of the first GPUs that multiply bf16.
AMPERE = (8, 0)
# Compute capability of the first GPUs that multiply float8.
ADA = (8, 9)
# Buffers of cuBLAS that no stream shares with another: 8 of 4 MiB.
CUBLAS_WORKSPACE = ":4096:8"


def usual(device: torch.device) -> str:
    """The precision that a device trains fastest in: bf16 where it multiplies that, else fp32."""
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= AMPERE else "fp32"
    return "bf16" if environment.multiplies_bf16() else "fp32"


def dtype_on(device: torch.device, precision: str) -> torch.dtype:
    """The type to compute a finished model in that was trained in `precision`: fp32 where the device would emulate that."""
    fast = usual(device)
    return DTYPES[fast if fast == "fp32" or precision == AUTO else precision]


def choose(asked: str, world: World, saved: str = "") -> str:
    """A precision in place of `auto`: that of the checkpoint the run resumes from (`saved`), else the one that all ranks are
    fast in. Warns of bf16 that a device emulates. A collective."""
    common = "fp32" if world.agree_any(usual(world.device) == "fp32") else "bf16"
    chosen = (saved or common) if asked == AUTO else asked
    if (chosen, common) == ("bf16", "fp32") and world.is_main:
        log.warning(
            "precision=bf16: a device without bf16 products emulates them, a CPU 10 to 60 times slower than fp32; a new run "
            "with precision=auto or fp32 is faster"
        )
    return chosen


def with_precision(config: Config, world: World, saved: str = "") -> Config:
    """`config` with the precision that `choose` gives. A collective."""
    return config.model_copy(update={"precision": choose(config.precision, world, saved)})


def repeat_bit_for_bit(fill: bool = False) -> None:
    """Updates repeat bit for bit on CUDA too: from here on torch takes deterministic algorithms only, and a RuntimeError
    names an operation that has none. docs/reproducibility.md lists them.

    For the whole process, and to be called before its first matrix product on CUDA. `fill`: new tensors hold NaN until
    they are written, which shows what is read too early and costs a pass over each.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def multiply_in_float8(model: nn.Module, device: torch.device) -> None:
    """Training multiplies in float8 in the linears of all layers but the first and the last: torchao's products, with a scale
    of each tensor (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"). Parameters stay as they are.

    Raises ValueError where the device or the installation cannot.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < ADA:
        raise ValueError("precision=fp8 needs a GPU of compute capability 8.9 or newer; use bf16")
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError as error:
        raise ValueError(f"precision=fp8 needs torchao ({error}): pip install torchao, or use bf16") from error
    layers: Any = model.layers
    for linear in (module for layer in layers[1:-1] for module in layer.modules() if hasattr(module, "matmul")):
        outputs, inputs = linear.weight.shape
        shell = nn.Linear(inputs, outputs, bias=False, device="meta")
        shell.weight = linear.weight
        linear.matmul = partial(_float8_product, convert_to_float8_training(shell), linear)


def _float8_product(float8: Any, linear: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias; evaluation computes in the model's type."""
    if not linear.training:
        return F.linear(x, float8.weight, bias)
    y = float8(x)
    return y if bias is None else y + bias
