"""What updates that repeat bit for bit rest on: torch's and cuBLAS's settings, kernels without atomics."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks


def flags(world: Any) -> list[Any]:
    """Torch's settings before and after an engine asks for updates that repeat, and losses of the same updates twice."""

    def now() -> list[Any]:
        filled = torch.utils.deterministic.fill_uninitialized_memory
        return [torch.are_deterministic_algorithms_enabled(), filled, os.environ.get("CUBLAS_WORKSPACE_CONFIG")]

    tiny.engine(tiny.config(), world)
    before, cfg = now(), tiny.config(optimizer__name="lamb", zero__stage=1, precision="bf16", deterministic=True)
    losses = [tiny.train(tiny.engine(cfg, world), range(2)) for _ in range(2)]
    return [before, now(), losses[0] == losses[1]]


@pytest.mark.dist
def test_the_key_asks_torch_and_cublas_for_it() -> None:
    ((before, after, same),) = run_ranks(1, flags)
    assert before == [False, True, os.environ.get("CUBLAS_WORKSPACE_CONFIG")]
    assert after == [True, False, os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")] and same


def test_our_kernels_add_nothing_atomically() -> None:
    sources = [path for path in (ROOT / "csrc").rglob("*.*") if path.suffix in (".cu", ".cuh", ".h")]
    assert len(sources) > 10
    atomic = [p.name for p in sources if re.search(r"\batomic\w*\(|\bred\.\w+", re.sub(r"//[^\n]*", "", p.read_text()))]
    assert not atomic, f"{atomic}: sums are taken in a fixed order (docs/reproducibility.md)"
