"""bias_geglu and rotate, which only layers of `model.kind=modern` have, against fp64 and as citizens of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megabert import ops
from megabert.ops.rotary import THETA
from tests.ops import reference
from tests.ops.oracle import DTYPES, check, needs_library, normal

PLACES = torch.tensor([[0, 1, 2, 0, 1], [3, 4, 5, 100, 8191]])


@needs_library
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 2), (1, 6), (2, 2046), (130, 192), (5, 3, 32)], ids=str)
def test_bias_geglu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    half = (*shape[:-1], shape[-1] // 2)
    check(
        lambda x, b: [ops.bias_geglu(x, b, "native")],
        lambda x, b: [ops.bias_geglu(x, b, "torch")],
        lambda x, b: [reference.bias_geglu(x, b)],
        [normal(*shape, seed=1, scale=3), normal(shape[-1], seed=2)], [normal(*half, seed=3)], dtype,
    )  # fmt: skip


def through_complex_numbers(qkv: Tensor, heads: int, size: int) -> Tensor:
    """The formula as the paper has it: pairs of columns are complex numbers, multiplied by exp(i angle)."""
    parts = qkv.view(*qkv.shape[:2], 3, heads, size)
    turn = PLACES[..., None] * THETA ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    pairs = torch.complex(parts[..., : size // 2], parts[..., size // 2 :])[:, :, :2]
    turned = pairs * torch.polar(torch.ones_like(turn), turn)[:, :, None, None]
    return torch.cat([torch.cat([turned.real, turned.imag], -1), parts[:, :, 2:]], 2).reshape(qkv.shape)


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_library)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "size"), [(1, 2), (2, 6), (3, 40), (2, 64)])
def test_rotate(heads: int, size: int, dtype: torch.dtype, backend: str) -> None:
    angles = ops.rotation(PLACES, size)
    shape = (*PLACES.shape, 3 * heads * size)

    def plain(x: Tensor) -> list[Tensor]:
        return [reference.rotate(x, *angles, heads)]

    check(
        lambda x: [ops.rotate(x, heads, angles, backend)], plain,
        lambda x: [through_complex_numbers(x, heads, size)] if dtype != torch.float32 else plain(x),
        [normal(*shape, seed=1)], [normal(*shape, seed=2)], dtype,
    )  # fmt: skip


def test_the_angles_are_the_papers() -> None:
    """In fp32, whose angle at the last place of 8,192 has 13 bits behind the point."""
    qkv = normal(*PLACES.shape, 3 * 2 * 64, seed=1)
    found = ops.rotate(qkv, 2, ops.rotation(PLACES, 64), "torch")
    torch.testing.assert_close(found, through_complex_numbers(qkv, 2, 64), rtol=0, atol=2e-3)
    near = slice(0, 3)
    torch.testing.assert_close(found[:, near], through_complex_numbers(qkv, 2, 64)[:, near], rtol=0, atol=2e-6)


@needs_library
def test_the_number_of_threads_changes_no_bit() -> None:
    before, results = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        x, bias = (t.bfloat16().requires_grad_() for t in (normal(1, 1500, 192, seed=1), normal(192, seed=2)))
        angles = ops.rotation(torch.arange(1500)[None], 16)
        y = ops.bias_geglu(ops.rotate(x, 4, angles, "native"), bias, "native")
        y.float().square().sum().backward()
        results.append([y.detach(), x.grad, bias.grad])
    torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        assert a is not None and b is not None and a.equal(b)


@needs_library
def test_strided_and_empty_inputs() -> None:
    x, bias = normal(2, 3, 48, seed=1).float(), normal(96, seed=2).float()[::2]
    strided, angles = torch.stack([x, x], -1)[..., 0], ops.rotation(torch.arange(6).view(2, 3), 8)
    assert ops.bias_geglu(strided, bias, "native").equal(ops.bias_geglu(x, bias.clone(), "native"))
    assert ops.rotate(strided, 2, angles, "native").equal(ops.rotate(x, 2, angles, "native"))
    empty, leaf = torch.empty(0, 3, 48, requires_grad=True), bias.clone().requires_grad_()
    turned = ops.rotate(empty, 2, ops.rotation(torch.empty(0, 3, dtype=torch.int32), 8), "native")
    ops.bias_geglu(turned, leaf, "native").sum().backward()
    assert leaf.grad is not None and leaf.grad.abs().max() == 0


@needs_library
def test_torch_knows_the_operations() -> None:
    library: Any = torch.ops.megabert
    x, bias = (normal(*s, seed=n).float().requires_grad_() for n, s in enumerate([(2, 3, 48), (48,)]))
    cos, sin = ops.rotation(torch.arange(6).view(2, 3), 8)
    torch.library.opcheck(library.bias_geglu, (x, bias))
    torch.library.opcheck(library.rotate, (x, cos, sin, 2, False))
    torch.library.opcheck(library.rotate, (x, cos, sin, 2, True))
    torch.library.opcheck(
        library.bias_geglu_backward, (x.detach()[..., :24], x.detach(), bias.detach()),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


@needs_library
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("bias_geglu", (torch.ones(2, 3), torch.ones(3)), "x has 3 columns, which are no two halves"),
        ("bias_geglu", (torch.ones(2, 4), torch.ones(2)), "bias has size 2 in dimension 0, not 4"),
        (
            "bias_geglu_backward",
            (torch.ones(2, 4), torch.ones(2, 4), torch.ones(4)),
            "grad is not half of x in its last dimension",
        ),
        ("rotate", (torch.ones(2, 13), torch.ones(2, 1), torch.ones(2, 1), 2, False), "qkv has 13 columns"),
        (
            "rotate",
            (torch.ones(2, 12), torch.ones(2, 1), torch.ones(3, 1), 2, False),
            "sin has 3 elements, not 1 a token",
        ),
        ("rotate", (torch.ones(2, 12), torch.ones(2, 1).double(), torch.ones(2, 1), 2, False), "cos has dtype Double"),
    ],
)
def test_wrong_arguments_are_named(name: str, arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        getattr(torch.ops.megabert, name)(*arguments)
