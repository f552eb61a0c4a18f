"""Updates that repeat bit for bit on CUDA too; docs/reproducibility.md says by what, operation by operation."""

from __future__ import annotations

import os

import torch

WORKSPACE = ":4096:8"  # buffers of cuBLAS that no stream shares with another: 8 of 4 MiB


def repeat_bit_for_bit(fill: bool = False) -> None:
    """From here on torch takes deterministic algorithms only; a RuntimeError names an operation that has none.

    For the whole process, and to be called before its first matrix product on CUDA. `fill`: new tensors hold NaN until
    they are written, which shows what is read too early and costs a pass over each.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
