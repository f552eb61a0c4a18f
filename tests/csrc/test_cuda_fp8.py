"""The cast to FP8 of the GPU, its own source on the CPU, against torch's formats: every bit, every size, both thread orders."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.csrc.cuda_on_cpu import Kernels, compiler
from tests.csrc.test_cuda_source import STREAM, empty, seed_tensor
from tests.ops.oracle import error, normal

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
TILE, E4M3, E5M2 = 128, torch.float8_e4m3fn, torch.float8_e5m2
SIZES = [(1, 1), (4, 3), (130, 40), (5, 1023), (256, 136), (127, 264)]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels()


def wanted(x: Tensor, scale: float, kind: torch.dtype) -> Tensor:
    limit = torch.finfo(kind).max
    return (x.float() * scale).clamp(-limit, limit).to(kind)


def tiles(x: Tensor) -> list[float]:
    """Largest magnitude of each tile, a column of tiles after another."""
    return [float(part.abs().max()) for columns in x.split(TILE, 1) for part in columns.split(TILE, 0)]


def cast(
    kernels: Kernels, x: Tensor, scale: float, kind: torch.dtype, straight: bool = True, turned: bool = True
) -> list[Tensor]:
    rows, width = x.shape
    untouched = torch.full((rows, width), 0x55, dtype=torch.uint8)
    count = math.ceil(rows / TILE) * math.ceil(width / TILE)
    found = kernels.run(
        "cast_transpose", x.dtype, x, torch.tensor([scale]), untouched if straight else None,
        untouched.view(width, rows) if turned else None, torch.full((count,), -1.0), rows, width,
        kind == torch.float8_e5m2, outputs=tuple(i for i, there in ((2, straight), (3, turned), (4, True)) if there),
    )  # fmt: skip
    return [t.view(kind) if t.dtype == torch.uint8 else t for t in found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_cast_transpose(kernels: Kernels, shape: tuple[int, int], kind: torch.dtype, dtype: torch.dtype) -> None:
    """Magnitudes from below the smallest subnormal to beyond the largest value."""
    x = (normal(*shape, seed=1) * 2 ** (8 * normal(*shape, seed=2))).clamp(-60000, 60000).to(dtype)
    scale = 4.0
    values, turned, amax = cast(kernels, x, scale, kind)
    right = wanted(x, scale, kind)
    assert values.view(torch.uint8).equal(right.view(torch.uint8))
    assert turned.view(torch.uint8).equal(right.view(torch.uint8).t())
    assert amax.tolist() == tiles(x.float())
    (alone, _) = cast(kernels, x, scale, kind, turned=False)
    assert alone.view(torch.uint8).equal(values.view(torch.uint8))
    (alone, _) = cast(kernels, x, scale, kind, straight=False)
    assert alone.view(torch.uint8).equal(turned.view(torch.uint8))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.bfloat16) for shape in SIZES), ((127, 264), torch.float16), ((130, 40), torch.float32)],
    ids=str,
)
def test_gelu_for_fp8_products(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The codes, bit for bit, are those of the casts of what the plain kernels write; the bias's gradient is theirs."""
    rows, width = shape
    x, bias, grad = (normal(*s, seed=i).to(dtype) for i, s in enumerate((shape, (width,), shape)))
    (y,) = kernels.run("bias_gelu", dtype, x, bias, empty(*shape, dtype=dtype), rows, width, outputs=(2,))
    dx, dbias = kernels.run(
        "bias_gelu_backward", dtype, grad, x, bias, empty(*shape, dtype=dtype), empty(3, width, dtype=torch.float32),
        empty(width, dtype=dtype), rows, width, outputs=(3, 5),
    )  # fmt: skip
    down, across, scale = -(-rows // TILE), -(-width // TILE), torch.tensor([4.0])

    def codes() -> list[Tensor]:
        turned = torch.zeros(width, rows, dtype=torch.uint8)
        return [scale, torch.zeros(*shape, dtype=torch.uint8), turned, torch.full((down * across,), -1.0)]

    forward = kernels.run("bias_gelu_cast", dtype, x, bias, *codes(), rows, width, outputs=(3, 4, 5))
    *backward, found = kernels.run(
        "bias_gelu_backward_cast", dtype, grad, x, bias, *codes(), empty(down, width, dtype=torch.float32),
        empty(width, dtype=dtype), rows, width, outputs=(4, 5, 6, 8),
    )  # fmt: skip
    for plain, kind, eight in ((y, E4M3, forward), (dx, E5M2, backward)):
        for ours, theirs in zip(eight, cast(kernels, plain, 4.0, kind), strict=True):
            assert ours.equal(theirs.view(ours.dtype))
    exact = F.gelu((x.double() + bias.double()).requires_grad_())
    limit = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-6}[dtype]
    assert error(y, exact.detach()) < limit and error(found, dbias.double()) < limit


@pytest.mark.parametrize(
    ("shape", "dtype", "p"),
    [
        ((16, 16), torch.bfloat16, 0.1),
        ((48, 264), torch.bfloat16, 0.0),
        ((80, 768), torch.float16, 0.1),
        ((32, 1024), torch.bfloat16, 0.1),
        ((32, 528), torch.float32, 0.1),
    ],
    ids=str,
)
def test_layer_norm_for_fp8_products(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype, p: float) -> None:
    """What the plain kernel gives, bit for bit, and the codes that the cast of its result gives."""
    rows, width = shape
    sizes = (shape, (width,), shape, (width,), (width,))
    inputs = [normal(*size, seed=i).to(dtype) for i, size in enumerate(sizes)]
    results = [*(empty(*shape, dtype=dtype) for _ in range(2)), *(empty(rows, dtype=torch.float32) for _ in range(2))]
    numbers = (rows, width, 1e-12, STREAM, p, seed_tensor())
    wanted = kernels.run("layer_norm", dtype, *inputs, *results, *numbers, outputs=(5, 6, 7, 8))
    codes = [torch.zeros(size, dtype=torch.uint8) for size in (shape, shape[::-1])]
    *found, values, turned, amax = kernels.run(
        "layer_norm_cast", dtype, *inputs, *results, torch.tensor([4.0]), *codes, torch.full((-(-rows // 32),), -1.0),
        *numbers, outputs=(5, 6, 7, 8, 10, 11, 12),
    )  # fmt: skip
    assert all(ours.equal(theirs) for ours, theirs in zip(found, wanted, strict=True))
    right, right_turned, _ = cast(kernels, wanted[0], 4.0, E4M3)
    assert values.equal(right.view(torch.uint8)) and turned.equal(right_turned.view(torch.uint8))
    assert amax.tolist() == [float(part.float().abs().max()) for part in wanted[0].split(32)]


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_bf16_value(kernels: Kernels, kind: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    x = torch.where(every.isfinite(), every, 0).view(256, 256)
    for scale in (1.0, 2.0**-30):
        values, _, _ = cast(kernels, x, scale, kind)
        assert values.view(torch.uint8).equal(wanted(x, scale, kind).view(torch.uint8))


def test_nan_stays_in_its_place_and_in_the_largest_magnitude(kernels: Kernels) -> None:
    x = torch.ones(130, 136, dtype=torch.bfloat16)
    x[129, 3], x[2, 135] = math.nan, -math.inf
    values, turned, amax = cast(kernels, x, 1.0, torch.float8_e4m3fn)
    assert values.double().isnan().nonzero().tolist() == [[129, 3]]
    assert turned.double().isnan().nonzero().tolist() == [[3, 129]]
    assert values[2, 135].item() == -448  # the product is NaN by the largest magnitude, which is infinite
    assert [str(v) for v in amax.tolist()] == ["1.0", "nan", "inf", "1.0"]
