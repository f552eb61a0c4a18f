"""FP8 linears against fp64: every rounding, the three products, scales over updates, what saturates and what is not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megabert.ops import Scaling, fp8, linear
from megabert.ops.fp8 import FORMATS, GRADIENT, HISTORY, INPUT, WEIGHT
from tests.ops.oracle import error, needs_library, normal

CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Micikevicius et al. 2022, table 1: explicit mantissa bits, exponent of the smallest normal, largest value.
TABLE = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}


def rounded(x: Tensor, kind: torch.dtype) -> Tensor:
    """fp64 values to the nearest of a format, ties to even, saturating: from the format's definition alone."""
    bits, lowest, largest = TABLE[kind]
    exponent = torch.frexp(x)[1].sub(1).clamp(min=lowest)  # x = 1.m * 2^exponent, or subnormal
    step = torch.pow(2.0, (exponent - bits).double())
    return ((x / step).round() * step).clamp(-largest, largest)  # torch rounds ties to even


def case(rows: int = 48, inputs: int = 64, outputs: int = 96) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and the gradient of the output, in magnitudes of training."""
    x, weight = normal(rows, inputs, seed=1), normal(outputs, inputs, seed=2, scale=0.02)
    grad = normal(rows, outputs, seed=3, scale=1e-6) * normal(rows, 1, seed=4).exp()
    return x.bfloat16(), weight.bfloat16(), grad.bfloat16()


def results(x: Tensor, weight: Tensor, grad: Tensor, scales: Any) -> list[Tensor]:
    """y, dx and dweight."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight)]
    y = linear(*leaves, fp8=scales)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def learned(*tensors: Tensor, unit: int = 1) -> Scaling:
    """Scaling of one linear that has seen one update of these tensors."""
    scaling = Scaling(1, CPU, unit)
    results(*tensors, scaling.linears[0])
    scaling.end_update()
    return scaling


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_library)])
@pytest.mark.parametrize("kind", FORMATS[1:], ids=str)
def test_every_bf16_value_is_rounded_as_the_format_says(kind: torch.dtype, backend: str) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    x = every[every.isfinite()].view(-1, 32)
    for scale in (1.0, 2.0**9, 2.0**-20):
        values, turned, amax = fp8.cast_transpose(x, torch.tensor(scale), kind, True, True, backend)
        assert values is not None and turned is not None
        assert values.double().equal(rounded(x.double() * scale, kind)), scale
        assert turned.view(torch.uint8).equal(values.view(torch.uint8).t().contiguous())
        assert amax == x.abs().max()
        assert fp8._decoded(values, torch.bfloat16).double().equal(values.double())
    values = torch.logspace(-3, 2, 5000, dtype=torch.float64).bfloat16()[None]
    found = fp8.cast_transpose(values, torch.tensor(1.0), kind, True, False, backend)[0]
    assert found is not None
    off = (found.double() / values.double() - 1).abs()
    normal_range = values.double() >= 2.0 ** TABLE[kind][1]
    assert off[normal_range].max() <= 2.0 ** -(TABLE[kind][0] + 1)


@needs_library
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (127, 64), (130, 1023), (256, 128)], ids=str)
@pytest.mark.parametrize("kind", FORMATS[1:], ids=str)
def test_both_casts_give_the_same_bits(shape: tuple[int, int], kind: torch.dtype) -> None:
    x, scale = normal(*shape, seed=1, scale=30).bfloat16(), torch.tensor(4.0)
    for wanted in ((True, True), (True, False), (False, True)):
        found = [fp8.cast_transpose(x, scale, kind, *wanted, backend) for backend in ("native", "torch")]
        for ours, theirs, there in zip(*found, (*wanted, True), strict=True):
            if there:
                assert ours is not None and theirs is not None and ours.dtype == theirs.dtype
                assert ours.double().equal(theirs.double())
    y = x.clone()
    y[-1, -1] = math.nan
    values, turned, amax = fp8.cast_transpose(y, scale, kind, True, True, "native")
    assert values is not None and turned is not None and amax.isnan()
    assert values.double().isnan().nonzero().tolist() == [[shape[0] - 1, shape[1] - 1]]
    assert turned.double().isnan().nonzero().tolist() == [[shape[1] - 1, shape[0] - 1]]


@needs_library
def test_torch_knows_the_native_cast() -> None:
    x, one = normal(200, 48, seed=1).bfloat16(), torch.ones(())
    op: Any = torch.ops.megabert.cast_transpose
    for e5m2, straight, turned in ((False, True, True), (True, False, True), (True, True, False)):
        torch.library.opcheck(op, (x, one, e5m2, straight, turned), test_utils=("test_schema", "test_faketensor"))
    assert op(x[:0], one, False, True, True)[0].shape == (0, 48)
    wrong = [
        ((x[0], one), "x has 1 dimensions, not 2"),
        ((x.half(), one), "x has dtype Half"),
        ((x, one.double()), "scale has dtype Double"),
        ((x, torch.ones(2)), "scale has 2 elements"),
    ]
    for arguments, message in wrong:
        with pytest.raises(RuntimeError, match=message):
            op(*arguments, False, True, True)


@needs_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gelu_and_norm_give_the_codes_that_the_casts_give(dtype: torch.dtype) -> None:
    x, bias, grad = (normal(*size, seed=i).to(dtype) for i, size in enumerate(((48, 80), (80,), (48, 80))))
    scale, library = torch.tensor(4.0), torch.ops.megabert
    forward = library.bias_gelu_cast(x, bias, scale)
    *backward, dbias = library.bias_gelu_backward_cast(grad, x, bias, scale)
    dx, wanted = library.bias_gelu_backward(grad, x, bias)
    assert dbias.equal(wanted)
    for plain, e5m2, eight in ((library.bias_gelu(x, bias), False, forward), (dx, True, backward)):
        for ours, theirs in zip(eight, library.cast_transpose(plain, scale, e5m2, True, True), strict=True):
            assert ours.dtype == theirs.dtype and ours.double().equal(theirs.double())
    norm = (x, bias, grad, bias, bias, torch.tensor([5]), 1, 0.1, 1e-5)
    y, *others, values, turned, amax = library.dropout_add_layer_norm_cast(*norm, scale)
    for ours, theirs in zip((y, *others), library.dropout_add_layer_norm(*norm), strict=True):
        assert ours.equal(theirs)
    wanted = library.cast_transpose(y, scale, False, True, True)
    for ours, theirs in zip((values, turned, amax), wanted, strict=True):
        assert ours.double().equal(theirs.double())
    for op, inputs in (
        (library.bias_gelu_cast, (x, bias, scale)),
        (library.bias_gelu_backward_cast, (grad, x, bias, scale)),
        (library.dropout_add_layer_norm_cast, (*norm, scale)),
    ):
        torch.library.opcheck(op, inputs, test_utils=("test_schema", "test_faketensor"))
        with pytest.raises(RuntimeError, match="scale has 2 elements"):
            op(*inputs[:-1], torch.ones(2))


def test_three_products_are_those_of_the_rounded_operands() -> None:
    """Against fp64 on operands rounded by the oracle: no error but bf16's rounding of the result. Against fp64 on the
    operands themselves: two roundings of 2^-4 (E4M3) or 2^-3 (E5M2) at most, so half of their sum in the mean."""
    x, weight, grad = case()
    scaling = learned(x, weight, grad)
    found = results(x, weight, grad, scaling.linears[0])
    scale = scaling.scale[0].double()
    eight = [rounded(t.double() * s, kind) / s for t, s, kind in zip((x, weight, grad), scale, FORMATS, strict=True)]
    for tensors, limit in ((eight, None), ([t.double() for t in (x, weight, grad)], (0.0625, 0.09375, 0.09375))):
        a, w, g = tensors
        exact = (a @ w.T, g @ w, g.T @ a)
        for i, (ours, theirs) in enumerate(zip(found, exact, strict=True)):
            if limit is None:
                assert error(ours, theirs) <= 2**-8, (i, error(ours, theirs))
            else:
                share = ((ours.double() - theirs).norm() / theirs.norm()).item()
                assert 0.01 < share <= limit[i], (i, share)


def test_emulation_is_torchs_scaled_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operands of all three products, through torch._scaled_mm on the CPU: the same bits; and through its checks for
    CUDA, which want the second one column by column and sizes divisible by 16."""
    seen, plain = [], fp8.product

    def record(*args: Any, **more: Any) -> Tensor:
        seen.append((*args, plain(*args, **more)))
        return seen[-1][-1]

    x, weight, grad = case()
    scaling = learned(x, weight, grad)
    monkeypatch.setattr(fp8, "product", record)
    results(x, weight, grad, scaling.linears[0])
    assert [(a.dtype, b.dtype) for a, b, *_ in seen] == [(E4M3, E4M3), (E5M2, E4M3), (E5M2, E4M3)]
    for a, b, a_inverse, b_inverse, dtype, ours in seen:
        theirs = torch._scaled_mm(a, b.t(), scale_a=a_inverse, scale_b=b_inverse, out_dtype=dtype)
        assert theirs.equal(ours)
        with FakeTensorMode():
            on_gpu = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in (a, b, a_inverse, b_inverse)]
            assert a.is_contiguous() and b.is_contiguous()
            bias = torch.empty(len(b), dtype=dtype, device="cuda")
            for y in (plain(*on_gpu, dtype, fast=True), plain(*on_gpu, dtype, fast=True, bias=bias)):
                assert (y.shape, y.device.type) == (ours.shape, "cuda")


def test_first_update_is_that_of_bf16_and_only_observes() -> None:
    x, weight, grad = case()
    scaling = Scaling(1, CPU)
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight)]
    plain = F.linear(*leaves)
    wanted = [plain.detach(), *torch.autograd.grad(plain, leaves, grad)]
    for ours, theirs in zip(results(x, weight, grad, scaling.linears[0]), wanted, strict=True):
        assert ours.equal(theirs)
    assert scaling.amax[0].tolist() == [t.abs().max().item() for t in (x, weight, grad)]
    assert scaling.state() == []


def test_the_bias_and_its_gradient() -> None:
    x, weight, grad = case()
    scaling, bias = learned(x, weight, grad), normal(96, seed=5).bfloat16().requires_grad_()
    y = linear(x.view(6, 8, 64), weight, bias, scaling.linears[0])
    y.backward(grad.view(6, 8, 96))
    plain = linear(x, weight, fp8=scaling.linears[0]).double()
    assert y.shape == (6, 8, 96) and bias.grad is not None
    assert error(y.detach().view(48, 96), plain + bias.detach().double()) <= 2**-8
    assert error(bias.grad, grad.double().sum(0)) <= 2**-8


def test_scales_are_powers_of_two_with_headroom() -> None:
    """Of 200 magnitudes: the scaled amax lies in (limit / 4, limit / 2], so an amax may double before it saturates."""
    scaling = Scaling(200, CPU, gradient_unit=3)
    amax = torch.logspace(-12, 4, 200)[:, None].expand(200, 3)
    scaling.amax.copy_(amax)
    scaling.end_update()
    mantissa, _ = torch.frexp(scaling.scale)
    assert (mantissa == 0.5).all() and (scaling.scale * scaling.inverse == 1).all()
    limits = torch.tensor([TABLE[kind][2] for kind in FORMATS])
    share = amax * scaling.scale / limits
    assert (share <= 0.5 * (1 + 1e-6)).all() and (share > 0.25 * (1 - 1e-6)).all()
    assert scaling.amax.abs().max() == 0


def test_a_scale_follows_the_largest_of_the_last_updates() -> None:
    scaling = Scaling(1, CPU)
    scales = []
    for amax in [1.0, 64.0, *[1.0] * HISTORY]:
        scaling.amax.fill_(amax)
        scaling.end_update()
        scales.append(scaling.scale[0, INPUT].item())
    assert scales == [128.0] + [2.0] * HISTORY + [128.0]


def test_nothing_seen_and_nothing_finite_count_as_nothing() -> None:
    scaling = Scaling(1, CPU)
    scaling.amax.copy_(torch.tensor([[0.0, math.inf, math.nan]]))
    scaling.end_update()
    assert scaling.scale.tolist() == [[1.0] * 3] and scaling.history.isfinite().all()
    scaling.amax.copy_(torch.tensor([[0.0, 1.0, 1.0]]))
    scaling.end_update()
    assert scaling.scale.tolist() == [[1.0, 128.0, 2.0**14]]


def test_what_outgrows_its_history_saturates() -> None:
    """Values 1,000 times those of the update before are clamped to what the scale can show, none is lost or not finite."""
    x, weight, grad = case()
    scaling = learned(x, weight, grad)
    y, dx, dweight = results(x * 1000, weight * 1000, grad * 1000, scaling.linears[0])
    for t in (y, dx, dweight):
        assert t.isfinite().all() and t.abs().max() > 0
    kept = scaling.linears[0].quantize(INPUT, x * 1000)
    assert kept.values is not None
    assert kept.values.double().abs().max() == 448 and kept.values.double().sign().equal(x.double().sign())
    scaling.end_update()  # and the next update fits
    again = scaling.linears[0].quantize(INPUT, x * 1000)
    assert again.values is not None and again.values.double().abs().max() <= 224


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("role", [INPUT, WEIGHT, GRADIENT])
def test_what_is_not_finite_stays_so(role: int, bad: float) -> None:
    tensors = [t.clone() for t in case()]
    scaling = learned(*tensors)
    tensors[role][3, 5] = bad
    y, dx, dweight = results(*tensors, scaling.linears[0])
    assert [not t.isfinite().all().item() for t in (y, dx, dweight)] == [
        role in (INPUT, WEIGHT), role in (WEIGHT, GRADIENT), role in (INPUT, GRADIENT)
    ]  # fmt: skip
    assert not scaling.amax.isfinite().all()
    scaling.end_update()
    assert scaling.history.isfinite().all()


def test_gradients_do_not_depend_on_how_an_update_is_split() -> None:
    """Inside an update of 8 parts gradients are 8 times as large; the history and what is computed are the same."""
    x, weight, grad = case()
    one, eight = learned(x, weight, grad), learned(x, weight, grad * 8, unit=8)
    assert one.state() == eight.state()
    first = results(x, weight, grad, one.linears[0])
    second = results(x, weight, grad * 8, eight.linears[0])
    assert all(a.equal(b) for a, b in zip(first, [second[0], second[1] / 8, second[2] / 8], strict=True))
    other = Scaling(1, CPU, gradient_unit=8)
    other.load(one.state())
    assert other.scale.equal(eight.scale) and other.known
    with pytest.raises(ValueError, match=r"amax_history is \[16, 3\] in the checkpoint and \[16, 6\] in this run"):
        Scaling(2, CPU).load(one.state())


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a device: a value read back, a tensor moved."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        moved = name == "_to_copy" and (kwargs or {}).get("device") is not None
        self.count += moved or name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
        return func(*args, **(kwargs or {}))


def test_an_update_reads_nothing_back_and_moves_no_state() -> None:
    """What a CUDA graph needs: no host reads, the state at fixed addresses."""
    x, weight, grad = case()
    scaling = learned(x, weight, grad)
    places = [t.data_ptr() for t in (scaling.scale, scaling.inverse, scaling.amax, scaling.history)]
    with Reads() as reads:
        for _ in range(2):
            results(x, weight, grad, scaling.linears[0])
            scaling.end_update()
        assert reads.count == 0
        scaling.scale[0, 0].item()  # the counter counts
    assert reads.count == 1
    assert places == [t.data_ptr() for t in (scaling.scale, scaling.inverse, scaling.amax, scaling.history)]


def test_sizes_that_the_product_cannot_take_are_named() -> None:
    x, weight, grad = case(rows=40)
    with pytest.raises(ValueError, match=r"40 tokens in a micro-batch are no multiple of 16; change batch\.micro_size"):
        learned(x, weight, grad)


def test_a_gpu_without_fp8_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"compute capability 8\.9 or newer, this one has 8\.0; use bf16"):
        Scaling(1, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fp8.support(torch.device("cuda")) == (True, "torch._scaled_mm")
