"""Reference implementations of the native operations, in plain eager torch and in the precision of their inputs.

The dropout mask is an argument here, and `keep_mask` draws it as the native code does: Philox4x32-10 (Salmon et al. 2011)
on (column / 8, row, stream) under the seed, 16 bits an element, as written down in csrc/common/philox.h.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low half of 32-bit products, in int64."""
    high = ((a >> 16) * b + (((a & 0xFFFF) * b) >> 16)) >> 16
    return high, (a * b) & _LOW


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four 32-bit words (in int64) for each counter of four words; tensors broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def keep_mask(seed: int, stream: int, shape: tuple[int, ...], p: float) -> Tensor:
    """Dropout as a factor, fp64 of `shape`: 0 where dropped, with probability round(p * 65536) / 65536, else 1 / (share kept)."""
    rows, columns, threshold = math.prod(shape[:-1]), shape[-1], int(p * 65536 + 0.5)
    row = torch.arange(rows)[:, None]
    group = torch.arange(-(-columns // 8))[None]
    words = philox((group.expand(rows, -1), row & _LOW, row >> 32, torch.tensor(stream)), (seed & _LOW, seed >> 32))
    halves = [part for word in words for part in (word & 0xFFFF, word >> 16)]
    values = torch.stack(halves, -1).flatten(1)[:, :columns]  # (rows, columns)
    return ((values >= threshold).double() * (65536 / (65536 - threshold))).view(shape)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """x [..., D], bias [D] -> z * Phi(z), z = x + bias."""
    z = x + bias
    return z * 0.5 * torch.erfc(-z * 0.5**0.5)


def bias_geglu(x: Tensor, bias: Tensor) -> Tensor:
    """x [..., 2F], bias [2F] -> a * Phi(a) * b of (a, b) = x + bias, [..., F]."""
    value, gate = (x + bias).chunk(2, -1)
    return value * 0.5 * torch.erfc(-value * 0.5**0.5) * gate


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """qkv [..., 3 * H * d], cos and sin [..., d / 2] -> queries and keys as complex numbers times cos + i sin, values as they are."""
    query_key, value = qkv.unflatten(-1, (3, heads, 2, -1)).split([2, 1], -4)
    first, second = query_key.unbind(-2)
    cos, sin = (x[..., None, None, :].to(qkv.dtype) for x in (cos, sin))
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -2)
    return torch.cat([turned, value], -4).flatten(-4)


def dropout_add_layer_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, eps: float, keep: Tensor
) -> tuple[Tensor, Tensor]:
    """x, residual, keep [..., D]; vectors [D] -> (LayerNorm(z) * weight + shift, z), z = residual + (x + bias) * keep."""
    z = residual + (x + bias) * keep.to(x.dtype)
    centred = z - z.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    return centred * rstd * weight + shift, z


def inside(start: Tensor, end: Tensor, keys: int) -> Tensor:
    """bounds [B, Q] -> the keys that may be attended to, [B, 1, Q, K]."""
    key = torch.arange(keys)
    return ((key >= start[..., None]) & (key < end[..., None]))[:, None]


def softmax_mask(scores: Tensor, allowed: Tensor, added: Tensor, scale: float, keep: Tensor) -> Tensor:
    """softmax(scale * scores + added) over the allowed keys, times keep; all [B, H, Q, K] or broadcastable; no keys: zeros."""
    scores = (scores * scale + added.to(scores.dtype)).masked_fill(~allowed, -torch.inf)
    top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = (scores - top).exp()
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30) * keep.to(scores.dtype)


def users_softmax(scores: Tensor, allowed: Tensor, added: Tensor, scale: float, keep: Tensor) -> Tensor:
    """The same as torch users write it, all in the input's type."""
    scores = (scores * scale + added.to(scores.dtype)).masked_fill(~allowed, -torch.inf)
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0) * keep.to(scores.dtype)


def attention(
    qkv: Tensor, heads: int, start: Tensor, end: Tensor, keep: Tensor, softmax: Callable[..., Tensor] = softmax_mask
) -> Tensor:
    """qkv [B, T, 3 * H * d], bounds [B, T], keep [B, H, T, T] -> context [B, T, H * d]; no keys: zeros."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    scale = q.shape[-1] ** -0.5
    weights = softmax(q @ k.mT, inside(start, end, qkv.shape[1]), torch.zeros(()), scale, keep)
    return (weights @ v).transpose(1, 2).flatten(-2)


def mlm_loss(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """hidden [N, D], weight [V', D], bias [V'], labels [N] -> (loss sum, correct) over the first vocab_size entries."""
    real = labels >= 0
    logits = (hidden @ weight[:vocab_size].T + bias[:vocab_size])[real]
    target = labels[real]
    loss = (logits.logsumexp(-1) - logits.gather(1, target[:, None])[:, 0]).sum()
    return loss, (logits.argmax(-1) == target).sum()
