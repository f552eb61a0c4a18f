"""The CUDA operations on a GPU: against fp64 under the same rule as on the CPU, and the CPU's dropout masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabert import ops
from tests.ops import oracle, reference
from tests.ops.oracle import FLOOR, error, normal
from tests.ops.test_attention import added, bounds, causal, plain_attention
from tests.ops.test_softmax_mask import SHAPE, factor, masks, plain

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SEED, STREAM, EPS = 0xFEED5, 3, 1e-5
FLOORS = FLOOR | {torch.float16: 1e-3}


def results(function: Callable[..., Any], inputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = [o for o in function(*leaves) if o.requires_grad]
    torch.autograd.backward(outputs, [g.to(o) for g, o in zip(grads, outputs, strict=True)])
    found = [*(o.detach() for o in outputs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    assert len(found) == len(outputs) + len(leaves)
    return [t.cpu() for t in found]


def check(
    native: Callable[..., Any], plain_torch: Callable[..., Any], exact: Callable[..., Any], inputs: list[Tensor],
    grads: list[Tensor], dtype: torch.dtype, multiple: float = 2.0,
) -> None:  # fmt: skip
    """`native` on CUDA, `plain_torch` on the CPU in the same type, `exact` in fp64."""
    inputs, grads = [t.to(dtype) for t in inputs], [g.to(dtype) for g in grads]
    truth = results(exact, [t.double() for t in inputs], grads)
    theirs = results(plain_torch, inputs, grads)
    ours = results(native, [t.cuda() for t in inputs], grads)
    for i, (a, b, t) in enumerate(zip(ours, theirs, truth, strict=True)):
        limit = multiple * error(b, t) + FLOORS[dtype]
        assert torch.isfinite(a).all() and error(a, t) <= limit, (
            f"result {i}: error {error(a, t):.2e}, allowed {limit:.2e}"
        )


def seed() -> Tensor:
    return torch.tensor([SEED], device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("kind", masks(SHAPE, torch.float32))
def test_softmax_mask(kind: str, p: float, dtype: torch.dtype) -> None:
    arguments, allowed, added = masks(SHAPE, dtype)[kind]
    there: Any = {name: t.cuda() for name, t in arguments.items()}
    keep = factor(SHAPE, p)
    check(
        lambda x: [ops.fused_softmax_mask(x, **there, scale=0.4, p=p, seed=seed(), stream=STREAM)],
        lambda x: [plain(x, allowed, added, keep)],
        lambda x: [reference.softmax_mask(x, allowed, added, 0.4, keep)],
        [normal(*SHAPE, seed=7, scale=4)], [normal(*SHAPE, seed=8)], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [1, 3, 1023, 1024, 4096, 8192])
def test_softmax_mask_sizes(keys: int, dtype: torch.dtype) -> None:
    shape, one = (2, 2, 5, keys), torch.ones((), dtype=torch.bool)
    nothing, keep = torch.zeros(()), factor(shape, 0.2)
    check(
        lambda x: [ops.fused_softmax_mask(x, scale=0.4, p=0.2, seed=seed(), stream=STREAM)],
        lambda x: [plain(x, one, nothing, keep)],
        lambda x: [reference.softmax_mask(x, one, nothing, 0.4, keep)],
        [normal(*shape, seed=7, scale=4)], [normal(*shape, seed=8)], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1023), (700, 1024), (5, 3, 4096)], ids=str)
def test_bias_gelu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(
        lambda x, b: [ops.bias_gelu(x, b, "native")], lambda x, b: [F.gelu(x + b)],
        lambda x, b: [reference.bias_gelu(x, b)],
        [normal(*shape, seed=1, scale=3), normal(shape[-1], seed=2)], [normal(*shape, seed=3)], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 2046), (700, 2816), (5, 3, 4096)], ids=str)
def test_bias_geglu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    half = (*shape[:-1], shape[-1] // 2)
    check(
        lambda x, b: [ops.bias_geglu(x, b, "native")], lambda x, b: [ops.bias_geglu(x, b, "torch")],
        lambda x, b: [reference.bias_geglu(x, b)],
        [normal(*shape, seed=1, scale=3), normal(shape[-1], seed=2)], [normal(*half, seed=3)], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "size"), [(1, 2), (3, 10), (16, 64)])
def test_rotate(heads: int, size: int, dtype: torch.dtype) -> None:
    angles = ops.rotation(torch.arange(600).view(4, 150).cuda(), size)
    exact = [t.cpu().double() for t in angles]
    check(
        lambda x: [ops.rotate(x, heads, angles, "native")], lambda x: [ops.rotate(x, heads, angles, "torch")],
        lambda x: [reference.rotate(x, *exact, heads)],
        [normal(4, 150, 3 * heads * size, seed=1)], [normal(4, 150, 3 * heads * size, seed=2)], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(1, 3), (3, 1023), (700, 1024), (40, 5000)], ids=str)
def test_dropout_add_layer_norm(shape: tuple[int, int], p: float, dtype: torch.dtype) -> None:
    keep = reference.keep_mask(SEED, STREAM, *shape, p)

    def plain_norm(x: Tensor, b: Tensor, r: Tensor, w: Tensor, s: Tensor) -> list[Tensor]:
        z = r + (x + b) * keep.to(x.dtype)
        return [F.layer_norm(z, z.shape[-1:], w, s, EPS), z]

    vectors = [normal(shape[-1], seed=s) for s in (3, 4, 5)]
    check(
        lambda x, b, r, w, s: ops.dropout_add_layer_norm(x, b, r, w, s, p, EPS, seed(), STREAM, "native"),
        plain_norm,
        lambda x, b, r, w, s: reference.dropout_add_layer_norm(x, b, r, w, s, EPS, keep),
        [normal(*shape, seed=1), vectors[0], normal(*shape, seed=2), *vectors[1:]],
        [normal(*shape, seed=7), normal(*shape, seed=8)], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("count", "vocab", "entries"), [(1, 1, 1), (5, 1023, 1152), (2100, 500, 512), (40, 30522, 30592)]
)
def test_mlm_loss(count: int, vocab: int, entries: int, dtype: torch.dtype) -> None:
    labels = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(1))
    labels[1::4] = -100
    there = labels.cuda()
    check(
        lambda h, w, b: [ops.mlm_loss(h, w, b, there, vocab, "native", 0.1, 1e-3)[0]],
        lambda h, w, b: [ops.mlm_loss(h, w, b, labels, vocab, "torch", 0.1, 1e-3)[0]],
        lambda h, w, b: [reference.mlm_loss(h, w, b, labels, vocab, 0.1, 1e-3)[0]],
        [normal(count, 64, seed=2), normal(entries, 64, seed=3, scale=0.3), normal(entries, seed=4)],
        [torch.tensor(0.37)], dtype,
    )  # fmt: skip


def test_mlm_loss_of_several_chunks() -> None:
    """More logits than a chunk has (csrc/mlm_loss/cuda.cu), with fp64 on the GPU too."""
    count, vocab, entries = 10_000, 30_522, 30_592
    labels = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(1)).cuda()
    labels[1::4] = -100
    inputs = normal(count, 64, seed=2), normal(entries, 64, seed=3, scale=0.3), normal(entries, seed=4)
    oracle.check(
        lambda h, w, b: [ops.mlm_loss(h, w, b, labels, vocab, "native")[0]],
        lambda h, w, b: [ops.mlm_loss(h, w, b, labels, vocab, "torch")[0]],
        lambda h, w, b: [reference.mlm_loss(h, w, b, labels, vocab)[0]],
        [t.cuda() for t in inputs], [torch.tensor(0.37, device="cuda")], torch.bfloat16,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "vocab"), [(1, 1), (70, 999), (5, 1024), (40, 30522)])
def test_mlm_loss_of_logits(count: int, vocab: int, dtype: torch.dtype) -> None:
    labels = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(1))
    labels[1::4] = -100
    there, one = labels.cuda(), torch.eye(vocab, dtype=torch.float64)
    nothing = torch.zeros(vocab, dtype=torch.float64)
    check(
        lambda x: [ops.mlm_loss_of_logits(x, there, "native", 0.1, 1e-3)[0]],
        lambda x: [ops.mlm_loss_of_logits(x, labels, "torch", 0.1, 1e-3)[0]],
        lambda x: [reference.mlm_loss(x, one, nothing, labels, vocab, 0.1, 1e-3)[0]],
        [normal(count, vocab, seed=5, scale=3)], [torch.tensor(0.37)], dtype,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
def test_attention_of_512_tokens_repeats_bit_for_bit_when_asked(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one block of keys, where torch's flash attention adds up dq atomically by default."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    qkv, grad = (normal(8, 512, n * 256, seed=s).bfloat16().cuda() for n, s in ((3, 1), (1, 2)))
    start, end = (torch.full((8, 512), n, dtype=torch.int32, device="cuda") for n in (0, 512))
    inputs = ops.attention_inputs(backend, start, end, end[:, :1])
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(20):
            leaf = qkv.clone().requires_grad_()
            ops.attend(leaf, 4, inputs, 0.0, seed(), STREAM, backend).backward(grad)
            assert leaf.grad is not None
            found.append(leaf.grad)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(again.equal(found[0]) for again in found)


ATTENTION = {
    "one token": ([[1]], 1, 1, 8),
    "three": ([[3], [1, 2]], 3, 2, 16),
    "packed and padded": ([[20, 1, 19], [45], [0]], 45, 3, 24),
    "a full row": ([[128], [60, 1, 67], [100, 20]], 128, 16, 64),
    "161": ([[90, 70], [161]], 161, 2, 64),
    "512": ([[512], [150, 362], [200, 100, 212], [0]], 512, 4, 64),
    "1023": ([[1023], [600, 400]], 1023, 1, 40),
}


def attention_mask(case: str, left_to_right: bool) -> tuple[Tensor, Tensor]:
    start, end, _ = bounds(*ATTENTION[case][0], width=ATTENTION[case][1])
    return start, causal(start, end) if left_to_right else end


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("left_to_right", [False, True])
@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case: str, left_to_right: bool, p: float, dtype: torch.dtype) -> None:
    rows, width, heads, size = ATTENTION[case]
    start, end = attention_mask(case, left_to_right)
    there = [start.cuda(), end.cuda()]
    keep = reference.keep_mask(SEED, STREAM, len(rows) * heads * width, width, p).view(-1, heads, width, width)
    check(
        lambda qkv, bias: [ops.attend(qkv, heads, there, p, seed(), STREAM, "native", bias)],
        added(lambda qkv: plain_attention(qkv, heads, start, end, keep)),
        added(lambda qkv: reference.attention(qkv, heads, start, end, keep)),
        [normal(len(rows), width, 3 * heads * size, seed=1, scale=1.5), normal(3 * heads * size, seed=3)],
        [normal(len(rows), width, heads * size, seed=2)], dtype, multiple=4,
    )  # fmt: skip


@pytest.mark.parametrize("case", ["a full row", "512"])
def test_attention_repeats_bit_for_bit(case: str) -> None:
    rows, width, heads, size = ATTENTION[case]
    there = [t.cuda() for t in attention_mask(case, False)]
    qkv = normal(len(rows), width, 3 * heads * size, seed=1).to("cuda", torch.bfloat16)
    found = []
    for _ in range(10):
        leaves = qkv.detach().requires_grad_(), torch.zeros_like(qkv[0, 0]).requires_grad_()
        out = ops.attend(leaves[0], heads, there, 0.1, seed(), STREAM, "native", leaves[1])
        found.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    assert all(a.equal(b) for other in found[1:] for a, b in zip(other, found[0], strict=True))


def test_attention_with_wrong_bounds_is_nan_and_touches_nothing() -> None:
    start, end = (t.cuda() for t in attention_mask("161", False))
    start[0, 3], end[0, 4], start[1, 96:128], end[1, 96:128] = -1, 162, -(2**31), 2**31 - 1
    wrong = torch.zeros(2, 161, dtype=torch.bool, device="cuda")
    wrong[0, 3:5] = wrong[1, 96:128] = True
    qkv = normal(2, 161, 3 * 2 * 64, seed=1).to("cuda", torch.bfloat16).requires_grad_()
    bias = torch.zeros_like(qkv[0, 0]).requires_grad_()
    out = ops.attend(qkv, 2, [start, end], 0.1, seed(), STREAM, "native", bias)
    grad, of_bias = torch.autograd.grad(out, [qkv, bias], torch.ones_like(out))
    torch.cuda.synchronize()
    for found in (out, grad[..., :128]):
        assert found.isnan().all(-1).equal(wrong) and found.isnan().any(-1).equal(wrong)
    assert grad[..., 128:].isfinite().all()
    assert of_bias[:128].isnan().all() and of_bias[128:].isfinite().all()


@pytest.mark.parametrize(
    ("qkv", "heads", "message"),
    [
        (torch.ones(1, 4, 192), 1, "qkv has dtype Float, not BFloat16 or Half"),
        (torch.ones(1, 4, 384).bfloat16(), 1, "heads have size 128, not a multiple of 8 up to 64"),
        (torch.ones(1, 4, 60).bfloat16(), 1, "heads have size 20, not a multiple of 8 up to 64"),
    ],
)
def test_what_attention_cannot_take_is_named(qkv: Tensor, heads: int, message: str) -> None:
    bound = torch.zeros(1, 4, dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match=message):
        torch.ops.megabert.attention(qkv.cuda(), None, bound, bound, seed(), 0, heads, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dropout_masks_are_the_cpus(dtype: torch.dtype) -> None:
    x = normal(300, 1027, seed=1).to(dtype)
    here = torch.ops.megabert.dropout(x, torch.tensor([SEED]), STREAM, 0.3)
    there = torch.ops.megabert.dropout(x.cuda(), seed(), STREAM, 0.3)
    assert (here == 0).equal((there == 0).cpu())


def test_a_stream_of_ones_own() -> None:
    """Kernels run on torch's current stream: what follows on it sees their result."""
    x, bias = torch.randn(4096, 4096, device="cuda"), torch.zeros(4096, device="cuda")
    expected = F.gelu(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        found = ops.bias_gelu(x * 2, bias, "native")
        difference = (found - F.gelu(x * 2)).abs().max()
    stream.synchronize()
    assert difference < 1e-5 and not found.equal(expected)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("bias_gelu", (torch.ones(2, 4), torch.ones(4)), "bias is not on the CPU|x is not on a CUDA device"),
        ("dropout", (torch.ones(2, 4), torch.tensor([1]), 0, 0.1), "seed is not on|x is not on a CUDA device"),
    ],
)
def test_mixed_devices_are_named(name: str, arguments: tuple[Any, ...], message: str) -> None:
    op = getattr(torch.ops.megabert, name)
    for moved in (0, 1):
        mixed = [a.cuda() if i == moved else a for i, a in enumerate(arguments)]
        with pytest.raises(RuntimeError, match=message.replace("|x", "|bias is not|x") + "|not on a CUDA"):
            op(*mixed)
