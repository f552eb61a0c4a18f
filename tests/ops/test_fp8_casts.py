"""The native casts to FP8, alone and inside GELU, its gradient and LayerNorm, on each device: the codes of torch's cast, bit for
bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megabert.ops import fp8
from tests.ops.oracle import error, needs_library, normal

pytestmark = [needs_library, pytest.mark.usefixtures("two_threads")]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALE, STREAM, EPS = 4.0, 3, 1e-5
PLACES = [
    pytest.param(device, dtype, marks=[pytest.mark.gpu] if device == "cuda" else [], id=f"{device}-{dtype}")
    for device, dtypes in (("cpu", "bfloat16 float32"), ("cuda", "bfloat16 float16 float32"))
    for dtype in dtypes.split()
]
on_each = pytest.mark.parametrize(("device", "kind"), PLACES)
library: Any = torch.ops.megabert


def drawn(device: str, kind: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Values with some that saturate E4M3 by SCALE."""
    dtype = getattr(torch, kind)
    return [normal(*shape, seed=seed, scale=20).to(device, dtype) for seed, shape in enumerate(shapes)]


def same_codes(found: Tensor, x: Tensor, kind: torch.dtype, scale: float = SCALE) -> None:
    """`found` is torch's cast of `x` on the CPU: the same bytes, but for NaN, which has several, in the same places."""
    want, _, _ = fp8.cast_transpose(x.cpu(), torch.tensor(scale), kind, True, False, "torch")
    assert want is not None and found.dtype == kind and found.shape == want.shape
    nan, found = want.float().isnan(), found.cpu()
    assert found.float().isnan().equal(nan)
    ours, theirs = (t.view(torch.uint8).masked_fill(nan, 0) for t in (found, want))
    assert ours.equal(theirs)


def same_cast(found: list[Tensor], x: Tensor, kind: torch.dtype, scale: float = SCALE) -> None:
    """(values, transposed, amax) are those of `x`; NaN where its largest magnitude is."""
    values, turned, amax = found
    same_codes(values, x, kind, scale)
    same_codes(turned, x.t(), kind, scale)
    torch.testing.assert_close(amax.amax().cpu(), x.cpu().float().abs().amax(), rtol=0, atol=0, equal_nan=True)


@on_each
@pytest.mark.parametrize("eight", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 8), (130, 40), (5, 1023), (127, 264), (256, 1024)], ids=str)
def test_cast(shape: tuple[int, int], eight: torch.dtype, device: str, kind: str) -> None:
    """Magnitudes from below the smallest subnormal to beyond the largest value; then what is not finite."""
    x = (normal(*shape, seed=1) * 2 ** (8 * normal(*shape, seed=2))).clamp(-60000, 60000)
    x = x.to(device, getattr(torch, kind))
    scale = torch.tensor(SCALE, device=device)
    for bad in (None, math.inf, -math.inf, math.nan):
        if bad is not None:
            x[-1, -1] = bad
        same_cast(library.cast_transpose(x, scale, eight == E5M2, True, True), x, eight)
    values, turned, _ = library.cast_transpose(x, scale, eight == E5M2, True, False)
    same_codes(values, x, eight)
    assert turned.numel() == 0
    values, turned, _ = library.cast_transpose(x, scale, eight == E5M2, False, True)
    same_codes(turned, x.t(), eight)
    assert values.numel() == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("eight", [E4M3, E5M2], ids=str)
def test_every_bf16_value(eight: torch.dtype, device: str) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(256, 256).to(device)
    for scale in (1.0, 2.0**9, 2.0**-30):
        found = library.cast_transpose(x, torch.tensor(scale, device=device), eight == E5M2, True, True)
        same_cast(found, x, eight, scale)


@on_each
@pytest.mark.parametrize("shape", [(16, 8), (48, 80), (130, 264), (320, 1024), (144, 4096)], ids=str)
def test_gelu(shape: tuple[int, int], device: str, kind: str) -> None:
    """What the operation alone gives, cast; so of its gradient, whose bias's is a sum in another order on CUDA."""
    x, bias, grad = drawn(device, kind, shape, shape[1:], shape)
    scale = torch.tensor(SCALE, device=device)
    for bad in (None, math.nan):
        if bad is not None:
            x[3, 5] = grad[5, 3] = bad
        same_cast(library.bias_gelu_cast(x, bias, scale), library.bias_gelu(x, bias), E4M3)
        dx, wanted = library.bias_gelu_backward(grad, x, bias)
        *found, dbias = library.bias_gelu_backward_cast(grad, x, bias, scale)
        same_cast(found, dx, E5M2)
        there = wanted.isfinite()
        assert dbias.isfinite().equal(there)
        limit = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 1e-5}[kind]
        assert error(dbias[there].cpu(), wanted[there].cpu()) < limit


@on_each
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(16, 8), (48, 264), (80, 768), (144, 1024)], ids=str)
def test_norm(shape: tuple[int, int], p: float, device: str, kind: str) -> None:
    """The cast of the norm that the same call gives, which is that of the operation alone; a row with NaN is NaN."""
    vector = shape[1:]
    x, bias, residual, weight, shift = drawn(device, kind, shape, vector, shape, vector, vector)
    x[3, 5] = math.nan
    numbers = torch.tensor([5], device=device), STREAM, p, EPS
    inputs = x, bias, residual, weight, shift, *numbers
    y, *others, values, turned, amax = library.dropout_add_layer_norm_cast(*inputs, torch.tensor(SCALE, device=device))
    same_cast([values, turned, amax], y, E4M3)
    assert y[3].isnan().all() and y.isnan().sum() == shape[1]
    for ours, theirs in zip((y, *others), library.dropout_add_layer_norm(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "name", ["cast_transpose", "bias_gelu_cast", "bias_gelu_backward_cast", "dropout_add_layer_norm_cast"]
)
def test_a_wrong_cast_is_found_before_it_trains(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One code of the transposed result, off by one: training then runs on torch's casts and says so."""
    place = torch.device(device)
    fp8.wrong_cast.cache_clear()
    assert fp8.wrong_cast(place) == "" and fp8.Scaling(1, place).backend == "native"
    fp8.wrong_cast.cache_clear()
    right = getattr(library, name)

    def wrong(*arguments: Any) -> tuple[Tensor, ...]:
        found = list(right(*arguments))
        turned = [t for t in found if t.dtype in (E4M3, E5M2)][1]
        turned.view(torch.uint8)[-1, -1] += 1
        return tuple(found)

    monkeypatch.setattr(library, name, wrong)
    scaling = fp8.Scaling(1, place)
    fp8.wrong_cast.cache_clear()
    assert scaling.backend == "torch"
    assert scaling.how.endswith(f"; torch's casts: the native {name} gives other codes here")
    assert fp8.Scaling(1, place, backend="native").backend == "native", "asked for"
