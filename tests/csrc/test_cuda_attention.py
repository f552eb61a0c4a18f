"""The CUDA kernels of attention on the CPU, a fibre for each thread, with tensor cores emulated lane by lane."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.csrc.cuda_on_cpu import Kernels, compiler
from tests.csrc.test_cuda_source import SEED, STREAM, empty, gradients
from tests.ops import reference
from tests.ops.oracle import compare, normal
from tests.ops.test_attention import arbitrary, bounds, causal, plain_attention

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels()


def attend(
    kernels: Kernels, qkv: Tensor, grad: Tensor, start: Tensor, end: Tensor, heads: int, p: float, place: int = 0
) -> list[Tensor]:
    """context, log-sum-exp, dqkv and the gradient of the bias"""
    (batch, width, triple), dtype = qkv.shape, qkv.dtype
    size, tiles = triple // 3 // heads, -(-width // 32)
    numbers = (batch, width, heads, size, STREAM, p, torch.tensor([SEED, place]))
    context, lse = kernels.run(
        "attention", dtype, qkv, start, end, empty(batch, width, heads * size, dtype=dtype),
        empty(batch, heads, width, dtype=torch.float32), *numbers, outputs=(3, 4),
    )  # fmt: skip
    partial = empty(batch * heads, tiles * 32, 64, dtype=torch.float32) if width > 128 else None
    dqkv, dbias = kernels.run(
        "attention_backward", dtype, grad, qkv, context, lse, start, end, empty(batch, width, triple, dtype=dtype),
        empty(triple, dtype=dtype), empty(batch, triple, dtype=torch.float32), partial, *numbers, outputs=(6, 7),
    )  # fmt: skip
    return [context, lse, dqkv, dbias]


slow = pytest.mark.slow
ROWS = [
    # rows of sequences, tokens a row, heads, head size, dropout, key ranges
    pytest.param([[1]], 1, 1, 64, 0.1, "whole", id="one token"),
    pytest.param([[3], [1, 2], [0]], 3, 2, 16, 0.0, "causal", id="three tokens"),
    pytest.param([[60, 1, 39], [0]], 100, 1, 64, 0.1, "whole", id="packed and padded"),
    pytest.param([[128]], 128, 1, 64, 0.1, "whole", id="full row"),
    pytest.param([[0]], 37, 2, 24, 0.1, "arbitrary", id="any range"),
    pytest.param([[90, 70]], 161, 1, 64, 0.1, "causal", id="two blocks"),
    pytest.param([[100, 128, 128], [17, 299]], 360, 2, 64, 0.1, "whole", id="three blocks", marks=slow),
    pytest.param([[1023], [500, 0, 400]], 1023, 1, 64, 0.0, "causal", id="1023", marks=slow),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "width", "heads", "size", "p", "kind"), ROWS)
def test_attention(
    kernels: Kernels, rows: list[list[int]], width: int, heads: int, size: int, p: float, kind: str, dtype: torch.dtype
) -> None:
    start, end, _ = bounds(*rows, width=width)
    if kind != "whole":
        start, end = (start, causal(start, end)) if kind == "causal" else arbitrary(len(rows), width)
    qkv = normal(len(rows), width, 3 * heads * size, seed=1, scale=1.5).to(dtype)
    grad = normal(len(rows), width, heads * size, seed=2).to(dtype)
    keep = reference.keep_mask(SEED, STREAM, len(rows) * heads * width, width, p).view(-1, heads, width, width)
    context, lse, dqkv, dbias = attend(kernels, qkv, grad, start, end, heads, p)
    x, exact = qkv.requires_grad_(), qkv.detach().double().requires_grad_()
    zero, none = (torch.zeros_like(t[0, 0]).requires_grad_() for t in (x, exact))
    compare(
        [context, dqkv, dbias],
        gradients(plain_attention(x + zero, heads, start, end, keep), [x, zero], grad),
        gradients(reference.attention(exact + none, heads, start, end, keep), [exact, none], grad),
        dtype, multiple=4,
    )  # fmt: skip
    q, k, _ = exact.detach().view(len(rows), width, 3, heads, size).permute(2, 0, 3, 1, 4)
    key = torch.arange(width)
    allowed = ((key >= start[..., None]) & (key < end[..., None]))[:, None]
    scores = (q @ k.mT * size**-0.5).masked_fill(~allowed, -torch.inf)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    silent = end <= start
    assert (context[silent] == 0).all() and (dqkv.view(*start.shape, 3, -1)[silent][:, 0] == 0).all()


def test_rows_of_a_larger_batch_have_its_mask(kernels: Kernels) -> None:
    width, heads = 40, 2
    start, end, _ = bounds(*[[30, 10]] * 3, width=width)
    qkv, grad = (normal(3, width, 3 * heads * 16, seed=1).bfloat16(), normal(3, width, heads * 16, seed=2).bfloat16())
    with kernels.lines_of_a_row(heads * width):
        whole = attend(kernels, qkv, grad, start, end, heads, 0.3)
        part = attend(kernels, qkv[1:], grad[1:], start[1:], end[1:], heads, 0.3, place=1)
    for ours, theirs in zip(part[:3], whole[:3], strict=True):  # not the gradient of the bias, a sum over rows
        assert torch.equal(ours, theirs[1:])


def test_attention_with_wrong_bounds_is_nan_and_touches_nothing(kernels: Kernels) -> None:
    width = 40
    start, end, _ = bounds([40], width=width)
    start[0, 3], end[0, 4], end[0, 5] = -1, width + 1, -7  # the last one is a token without keys
    start[0, 32:], end[0, 32:] = -9, width + 9  # a whole tile of queries
    qkv, grad = (normal(1, width, n, seed=1).bfloat16() for n in (3 * 64, 64))
    context, lse, dqkv, dbias = attend(kernels, qkv, grad, start, end, 1, 0.1)
    wrong = torch.zeros(width, dtype=torch.bool)
    wrong[[3, 4, *range(32, 40)]] = True
    for rows in (context[0], lse[0].mT, dqkv[0, :, :64]):
        assert rows.isnan().all(-1).equal(wrong) and rows.isnan().any(-1).equal(wrong)
    assert dbias[:64].isnan().all() and dbias[64:].isfinite().all()
    assert dqkv[0, :, 64:].isfinite().all() and (context[0, 5] == 0).all() and lse[0, 0, 5] == -torch.inf
