"""Linear layers whose three matrix products run in FP8: E4M3 values and weights, E5M2 gradients, delayed scaling.

Formats and their use: Micikevicius et al. 2022, "FP8 Formats for Deep Learning". A tensor is multiplied by a power of two
before it is rounded, and the product by its inverse; both are exact, so rounding to FP8 is the only error that is added to
those of bf16. The power follows from the largest magnitudes ("amax") of the last updates. It is fixed within an update, so
accumulation and recomputation see one scale, and it changes on the device, at fixed addresses, with nothing read back.

The native GELU, its gradient and LayerNorm write what a product reads in FP8 themselves, with the bits that a cast would give.

What lies beyond a format's range saturates. What is not finite makes the whole product NaN. On CUDA the products are
`torch._scaled_mm`; on the CPU they are emulated by casts, for their numerics and not for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megabert.ops.backend import MISSING, has_kernel

INPUT, WEIGHT, GRADIENT = range(3)  # what a linear layer quantises
FORMATS = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
HISTORY = 16  # updates whose amax decide a scale
HEADROOM = 2.0  # an amax may grow by it before it saturates; costs a binary order of E4M3's 15, no precision
SMALLEST = 2.0**-48  # amax below it count as it: the inverses of two scales still have a normal fp32 product
MULTIPLE = 16  # of every dimension of a product, which torch._scaled_mm asks for
EXPONENT = 0x7F800000  # the exponent bits of fp32


def support(device: torch.device) -> tuple[bool, str]:
    """Whether FP8 runs or is emulated on a device, and how, or why not."""
    if device.type != "cuda":
        return True, f"emulated on {device.type}: for its numerics, not for speed"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return False, f"needs a GPU of compute capability 8.9 or newer, this one has {major}.{minor}"
    return True, "torch._scaled_mm"


class Scaling:
    """The scales of a model's FP8 linears and the amax they follow from; tensors of [linears, 3] on `device`.

    `gradient_unit`: by how much gradients in the backward pass are larger than their share of the update's, which are
    divided by the ranks afterwards. The history holds those of the update, so it does not depend on the number of ranks.
    """

    def __init__(self, linears: int, device: torch.device, gradient_unit: int = 1, backend: str = "auto") -> None:
        """`backend` of the casts: native, torch, or auto, which is native where it is built and its codes are torch's.

        Raises ValueError for a device without FP8.
        """
        able, self.how = support(device)
        if not able:
            raise ValueError(f"precision=fp8 {self.how}; use bf16")
        if backend == "auto":
            backend = "native" if has_kernel("cast_transpose", device.type) else "torch"
            if backend == "native" and (wrong := wrong_cast(device)):
                backend, self.how = ("torch", f"{self.how}; torch's casts: the native {wrong} gives other codes here")
        self.backend = backend
        self.amax = torch.zeros(linears, 3, device=device)  # of the update so far
        self.history = torch.zeros(HISTORY, linears, 3, device=device)  # newest first
        self.scale, self.inverse = torch.ones_like(self.amax), torch.ones_like(self.amax)
        self._unit = torch.tensor([1.0, 1.0, gradient_unit], device=device)
        self._limits = torch.tensor([torch.finfo(kind).max for kind in FORMATS], device=device)
        self.known = False  # without a history products run in bf16 and amax are only observed
        self.linears = [Linear8(self, number) for number in range(linears)]

    @torch.no_grad()
    def end_update(self) -> None:
        """Take the amax of all ranks into the history and set the next update's scales. A collective.

        An amax that is not finite belongs to an update that is skipped, and counts as none.
        """
        seen = torch.where(self.amax.isfinite(), self.amax, 0.0) / self._unit
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        self.amax.zero_()
        self._set(torch.cat([seen[None], self.history[:-1]]))

    def state(self) -> list[list[float]]:
        """The history: an update a row, newest first; exact as JSON. [] before the first update."""
        return self.history.flatten(1).tolist() if self.known else []

    def load(self, state: Sequence[Sequence[float]]) -> None:
        """Continue from `state`. Raises ValueError when it is that of another number of linears or updates."""
        self.amax.zero_()
        self.known = False
        if not state:
            return
        saved, (updates, linears, roles) = torch.tensor(state), self.history.shape
        if saved.shape != (updates, linears * roles):
            raise ValueError(
                f"amax_history is {list(saved.shape)} in the checkpoint and {[updates, linears * roles]} in this run"
            )
        self._set(saved.view_as(self.history))

    def _set(self, history: Tensor) -> None:
        self.history.copy_(history)
        amax = self.history.amax(0) * self._unit
        # Clearing the mantissa of a positive float leaves the power of two below it.
        wanted = self._limits / (amax.clamp(min=SMALLEST) * HEADROOM)
        power = (wanted.view(torch.int32) & EXPONENT).view(torch.float32)
        self.scale.copy_(torch.where(amax > 0, power, 1.0))
        self.inverse.copy_(1 / self.scale)
        self.known = True


class Quantized(NamedTuple):
    """A matrix [N, D] rounded to FP8, in the layouts that were asked for; times `inverse` it is about the matrix."""

    values: Tensor | None  # [N, D], row by row: an operand of products over D
    transposed: Tensor | None  # [D, N], row by row: an operand of products over N
    inverse: Tensor  # fp32 scalar; NaN where the matrix is not finite


class Linear8:
    """One linear layer's scales."""

    def __init__(self, scaling: Scaling, number: int) -> None:
        self._scaling = scaling
        self._scale, self._inverse, self._amax = (
            tensor[number].unbind() for tensor in (scaling.scale, scaling.inverse, scaling.amax)
        )

    def quantize(self, role: int, x: Tensor, straight: bool = True, transposed: bool = True) -> Quantized:
        """`x` [N, D] as one role of a product, its amax taken into account.

        Before there is a history: `x` as it is.
        """
        if self.known:
            backend = self._scaling.backend
            return self.take(role, *cast_transpose(x, self._scale[role], FORMATS[role], straight, transposed, backend))
        taken = self.take(role, x if straight else None, x.t() if transposed else None, largest(x))
        return taken._replace(inverse=torch.ones_like(taken.inverse))

    def take(self, role: int, values: Tensor | None, transposed: Tensor | None, amax: Tensor) -> Quantized:
        """What was rounded by the scale of a role elsewhere, its amax [...] taken into account."""
        amax = amax.amax()
        self._amax[role].copy_(torch.maximum(self._amax[role], amax))
        return Quantized(values, transposed, self._inverse[role] + (amax - amax))  # inf - inf is NaN

    def scale(self, role: int) -> Tensor:
        return self._scale[role]

    @property
    def known(self) -> bool:
        """Whether there are scales."""
        return self._scaling.known


def cast_transpose(
    x: Tensor, scale: Tensor, kind: torch.dtype, straight: bool, transposed: bool, backend: str
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """x [N, D] times scale (a power of two), rounded to FP8: as [N, D] and as [D, N] where wanted; and the amax of x, fp32.

    To nearest, ties to even; beyond the range the largest value. The native backend reads x once.
    """
    if backend == "native":
        op = torch.ops.megabert.cast_transpose
        values, turned, amax = op(x, scale, kind == torch.float8_e5m2, straight, transposed)
        return values if straight else None, turned if transposed else None, amax.amax()
    limit = torch.finfo(kind).max
    values = (x.contiguous().float() * scale).clamp(-limit, limit).to(kind)
    turned = values.t().contiguous() if transposed else None
    return values if straight else None, turned, largest(x)


@cache
@torch.no_grad()
def wrong_cast(device: torch.device) -> str:
    """The first native operation whose FP8 codes on a device are not those of torch's cast; "" where all are right."""
    library, draw = torch.ops.megabert, torch.Generator().manual_seed(0)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cpu").view(torch.bfloat16).view(-1, 256)
    every = torch.where(every.isfinite(), every, 0).to(device)

    def drawn(*shape: int) -> Tensor:  # with values that saturate
        return torch.randn(shape, generator=draw, device="cpu").mul_(100).to(device, torch.bfloat16)

    x, grad, bias = drawn(144, 264), drawn(144, 264), drawn(264)  # parts of tiles, too
    scale, seed = torch.full((), 4.0, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    dx = library.bias_gelu_backward(grad, x, bias)[0]
    y, _, _, _, *norm = library.dropout_add_layer_norm_cast(x, bias, grad, bias, bias, seed, 0, 0.0, 1e-5, scale)
    gelu = library.bias_gelu_cast(x, bias, scale)
    slope = library.bias_gelu_backward_cast(grad, x, bias, scale)[:3]
    cases = [
        *(("cast_transpose", every, k, library.cast_transpose(every, scale, k == FORMATS[GRADIENT], True, True)) for k in FORMATS[1:]),
        ("bias_gelu_cast", library.bias_gelu(x, bias), FORMATS[INPUT], gelu),
        ("bias_gelu_backward_cast", dx, FORMATS[GRADIENT], slope),
        ("dropout_add_layer_norm_cast", y, FORMATS[INPUT], norm),
    ]  # fmt: skip
    for name, plain, kind, (values, turned, amax) in cases:
        right, right_turned, most = cast_transpose(plain, scale, kind, True, True, "torch")
        assert right is not None and right_turned is not None
        pairs = ((values, right), (turned, right_turned))
        if not (amax.amax() == most and all(a.view(torch.uint8).equal(b.view(torch.uint8)) for a, b in pairs)):
            return name
    return ""


def largest(x: Tensor) -> Tensor:
    """Largest magnitude in x, fp32; NaN where there is one."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float()


def product(
    a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, dtype: torch.dtype, fast: bool,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """a [M, K] b [N, K]^T times both inverses, plus bias [N]: [M, N] in `dtype`; FP8 operands lie row by row.

    fast: Hopper's tensor cores may keep partial sums in fewer than 32 bits, which costs gradients accuracy.
    """
    if a.dtype not in FORMATS:
        return F.linear(a, b, bias)
    if a.is_cuda:
        return torch._scaled_mm(
            a, b.t(), scale_a=a_inverse, scale_b=b_inverse, bias=bias, out_dtype=dtype, use_fast_accum=fast
        )
    y = (_decoded(a, dtype) @ _decoded(b, dtype).t()) * (a_inverse * b_inverse)
    return y if bias is None else y + bias


def _decoded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """FP8 values in `dtype`, by a table: torch's own conversion is 30 times slower on the CPU."""
    table = torch.arange(256, dtype=torch.uint8).view(values.dtype).to(dtype)
    return table.index_select(0, values.view(torch.uint8).flatten().int()).view(values.shape)


def _forward(
    ctx: Any, left: Quantized, weight: Tensor, bias: Tensor | None, fp8: Linear8, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """x W^T + bias of a quantised x, and what `_gradients` needs: x in FP8, W as it is (ZeRO-3 gathers it again)."""
    ctx.fp8 = fp8
    right = fp8.quantize(WEIGHT, weight, transposed=False)
    assert left.values is not None and right.values is not None
    y = product(left.values, right.values, left.inverse, right.inverse, dtype, fast=True, bias=bias)
    return y, (left.transposed, left.inverse, weight)


def _gradients(
    ctx: Any, g: Quantized, x: Tensor, x_inverse: Tensor, weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """dx and dW from the quantised gradient of the product."""
    dx = dweight = None
    if ctx.needs_input_grad[0]:
        right = ctx.fp8.quantize(WEIGHT, weight, straight=False)
        assert g.values is not None and right.transposed is not None
        dx = product(g.values, right.transposed, g.inverse, right.inverse, dtype, fast=False)
    if ctx.needs_input_grad[1]:
        assert g.transposed is not None
        dweight = product(g.transposed, x, g.inverse, x_inverse, dtype, fast=False)
    return dx, dweight


class _Linear(torch.autograd.Function):
    """y = x W^T + bias; `given`: x is quantised already, and only says where its gradient goes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, fp8: Linear8, *given: Tensor) -> Tensor:
        left = Quantized(*given) if given else fp8.quantize(INPUT, x, transposed=ctx.needs_input_grad[1])
        y, kept = _forward(ctx, left, weight, bias, fp8, x.dtype)
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        need_x, need_weight, need_bias, *others = ctx.needs_input_grad
        g = ctx.fp8.quantize(GRADIENT, grad, straight=need_x, transposed=need_weight)
        x, x_inverse, weight = ctx.saved_tensors
        dx, dweight = _gradients(ctx, g, x, x_inverse, weight, grad.dtype)
        return dx, dweight, grad.sum(0) if need_bias else None, *(None for _ in others)


class _LinearGelu(torch.autograd.Function):
    """gelu(x W^T + bias) as what the next product reads; its gradient comes as what the products of this one read."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, fp8: Linear8, following: Linear8, *given: Tensor
    ) -> tuple[Any, ...]:
        left = Quantized(*given) if given else fp8.quantize(INPUT, x, transposed=ctx.needs_input_grad[1])
        h, kept = _forward(ctx, left, weight, None, fp8, x.dtype)
        ctx.save_for_backward(h, bias, *kept)
        cast = torch.ops.megabert.bias_gelu_cast(h, bias, following.scale(INPUT))
        eight = following.take(INPUT, *cast)
        ctx.mark_non_differentiable(*eight)
        return h.new_zeros(1, 1).expand_as(h), *eight

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_eight: None) -> tuple[Tensor | None, ...]:
        h, bias, x, x_inverse, weight = ctx.saved_tensors
        cast = torch.ops.megabert.bias_gelu_backward_cast
        *codes, dbias = cast(grad, h, bias, ctx.fp8.scale(GRADIENT))
        dx, dweight = _gradients(ctx, ctx.fp8.take(GRADIENT, *codes), x, x_inverse, weight, grad.dtype)
        return dx, dweight, dbias, *(None for _ in ctx.needs_input_grad[3:])


class Rounded(NamedTuple):
    """An activation that was rounded to FP8 where it was computed, for the product that reads it."""

    x: Tensor  # [..., K] of its type, for its gradient; a single zero, expanded, where nothing else reads it
    eight: Quantized  # [tokens, K]


def linear(x: Tensor | Rounded, weight: Tensor, bias: Tensor | None = None, fp8: Linear8 | None = None) -> Tensor:
    """x [..., K], weight [N, K], bias [N] -> x W^T + bias [..., N]; all three products in FP8 where `fp8` is given.

    Raises ValueError for FP8 sizes that are no multiple of 16.
    """
    x, given = x if isinstance(x, Rounded) else (x, ())
    if fp8 is None:
        return F.linear(x, weight, bias)
    return _Linear.apply(_flat(x), weight, bias, fp8, *given).view(*x.shape[:-1], len(weight))


def linear_gelu(x: Tensor | Rounded, weight: Tensor, bias: Tensor, fp8: Linear8, following: Linear8) -> Rounded:
    """gelu(x W^T + bias) [..., N] for the product that has `following`, with the bits that its own cast would give.

    Both must know their scales, and the native library be there. Raises ValueError as `linear`.
    """
    x, given = x if isinstance(x, Rounded) else (x, ())
    y, *eight = _LinearGelu.apply(_flat(x), weight, bias, fp8, following, *given)
    return Rounded(y.view(*x.shape[:-1], len(weight)), Quantized(*eight))


def _flat(x: Tensor) -> Tensor:
    """[..., K] -> [tokens, K]"""
    flat = x.reshape(-1, x.shape[-1])
    if len(flat) % MULTIPLE:
        raise ValueError(
            f"precision=fp8: {len(flat)} tokens in a micro-batch are no multiple of {MULTIPLE}; change batch.micro_size"
        )
    return flat


def _register() -> None:
    def codes(x: Tensor, kind: torch.dtype, straight: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
        rows, width = x.shape
        tiles = -(-rows // 128) * (-(-width // 128) if x.is_cuda else min(width, 1))
        return (
            x.new_empty((rows, width) if straight else 0, dtype=kind),
            x.new_empty((width, rows) if transposed else 0, dtype=kind),
            x.new_empty(tiles, dtype=torch.float32),
        )

    @torch.library.register_fake("megabert::cast_transpose")
    def _(x: Tensor, scale: Tensor, e5m2: bool, straight: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
        return codes(x, torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn, straight, transposed)

    @torch.library.register_fake("megabert::bias_gelu_cast")
    def _(x: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return codes(x, torch.float8_e4m3fn, True, True)

    @torch.library.register_fake("megabert::bias_gelu_backward_cast")
    def _(grad: Tensor, x: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return *codes(x, torch.float8_e5m2, True, True), torch.empty_like(bias)


if not MISSING:
    _register()
