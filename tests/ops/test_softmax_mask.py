"""Scale, mask, softmax and dropout in one operation: every kind of mask against fp64, empty rows, dropout replayed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megabert import ops
from tests.ops import reference
from tests.ops.oracle import ON, check, needs_library, normal

pytestmark = needs_library
SEED, STREAM, SCALE = 0xFEED5, 3, 0.4
SHAPE = (2, 3, 5, 37)  # batch, heads, queries, keys
generator = torch.Generator().manual_seed


def bounds(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Random key ranges [B, Q], some empty, one the whole row."""
    batch, _, queries, keys = shape
    start, end = (torch.randint(0, keys + n, (batch, queries), generator=generator(1 + n)).int() for n in (0, 1))
    start[0, 0], end[0, 0] = 0, keys
    start[-1, -1], end[-1, -1] = keys // 2, keys // 2
    return start, end


def masks(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, tuple[dict[str, Tensor], Tensor, Tensor]]:
    """Name -> (the operation's arguments, keys that may be attended to, what is added to the scores)."""
    batch, heads, queries, keys = shape
    start, end = bounds(shape)
    everything, nothing = torch.ones((), dtype=torch.bool), torch.zeros(())
    lengths = torch.arange(batch, dtype=torch.int32)[:, None] * (keys - 1) + 1
    allowed = torch.rand(batch, 1, queries, keys, generator=generator(3)) < 0.6
    allowed[0, :, -1] = False
    added = normal(1, heads, 1, keys, seed=4).to(dtype)
    strided = normal(batch, heads, keys, queries, seed=5).to(dtype).transpose(-1, -2)
    one_for_all = normal(batch, heads, queries, 1, seed=6).to(dtype)
    return {
        "none": ({}, everything, nothing),
        "bounds": ({"key_start": start, "key_end": end}, reference.inside(start, end, keys), nothing),
        "lengths": ({"key_end": lengths}, reference.inside(0 * lengths, lengths, keys), nothing),
        "bool": ({"mask": allowed}, allowed, nothing),
        "added": ({"mask": added}, everything, added),
        "strided": ({"mask": strided}, everything, strided),
        "broadcast over keys, bounds": (
            {"mask": one_for_all, "key_end": end}, reference.inside(0 * end, end, keys), one_for_all,
        ),
    }  # fmt: skip


CASES = [(SHAPE, kind, p) for kind in masks(SHAPE, torch.float32) for p in (0.0, 0.1)]
CASES += [(shape, "bounds", 0.2) for shape in ((1, 1, 1, 1), (1, 2, 3, 3), (2, 1, 2, 1023), (1, 1, 2, 8192))]


@ON
@pytest.mark.parametrize(("shape", "kind", "p"), CASES, ids=str)
def test_masks_against_fp64(shape: tuple[int, ...], kind: str, p: float, dtype: torch.dtype, device: str) -> None:
    arguments, allowed, added = masks(shape, dtype)[kind]
    keep, seed = reference.keep_mask(SEED, STREAM, shape, p), torch.tensor([SEED], device=device)
    there: Any = {name: t.to(device) for name, t in arguments.items()}
    check(
        lambda x: [ops.fused_softmax_mask(x, **there, scale=SCALE, p=p, seed=seed, stream=STREAM)],
        lambda x: [reference.users_softmax(x, allowed, added, SCALE, keep)],
        lambda x: [reference.softmax_mask(x, allowed, added, SCALE, keep)],
        [normal(*shape, seed=7, scale=4)], [normal(*shape, seed=8)], dtype, device=device,
    )  # fmt: skip


def test_empty_rows_are_zeros_and_nan_stays_in_its_row() -> None:
    """A row without a key has zero gradients; so has a tensor without elements."""
    scores = torch.full((2, 2, 3, 9), 5.0).requires_grad_()
    out = ops.fused_softmax_mask(scores, key_end=torch.tensor([[0], [4]], dtype=torch.int32))
    assert (out[0] == 0).all() and (out[1, ..., 4:] == 0).all()
    torch.testing.assert_close(out[1, ..., :4], torch.full((2, 3, 4), 0.25))
    (out * torch.arange(9.0)).sum().backward()
    assert not scores.grad[0].any() and scores.grad[1, ..., :4].abs().min() > 0
    for shape in ((0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)):
        scores = torch.zeros(shape, requires_grad=True)
        out = ops.fused_softmax_mask(scores, p=0.1, seed=torch.tensor([1]))
        assert out.shape == torch.autograd.grad(out.sum(), scores)[0].shape == shape
    scores = torch.zeros(1, 1, 3, 40)
    scores[0, 0, 1, 7] = float("nan")
    out = ops.fused_softmax_mask(scores)
    assert out[0, 0, 1].isnan().all() and not out[0, 0, [0, 2]].isnan().any()


def test_no_tensor_of_the_masks_full_size_is_made() -> None:
    """Peak of the torch allocations: output and probabilities, nothing else of that size."""
    shape = (2, 8, 256, 256)
    start = torch.zeros(2, 256, dtype=torch.int32)
    scores = torch.randn(shape, dtype=torch.bfloat16, generator=generator(1))
    with torch.profiler.profile(profile_memory=True) as profile:
        ops.fused_softmax_mask(scores, key_start=start, key_end=start + 200, p=0.1, seed=torch.tensor([1]))
    made = [e.self_cpu_memory_usage for e in profile.events() if e.self_cpu_memory_usage > 0]
    assert sum(made) <= 2 * scores.numel() * 2 + 4096, made


def test_arguments_that_contradict_are_named() -> None:
    for arguments, message in (
        ({"p": 0.1}, "needs a seed"),
        ({"mask": torch.ones(1, 1, 2, 2, requires_grad=True)}, "mask gets no gradient"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.fused_softmax_mask(torch.ones(1, 1, 2, 2), **arguments)
