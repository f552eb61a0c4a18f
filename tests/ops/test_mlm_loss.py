"""Masked-LM loss: value, count and gradients against fp64; ignored slots and padded entries add nothing; chunks do not show."""

import math

import pytest
import torch
from torch import Tensor

from megabert import ops
from tests.ops import reference
from tests.ops.oracle import ON, check, needs_library, normal

pytestmark = [needs_library, pytest.mark.usefixtures("two_threads")]


def problem(count: int, width: int, vocab: int, entries: int) -> tuple[list[Tensor], Tensor]:
    labels = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(1))
    labels[::4] = -100
    return [normal(count, width, seed=2), normal(entries, width, seed=3, scale=0.3), normal(entries, seed=4)], labels


@ON
@pytest.mark.parametrize(
    ("count", "width", "vocab", "entries"),
    [
        *((2, 8, 1, 1), (3, 5, 3, 128), (1023, 32, 1023, 1152), (33, 16, 128, 128)),
        # of 2,500 predictions five chunks, the last a short one; of 40,000 as many chunks as there may be
        *((count, 16, 120, 128) for count in (2500, 40_000)),
    ],
)
def test_against_fp64(count: int, width: int, vocab: int, entries: int, dtype: torch.dtype, device: str) -> None:
    inputs, labels = problem(count, width, vocab, entries)
    there = labels.to(device)
    check(
        lambda h, w, b: [ops.mlm_loss(h, w, b, there, vocab, "native")[0]],
        lambda h, w, b: [ops.mlm_loss(h, w, b, labels, vocab, "torch")[0]],
        lambda h, w, b: [reference.mlm_loss(h, w, b, labels, vocab)[0]],
        inputs, [torch.tensor(0.37)], dtype, device=device,
    )  # fmt: skip


def test_memory_is_one_chunk_whatever_the_number_of_predictions() -> None:
    """What is allocated for 4,096 predictions more: their gradient and three numbers each, and nothing of V' a row."""

    def allocated(count: int) -> int:
        inputs, labels = problem(count, 16, 4000, 4096)
        hidden, weight, bias = (t.bfloat16() for t in inputs)
        with torch.profiler.profile(profile_memory=True) as profile:
            torch.ops.megabert.mlm_loss(hidden, weight, bias, labels, 4000, True)
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.events())

    chunk = 512 * 4096 * 2
    few, many = allocated(1024), allocated(5120)
    assert chunk < few < 2 * chunk and many - few < 4096 * (16 * 2 + 12) + 65536, (few, many)


def test_log_sum_exp_and_counts() -> None:
    inputs, labels = problem(300, 16, 500, 512)
    hidden, weight, bias = (t.float() for t in inputs)
    labels[:100] = (hidden[:100] @ weight[:500].T + bias[:500]).argmax(-1)
    results = torch.ops.megabert.mlm_loss(hidden, weight, bias, labels, 500, False)
    assert not any(gradient.numel() for gradient in results[4:])
    correct = int(reference.mlm_loss(*inputs, labels, 500)[1])
    assert int(results[1]) == int(ops.mlm_loss(hidden, weight, bias, labels, 500, "torch")[1]) == correct
    assert int(results[2]) == int((labels >= 0).sum())
    exact = (hidden @ weight[:500].T + bias[:500]).double().logsumexp(-1) * (labels >= 0)
    torch.testing.assert_close(results[3].double(), exact, rtol=1e-6, atol=1e-5)
    tied = torch.zeros(2, 4), torch.zeros(8, 4), torch.zeros(8), torch.tensor([0, 5])
    assert int(ops.mlm_loss(*tied, 8, "native")[1]) == 1, "the first of equal logits counts"


@pytest.mark.parametrize("banned", [100, 512, 650])
def test_tokens_banned_by_the_bias_have_no_probability(banned: int) -> None:
    """Also if all that a pass reads first are."""
    inputs, _ = problem(3, 16, 700, 704)
    hidden, weight, bias = (t.float().requires_grad_() for t in inputs)
    bias.data[:banned], labels = -math.inf, torch.tensor([650, 660, 699])
    results = {}
    for backend in ("native", "torch"):
        loss, _ = ops.mlm_loss(hidden, weight, bias, labels, 700, backend)
        results[backend] = [loss, *torch.autograd.grad(loss, [hidden, weight, bias])]
    torch.testing.assert_close(results["native"], results["torch"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_padded_entries_are_invisible(backend: str) -> None:
    inputs, labels = problem(20, 16, 100, 128)
    hidden, weight, bias = (t.float().requires_grad_() for t in inputs)
    bias.data[100:] = 1e4  # would win everything
    loss, _ = ops.mlm_loss(hidden, weight, bias, labels, 100, backend)
    small, _ = reference.mlm_loss(hidden, weight[:100], bias[:100], labels, 100)
    torch.testing.assert_close(loss, small, rtol=1e-6, atol=1e-5)
    assert not any(grad[100:].any() for grad in torch.autograd.grad(loss, [weight, bias]))
    assert ops.mlm_logits(hidden, weight, bias, 100).shape == (20, 100)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_bias_alone_has_its_gradient(backend: str) -> None:
    inputs, labels = problem(20, 16, 100, 128)
    hidden, weight, bias = (t.float() for t in inputs)
    alone = bias.clone().requires_grad_()
    ops.mlm_loss(hidden, weight, alone, labels, 100, backend)[0].backward()
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    expected = torch.autograd.grad(ops.mlm_loss(*leaves, labels, 100, backend)[0], leaves)[2]
    torch.testing.assert_close(alone.grad, expected)


def test_the_torch_head_multiplies_the_whole_padded_matrix() -> None:
    """Products of forward and backward with 1,024 entries, a multiple of 128, none with the 1,000 that are real."""
    inputs, labels = problem(70, 64, 1000, 1024)
    leaves = [t.bfloat16().requires_grad_() for t in inputs]
    with torch.profiler.profile(record_shapes=True) as profile:
        ops.mlm_loss(*leaves, labels, 1000, "torch")[0].backward()
    products = [set().union(*e.input_shapes) for e in profile.events() if e.name in ("aten::mm", "aten::addmm")]
    assert len(products) == 3 and all(1024 in sizes and 1000 not in sizes for sizes in products), products


@pytest.mark.parametrize("count", [0, 5, 40])
def test_rows_without_a_prediction_have_no_gradient(count: int) -> None:
    """Of 40 rows a part has one, of 0 or 5 none."""
    inputs, labels = problem(count, 16, 100, 128)
    labels = labels if count == 40 else torch.full((count,), -100)
    leaves = [t.bfloat16().requires_grad_() for t in inputs]
    loss, correct = ops.mlm_loss(*leaves, labels, 100, "native")
    hidden, weight, bias = torch.autograd.grad(loss, leaves)
    assert not hidden[labels < 0].any() and (hidden[labels >= 0] != 0).any(-1).all()
    if count < 40:
        assert loss == 0 and correct == 0 and not weight.any() and not bias.any()


def test_scale_of_the_loss_is_not_rounded() -> None:
    """The factor 1/3001 has no short bf16 form; the gradient must be the fp32 multiple, rounded once."""
    inputs, labels = problem(30, 16, 100, 128)
    leaves = [t.bfloat16().requires_grad_() for t in inputs]
    loss = ops.mlm_loss(*leaves, labels, 100, "native")[0]
    one, small = (torch.autograd.grad(loss * f, leaves, retain_graph=True)[1].double() for f in (1.0, 1 / 3001))
    ratio = ((small * one).sum() / one.square().sum()).item() * 3001
    assert abs(ratio - 1) < 2e-4
