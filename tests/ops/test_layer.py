"""The element-wise operations of a layer against fp64, in awkward sizes: GELU with and without a gate, rotation, LayerNorm; and
dropout masks: the published Philox, the same mask from oracle and native code, the right share, no visible pattern."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabert import ops
from tests.helpers import tiny
from tests.ops import reference
from tests.ops.oracle import ON, check, needs_library, normal

pytestmark = needs_library
SEED, STREAM, EPS = 0x0123456789ABCDEF, 9, 1e-12
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
    x = torch.tensor([math.inf, 3e38, 40.0, -40.0, -3e38, math.nan])
    found = ops.bias_gelu(x[None], torch.zeros(6), "native")[0]
    assert found[:3].equal(x[:3]) and found[3:5].abs().max() == 0 and found[5].isnan()


def through_complex_numbers(qkv: Tensor, heads: int, size: int) -> Tensor:
    """The formula as the paper has it: pairs of columns are complex numbers, multiplied by exp(i angle)."""
    parts = qkv.view(*qkv.shape[:2], 3, heads, size)
    turn = PLACES[..., None] * 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    pairs = torch.complex(parts[..., : size // 2], parts[..., size // 2 :])[:, :, :2]
    turned = pairs * torch.polar(torch.ones_like(turn), turn)[:, :, None, None]
    return torch.cat([torch.cat([turned.real, turned.imag], -1), parts[:, :, 2:]], 2).reshape(qkv.shape)


@ON
@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize(("heads", "size"), [(1, 2), (2, 6), (3, 40), (2, 64)])
def test_rotate(heads: int, size: int, backend: str, dtype: torch.dtype, device: str) -> None:
    angles, shape = ops.rotation(PLACES, size), (2, 5, 3 * heads * size)
    there = ops.Rotation(*(tensor.to(device) for tensor in angles))  # another device's powers differ in the last bit

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
    sizes = (shape, shape[-1:], shape, shape[-1:], shape[-1:])
    return [normal(*size, seed=s) for size, s in zip(sizes, (1, 3, 2, 4, 5), strict=True)]


@ON
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("post", [False, True], ids=["pre", "post"])
@pytest.mark.parametrize("shape", [(1, 3), (2, 1023), (200, 96), (5, 3, 16), (40, 5000)], ids=str)
def test_dropout_add_layer_norm(shape: tuple[int, ...], post: bool, p: float, dtype: torch.dtype, device: str) -> None:
    seed, keep = torch.tensor([SEED], device=device), reference.keep_mask(SEED, STREAM, shape, p)

    def plain(x: Tensor, b: Tensor, r: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        z = r + (x + b) * keep.to(x.dtype)
        return F.layer_norm(z, z.shape[-1:], w, s, EPS), z

    def outputs(normed: Tensor, z: Tensor) -> list[Tensor]:
        return [normed, normed if post else z]

    check(
        lambda *inputs: ops.dropout_add_layer_norm(*inputs, p, EPS, seed, STREAM, "native", post=post),
        lambda *inputs: outputs(*plain(*inputs)),
        lambda *inputs: outputs(*reference.dropout_add_layer_norm(*inputs, EPS, keep)),
        norm_inputs(shape), [normal(*shape, seed=7), normal(*shape, seed=8)], dtype, device=device,
    )  # fmt: skip


@pytest.mark.parametrize(("post", "used"), [(False, 0), (True, 0), (True, 1)])
def test_only_the_norm_is_used(post: bool, used: int) -> None:
    """A gradient that does not exist must not be needed: of z, of the norm's first or second use."""
    leaves = [t.float().requires_grad_() for t in norm_inputs((4, 24))]
    outputs = ops.dropout_add_layer_norm(*leaves, 0.1, EPS, torch.tensor([SEED]), STREAM, "native", post=post)
    exact = [t.requires_grad_() for t in norm_inputs((4, 24))]
    wanted = reference.dropout_add_layer_norm(*exact, EPS, reference.keep_mask(SEED, STREAM, (4, 24), 0.1))[0]
    grads = [torch.autograd.grad(y.sum(), x) for y, x in ((outputs[used].double(), leaves), (wanted, exact))]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("rms", [False, True])
def test_gradients_of_many_rows_in_bf16_are_those_of_fp32(rms: bool) -> None:
    """Of an embedding of two rows, and of a norm, over 16,384 positions: torch's own, added up in bf16, are 7 to 70% off."""
    draw = torch.Generator().manual_seed(4)
    grad, x = (torch.randn(64, 256, 8, generator=draw).add(mean).bfloat16() for mean in (0.2, 0.0))
    ids, one = torch.randint(2, (64, 256), generator=draw, dtype=torch.int32), torch.ones(8, dtype=torch.bfloat16)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        weights = [t.to(dtype, copy=True).requires_grad_() for t in (one.repeat(2, 1), one, 0 * one)]
        y = ops.embedding(ids, weights[0]) + ops.norm(x.to(dtype), weights[1], None if rms else weights[2], EPS, rms)
        y.backward(grad.to(dtype))
        found.append([w.grad.double() for w in weights if w.grad is not None])
    for one, exact in zip(*found, strict=True):
        torch.testing.assert_close(one, exact, rtol=0, atol=4e-3 * float(exact.abs().max()))
    assert len(found[0]) == 3 - rms


def test_empty_batches_have_zero_gradients() -> None:
    x, v, w = torch.empty(0, 3, 48, requires_grad=True), *(torch.ones(48, requires_grad=True) for _ in "vw")
    turned = ops.rotate(x, 2, ops.rotation(torch.empty(0, 3, dtype=torch.int32), 8), "native")
    gelu = ops.bias_gelu(turned, v, "native")
    y, _ = ops.dropout_add_layer_norm(gelu, v, x, v, v, 0.1, EPS, torch.tensor([1]), 0, "native")
    ops.bias_geglu(y, w, "native").sum().backward()
    assert not v.grad.any() and not w.grad.any()


@pytest.mark.parametrize("attention", ["sdpa", "native", "fused_softmax"])
def test_recomputed_gradients_do_not_depend_on_micro_batches(attention: str) -> None:
    """Each dropout mask follows its row, and an update's seed: others give other gradients."""
    changes = {"model__dropout": 0.1, "model__attention_dropout": 0.1, "model__activation_checkpointing": True}
    layer = "torch" if attention == "sdpa" else "native"
    model = tiny.model(tiny.config(**changes, ops__attention=attention, ops__layer=layer)).train()

    def gradients(*cuts: tuple[int, int], seed: int = 77) -> list[Tensor]:
        model.zero_grad()
        for first, last in cuts:
            out = model(**tiny.batch(3, range(first, last)).inputs(), seed=torch.tensor([seed, first]))
            (out.mlm_loss_sum + out.nsp_loss_sum).backward()
        return [p.grad.clone() for p in model.parameters()]

    whole = gradients((0, 8))
    torch.testing.assert_close(gradients((6, 8), (0, 2), (2, 6)), whole, rtol=1e-4, atol=1e-5)
    assert max((a - b).abs().max() for a, b in zip(gradients((0, 8), seed=78), whole, strict=True)) > 1e-3


def test_philox_gives_the_published_values() -> None:
    """Known answers of philox4x32-10 from the Random123 distribution."""
    for bits, words in (
        (0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (0xFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ):
        assert [int(word) for word in reference.philox((torch.tensor([bits]),) * 4, (bits, bits))] == words


def native_mask(
    seed: int, stream: int, rows: int, columns: int, p: float, dtype=torch.float32, device: str = "cpu"
) -> Tensor:
    """The factor that the native operation multiplies with."""
    ones, seeds = torch.ones(rows, columns, dtype=dtype, device=device), torch.tensor([seed], device=device)
    return ops.dropout(ones, p, seeds, stream, "native").cpu()


@ON
def test_native_mask_is_the_oracles(dtype: torch.dtype, device: str) -> None:
    shapes = [(1, 1, 0.5, 0), (3, 1023, 0.1, 7), (257, 64, 0.9, 2**31), (5, 100, 1e-9, 1), (4, 9, 0.0, 1)]
    for rows, columns, p, stream in shapes:
        expected = reference.keep_mask(SEED, stream, (rows, columns), p)
        assert native_mask(SEED, stream, rows, columns, p, dtype, device).equal(expected.to(dtype))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_share_and_independence_of_the_mask(p: float) -> None:
    rows, columns = 1000, 1000
    kept = (native_mask(SEED, 3, rows, columns, p) != 0).double()
    sigma = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(1 - kept.mean().item() - p) < 4 * sigma + 2**-17  # p is rounded to 16 bits
    centred = (kept - kept.mean()) / kept.std()
    others = {"next column": centred.roll(1, 1), "eight on": centred.roll(8, 1), "next row": centred.roll(1, 0)}
    for what, seed, stream in (("next seed", SEED + 1, 3), ("next stream", SEED, 4)):
        others[what] = (native_mask(seed, stream, rows, columns, p) != 0).double() - (1 - p)
    for name, other in others.items():
        correlation = (centred * other / other.std()).mean().item()
        assert abs(correlation) < 5e-3, f"{name}: correlation {correlation:.4f}"  # 5 sigma
    for share in (kept.mean(0), kept.mean(1)):  # no column or row is special
        assert (share - (1 - p)).abs().max() < 5.5 * (p * (1 - p) / rows) ** 0.5
