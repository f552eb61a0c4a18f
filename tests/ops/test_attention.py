"""Attention inside packed sequences: every backend against fp64, the mask's edges, dropout replayed, pads silent."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megabert import ops
from megabert.config import ModelConfig, OpsConfig
from megabert.data.batch import compact_lengths
from megabert.hf.packing import pack
from megabert.model import BertForPreTraining
from megabert.ops import attention, backend
from megabert.ops.attention import local_keys
from tests.ops import reference
from tests.ops.oracle import ON, Function, check, needs_library, normal

SEED, STREAM = 0xABCDEF0123, 4


def bounds(*rows: list[int], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """key_start, key_end [B, width] and lengths [B, S] of rows that hold sequences of these lengths."""
    start = torch.zeros(len(rows), width, dtype=torch.int32)
    end, slots = start.clone(), max(map(len, rows))
    lengths = torch.zeros(len(rows), slots, dtype=torch.int32)
    for b, row in enumerate(rows):
        at = 0
        for s, length in enumerate(row):
            start[b, at : at + length], end[b, at : at + length] = at, at + length
            lengths[b, s] = length
            at += length
    return start, end, lengths


WINDOW = 32
CASES = {
    "one token": ([[1]], 1, 1, 8),
    "three": ([[3], [1, 2]], 3, 2, 16),
    "odd head size": ([[5, 4], [9]], 11, 3, 7),
    "packed and padded": ([[20, 1, 19], [45], [0]], 45, 3, 16),
    "three blocks of keys": ([[90, 70], [161]], 161, 2, 64),
    "long": ([[1123], [600, 400]], 1123, 1, 64),
}


def plain_attention(qkv: Tensor, heads: int, start: Tensor, end: Tensor, keep: Tensor) -> Tensor:
    return reference.attention(qkv, heads, start, end, keep, reference.users_softmax)


def added(function: Callable[[Tensor], Tensor]) -> Function:
    """`function` of qkv that a bias was added to: the same values, and the bias has its gradient."""
    return lambda qkv, bias: [function(qkv + (bias - bias.detach()))]


def causal(start: Tensor, end: Tensor) -> Tensor:
    """key_end of a causal model: one past the token itself, 0 in padding."""
    return torch.minimum(end, torch.arange(1, end.shape[1] + 1, dtype=torch.int32))


def arbitrary(batch: int, width: int) -> tuple[Tensor, Tensor]:
    """Key ranges that are not sequences', some empty."""
    generator = torch.Generator().manual_seed(5)
    start = torch.randint(0, width, (batch, width), generator=generator, dtype=torch.int32)
    return start, torch.randint(0, width + 1, (batch, width), generator=generator, dtype=torch.int32)


KINDS = ("both ways", "causal", "any range", "window", "causal window")


def check_attention(
    attend: Callable[..., Tensor], case: tuple[list[list[int]], int, int, int], kind: str, p: float,
    dtype: torch.dtype, device: str = "cpu",
) -> None:  # fmt: skip
    """`attend(qkv, bias, heads, start, end)` of the rows of `case`, whose key ranges are of `kind`, against fp64."""
    rows, width, heads, size = case
    start, end, _ = bounds(*rows, width=width)
    if kind == "any range":
        start, end = arbitrary(len(rows), width)
    end = causal(start, end) if "causal" in kind else end
    start, end = local_keys(start, end, WINDOW) if "window" in kind else (start, end)
    keep = reference.keep_mask(SEED, STREAM, (len(rows), heads, width, width), p)
    there = start.to(device), end.to(device)
    check(
        lambda qkv, bias: [attend(qkv, bias, heads, *there)],
        added(lambda qkv: plain_attention(qkv, heads, start, end, keep)),
        added(lambda qkv: reference.attention(qkv, heads, start, end, keep)),
        [normal(len(rows), width, 3 * heads * size, seed=1, scale=1.5), normal(3 * heads * size, seed=3)],
        [normal(len(rows), width, heads * size, seed=2)], dtype, multiple=4,  # log-sum-exp is rounded to fp32
        device=device,
    )  # fmt: skip


@needs_library
@ON
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_native_against_fp64(case: str, kind: str, p: float, dtype: torch.dtype, device: str) -> None:
    if device == "cuda" and (dtype == torch.float32 or CASES[case][3] % 8):
        pytest.skip("native attention on CUDA takes 16-bit types and heads of a multiple of 8 columns")
    seed = torch.tensor([SEED], device=device)

    def attend(qkv: Tensor, bias: Tensor, heads: int, *keys: Tensor) -> Tensor:
        return ops.attend(qkv, heads, [*keys], p, seed, STREAM, "native", bias)

    check_attention(attend, CASES[case], kind, p, dtype, device)


def test_window_ends_at_its_sequence() -> None:
    start, end = local_keys(*bounds([5, 3], width=9)[:2], 4)
    assert (start.tolist(), end.tolist()) == ([[0, 0, 0, 1, 2, 5, 5, 5, 0]], [[3, 4, 5, 5, 5, 8, 8, 8, 0]])


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_windows_read_no_keys_far_away(dtype: torch.dtype) -> None:
    """What they would multiply by zero is NaN: forward and backward skip it, whatever the row's length."""
    inputs = list(local_keys(*bounds([1024], width=1024)[:2], WINDOW))
    qkv = normal(1, 1024, 3 * 32, seed=1).to(dtype)
    qkv[:, 400:] = float("nan")
    qkv.requires_grad_()
    out = ops.attend(qkv, 2, inputs, 0.0, torch.tensor([SEED]), STREAM, "native")
    (grad,) = torch.autograd.grad(out[:, :300].float().square().sum(), qkv)
    assert torch.isfinite(out[:, :340]).all() and torch.isfinite(grad[:, :280]).all()


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_keys_have_no_weight_at_all(dtype: torch.dtype) -> None:
    """2^-126 in place of 0 would show in values of 1e38, and make denormal products, which take a hundred times as long."""
    place = torch.arange(40, dtype=torch.int32)[None]
    inputs = [(place - 3).clamp(min=0), place]  # the three tokens before, so that none attends to the last
    qkv, seed = normal(1, 40, 3 * 16, seed=1).to(dtype), torch.tensor([SEED])
    huge = qkv.clone()
    huge[:, 20:, 32:] = 1e38
    qkv.requires_grad_()
    out, other = (ops.attend(x, 1, inputs, 0.0, seed, STREAM, "native") for x in (qkv, huge))
    assert out[:, :21].equal(other[:, :21]) and not out[:, 21:].equal(other[:, 21:])
    (grad,) = torch.autograd.grad((out.float() * 1e35).sum(), qkv)
    assert not grad[:, -1, 16:].any() and grad[:, :-1, 32:].all()


@pytest.mark.parametrize(
    "backend", ["sdpa", *(pytest.param(b, marks=needs_library) for b in ("native", "fused_softmax"))]
)
def test_backends_agree_with_the_oracle(backend: str) -> None:
    """With a window and without; pads are silent, and a causal model's later tokens change nothing before them."""
    rows, width, heads, size = CASES["packed and padded"]
    start, end, lengths = bounds(*rows, width=width)
    qkv, seed = normal(len(rows), width, 3 * heads * size, seed=1).float().requires_grad_(), torch.tensor([SEED])
    outs = []
    for window, seen in ((6, local_keys(start, end, 6)), (0, (start, end))):
        inputs = ops.attention_inputs(backend, start, end, lengths, window)
        out = ops.attend(qkv, heads, inputs, 0.0, seed, STREAM, backend, window=window)
        exact = reference.attention(qkv.double(), heads, *seen, torch.ones(1))
        assert (out.double() - exact).abs().max() < 2e-6
        outs.append(out)
    assert (outs[0] - out).abs().max() > 0.1
    (grad,) = torch.autograd.grad(out.square().sum(), qkv)
    assert not out[end == 0].any() and not grad[end == 0].any() and torch.isfinite(grad).all()
    inputs = ops.attention_inputs(backend, start, causal(start, end), lengths)
    changed = qkv.detach().clone()
    changed[:, 30:] = normal(len(rows), width - 30, 3 * heads * size, seed=3).float()
    one, two = (ops.attend(x, heads, inputs, 0.0, seed, STREAM, backend) for x in (qkv, changed))
    assert one[:, :30].equal(two[:, :30]) and not one[:, 30:40].equal(two[:, 30:40])


@needs_library
def test_large_scores_stay_finite_and_nan_is_seen() -> None:
    start, end, _ = bounds([8, 8], width=16)
    attend = lambda qkv: ops.attend(qkv, 1, [start, end], 0.0, torch.tensor([1]), 0, "native")  # noqa: E731
    qkv = (normal(1, 16, 3 * 16, seed=1) * 1e4).float().requires_grad_()
    out = attend(qkv)
    assert torch.isfinite(torch.autograd.grad(out.sum(), qkv, retain_graph=True)[0]).all()
    exact = reference.attention(qkv.double(), 1, start, end, torch.ones(1))
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-2)
    qkv = torch.ones(1, 16, 48)
    qkv[0, 3, 20] = float("nan")
    out = attend(qkv)
    assert out[0, :8].isnan().any() and not out[0, 8:].isnan().any()


@pytest.mark.gpu
def test_flash_attention_against_sdpa() -> None:
    rows, width, heads, size = [[20, 1, 19], [45], [0]], 45, 3, 64
    start, end, lengths = bounds(*rows, width=width)
    compact, slots, start, end = (t.cuda() for t in (compact_lengths(lengths, width), lengths, start, end))
    found = []
    for name, given in (("sdpa", slots), ("varlen", slots), ("varlen", compact)):
        qkv = normal(len(rows), width, 3 * heads * size, seed=1).to("cuda", torch.bfloat16).requires_grad_()
        inputs = ops.attention_inputs(name, start, end, given)
        real = ops.attend(qkv, heads, inputs, 0.0, torch.tensor([1], device="cuda"), 0, name) * (end > 0)[..., None]
        found.append((real, torch.autograd.grad(real.float().square().sum(), qkv)[0]))
    for out, grad in found[1:]:
        torch.testing.assert_close(out, found[0][0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(grad, found[0][1], rtol=5e-2, atol=5e-2)


def flash(q: Tensor, k: Tensor, v: Tensor, begins: Tensor, _: Tensor, *numbers: Any, scale: float, **sides: int) -> Any:
    """What the kernel behind torch.nn.attention.varlen computes, by torch: `numbers` are two widths, the dropout, `is_causal`."""
    out = torch.zeros_like(q)
    left, right = sides.get("window_size_left", -1), 0 if numbers[3] else sides.get("window_size_right", -1)
    for begin, end in itertools.pairwise(begins.tolist()):
        parts = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        away = torch.arange(end - begin) - torch.arange(end - begin)[:, None]  # of a key from its query
        seen = ((away >= -left) | (left < 0)) & ((away <= right) | (right < 0))
        out[begin:end] = F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale).transpose(0, 1)
    return (out,)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_gets_sequences_windows_and_objective(causal, window, monkeypatch) -> None:
    """A model gets masked and causal batches, and passes the objective of each to the kernel."""
    monkeypatch.setattr(backend, "_obstacle", lambda *_: "")  # as on a machine that has everything
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    kernels: list[str] = []  # that were put behind it
    monkeypatch.setattr(attention, "activate_flash_attention_impl", kernels.append)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: kernels.append("torch's"))
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: "FA3" if kernels[-1:] == ["FA3"] else None)
    size = {"layers": 2, "hidden": 32, "heads": 2, "vocab_size": 50, "max_positions": 16, "window": window}
    shape = ModelConfig(**size, kind="modern", norm="pre", nsp=False, attention_dropout=0.0)
    sequences = [np.arange(5, 5 + length) for length in (7, 6, 16, 3, 4, 5)]
    packed = pack(sequences, [len(ids) for ids in sequences], 16, causal)
    built = lambda name, **more: BertForPreTraining(  # noqa: E731
        shape.model_copy(update=more), OpsConfig(attention=name, layer="torch", mlm_loss="torch"), "cuda"
    )
    states = []
    for name in ("varlen", "flash3", "sdpa"):
        torch.manual_seed(0)
        model = built(name).float().eval()
        states.append(model.encode(**packed.inputs(), causal=causal)[packed.key_end > 0])
    assert kernels == ["FA3"]
    for state in states[:2]:
        torch.testing.assert_close(state, states[2], rtol=1e-5, atol=1e-5)
    built("varlen")
    assert kernels == ["FA3", "torch's"]
    with pytest.raises(ValueError, match=r"ops\.attention=flash3 has no dropout: add model\.attention_dropout=0"):
        built("flash3", attention_dropout=0.1)
