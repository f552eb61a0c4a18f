"""A backend is chosen once, with its reason; an explicit choice that cannot run is an error and never something else."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from typing import get_args

import pytest
import torch

from megabert import ops
from megabert.common.environment import cpu_flags
from megabert.config import OpsConfig
from megabert.ops import backend
from tests.conftest import ROOT
from tests.ops.oracle import needs_library


def test_configuration_model_and_table_name_the_same_backends() -> None:
    named = {name: get_args(field.annotation) for name, field in OpsConfig.model_fields.items()}
    assert named.pop("optimizer") == ("auto", "torch", "apex")  # the engine's, not the model's
    assert named == {role: ("auto", *backends) for role, backends in ops.BACKENDS.items()}
    assert ops.Backends._fields == tuple(ops.BACKENDS) == tuple(named)


@needs_library
def test_what_torch_says_of_a_failed_call_reaches_the_caller() -> None:
    huge = torch.ones(1, dtype=torch.bfloat16).expand(2**24, 2**24)  # 512 TiB, made contiguous
    kept = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)  # torch keeps the reason from then on
    with pytest.raises(RuntimeError, match=r"tried to allocate \d+ bytes" if kept else "aten::contiguous") as error:
        torch.ops.megabert.bias_gelu(huge, huge[0].contiguous())
    assert "failed at" in str(error.value)


@pytest.mark.parametrize("op", [op for op, backends in ops.BACKENDS.items() if "native" in backends])
def test_auto_is_native_where_the_library_is(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.bfloat16, torch.float32) if not ops.MISSING else ():
        assert ops.choose(op, "auto", "cpu", dtype).name == "native"
    name, reason = ops.choose(op, "auto", "cpu", torch.float16)
    assert name in ("sdpa", "torch") and ("float16" in reason or ops.MISSING)
    monkeypatch.setattr(backend, "MISSING", "native library not built")
    assert ops.choose(op) == (backend.BACKENDS[op][0], "native library not built")
    with pytest.raises(ValueError, match=f"ops.{op}=native cannot run on cpu in bfloat16: native library not built"):
        ops.choose(op, "native")


@pytest.mark.parametrize(
    ("op", "requested", "dtype", "message"),
    [
        ("attention", "varlen", torch.bfloat16, "=varlen cannot run on cpu in bfloat16: .*CUDA"),
        ("attention", "flash3", torch.bfloat16, "=flash3 cannot run on cpu in bfloat16: .*CUDA"),
        ("attention", "flash", torch.bfloat16, "='flash': choose one of auto, sdpa, varlen, flash3, native"),
        ("layer", "native", torch.float64, "=native cannot run on cpu in float64"),
    ],
)
def test_impossible_choices_are_errors(op: str, requested: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=f"ops.{op}{message}"):
        ops.choose(op, requested, "cpu", dtype)


@pytest.mark.parametrize(
    ("blocked", "causal", "chosen"),
    [
        *(((), causal, "native") for causal in (False, True)),
        *((("native",), False, "varlen"), (("native",), True, "sdpa"), (("native", "varlen"), False, "sdpa")),
    ],
)
def test_auto_on_a_gpu_is_a_rule(blocked, causal, chosen, monkeypatch) -> None:
    """Ours where it was built for the device, else flash attention, which needs to be told which batches are causal."""
    monkeypatch.setattr(backend, "_obstacle", lambda _, name, *__: f"{name} is blocked" if name in blocked else "")
    found = ops.choose("attention", "auto", "cuda", torch.bfloat16, causal=causal)
    reason = "native is blocked" if blocked else "fused cuda code for bfloat16"
    assert found == (chosen, reason)
    others = ("torch", "native is blocked") if blocked else ("native", reason)
    assert ops.choose("layer", "auto", "cuda") == ops.choose("mlm_loss", "auto", "cuda") == others


@pytest.mark.parametrize(
    ("installed", "capability", "reason"),
    [
        *((True, (9, 0), ""), (False, (9, 0), "needs flash_attn_interface")),
        *((True, (n, 0), f"is for compute capability 9, not {n}") for n in (8, 10)),
        (True, (7, 5), "needs compute capability 8.0 or newer"),
    ],
)
def test_where_flash_attention_3_runs(installed, capability, reason, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(backend, "missing_kernels", lambda *_: "not built")
    found = ops.obstacles("attention", "cuda", torch.bfloat16)["flash3"]
    assert found.startswith(f"FlashAttention-3 {reason}") if reason else not found
    assert ops.obstacles("attention", "cuda", torch.float32)["flash3"] == "FlashAttention-3 takes bfloat16, not float32"
    assert ops.choose("attention", "auto", "cuda", torch.bfloat16).name != "flash3"


@pytest.mark.parametrize(("compiler", "reason"), [("", "needs a C compiler for triton"), ("clang", "")])
def test_compiled_on_cuda_needs_a_c_compiler(compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which images with torch may lack."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == compiler else None)
    found = ops.obstacles("layer", "cuda", torch.bfloat16)["compiled"]
    assert reason in found and bool(found) == bool(reason)


def test_what_attention_on_cuda_cannot_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MISSING", "")
    monkeypatch.setattr(backend, "has_kernel", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ops.choose("attention", "native", "cuda", torch.bfloat16, head_size=8).name == "native"
    for dtype, size, reason in (
        (torch.float32, 64, "takes bfloat16, not float32"),
        (torch.bfloat16, 128, "takes heads of at most 64 columns, a multiple of 8, not 128"),
        (torch.bfloat16, 20, "takes heads of at most 64 columns, a multiple of 8, not 20"),
    ):
        with pytest.raises(ValueError, match=f"cannot run on cuda in .*: native attention {reason}"):
            ops.choose("attention", "native", "cuda", dtype, head_size=size)
        assert ops.choose("attention", "native", "cpu", torch.bfloat16, head_size=size).name == "native"
    # torch's kernels check the same (flash_attn/flash_api.cpp)
    for size, chosen in ((128, "varlen"), (26, "sdpa"), (264, "sdpa")):
        assert ops.choose("attention", "auto", "cuda", torch.bfloat16, head_size=size).name == chosen


@pytest.mark.parametrize(
    ("hip", "kernels", "releases", "reason"),
    [
        (None, False, (0, 0), r"no cuda code \(MEGABERT_CUDA=1 make venv builds it\)"),
        (None, True, (13000, 12080), "are of CUDA 13.0, the driver is of 12.8: update it"),
        (None, True, (13020, 13000), ""),
        ("7.1", True, (13000, 0), "this torch is the build for ROCm"),
    ],
)
def test_a_gpu_that_native_kernels_cannot_use_is_named(hip, kernels, releases, reason, monkeypatch) -> None:
    monkeypatch.setattr(backend, "MISSING", "")
    monkeypatch.setattr(backend, "has_kernel", lambda *_: kernels)
    monkeypatch.setattr(backend, "cuda_releases", lambda: releases)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert re.search(reason, backend.missing_kernels("cuda")) and bool(backend.missing_kernels("cuda")) == bool(reason)
    assert ops.obstacles("layer", "cuda", torch.float32)["native"] == backend.missing_kernels("cuda")


def instruction_sets() -> list[str]:
    """That this machine has, its best last."""
    needs = {
        "avx2": {"avx2", "fma"},
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
        "avx512bf16": {"avx512f", "avx512_bf16"},
        "amx": {"avx512_bf16", "amx_tile", "amx_bf16"},
    }
    return ["generic", *(name for name, wanted in needs.items() if wanted <= cpu_flags())]


def run(command: list[str], isa: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"MEGABERT_CPU_ISA": isa}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("name", instruction_sets()[:-1])
def test_other_instruction_sets_pass_the_same_tests(name: str) -> None:
    """The machine's best is what the other tests of this folder run; here their numerics run again with those below it."""
    files = [f"tests/ops/test_{part}.py" for part in ("attention", "layer", "mlm_loss", "softmax_mask", "operations")]
    chosen = (
        "(fp64 or gelu or norm or rotate or dropout or native_mask) and not 40000 and not long and not micro_batches"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen]
    result = run([*command, *files], name)
    assert result.returncode == 0, result.stdout[-3000:]


@needs_library
def test_an_unknown_instruction_set_is_an_error() -> None:
    code = "import torch; from megabert import ops; ops.bias_gelu(torch.ones(1, 4), torch.ones(4), 'native')"
    result = run([sys.executable, "-c", code], "mmx")
    assert result.returncode != 0 and "MEGABERT_CPU_ISA=mmx: choose generic" in result.stderr
