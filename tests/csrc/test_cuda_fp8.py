"""The cast to FP8 of the GPU, its own source on the CPU, against torch's formats: every bit, every size, both thread orders."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.csrc.cuda_on_cpu import Kernels, compiler
from tests.model.ops.oracle import normal

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
TILE = 128
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
def test_cast_transpose(
    kernels: Kernels, shape: tuple[int, int], kind: torch.dtype, dtype: torch.dtype
) -> None:
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
