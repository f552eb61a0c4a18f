"""Which operations of an update repeat bit for bit: each is in the table of docs/reproducibility.md, and the key sees to it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megabert import ops
from megabert.config import ModelConfig, OpsConfig
from megabert.model import BertForPreTraining
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks
from tests.test_model import SMALL, batch

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reproducibility.md"
OF_TORCH = {"profiler", "mkldnn"}  # namespaces that hold nothing of an update's arithmetic on CUDA


def normalised(name: str) -> str:
    """`aten::_foreach_lerp_` -> `lerp`: forms of one operation are one."""
    return name.removeprefix("aten::").removeprefix("_foreach_").removesuffix("_")


class Trace(TorchDispatchMode):
    """Names of the operations called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name
        if name.partition("::")[0] not in OF_TORCH:
            self.names.add(normalised(name))
        return func(*args, **(kwargs or {}))


def listed() -> set[str]:
    """The operations in the first cells of the page's table."""
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([\w:*]+)`", row.partition("(")[0])}


def unlisted(names: set[str]) -> set[str]:
    found = listed()
    return {name for name in names if name not in found and re.sub("::.*", "::*", name) not in found}


def updates(world: Any) -> dict[str, Any]:
    """What two updates call, for AdamW and Muon under ZeRO and for LAMB under the guard of stage 0, and the flags before and after."""

    def flags() -> list[Any]:
        return [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        ]

    tiny.engine(tiny.config(), world)
    found: dict[str, Any] = {"without": flags(), "names": set()}
    for name, stage, precision in (("adamw", 1, "bf16"), ("lamb", 0, "fp32"), ("muon", 1, "bf16")):
        cfg = tiny.config(optimizer__name=name, zero__stage=stage, precision=precision, deterministic=True)
        engine = tiny.engine(cfg, world)
        with Trace() as trace:
            tiny.train(engine, range(2))
        found["names"] |= trace.names
    return found | {"with": flags()}


@pytest.fixture(scope="module")
def traced() -> dict[str, Any]:
    return run_ranks(1, updates)[0]


@pytest.mark.dist
def test_every_operation_of_an_update_under_deepspeed_is_in_the_table(traced: dict[str, Any]) -> None:
    assert {"mm", "_fused_adamw", "addcmul", "norm"} <= traced["names"]
    missing = unlisted(traced["names"])
    assert not missing, f"say of {sorted(missing)} in {PAGE.name} whether they repeat on CUDA"


@pytest.mark.dist
def test_the_key_asks_torch_and_cublas_for_it(traced: dict[str, Any]) -> None:
    assert traced["without"] == [False, False, True, os.environ.get("CUBLAS_WORKSPACE_CONFIG")]
    assert traced["with"] == [True, False, False, os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")]


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize(
    ("attention", "rest", "device"),
    [
        ("sdpa", "torch", "cpu"),
        ("varlen", "torch", "cuda"),
        pytest.param("native", "native", "cpu", marks=pytest.mark.skipif(bool(ops.MISSING), reason=ops.MISSING or "-")),
        pytest.param(
            "fused_softmax", "native", "cpu", marks=pytest.mark.skipif(bool(ops.MISSING), reason=ops.MISSING or "-")
        ),
    ],
)  # fmt: skip
def test_every_operation_of_the_model_is_in_the_table(attention: Any, rest: Any, device: str, norm: Any) -> None:
    """Forward and backward on `meta`, with dropout, and recomputation in one of them."""
    cfg = ModelConfig(**SMALL | {"norm": norm, "activation_checkpointing": norm == "pre"})
    with torch.device("meta"):
        built = BertForPreTraining(cfg, OpsConfig(attention=attention, mlm_loss=rest, layer=rest), device).bfloat16()
    inputs = {name: tensor.to("meta") for name, tensor in batch([[9, 20, 1], [32]], 32).items()}
    with Trace() as trace:
        out = built(**inputs)
        (out.mlm_loss_sum + out.nsp_loss_sum).backward()
    attention_own = {"sdpa": "bmm", "varlen": "_flash_attention_backward", "native": "megabert::attention_backward"}
    assert attention_own.get(attention, "megabert::softmax_mask_backward") in trace.names
    missing = unlisted(trace.names)
    assert not missing, f"say of {sorted(missing)} in {PAGE.name} whether they repeat on CUDA"


def test_the_table_names_operations_of_torch() -> None:
    names = {name for name in listed() if "::" not in name}
    assert len(names) > 80
    known = {normalised(name.split(".")[0]) for name in torch._C._dispatch_get_all_op_names()}
    assert names <= known, f"{sorted(names - known)} are no operations of torch {torch.__version__}"


def test_flash_attention_has_a_deterministic_form_in_this_torch() -> None:
    header = Path(torch.__file__).parent / "include/ATen/native/transformers/cuda/flash_attn/flash_api.h"
    declaration = header.read_text().partition("mha_varlen_bwd")[2].partition(";")[0]
    assert "const bool deterministic" in declaration


def test_our_kernels_add_nothing_atomically() -> None:
    sources = [path for path in (ROOT / "csrc").rglob("*.*") if path.suffix in (".cu", ".cuh", ".h")]
    assert len(sources) > 10
    atomic = [p.name for p in sources if re.search(r"\batomic\w*\(|\bred\.\w+", re.sub(r"//[^\n]*", "", p.read_text()))]
    assert not atomic, f"{atomic}: sums are taken in a fixed order (docs/reproducibility.md)"


def test_a_schedule_that_reads_the_clock_is_refused() -> None:
    with pytest.raises(ValueError, match=r"deterministic=true: schedule\.name=budget depends on the clock"):
        tiny.config(deterministic=True, schedule__name="budget", schedule__budget_minutes=1.0)
