"""The element-wise operations of a layer beside eager and compiled torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.cases import Case, Maker, size_of
from megabert.model import ops


def layer(make: Maker, small: bool) -> list[Case]:
    rows, width = (64, 48) if small else (8192, 1024)
    ffn = 4 * width
    x, bias = make.normal(rows, ffn), make.normal(ffn)
    compiled = torch.compile if not small else (lambda f, **_: f)

    def gelu(x: Tensor, b: Tensor) -> Tensor:
        return F.gelu(x + b)

    sides = {
        "ours": make.both_ways(lambda x, b: ops.bias_gelu(x, b, "native"), x, bias),
        "torch": make.both_ways(gelu, x, bias),
        "torch.compile": make.both_ways(compiled(gelu, dynamic=False), x, bias),
    }
    cases = [
        Case(
            "bias_gelu",
            f"[{rows}, {ffn}]",
            sides,
            [("ours", name) for name in list(sides)[1:]],
            {"ours": 5 * size_of(x)},
        )
    ]
    wide, biases = make.normal(rows, 2 * ffn), make.normal(2 * ffn)

    def geglu(x: Tensor, b: Tensor) -> Tensor:
        value, gate = (x + b).chunk(2, -1)
        return F.gelu(value) * gate

    sides = {
        "ours": make.both_ways(lambda x, b: ops.bias_geglu(x, b, "native"), wide, biases),
        "torch": make.both_ways(geglu, wide, biases),
        "torch.compile": make.both_ways(compiled(geglu, dynamic=False), wide, biases),
    }
    against = [("ours", name) for name in list(sides)[1:]]
    cases.append(Case("bias_geglu", f"[{rows}, 2 x {ffn}]", sides, against, {"ours": 8 * size_of(x)}))
    size = 16 if small else 64
    heads = width // size
    qkv = make.normal(rows, 3 * width)
    angles = ops.rotation(torch.arange(rows, device=make.device) % 128, size)
    turn = [t[:, None, None].to(qkv.dtype) for t in angles]

    def turned(x: Tensor) -> Tensor:
        query_key, value = x.view(rows, 3, heads, size).split([2, 1], 1)
        first, second = query_key.chunk(2, -1)
        cos, sin = turn
        query_key = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return torch.cat([query_key, value], 1)

    sides = {
        "ours": make.both_ways(lambda x: ops.rotate(x, heads, angles, "native"), qkv),
        "torch": make.both_ways(turned, qkv),
        "torch.compile": make.both_ways(compiled(turned, dynamic=False), qkv),
    }
    cases.append(Case("rotate", f"[{rows}, 3 x {width}]", sides, against, {"ours": 4 * size_of(qkv)}))
    y, residual, vectors = (
        make.normal(rows, width),
        make.normal(rows, width),
        [make.normal(width) for _ in range(3)],
    )

    def norm(x: Tensor, r: Tensor, b: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.layer_norm(r + F.dropout(x + b, 0.1), (width,), w, s, 1e-12)

    def ours(x: Tensor, r: Tensor, b: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return ops.dropout_add_layer_norm(x, b, r, w, s, 0.1, 1e-12, make.seed, 0, "native")

    inputs = (y, residual, *vectors)
    sides = {
        "ours": make.both_ways(ours, *inputs),
        "torch": make.both_ways(norm, *inputs),
        "torch.compile": make.both_ways(compiled(norm, dynamic=False), *inputs),
    }
    moved = {"ours": 8 * size_of(y)}  # x, residual, y, z; grad, z, dx, dresidual
    cases.append(
        Case(
            "dropout_add_layer_norm",
            f"[{rows}, {width}], dropout 0.1",
            sides,
            [("ours", n) for n in list(sides)[1:]],
            moved,
        )
    )
    return cases
