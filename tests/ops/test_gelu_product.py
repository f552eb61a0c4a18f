"""The product in Triton with GELU's gradient at its end: its own source by Triton's interpreter on the CPU, and compiled for GPUs.

The interpreter is chosen when Triton is imported, so the tests that need it run in a process of their own. It has no products
of bfloat16.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import cuda_kernels
from megabert import ops
from megabert.config import ModelConfig
from megabert.model import Layer
from megabert.ops import reference
from tests.ops.oracle import check, needs_library, normal

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="the test below starts it with Triton's interpreter")


@pytest.mark.skipif(INTERPRETED, reason="it starts the others")
def test_the_interpreter_gives_what_the_reference_gives() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "6 passed" in done.stdout or (ops.MISSING and "5 passed" in done.stdout), done.stdout


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "hidden", "ffn"), [(300, 72, 136), (128, 64, 256)], ids=["parts of tiles", "whole tiles"]
)
def test_it_keeps_the_rule(rows: int, hidden: int, ffn: int, dtype: torch.dtype) -> None:
    inputs = [normal(rows, ffn, seed=1, scale=2.0), normal(ffn, seed=2), normal(hidden, ffn, seed=3, scale=0.1)]

    def ours(x: Tensor, bias: Tensor, weight: Tensor) -> list[Tensor]:
        return [ops.gelu_linear(ops.BeforeGelu(x, bias), weight, "torch")]

    def plain(x: Tensor, bias: Tensor, weight: Tensor) -> list[Tensor]:
        return [F.linear(F.gelu(x + bias), weight)]

    def exact(x: Tensor, bias: Tensor, weight: Tensor) -> list[Tensor]:
        return [reference.bias_gelu(x, bias) @ weight.t()]

    if dtype == torch.float32:  # its GELU has the accuracy of two-byte types (csrc/bias_gelu/kernel.cuh): 1.8e-5
        found, true = (
            torch.autograd.grad(f(*leaves)[0].sum(), leaves)
            for f in (ours, exact)
            for leaves in [[t.float().requires_grad_() for t in inputs]]
        )
        for a, b in zip(found, true, strict=True):
            assert (a - b).abs().max() < 3e-5 * b.abs().max()
        return
    check(ours, plain, exact, inputs, [normal(rows, hidden, seed=4)], dtype)


@interpreted
def test_sizes_that_its_descriptors_cannot_take_are_named() -> None:
    x, bias, weight = (torch.ones(4, 12).half().requires_grad_(), torch.ones(12).half(), torch.ones(8, 12).half())
    with pytest.raises(ValueError, match=r"8 and 12 columns, must be multiples of 8"):
        ops.gelu_linear(ops.BeforeGelu(x, bias), weight, "torch").sum().backward()


@interpreted
@needs_library
def test_a_layer_with_it_has_the_gradients_of_one_without() -> None:
    cfg = ModelConfig(vocab_size=100, hidden=64, heads=2, dropout=0.1, attention_dropout=0.1)
    results = []
    for name in ("torch", "triton"):
        torch.manual_seed(1)
        chosen = ops.Backends(*(ops.Choice(role, "") for role in ("native", "native", "native", name)))
        layer = Layer(cfg, chosen)
        x = torch.randn(2, 16, 64).requires_grad_()
        start, end = torch.zeros(2, 16, dtype=torch.int32), torch.full((2, 16), 16, dtype=torch.int32)
        bounds = ops.attention_inputs("native", start, end, torch.full((2, 1), 16, dtype=torch.int32))
        normed, _ = layer(x, x, bounds, torch.tensor([5]), 4)
        named = dict(layer.named_parameters())
        grads = torch.autograd.grad(normed.square().sum(), [x, *named.values()])
        results.append({"out": normed.detach(), "x": grads[0]} | dict(zip(named, grads[1:], strict=True)))
    for key, wanted in results[0].items():
        torch.testing.assert_close(results[1][key], wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()), msg=key)


@pytest.mark.skipif(INTERPRETED, reason="it compiles")
@pytest.mark.parametrize(
    ("architecture", "instruction", "blocks"), [("90", "wgmma.mma_async", 2), ("100", "tcgen05.mma", 1)]
)
def test_it_compiles_for_tensor_cores_and_the_copy_engine_and_spills_nothing(
    architecture: str, instruction: str, blocks: int
) -> None:
    kernel, ptx = cuda_kernels.triton_kernel(architecture)
    assert instruction in ptx and "cp.async.bulk.tensor" in ptx and "mma.sync" not in ptx
    assert kernel.stack == 0
    assert kernel.blocks >= blocks, kernel


@pytest.mark.skipif(INTERPRETED, reason="of the choice")
def test_where_it_cannot_run_the_choice_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops.choose("feed_forward") == ("torch", "Triton's product needs a CUDA device")
    with pytest.raises(ValueError, match=r"ops.feed_forward=triton cannot run on cpu in bfloat16: Triton's product"):
        ops.choose("feed_forward", "triton")
    with pytest.raises(ValueError, match="takes bfloat16 and float16, not float32"):
        ops.choose("feed_forward", "triton", "cuda", torch.float32)
    assert ops.choose("feed_forward", "triton", "cuda").name == "triton"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ValueError, match=r"needs compute capability 9\.0 or newer"):
        ops.choose("feed_forward", "triton", "cuda")
