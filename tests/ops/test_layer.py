"""bias_gelu and dropout_add_layer_norm against fp64, in every awkward size, and as citizens of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabert import ops
from tests.ops import reference
from tests.ops.oracle import DTYPES, check, needs_library, normal

pytestmark = needs_library
SEED, STREAM, EPS = 0x5EED, 9, 1e-12
SIZES = [(1, 1), (3, 1), (1, 3), (2, 1023), (130, 96), (5, 3, 16)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_bias_gelu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [normal(*shape, seed=1, scale=3), normal(shape[-1], seed=2)]
    check(
        lambda x, b: [ops.bias_gelu(x, b, "native")],
        lambda x, b: [ops.bias_gelu(x, b, "torch")],
        lambda x, b: [reference.bias_gelu(x, b)],
        inputs, [normal(*shape, seed=3)], dtype,
    )  # fmt: skip


def test_gelu_keeps_relative_accuracy_in_the_tail() -> None:
    """For very negative inputs gelu is tiny, not noise: relative error 1e-5 down to 1e-35, where 1 + erf gives 0."""
    x = torch.linspace(-12.5, 0, 1001)
    exact = reference.bias_gelu(x.double(), torch.zeros(1, dtype=torch.float64))
    found = ops.bias_gelu(x[:, None], torch.zeros(1), "native")[:, 0].double()
    assert ((found - exact).abs() <= 1e-5 * exact.abs() + 1e-37).all()


def test_gelu_of_extremes() -> None:
    x = torch.tensor([[float("inf"), 3e38, 40.0, -40.0, -3e38, float("nan")]])
    found = ops.bias_gelu(x, torch.zeros(6), "native")[0]
    assert found[:3].tolist() == x[0, :3].tolist()
    assert found[3:5].abs().max() == 0
    assert found[5].isnan()


def norm_inputs(shape: tuple[int, ...]) -> list[Tensor]:
    vectors = [normal(shape[-1], seed=s) for s in (3, 4, 5)]
    return [normal(*shape, seed=1), vectors[0], normal(*shape, seed=2), vectors[1], vectors[2]]


def keep_factor(shape: tuple[int, ...], p: float) -> Tensor:
    rows = int(torch.tensor(shape[:-1]).prod())
    return reference.keep_mask(SEED, STREAM, rows, shape[-1], p).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("post", [False, True], ids=["pre", "post"])
@pytest.mark.parametrize("shape", [(1, 3), (2, 1023), (200, 96), (5, 3, 16)], ids=str)
def test_dropout_add_layer_norm(shape: tuple[int, ...], post: bool, p: float, dtype: torch.dtype) -> None:
    seed, keep = torch.tensor([SEED]), keep_factor(shape, p)

    def plain(x: Tensor, b: Tensor, r: Tensor, w: Tensor, s: Tensor) -> list[Tensor]:
        z = r + (x + b) * keep.to(x.dtype)
        normed = F.layer_norm(z, z.shape[-1:], w, s, EPS)
        return [normed, normed if post else z]

    def exact(x: Tensor, b: Tensor, r: Tensor, w: Tensor, s: Tensor) -> list[Tensor]:
        normed, z = reference.dropout_add_layer_norm(x, b, r, w, s, EPS, keep)
        return [normed, normed if post else z]

    check(
        lambda x, b, r, w, s: ops.dropout_add_layer_norm(
            x, b, r, w, s, p, EPS, seed, STREAM, "native", post=post
        ),
        plain, exact, norm_inputs(shape), [normal(*shape, seed=7), normal(*shape, seed=8)], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_alone(dtype: torch.dtype) -> None:
    shape, seed = (7, 1023), torch.tensor([SEED])
    keep = keep_factor(shape, 0.3)
    check(
        lambda x: [ops.dropout(x, 0.3, seed, STREAM, "native")],
        lambda x: [x * keep.to(x.dtype)],
        lambda x: [x * keep],
        [normal(*shape, seed=1)], [normal(*shape, seed=2)], dtype,
    )  # fmt: skip
    x = normal(*shape, seed=1).to(dtype)
    assert ops.dropout(x, 0.0, seed, STREAM, "native").equal(x)


@pytest.mark.parametrize(("post", "used"), [(False, 0), (True, 0), (True, 1)])
def test_only_the_norm_is_used(post: bool, used: int) -> None:
    """A gradient that does not exist must not be needed: of z, of the norm's first or second use."""
    leaves = [t.float().requires_grad_() for t in norm_inputs((4, 24))]
    seed = torch.tensor([SEED])
    outputs = ops.dropout_add_layer_norm(*leaves, 0.1, EPS, seed, STREAM, "native", post=post)
    outputs[used].sum().backward()
    exact = [t.double().requires_grad_() for t in norm_inputs((4, 24))]
    reference.dropout_add_layer_norm(*exact, EPS, keep_factor((4, 24), 0.1))[0].sum().backward()
    for a, b in zip(leaves, exact, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-5)


def test_strided_inputs_give_the_same() -> None:
    x = normal(6, 40, seed=1).float()
    strided = torch.stack([x, x], -1)[..., 0]
    assert not strided.is_contiguous()
    bias = normal(80, seed=2).float()[::2]
    assert ops.bias_gelu(strided, bias, "native").equal(ops.bias_gelu(x, bias.clone(), "native"))
    seed = torch.tensor([SEED])
    args = [strided.clone(), bias, strided, bias, bias]
    a = ops.dropout_add_layer_norm(*args, 0.1, EPS, seed, STREAM, "native")
    b = ops.dropout_add_layer_norm(*(t.clone() for t in args), 0.1, EPS, seed, STREAM, "native")
    assert a[0].equal(b[0]) and a[1].equal(b[1])


def test_empty_batch() -> None:
    x, v = torch.empty(0, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    ops.bias_gelu(x, v, "native").sum().backward()
    y, _ = ops.dropout_add_layer_norm(x, v, x, v, v, 0.1, EPS, torch.tensor([1]), 0, "native")
    y.sum().backward()
    assert v.grad is not None and v.grad.abs().max() == 0


def test_the_number_of_threads_changes_no_bit() -> None:
    before = torch.get_num_threads()
    results = []
    # of more than 512 rows of this width a thread gets a part
    for threads in (1, 2):
        torch.set_num_threads(threads)
        leaves = [t.bfloat16().requires_grad_() for t in norm_inputs((3000, 64))]
        y, z = ops.dropout_add_layer_norm(*leaves, 0.1, EPS, torch.tensor([SEED]), STREAM, "native")
        g = ops.dropout(ops.bias_gelu(y, leaves[1], "native"), 0.1, torch.tensor([SEED]), STREAM + 1, "native")
        (g.float().square().sum() + z.float().sum()).backward()
        results.append([g, *(t.grad for t in leaves)])
    torch.set_num_threads(before)
    for a, b in zip(*results, strict=True):
        assert a is not None and b is not None and a.equal(b)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_torch_knows_the_operations(p: float) -> None:
    seed = torch.tensor([SEED])
    x, r = (normal(4, 24, seed=s).float().requires_grad_() for s in (1, 2))
    b, w, s = (normal(24, seed=s).float().requires_grad_() for s in (3, 4, 5))
    library: Any = torch.ops.megabert
    torch.library.opcheck(library.bias_gelu, (x, b))
    torch.library.opcheck(library.dropout, (x, seed, 1, p))
    torch.library.opcheck(library.dropout_add_layer_norm, (x, b, r, w, s, seed, 1, p, 1e-5))
    y, z, mean, rstd = (t.detach() for t in library.dropout_add_layer_norm(x, b, r, w, s, seed, 1, p, 1e-5))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(library.bias_gelu_backward, (y, x.detach(), b.detach()), test_utils=checks)
    torch.library.opcheck(
        library.dropout_add_layer_norm_backward,
        (y, None, False, z, mean, rstd, w.detach(), seed, 1, p),
        test_utils=checks,
    )


def test_compiles_in_one_graph() -> None:
    def layer(x: Tensor, v: Tensor, seed: Tensor) -> Tensor:
        y, z = ops.dropout_add_layer_norm(ops.bias_gelu(x, v, "native"), v, x, v, v, 0.1, EPS, seed, STREAM, "native")
        first, second = ops.dropout_add_layer_norm(y, v, z, v + 1, v * 2, 0.1, EPS, seed, STREAM, "native", post=True)
        return (first.square() * second).sum()

    x, v, seed = normal(8, 32, seed=1).float(), normal(32, seed=2).float(), torch.tensor([SEED])
    grads = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        function(leaf, v, seed).backward()
        grads.append(leaf.grad)
    assert grads[0] is not None and grads[0].equal(grads[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 8, dtype=torch.float16)}, "x has dtype"),
        ({"bias": torch.ones(7)}, "bias has size 7 in dimension 0, not 8"),
        ({"residual": torch.ones(3, 8)}, "residual has another shape"),
        ({"weight": torch.ones(8, dtype=torch.bfloat16)}, "weight has dtype"),
        ({"seed": torch.ones(1)}, "seed has dtype"),
        ({"seed": torch.ones(3, dtype=torch.int64)}, "seed has 3 elements, not 1 or 2"),
        ({"p": 1.0}, "p is 1"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    args: dict[str, Any] = {
        "x": torch.ones(2, 8), "bias": torch.ones(8), "residual": torch.ones(2, 8), "weight": torch.ones(8),
        "shift": torch.ones(8), "seed": torch.tensor([1]), "stream": 0, "p": 0.1, "eps": 1e-5,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=message):
        torch.ops.megabert.dropout_add_layer_norm(**(args | change))
