"""A row is dropped the same whichever micro-batch it is in, by native and by torch's backends on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megabert.ops import attend, attention_inputs, dropout, dropout_add_layer_norm, fused_softmax_mask
from megabert.ops.backend import MISSING
from tests.helpers import tiny

ROWS, TOKENS, WIDTH, HEADS, KEY, P = 6, 5, 16, 2, 77, 0.3
CUTS = ((0, 2), (2, 3), (3, 6))  # micro-batches of unequal size

needs_library = pytest.mark.skipif(bool(MISSING), reason=MISSING or "")
Operation = Callable[[Tensor, Tensor], Tensor]


def _dropout(backend: str) -> Operation:
    return lambda x, seed: dropout(x, P, seed, 5, backend)


def _norm(backend: str) -> Operation:
    zeros, ones = torch.zeros(WIDTH), torch.ones(WIDTH)
    return lambda x, seed: dropout_add_layer_norm(x, zeros, x, ones, zeros, P, 1e-6, seed, 5, backend, post=True)[0]


def _attention(backend: str) -> Operation:
    def run(x: Tensor, seed: Tensor) -> Tensor:
        rows = len(x)
        start, end = (torch.zeros(rows, TOKENS, dtype=torch.int32), torch.full((rows, TOKENS), TOKENS - 1).int())
        inputs = attention_inputs(backend, start, end, torch.full((rows, 1), TOKENS - 1).int())
        return attend(torch.cat([x, x * 2, x * 3], -1), HEADS, inputs, P, seed, 5, backend)

    return run


def _softmax(x: Tensor, seed: Tensor) -> Tensor:
    return fused_softmax_mask(x[:, None, :, :TOKENS].expand(-1, 3, -1, -1), p=P, seed=seed, stream=5)


OPERATIONS = {
    **{f"{name} {kind}": make(kind) for kind in ("native", "torch") for name, make in (("dropout", _dropout), ("norm", _norm))},
    **{f"attention {kind}": _attention(kind) for kind in ("native", "fused_softmax", "sdpa")},
    "softmax": _softmax,
}  # fmt: skip


@needs_library
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_rows_mask_follows_the_row(name: str) -> None:
    torch.manual_seed(0)
    x, operation = torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True), OPERATIONS[name]

    def run(first: int, last: int, *seed: int) -> tuple[Tensor, Tensor]:
        y = operation(x[first:last], torch.tensor(seed))
        return y.detach(), torch.autograd.grad(y.square().sum(), x)[0][first:last]

    whole, gradient = run(0, ROWS, KEY, 0)
    parts = [run(first, last, KEY, first) for first, last in CUTS]
    torch.testing.assert_close(torch.cat([y for y, _ in parts]), whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.cat([dx for _, dx in parts]), gradient, rtol=1e-5, atol=1e-5)
    assert (run(0, ROWS, KEY, 1)[0] - whole).abs().max() > 0.1  # another place, another mask
    assert (run(0, ROWS, KEY + 1, 0)[0] - whole).abs().max() > 0.1


@pytest.mark.parametrize(
    "ops",
    [
        {"ops__attention": "sdpa", "ops__layer": "torch"},
        pytest.param({"ops__attention": "native", "ops__layer": "native"}, marks=needs_library),
    ],
    ids=["torch", "native"],
)
@pytest.mark.parametrize("recomputed", [False, True])
def test_loss_and_gradients_do_not_depend_on_the_cut_into_micro_batches(ops: dict[str, str], recomputed: bool) -> None:
    cfg = tiny.config(
        model__dropout=0.1, model__attention_dropout=0.1, model__activation_checkpointing=recomputed, **ops
    )
    model = tiny.model(cfg).train()

    def losses(cuts: list[tuple[int, int]]) -> tuple[float, list[Tensor]]:
        total = 0.0
        model.zero_grad()
        for first, last in cuts:
            out = model(**tiny.batch(3, range(first, last)).inputs(), seed=torch.tensor([KEY, first]))
            (out.mlm_loss_sum + out.nsp_loss_sum).backward()
            total += float(out.mlm_loss_sum.detach() + out.nsp_loss_sum.detach())
        return total, [p.grad.clone() for p in model.parameters()]

    one, gradients = losses([(0, 8)])
    for cuts in ([(0, 4), (4, 8)], [(6, 8), (0, 2), (2, 6)]):
        total, parts = losses(cuts)
        assert total == pytest.approx(one, rel=1e-5)
        for ours, theirs in zip(parts, gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
