"""Each operation as a problem at a run's shapes: inputs, the function of each backend, what torch users write, the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megabert.ops import reference
from megabert.ops.attention import attend, attention_inputs
from megabert.ops.layer import bias_geglu, bias_gelu, dropout_add_layer_norm
from megabert.ops.mlm_loss import mlm_loss
from megabert.ops.tolerance import Function

SEED, STREAM = 0x5EED, 4  # of the numbers drawn, and of the dropout masks


@dataclass(frozen=True)
class Shapes:
    """What a run asks of its operations. B rows of T tokens, S sequence slots and K prediction slots a row."""

    rows: int  # B, of a micro-batch
    seq_len: int  # T
    slots: int  # S
    sequences: float  # in a row, on average
    predictions: int  # K
    hidden: int  # D
    heads: int
    ffn: int  # F
    vocab: int
    padded_vocab: int
    gated: bool = False  # a feed-forward layer of 2F columns, the second half of which are gates
    norm: str = "post"
    dropout: float = 0.1
    attention_dropout: float = 0.1
    eps: float = 1e-12
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16

    def key(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"dtype": str(self.dtype), "sequences": round(self.sequences, 1)}


class Problem(NamedTuple):
    """One operation at given shapes and what is right for it. A function takes `inputs` and returns the differentiable
    outputs, whose gradients are `grads`."""

    inputs: list[Tensor]
    grads: list[Tensor]
    call: Callable[[str], Function]  # backend -> the function that runs on it
    plain: Function  # what torch users write, in the inputs' type
    exact: Function  # the reference, run in fp32 or fp64
    sample: slice = slice(None)  # of the first dimension of inputs and grads: the rows that are compared
    multiple: float = 2.0


def _normal(*shape: int, like: Shapes, device: torch.device, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(like.dtype)


def layout(shapes: Shapes, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """key_start, key_end int32 [rows, T] and lengths int32 [rows, S]: equal sequences, as many as a row has on average."""
    start = torch.zeros(rows, shapes.seq_len, dtype=torch.int32)
    end, lengths = start.clone(), torch.zeros(rows, shapes.slots, dtype=torch.int32)
    for row in range(rows):
        # so that the sum over the rows grows by the mean from each to the next
        count = int(shapes.sequences * (row + 1)) - int(shapes.sequences * row)
        count = min(max(count, 1), shapes.slots, shapes.seq_len)
        edges = [shapes.seq_len * i // count for i in range(count + 1)]
        for i, (first, last) in enumerate(pairwise(edges)):
            start[row, first:last], end[row, first:last], lengths[row, i] = first, last, last - first
    if shapes.causal:
        end = torch.minimum(end, torch.arange(1, shapes.seq_len + 1, dtype=torch.int32))
    return start.to(device), end.to(device), lengths.to(device)


def attention_problem(shapes: Shapes, device: torch.device, rows: int, dropout: bool) -> Problem:
    """Rows are independent: all are computed, the first and the last are compared (with dropout the first: masks are large)."""
    p = shapes.attention_dropout if dropout else 0.0
    start, end, lengths = layout(shapes, rows, device)
    compact = lengths[lengths > 0]  # as a batch's on a device: no empty slots
    seed = torch.tensor([SEED], device=device)
    sample = slice(0, 1) if p else slice(0, None, max(1, rows - 1))
    width, heads = shapes.seq_len, shapes.heads

    def keep() -> Tensor:
        if not p:
            return torch.ones(1)
        return reference.keep_mask(SEED, STREAM, heads * width, width, p).view(1, heads, width, width)

    def call(backend: str) -> Function:
        inputs = attention_inputs(backend, start, end, compact)
        return lambda qkv: [attend(qkv, heads, inputs, p, seed, STREAM, backend)]

    def plain(qkv: Tensor) -> list[Tensor]:
        q, k, v = qkv.view(qkv.shape[0], width, 3, heads, -1).permute(2, 0, 3, 1, 4)  # each (B, H, T, d)
        key = torch.arange(width)
        allowed = ((key >= start[sample, :, None]) & (key < end[sample, :, None]))[:, None]
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, -torch.inf)
        weights = F.softmax(scores, -1).masked_fill(~allowed, 0) * keep().to(qkv.dtype)
        return [(weights @ v).transpose(1, 2).reshape(qkv.shape[0], width, shapes.hidden)]

    return Problem(
        inputs=[_normal(rows, width, 3 * shapes.hidden, like=shapes, device=device)],
        grads=[_normal(rows, width, shapes.hidden, like=shapes, device=device)],
        call=call,
        plain=plain,
        exact=lambda qkv: [reference.attention(qkv, heads, start[sample], end[sample], keep())],
        sample=sample,
        multiple=4.0,  # as in its tests: log-sum-exp is rounded to fp32
    )


def layer_problem(shapes: Shapes, device: torch.device, rows: int, dropout: bool) -> Problem:
    """The element-wise part of one layer, its matrix products left out: norm, GELU (and gate), norm.

    The first norm's output is read twice, by a product and as the next residual (post-LN), as in the model."""
    p = shapes.dropout if dropout else 0.0
    seed, post = torch.tensor([SEED], device=device), shapes.norm == "post"
    tokens = (rows, shapes.seq_len)

    def normal(*shape: int) -> Tensor:
        return _normal(*shape, like=shapes, device=device)

    def chain(norm: Callable[..., tuple[Tensor, Tensor]], gelu: Callable[[Tensor, Tensor], Tensor]) -> Function:
        def function(*inputs: Tensor) -> list[Tensor]:
            (x1, b1, r, w1, s1), (h, b), (x2, b2, w2, s2) = inputs[:5], inputs[5:7], inputs[7:]
            normed, stream = norm(x1, b1, r, w1, s1, STREAM)
            after = norm(x2, b2, stream, w2, s2, STREAM + 1)
            return [normed, gelu(h, b), *after[: 1 if post else 2]]

        return function

    def keep(stream: int, like: Tensor) -> Tensor:
        if not p:
            return torch.ones(1)
        return reference.keep_mask(SEED, stream, rows * shapes.seq_len, shapes.hidden, p).view(like.shape)

    def plain_norm(
        x: Tensor, bias: Tensor, residual: Tensor, w: Tensor, s: Tensor, stream: int
    ) -> tuple[Tensor, Tensor]:
        z = residual + (x + bias) * keep(stream, x).to(x.dtype)
        normed = F.layer_norm(z, z.shape[-1:], w, s, shapes.eps)
        return normed, normed if post else z

    def exact_norm(
        x: Tensor, bias: Tensor, residual: Tensor, w: Tensor, s: Tensor, stream: int
    ) -> tuple[Tensor, Tensor]:
        factor = keep(stream, x)
        normed, z = reference.dropout_add_layer_norm(x, bias, residual, w, s, shapes.eps, factor)
        return normed, normed if post else z

    def call(backend: str) -> Function:
        def norm(x: Tensor, bias: Tensor, residual: Tensor, w: Tensor, s: Tensor, stream: int) -> tuple[Tensor, Tensor]:
            return dropout_add_layer_norm(x, bias, residual, w, s, p, shapes.eps, seed, stream, backend, post)

        return chain(norm, lambda x, bias: activation(x, bias, backend))

    activation, exact = (bias_geglu, reference.bias_geglu) if shapes.gated else (bias_gelu, reference.bias_gelu)
    wide, vector, into = (*tokens, shapes.hidden), (shapes.hidden,), shapes.ffn * (2 if shapes.gated else 1)
    inputs = [wide, vector, wide, vector, vector, (*tokens, into), (into,), wide, *[vector] * 3]
    outputs = [wide, (*tokens, shapes.ffn), wide, *([] if post else [wide])]
    return Problem(
        inputs=[normal(*size) for size in inputs],
        grads=[normal(*size) for size in outputs],
        call=call,
        plain=chain(plain_norm, lambda x, bias: activation(x, bias, "torch")),
        exact=chain(exact_norm, exact),
    )


def mlm_loss_problem(shapes: Shapes, device: torch.device, rows: int, dropout: bool) -> Problem:
    """The decoder and the loss on every prediction slot of `rows` rows, a tenth of them unused. Without dropout."""
    slots = rows * shapes.predictions
    labels = torch.randint(shapes.vocab, (slots,), device=device)
    labels[::10] = -100

    def call(backend: str) -> Function:
        return lambda hidden, weight, bias: [mlm_loss(hidden, weight, bias, labels, shapes.vocab, backend)[0]]

    return Problem(
        inputs=[
            _normal(slots, shapes.hidden, like=shapes, device=device),
            _normal(shapes.padded_vocab, shapes.hidden, like=shapes, device=device, scale=0.02),
            _normal(shapes.padded_vocab, like=shapes, device=device, scale=0.02),
        ],
        grads=[torch.ones((), device=device)],
        call=call,
        plain=call("torch"),
        exact=lambda hidden, weight, bias: [reference.mlm_loss(hidden, weight, bias, labels, shapes.vocab)[0]],
    )


PROBLEMS: dict[str, Callable[[Shapes, torch.device, int, bool], Problem]] = {
    "attention": attention_problem,
    "mlm_loss": mlm_loss_problem,
    "layer": layer_problem,
}
