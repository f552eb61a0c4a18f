"""The element-wise operations of a layer beside eager and compiled torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ops.cases import Case, Maker, size_of
from megabert import ops


def layer(make: Maker, small: bool) -> list[Case]:
    rows, width = (64, 48) if small else (8192, 1024)
    ffn = 4 * width
    x, bias = make.normal(rows, ffn), make.normal(ffn)
    compiled = torch.compile if not small else (lambda f, **_: f)

    def case(
        name: str, size: str, ours: Callable[..., Any], plain: Callable[..., Any], inputs: Sequence[Tensor], moved: int
    ) -> Case:
        sides = {
            "ours": make.both_ways(ours, *inputs),
            "torch": make.both_ways(plain, *inputs),
            "torch.compile": make.both_ways(compiled(plain, dynamic=False), *inputs),
        }
        return Case(name, size, sides, [("ours", "torch"), ("ours", "torch.compile")], {"ours": moved})

    def gelu(x: Tensor, b: Tensor) -> Tensor:
        return F.gelu(x + b)

    wide, biases = make.normal(rows, 2 * ffn), make.normal(2 * ffn)

    def geglu(x: Tensor, b: Tensor) -> Tensor:
        value, gate = (x + b).chunk(2, -1)
        return F.gelu(value) * gate

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

    y, residual, vectors = (make.normal(rows, width), make.normal(rows, width), [make.normal(width) for _ in range(3)])

    def norm(x: Tensor, r: Tensor, b: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.layer_norm(r + F.dropout(x + b, 0.1), (width,), w, s, 1e-12)

    def our_gelu(x: Tensor, b: Tensor) -> Tensor:
        return ops.bias_gelu(x, b, "native")

    def our_geglu(x: Tensor, b: Tensor) -> Tensor:
        return ops.bias_geglu(x, b, "native")

    def our_rotation(x: Tensor) -> Tensor:
        return ops.rotate(x, heads, angles, "native")

    def our_norm(x: Tensor, r: Tensor, b: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return ops.dropout_add_layer_norm(x, b, r, w, s, 0.1, 1e-12, make.seed, 0, "native")

    whole = y, residual, *vectors
    normed = f"[{rows}, {width}], dropout 0.1"
    return [
        case("bias_gelu", f"[{rows}, {ffn}]", our_gelu, gelu, (x, bias), 5 * size_of(x)),
        case("bias_geglu", f"[{rows}, 2 x {ffn}]", our_geglu, geglu, (wide, biases), 8 * size_of(x)),
        case("rotate", f"[{rows}, 3 x {width}]", our_rotation, turned, (qkv,), 4 * size_of(qkv)),
        # x, residual, y, z; grad, z, dx, dresidual
        case("dropout_add_layer_norm", normed, our_norm, norm, whole, 8 * size_of(y)),
    ]
