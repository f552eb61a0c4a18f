"""The CUDA operations on a GPU: against fp64 under the same rule as on the CPU, and the CPU's dropout masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabert.model import ops
from megabert.model.ops import reference
from tests.model.ops.oracle import FLOOR, error, normal
from tests.model.ops.test_softmax_mask import SHAPE, factor, masks, plain

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
    grads: list[Tensor], dtype: torch.dtype,
) -> None:  # fmt: skip
    """`native` on CUDA, `plain_torch` on the CPU in the same type, `exact` in fp64."""
    inputs, grads = [t.to(dtype) for t in inputs], [g.to(dtype) for g in grads]
    truth = results(exact, [t.double() for t in inputs], grads)
    theirs = results(plain_torch, inputs, grads)
    ours = results(native, [t.cuda() for t in inputs], grads)
    for i, (a, b, t) in enumerate(zip(ours, theirs, truth, strict=True)):
        limit = 2 * error(b, t) + FLOORS[dtype]
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
        (
            "dropout",
            (torch.ones(2, 4), torch.tensor([1]), 0, 0.1),
            "seed is not on|x is not on a CUDA device",
        ),
    ],
)
def test_mixed_devices_are_named(name: str, arguments: tuple[Any, ...], message: str) -> None:
    op = getattr(torch.ops.megabert, name)
    for moved in (0, 1):
        mixed = [a.cuda() if i == moved else a for i, a in enumerate(arguments)]
        with pytest.raises(RuntimeError, match=message.replace("|x", "|bias is not|x") + "|not on a CUDA"):
            op(*mixed)
