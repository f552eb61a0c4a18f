"""The kernels for AMX with its instructions emulated, against fp64 by the rule of the other instruction sets."""

import ctypes
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megabert.common.environment import cpu_flags
from tests.csrc.cuda_on_cpu import compile_once, compiler
from tests.ops.test_attention import CASES as SHAPES
from tests.ops.test_attention import KINDS, SEED, STREAM, check_attention

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
        context = qkv.new_full((batch, tokens, width // 3), torch.nan)
        lse = torch.full((batch, heads, tokens), torch.nan)
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


SHORT = ("one token", "odd head size", "packed and padded", "wide heads")
LONG = "two blocks of keys"
CASES = SHAPES | {"wide heads": ([[90, 70], [161]], 161, 1, 128), LONG: ([[1100]], 1100, 1, 16)}


@pytest.mark.parametrize(
    ("case", "kind", "p"),
    [*itertools.product(SHORT, KINDS, (0.0, 0.1)), (LONG, "both ways", 0.1), (LONG, "causal", 0.0)],
)
def test_attention_in_tiles_against_fp64(library, case, kind, p) -> None:
    def attend(qkv: Tensor, bias: Tensor, heads: int, *keys: Tensor) -> Tensor:
        return Attention.apply(library, qkv, bias, heads, p, *keys)

    check_attention(attend, CASES[case], kind, p, torch.bfloat16)
