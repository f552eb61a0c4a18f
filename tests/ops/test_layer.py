"""The element-wise operations of a layer against fp64, in awkward sizes: GELU with and without a gate, rotation, dropout, LayerNorm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabert import ops
from megabert.ops.rotary import THETA
from tests.helpers import tiny
from tests.ops import reference
from tests.ops.oracle import ON, check, needs_library, normal

pytestmark = needs_library
SEED, STREAM, EPS = 0x5EED, 9, 1e-12
PLACES = torch.tensor([[0, 1, 2, 0, 1], [3, 4, 5, 100, 8191]])


@ON
@pytest.mark.parametrize("name", ["bias_gelu", "bias_geglu"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 3), (2, 1023), (130, 96), (5, 3, 16), (700, 1024)], ids=str)
def test_gelu_with_and_without_a_gate(shape: tuple[int, ...], name: str, dtype: torch.dtype, device: str) -> None:
    wide = (*shape[:-1], 2 * shape[-1]) if name == "bias_geglu" else shape
    check(
        lambda x, b: [getattr(ops, name)(x, b, "native")], lambda x, b: [getattr(ops, name)(x, b, "torch")],
        lambda x, b: [getattr(reference, name)(x, b)],
        [normal(*wide, seed=1, scale=3), normal(wide[-1], seed=2)], [normal(*shape, seed=3)], dtype, device=device,
    )  # fmt: skip


def test_gelu_keeps_relative_accuracy_in_the_tail() -> None:
    """For very negative inputs gelu is tiny, not noise: relative error 1e-5 down to 1e-35, where 1 + erf gives 0."""
    x = torch.linspace(-12.5, 0, 1001)
    exact = reference.bias_gelu(x.double(), torch.zeros(1, dtype=torch.float64))
    found = ops.bias_gelu(x[:, None], torch.zeros(1), "native")[:, 0].double()
    assert ((found - exact).abs() <= 1e-5 * exact.abs() + 1e-37).all()
    x = torch.tensor([float("inf"), 3e38, 40.0, -40.0, -3e38, float("nan")])
    found = ops.bias_gelu(x[None], torch.zeros(6), "native")[0]
    assert found[:3].equal(x[:3]) and found[3:5].abs().max() == 0 and found[5].isnan()


def through_complex_numbers(qkv: Tensor, heads: int, size: int) -> Tensor:
    """The formula as the paper has it: pairs of columns are complex numbers, multiplied by exp(i angle)."""
    parts = qkv.view(*qkv.shape[:2], 3, heads, size)
    turn = PLACES[..., None] * THETA ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    pairs = torch.complex(parts[..., : size // 2], parts[..., size // 2 :])[:, :, :2]
    turned = pairs * torch.polar(torch.ones_like(turn), turn)[:, :, None, None]
    return torch.cat([torch.cat([turned.real, turned.imag], -1), parts[:, :, 2:]], 2).reshape(qkv.shape)


@ON
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize(("heads", "size"), [(1, 2), (2, 6), (3, 40), (2, 64)])
def test_rotate(heads: int, size: int, backend: str, dtype: torch.dtype, device: str) -> None:
    angles, there, shape = ops.rotation(PLACES, size), ops.rotation(PLACES.to(device), size), (2, 5, 3 * heads * size)

    def plain(x: Tensor) -> list[Tensor]:
        return [reference.rotate(x, *angles, heads)]

    check(
        lambda x: [ops.rotate(x, heads, there, backend)], plain,
        lambda x: [through_complex_numbers(x, heads, size)] if dtype != torch.float32 else plain(x),
        [normal(*shape, seed=1)], [normal(*shape, seed=2)], dtype, device=device,
    )  # fmt: skip


def test_rotation_has_the_angles_of_the_paper() -> None:
    """In fp32, whose angle at the last place of 8,192 has 13 bits behind the point."""
    qkv = normal(*PLACES.shape, 3 * 2 * 64, seed=1)
    found, wanted = ops.rotate(qkv, 2, ops.rotation(PLACES, 64), "torch"), through_complex_numbers(qkv, 2, 64)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-3)
    torch.testing.assert_close(found[:, :3], wanted[:, :3], rtol=0, atol=2e-6)


def norm_inputs(shape: tuple[int, ...]) -> list[Tensor]:
    vectors = [normal(shape[-1], seed=s) for s in (3, 4, 5)]
    return [normal(*shape, seed=1), vectors[0], normal(*shape, seed=2), vectors[1], vectors[2]]


def keep_factor(shape: tuple[int, ...], p: float) -> Tensor:
    rows = int(torch.tensor(shape[:-1]).prod())
    return reference.keep_mask(SEED, STREAM, rows, shape[-1], p).view(shape)


@ON
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("post", [False, True], ids=["pre", "post"])
@pytest.mark.parametrize("shape", [(1, 3), (2, 1023), (200, 96), (5, 3, 16), (40, 5000)], ids=str)
def test_dropout_add_layer_norm(shape: tuple[int, ...], post: bool, p: float, dtype: torch.dtype, device: str) -> None:
    seed, keep = torch.tensor([SEED], device=device), keep_factor(shape, p)

    def plain(x: Tensor, b: Tensor, r: Tensor, w: Tensor, s: Tensor) -> list[Tensor]:
        z = r + (x + b) * keep.to(x.dtype)
        normed = F.layer_norm(z, z.shape[-1:], w, s, EPS)
        return [normed, normed if post else z]

    def exact(x: Tensor, b: Tensor, r: Tensor, w: Tensor, s: Tensor) -> list[Tensor]:
        normed, z = reference.dropout_add_layer_norm(x, b, r, w, s, EPS, keep)
        return [normed, normed if post else z]

    check(
        lambda x, b, r, w, s: ops.dropout_add_layer_norm(x, b, r, w, s, p, EPS, seed, STREAM, "native", post=post),
        plain, exact, norm_inputs(shape), [normal(*shape, seed=7), normal(*shape, seed=8)], dtype, device=device,
    )  # fmt: skip


@pytest.mark.parametrize(("post", "used"), [(False, 0), (True, 0), (True, 1)])
def test_only_the_norm_is_used(post: bool, used: int) -> None:
    """A gradient that does not exist must not be needed: of z, of the norm's first or second use."""
    leaves = [t.float().requires_grad_() for t in norm_inputs((4, 24))]
    outputs = ops.dropout_add_layer_norm(*leaves, 0.1, EPS, torch.tensor([SEED]), STREAM, "native", post=post)
    exact = [t.double().requires_grad_() for t in norm_inputs((4, 24))]
    wanted = reference.dropout_add_layer_norm(*exact, EPS, keep_factor((4, 24), 0.1))[0]
    grads = [torch.autograd.grad(y.sum(), x) for y, x in ((outputs[used].double(), leaves), (wanted, exact))]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5, check_dtype=False)


def test_empty_batches_have_zero_gradients() -> None:
    x, v, w = torch.empty(0, 3, 48, requires_grad=True), *(torch.ones(48, requires_grad=True) for _ in "vw")
    turned = ops.rotate(x, 2, ops.rotation(torch.empty(0, 3, dtype=torch.int32), 8), "native")
    gelu = ops.bias_gelu(turned, v, "native")
    y, _ = ops.dropout_add_layer_norm(gelu, v, x, v, v, 0.1, EPS, torch.tensor([1]), 0, "native")
    ops.bias_geglu(y, w, "native").sum().backward()
    assert not v.grad.any() and not w.grad.any()


def test_a_layer_compiles_in_one_graph() -> None:
    def layer(x: Tensor, v: Tensor, seed: Tensor) -> Tensor:
        y, z = ops.dropout_add_layer_norm(ops.bias_gelu(x, v, "native"), v, x, v, v, 0.1, EPS, seed, STREAM, "native")
        first, second = ops.dropout_add_layer_norm(y, v, z, v + 1, v * 2, 0.1, EPS, seed, STREAM, "native", post=True)
        return (first.square() * second).sum()

    x, v, seed = normal(8, 32, seed=1).float().requires_grad_(), normal(32, seed=2).float(), torch.tensor([SEED])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    eager, traced = (torch.autograd.grad(f(x, v, seed), x)[0] for f in (layer, compiled))
    assert eager.equal(traced)


# -- dropout masks that follow the row, whichever micro-batch it is in ------------------------------------------------

ROWS, TOKENS, WIDTH, HEADS, KEY, P = 6, 5, 16, 2, 77, 0.3
Operation = Callable[..., Tensor]


def norm_of(backend: str) -> Operation:
    zeros, ones = torch.zeros(WIDTH), torch.ones(WIDTH)
    return lambda x, seed: ops.dropout_add_layer_norm(x, zeros, x, ones, zeros, P, 1e-6, seed, 5, backend, post=True)[0]


def attention_of(backend: str) -> Operation:
    def run(x: Tensor, seed: Tensor) -> Tensor:
        start, end = (torch.zeros(len(x), TOKENS).int(), torch.full((len(x), TOKENS), TOKENS - 1).int())
        inputs = ops.attention_inputs(backend, start, end, torch.full((len(x), 1), TOKENS - 1).int())
        return ops.attend(torch.cat([x, x * 2, x * 3], -1), HEADS, inputs, P, seed, 5, backend)

    return run


OPERATIONS: dict[str, Operation] = {
    **{f"dropout {kind}": partial(ops.dropout, p=P, stream=5, backend=kind) for kind in ("native", "torch")},
    **{f"norm {kind}": norm_of(kind) for kind in ("native", "torch")},
    **{f"attention {kind}": attention_of(kind) for kind in ("native", "fused_softmax", "sdpa")},
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rows_mask_follows_the_row(name: str) -> None:
    torch.manual_seed(0)
    x, operation = torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True), OPERATIONS[name]

    def run(first: int, last: int, *seed: int) -> tuple[Tensor, Tensor]:
        y = operation(x[first:last], seed=torch.tensor(seed))
        return y.detach(), torch.autograd.grad(y.square().sum(), x)[0][first:last]

    whole, gradient = run(0, ROWS, KEY, 0)
    parts = [run(first, last, KEY, first) for first, last in ((0, 2), (2, 3), (3, 6))]
    torch.testing.assert_close(torch.cat([y for y, _ in parts]), whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.cat([dx for _, dx in parts]), gradient, rtol=1e-5, atol=1e-5)
    for other in ((KEY, 1), (KEY + 1, 0)):
        assert (run(0, ROWS, *other)[0] - whole).abs().max() > 0.1


@pytest.mark.parametrize("backends", [("sdpa", "torch"), ("native", "native")], ids=["torch", "native"])
def test_recomputed_gradients_do_not_depend_on_micro_batches(backends: tuple[str, str]) -> None:
    changes = {"model__dropout": 0.1, "model__attention_dropout": 0.1, "model__activation_checkpointing": True}
    model = tiny.model(tiny.config(**changes, ops__attention=backends[0], ops__layer=backends[1])).train()

    def gradients(*cuts: tuple[int, int]) -> list[Tensor]:
        model.zero_grad()
        for first, last in cuts:
            out = model(**tiny.batch(3, range(first, last)).inputs(), seed=torch.tensor([KEY, first]))
            (out.mlm_loss_sum + out.nsp_loss_sum).backward()
        return [p.grad.clone() for p in model.parameters()]

    for ours, theirs in zip(gradients((6, 8), (0, 2), (2, 6)), gradients((0, 8)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
