"""Attention inside packed sequences: a pad attends to nothing and its context is zero (flash: finite).

Sequences are packed in rows, so the keys of a token are one range [key_start, key_end) of its row, and no mask of the
size of the attention matrix is needed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, restore_flash_attention_impl

from megabert.ops.backend import register
from megabert.ops.dropout_add_layer_norm import follows_rows, row_dropout
from megabert.ops.softmax_mask import fused_softmax_mask

# backends of torch's flash attention, and the kernels behind it: None is torch's own
FLASH = {"varlen": None, "flash3": "FA3"}


def use_kernels(backend: str) -> None:
    """Put the kernels of `backend` behind torch's flash attention, for the whole process; other backends leave it alone."""
    if backend in FLASH and current_flash_attention_impl() != FLASH[backend]:
        if kernels := FLASH[backend]:
            activate_flash_attention_impl(kernels)
        else:
            restore_flash_attention_impl()


def attention_inputs(
    backend: str, key_start: Tensor, key_end: Tensor, lengths: Tensor, window: int = 0, causal: bool = False
) -> list[Tensor]:
    """Inputs of `attend` from a batch, computed once for all layers with the same `window`.

    key_start, key_end int32 [B, T]; lengths int32 [B, S], or compact [N] (data.batch.compact_lengths). Returns sdpa: bool
    mask [B, 1, T, T]; native and fused_softmax: the bounds; varlen and flash3: int32 offsets of the sequences and of each row's
    pads in the flattened batch, [N + 1] or, with empty slots (for which kernels start blocks too), [B * (S + 1) + 1], followed by
    an empty tensor if `causal`, since this backend does not read key ranges.
    """
    width = key_start.shape[1]
    if window and backend not in FLASH:
        key_start, key_end = local_keys(key_start, key_end, window)
    if backend in ("native", "fused_softmax"):
        return [key_start, key_end]
    if backend == "sdpa":
        key = torch.arange(width, device=key_start.device, dtype=key_start.dtype)
        mask = (key >= key_start[..., None]) & (key < key_end[..., None])  # (B, T, T)
        return [mask[:, None]]
    if lengths.dim() == 2:
        pads = width - lengths.sum(1, keepdim=True, dtype=torch.int32)  # the pads of a row are one more sequence
        lengths = torch.cat([lengths, pads], 1).flatten()
    offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return [offsets, offsets.new_empty(0)] if causal else [offsets]


def local_keys(key_start: Tensor, key_end: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The part of the key ranges int32 [B, T] that is at most window / 2 tokens away (Beltagy et al. 2020, "Longformer")."""
    place, side = torch.arange(key_start.shape[1], device=key_start.device, dtype=key_start.dtype), window // 2
    start, end = torch.maximum(key_start, place - side), torch.minimum(key_end, place + side + 1)
    return start.masked_fill(end <= start, 0), end


def only_queries(backend: str, inputs: list[Tensor], keep: Tensor) -> list[Tensor]:
    """`attention_inputs` of a layer whose output is read only at the flat positions `keep`: on the CPU native attention then skips
    the other queries, and their context is zero."""
    if backend != "native" or keep.device.type != "cpu":
        return inputs
    flat = keep.flatten().long()
    narrow = [torch.zeros_like(bound) for bound in inputs]
    for bound, new in zip(inputs, narrow, strict=True):
        new.view(-1)[flat] = bound.view(-1)[flat]
    return narrow


def attend(
    qkv: Tensor, heads: int, inputs: list[Tensor], p: float, seed: Tensor, stream: int, backend: str,
    bias: Tensor | None = None, window: int = 0,
) -> Tensor:  # fmt: skip
    """softmax(q k^T / sqrt(head size)) v for each head, with dropout `p` on the probabilities.

    qkv [B, T, 3 * D] (queries, keys, values, each head by head) -> context [B, T, D].
    seed int64 [1] or [2] and stream number the dropout mask of native and fused_softmax (the same mask), as in
    `dropout_add_layer_norm`; varlen draws from torch's generator, and flash3 has no dropout.
    bias [3 * D], only for native: the bias included in qkv, whose gradient backward sums while it writes qkv's, instead of a sum
    that reads it again.
    window: that of `inputs`, for varlen and flash3, whose kernels need it as a number.
    """
    if backend == "native":
        return torch.ops.megabert.attention(qkv, bias, inputs[0], inputs[1], seed, stream, heads, p)[0]
    batch, width, triple = qkv.shape
    size = triple // 3 // heads
    if backend in FLASH:
        # the kernel behind torch.nn.attention.varlen, which has no dropout
        q, k, v = qkv.view(batch * width, 3, heads, size).unbind(1)  # (B * T, H, d)
        lengths, scale, causal = (inputs[0], inputs[0], width, width), size**-0.5, len(inputs) > 1
        # both ends inclusive; without them, everything
        sides = {"window_size_left": window // 2, "window_size_right": 0 if causal else window // 2} if window else {}
        fused = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, p, causal, False, scale=scale, **sides)
        return fused[0].reshape(batch, width, heads * size)
    q, k, v = qkv.view(batch, width, 3, heads, size).permute(2, 0, 3, 1, 4)  # each (B, H, T, d)
    if backend == "fused_softmax":
        start, end = inputs
        scores, scale = q @ k.transpose(-1, -2), size**-0.5  # (B, H, T, T)
        weights = fused_softmax_mask(scores, key_start=start, key_end=end, scale=scale, p=p, seed=seed, stream=stream)
        return (weights @ v).transpose(1, 2).reshape(batch, width, heads * size)
    mask = inputs[0]
    if p and follows_rows(qkv, seed):  # as torch does for its dropout
        scores = (q.float() @ k.float().transpose(-1, -2) * size**-0.5).masked_fill(~mask, -torch.inf)
        weights = torch.ops.aten._safe_softmax(scores, -1)  # (B, H, T, T); zeros where no key is
        out = (row_dropout(weights, p, seed, stream) @ v.float()).to(qkv.dtype)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
    out = out.masked_fill(~mask.any(-1, keepdim=True), 0)  # rows without a key, whose values depend on the kernel
    return out.transpose(1, 2).reshape(batch, width, heads * size)


def _shapes(qkv: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    (batch, width, triple), heads = qkv.shape, inputs[-2]
    return qkv.new_empty(batch, width, triple // 3), qkv.new_empty(batch, heads, width, dtype=torch.float32)


def _backward_shapes(grad: Tensor, qkv: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    return qkv.new_empty(qkv.shape), qkv.new_empty(qkv.shape[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, _bias, key_start, key_end, seed, *ctx.numbers = inputs
    ctx.save_for_backward(qkv, *output, key_start, key_end, seed)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    dqkv, dbias = torch.ops.megabert.attention_backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return dqkv, dbias if ctx.needs_input_grad[1] else None, *[None] * 6


register("attention", _shapes, _save, _backward, _backward_shapes)
