"""The kernels for AMX with its instructions emulated, against fp64 by the rule of the other instruction sets."""

import ctypes
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megabert.common.environment import cpu_flags
from megabert.ops.attention import local_keys
from tests.csrc.cuda_on_cpu import compile_once, compiler
from tests.ops import reference
from tests.ops.oracle import check, normal
from tests.ops.test_attention import SEED, STREAM, added, arbitrary, bounds, causal, factor, plain_attention

AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(not cpu_flags() >= AVX512, reason="the kernels for AMX need AVX-512 beside it"),
]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    source = Path(__file__).with_name("tiles_on_cpu.cpp")
    return compile_once(source, [source], "-O2")


class Attention(torch.autograd.Function):
    """`ops.attend` of bf16 by the kernels in `library`; qkv's bias has a gradient only."""

    @staticmethod
    def forward(
        ctx: Any, library: ctypes.CDLL, qkv: Tensor, bias: Tensor, heads: int, p: float, *keys: Tensor
    ) -> Tensor:
        batch, tokens, width = qkv.shape
        context, lse = (
            qkv.new_full((batch, tokens, width // 3), torch.nan),
            torch.full((batch, heads, tokens), torch.nan),
        )
        ctx.tensors = [qkv, *keys, context, lse]
        sizes = [ctypes.c_int64(n) for n in (batch, tokens, heads, width // 3 // heads, SEED, STREAM)]
        ctx.call = lambda *more: library.attention(
            *(ctypes.c_void_p(t.data_ptr()) for t in (*ctx.tensors, *more)),
            *[ctypes.c_void_p()] * (3 - len(more)), *sizes, ctypes.c_double(p),
        )  # fmt: skip
        assert ctx.call() > 0, "no tiles were used"
        return context

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        qkv = ctx.tensors[0]
        dqkv, sums = torch.full_like(qkv, torch.nan), torch.full((len(qkv), qkv.shape[2]), torch.nan)
        ctx.call(grad.contiguous(), dqkv, sums)
        return None, dqkv, sums.sum(0).to(qkv.dtype), *[None] * 4


CASES = {
    "one token": ([[1]], 1, 1, 8),
    "odd head size": ([[5, 4], [9]], 11, 3, 7),
    "packed and padded": ([[20, 1, 19], [45], [0]], 45, 3, 16),
    "wide heads": ([[90, 70], [161]], 161, 1, 128),
}
KINDS = ("both ways", "causal", "any range", "window", "causal window")
LONG = "two blocks of keys"


@pytest.mark.parametrize(
    ("case", "kind", "p"),
    [*itertools.product(CASES, KINDS, (0.0, 0.1)), (LONG, "both ways", 0.1), (LONG, "causal", 0.0)],
)
def test_attention_in_tiles_against_fp64(library, case, kind, p) -> None:
    rows, width, heads, size = CASES.get(case, ([[1100]], 1100, 1, 16))
    start, end, _ = bounds(*rows, width=width)
    if kind == "any range":
        start, end = arbitrary(len(rows), width)
    end = causal(start, end) if "causal" in kind else end
    start, end = local_keys(start, end, 32) if "window" in kind else (start, end)
    keep = factor(p, len(rows), heads, width)
    check(
        lambda qkv, bias: [Attention.apply(library, qkv, bias, heads, p, start, end)],
        added(lambda qkv: plain_attention(qkv, heads, start, end, keep)),
        added(lambda qkv: reference.attention(qkv, heads, start, end, keep)),
        [normal(len(rows), width, 3 * heads * size, seed=1, scale=1.5), normal(3 * heads * size, seed=3)],
        [normal(len(rows), width, heads * size, seed=2)], torch.bfloat16, multiple=4,
    )  # fmt: skip
