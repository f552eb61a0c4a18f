"""The CUDA kernels' own source on the CPU, a fibre for each thread, against fp64 and against the same rule as the CPU code.

The harness finds a barrier that not all threads reach and an access past the end of an argument.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabert import ops
from tests.csrc.cuda_on_cpu import Guarded, Kernels, Result, compiler
from tests.ops import reference
from tests.ops.oracle import FLOOR, compare, normal, results
from tests.ops.test_attention import arbitrary, causal, plain_attention
from tests.ops.test_attention import bounds as sequence_bounds
from tests.ops.test_softmax_mask import SCALE, bounds

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
SEED, STREAM = 0x5EED5EED5, 7
SEEDS = torch.tensor([SEED])


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels()


def agree(
    found: list[Tensor], plain: Callable[..., Any], exact: Callable[..., Any], inputs: list[Tensor],
    grads: list[Tensor], dtype: torch.dtype, multiple: float = 2.0,
) -> None:  # fmt: skip
    """Asserts the rule of tests/ops/oracle.py for a kernel's outputs and the gradients of all inputs."""
    truth = results(exact, [t.double() for t in inputs], grads)
    compare(found, results(plain, inputs, grads), truth, dtype, multiple)


def empty(dtype: torch.dtype, *shape: int) -> Tensor:
    """NaN or a large number, so that what is not written shows."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else 77, dtype=dtype)


def result(dtype: torch.dtype, *shape: int) -> Result:
    return Result(empty(dtype, *shape))


def test_wrong_barriers_and_reads_are_noticed(kernels: Kernels) -> None:
    assert "not reached by all threads" in kernels.call("wrong_barrier")
    x, y = (Guarded(kernels.library, torch.zeros(40)) for _ in range(2))
    assert "memory outside an argument" in kernels.call("wrong_bounds", x, y, 40)


class SoftmaxMask(ctypes.Structure):
    """csrc/softmax_mask/mask.h"""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "queries", "keys")), ("scale", ctypes.c_float),
        ("start", ctypes.c_void_p), ("end", ctypes.c_void_p),
        ("start_stride", ctypes.c_int64 * 2), ("end_stride", ctypes.c_int64 * 2),
        ("mask", ctypes.c_void_p), ("kind", ctypes.c_int32), ("mask_stride", ctypes.c_int64 * 4),
    ]  # fmt: skip


KINDS = {"none": 0, "bool": 1, "added": 2}


def softmax_arguments(shape: tuple[int, ...], scale: float, start: Guarded, end: Guarded, kind: str) -> SoftmaxMask:
    found = SoftmaxMask(*shape[1:], scale, start.address, end.address, kind=KINDS[kind])
    found.start_stride[:] = found.end_stride[:] = [shape[2], 1]
    return found


@DTYPES
@pytest.mark.parametrize(
    ("shape", "kind", "p"),
    [
        ((1, 1, 1, 1), "none", 0.1), ((2, 2, 3, 37), "bool", 0.1), ((2, 2, 3, 40), "added", 0.0),
        ((1, 2, 2, 512), "added", 0.1), ((1, 1, 2, 1023), "bool", 0.0), ((1, 1, 2, 2000), "added", 0.1),
        ((1, 1, 1, 4095), "none", 0.1), ((1, 1, 1, 8192), "none", 0.0),
    ],
    ids=str,
)  # fmt: skip
def test_softmax_mask(kernels, shape, kind, p, dtype) -> None:
    batch, heads, queries, keys = shape
    rows = batch * heads * queries
    start, end = bounds(shape)
    allowed, added = reference.inside(start, end, keys), torch.zeros(())
    mask = None
    if kind == "bool":
        mask = torch.rand(batch, 1, queries, keys, generator=torch.Generator().manual_seed(3)) < 0.7
        allowed, strides = allowed & mask, [queries * keys, 0, keys, 1]
    elif kind != "none":
        mask = normal(heads, keys, seed=4).to(dtype)
        added, strides = mask[None, :, None], [0, keys, 0, 1]
    held = [Guarded(kernels.library, t) for t in (start, end, *([mask] if mask is not None else []))]
    arguments = softmax_arguments(shape, SCALE, *held[:2], kind)
    if mask is not None:
        arguments.mask, arguments.mask_stride[:] = held[2].address, strides
    scores, grad = (normal(*shape, seed=s, scale=c).to(dtype) for s, c in ((7, 4), (8, 1)))
    keep = reference.keep_mask(SEED, STREAM, shape, p)
    made, drop = result(dtype, *shape), (rows, STREAM, p, SEEDS)
    out, probs = kernels.run("softmax_mask", dtype, arguments, scores, made, made, *drop)
    (dscores,) = kernels.run("softmax_mask_backward", dtype, grad, probs if p else out, made, keys, SCALE, *drop)
    agree(
        [out, dscores],
        lambda x: [reference.users_softmax(x, allowed, added, SCALE, keep)],
        lambda x: [reference.softmax_mask(x, allowed, added, SCALE, keep)],
        [scores], [grad], dtype,
    )  # fmt: skip
    assert (out == 0)[(keep == 0).expand(shape)].all() and (out == 0)[~allowed.expand(shape)].all()


def test_softmax_mask_reads_no_dropped_gradient(kernels: Kernels) -> None:
    shape, p = (1, 1, 4, 24), 0.3
    probs, drop = torch.full(shape, 1 / 24), (4, STREAM, p, SEEDS)
    kept = reference.keep_mask(SEED, STREAM, shape, p).bool()
    found = [
        kernels.run(
            "softmax_mask_backward", FP32, torch.where(kept, 1.0, dropped), probs, Result(probs), 24, SCALE, *drop
        )[0]
        for dropped in (0.0, torch.inf)
    ]
    assert found[1].isfinite().all() and found[1].equal(found[0])


def test_softmax_mask_with_wrong_bounds_is_nan_and_touches_nothing(kernels: Kernels) -> None:
    shape = (1, 1, 4, 24)
    start, end = torch.tensor([[0, -1, 25, 3]]).int(), torch.tensor([[24, 5, 30, 25]]).int()
    held = [Guarded(kernels.library, t) for t in (start, end)]
    arguments, zeros = softmax_arguments(shape, 1.0, *held, "none"), torch.zeros(shape)
    (out,) = kernels.run("softmax_mask", FP32, arguments, zeros, Result(zeros), zeros, 4, 0, 0.0, SEEDS)
    assert out[0, 0].isnan().all(-1).tolist() == [False, True, True, True]


SIZES = [(1, 1), (4, 3), (5, 1023), (7, 1024), (4, 2056)]


@DTYPES
@pytest.mark.parametrize("name", ["bias_gelu", "bias_geglu"])
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_gelu_with_and_without_a_gate(kernels: Kernels, rows: int, width: int, name: str, dtype: torch.dtype) -> None:
    gate = name == "bias_geglu"
    wide = 2 * width if gate else width
    given = normal(rows, wide, seed=1, scale=3), normal(wide, seed=2), normal(rows, width, seed=3)
    x, bias, grad = (t.to(dtype) for t in given)
    (y,) = kernels.run("activate", dtype, gate, x, bias, result(dtype, rows, width), rows, width)
    dx, dbias = kernels.run(
        "activate_backward", dtype, gate, grad, x, bias, result(dtype, rows, wide), empty(FP32, 3, wide),
        result(dtype, wide), rows, width,
    )  # fmt: skip
    plain, exact = getattr(ops, name), getattr(reference, name)
    agree([y, dx, dbias], lambda *a: [plain(*a, "torch")], lambda *a: [exact(*a)], [x, bias], [grad], dtype)


@DTYPES
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(("rows", "heads", "half"), [(1, 1, 1), (4, 3, 5), (5, 2, 12), (7, 16, 32), (4, 24, 64)])
def test_rotate(kernels: Kernels, rows: int, heads: int, half: int, back: bool, dtype: torch.dtype) -> None:
    x, angles = normal(rows, 6 * heads * half, seed=1).to(dtype), normal(rows, half, seed=2)
    cos, sin = angles.cos().float(), angles.sin().float()
    (y,) = kernels.run("rotate", dtype, x, cos, sin, result(dtype, *x.shape), rows, heads, half, back)
    both = [reference.rotate(x.to(kind), cos, -sin if back else sin, heads) for kind in (dtype, torch.float64)]
    compare([y], [both[0]], [both[1]], dtype)
    assert y[:, 4 * heads * half :].equal(x[:, 4 * heads * half :]), "values are copied"


@DTYPES
@pytest.mark.parametrize(("rows", "width"), SIZES)
@pytest.mark.parametrize(("lines", "place"), [(0, 0), (3, 4)], ids=["alone", "part of a larger batch"])
def test_dropout_draws_the_oracles_mask(kernels, rows, width, lines, place, dtype) -> None:
    x, seed = normal(rows, width, seed=1).to(dtype), torch.tensor([SEED, place])
    with kernels.lines_of_a_row(lines):
        (y,) = kernels.run("dropout", dtype, x, result(dtype, rows, width), rows, width, STREAM, 0.3, seed)
    keep = reference.keep_mask(SEED, STREAM, (lines * place + rows, width), 0.3)[lines * place :]
    torch.testing.assert_close(y.double(), x.double() * keep, rtol=2 * FLOOR[dtype], atol=0)


GRADIENTS = [(0.0, "of y"), (0.1, "of y"), (0.1, "of z")]
WIDE = [(4, 4100, 0.1, "of y"), (4, 4104, 0.0, "of z"), (5, 8192, 0.1, "of y")]  # two groups a thread


@DTYPES
@pytest.mark.parametrize(
    ("rows", "width", "p", "second"), [*((*size, *gradient) for size in SIZES for gradient in GRADIENTS), *WIDE]
)
def test_layer_norm(kernels: Kernels, rows: int, width: int, p: float, second: str, dtype: torch.dtype) -> None:
    x, residual, grad, more = (normal(rows, width, seed=s).to(dtype) for s in (1, 2, 7, 8))
    bias, weight, shift = (normal(width, seed=s).to(dtype) for s in (3, 4, 5))
    keep = reference.keep_mask(SEED, STREAM, (rows, width), p)
    made, statistic, drop = result(dtype, rows, width), result(FP32, rows), (STREAM, p, SEEDS)
    y, z, mean, rstd = kernels.run(
        "layer_norm", dtype, x, bias, residual, weight, shift, made, made, statistic, statistic, rows, width, 1e-5,
        *drop,
    )  # fmt: skip
    vector, partial = result(dtype, width), empty(FP32, 3, 3, width)
    *dx, dresidual, dbias, dweight, dshift = kernels.run(
        "layer_norm_backward", dtype, grad, more, second == "of z", z, weight, mean, rstd, made if p else None, made,
        partial, vector, vector, vector, rows, width, *drop,
    )  # fmt: skip

    def plain(x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, shift: Tensor) -> list[Tensor]:
        z = residual + (x + bias) * keep.to(x.dtype)
        return [F.layer_norm(z, (width,), weight, shift, 1e-5), z]

    grads = [grad, more] if second == "of z" else [grad.double() + more, torch.zeros(rows, width)]
    found = [y, z, *(dx or [dresidual]), dresidual, dbias, dweight, dshift]
    agree(found, plain, plain, [x, residual, bias, weight, shift], grads, dtype)


@DTYPES
@pytest.mark.parametrize(("rows", "vocab", "stride"), [(1, 1, 1), (4, 3, 128), (5, 1023, 1023), (6, 4500, 4608)])
def test_mlm_loss(kernels: Kernels, rows: int, vocab: int, stride: int, dtype: torch.dtype) -> None:
    logits, bias = normal(rows, stride, seed=1, scale=3).to(dtype), normal(stride, seed=2).to(dtype)
    labels = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(3))
    labels[1::3] = -100
    labels[0] = (logits[0, :vocab].float() + bias[:vocab].float()).argmax()
    count = result(torch.int64, 1)
    dlogits, lse, dbias, total, hit_count, predictions = kernels.run(
        "mlm_loss", dtype, Result(logits), bias, labels, empty(FP32, rows), result(FP32, rows), empty(torch.int32, rows),
        empty(FP32, 3, stride), result(dtype, stride), result(FP32, 1), count, count, rows, vocab, stride,
    )  # fmt: skip

    def exact(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return reference.mlm_loss(logits, torch.eye(stride, dtype=logits.dtype), bias, labels, vocab)

    agree([total[0], dlogits, dbias], exact, exact, [logits, bias], [torch.ones(())], dtype)
    logsumexp = (logits.double() + bias.double())[:, :vocab].logsumexp(-1) * (labels >= 0)
    torch.testing.assert_close(lse.double(), logsumexp, rtol=1e-5, atol=1e-5)
    hits = int(exact(logits.double(), bias.double())[1])
    assert int(hit_count) == hits >= 1 and int(predictions) == int((labels >= 0).sum())
    assert (dlogits[:, vocab:] == 0).all() and (dlogits[labels < 0] == 0).all()


def test_mlm_loss_of_equal_logits_and_of_a_wrong_label(kernels: Kernels) -> None:
    """Of equal logits the first is the prediction; a label outside the vocabulary makes its row NaN and no other."""
    labels, zero = torch.tensor([0, 5, 8, -1]), torch.zeros(1).long()
    dlogits, loss, correct = kernels.run(
        "mlm_loss", FP32, Result(torch.zeros(4, 8)), torch.zeros(8), labels, result(FP32, 4), empty(FP32, 4),
        result(torch.int32, 4), empty(FP32, 3, 8), torch.zeros(8), torch.zeros(1), zero, zero, 4, 8, 8,
    )  # fmt: skip
    assert correct.tolist()[:2] == [1, 0]
    assert loss.isnan().tolist() == dlogits.isnan().all(-1).tolist() == [False, False, True, True]


def attend(
    kernels: Kernels, qkv: Tensor, grad: Tensor, start: Tensor, end: Tensor, heads: int, p: float, place: int = 0
) -> list[Tensor]:
    """context, log-sum-exp, dqkv and the gradient of the bias"""
    batch, width, triple = qkv.shape
    size, tiles = triple // 3 // heads, -(-width // 32)
    numbers = (batch, width, heads, size, STREAM, p, torch.tensor([SEED, place]))
    context, lse = kernels.run(
        "attention", BF16, qkv, start, end, result(BF16, *grad.shape), result(FP32, batch, heads, width), *numbers
    )
    partial = empty(FP32, batch * heads, tiles * 32, 64) if width > 128 else None
    dqkv, dbias = kernels.run(
        "attention_backward", BF16, grad, qkv, context, lse, start, end, result(BF16, *qkv.shape), result(BF16, triple),
        empty(FP32, batch, triple), partial, *numbers,
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


@pytest.mark.parametrize(("rows", "width", "heads", "size", "p", "kind"), ROWS)
def test_attention(kernels, rows, width, heads, size, p, kind) -> None:
    start, end, _ = sequence_bounds(*rows, width=width)
    if kind != "whole":
        start, end = (start, causal(start, end)) if kind == "causal" else arbitrary(len(rows), width)
    qkv = normal(len(rows), width, 3 * heads * size, seed=1, scale=1.5).to(BF16)
    grad = normal(len(rows), width, heads * size, seed=2).to(BF16)
    keep = reference.keep_mask(SEED, STREAM, (len(rows), heads, width, width), p)
    context, _, dqkv, dbias = attend(kernels, qkv, grad, start, end, heads, p)
    agree(
        [context, dqkv, dbias],
        lambda qkv, bias: [plain_attention(qkv + bias, heads, start, end, keep)],
        lambda qkv, bias: [reference.attention(qkv + bias, heads, start, end, keep)],
        [qkv, torch.zeros_like(qkv[0, 0])], [grad], BF16, multiple=4,
    )  # fmt: skip
    silent = end <= start
    assert (context[silent] == 0).all() and (dqkv.view(*start.shape, 3, -1)[silent][:, 0] == 0).all()


def test_rows_of_a_larger_batch_have_its_mask(kernels: Kernels) -> None:
    width, heads = 40, 2
    start, end, _ = sequence_bounds(*[[30, 10]] * 3, width=width)
    qkv, grad = (normal(3, width, 3 * heads * 16, seed=1).bfloat16(), normal(3, width, heads * 16, seed=2).bfloat16())
    with kernels.lines_of_a_row(heads * width):
        whole = attend(kernels, qkv, grad, start, end, heads, 0.3)
        part = attend(kernels, qkv[1:], grad[1:], start[1:], end[1:], heads, 0.3, place=1)
    for ours, theirs in zip(part[:3], whole[:3], strict=True):  # not the gradient of the bias, a sum over rows
        assert torch.equal(ours, theirs[1:])


def test_attention_with_wrong_bounds_is_nan_and_touches_nothing(kernels: Kernels) -> None:
    width = 40
    start, end, _ = sequence_bounds([40], width=width)
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
