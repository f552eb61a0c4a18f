"""A matrix product with GELU's gradient at its end, in Triton: what the product gives is used before it leaves the registers.

Bias + GELU's own gradient would read it again, and write another tensor of its size. Tensors come and go by descriptors, which
Hopper's copy engine moves in tiles; it checks the bounds, too. Import this module only where Triton is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

TILE_ROWS, TILE_COLUMNS, TILE_INNER = 128, 128, 64
GROUP = 8  # tiles, one below the other, that run together: they read the same columns of the weight
WARPS, STAGES = (
    8,
    3,
)  # stages of 32 KiB: two blocks an SM, so that the end of one runs beside the products of the other
HOPPER_REGISTERS = 128  # a thread: as many as two blocks of 8 warps have. On Blackwell so few would spill


@triton.jit
def _product_gelu_gradient(  # type: ignore[no-untyped-def]
    grad, weight, x, dx, bias, sums, rows, inner, width,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr, tile_inner: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """dx = (grad weight) * gelu'(x + bias); sums [row tiles, width]: of dx over each tile's rows."""
    down, across = tl.cdiv(rows, tile_rows), tl.cdiv(width, tile_columns)
    block = tl.program_id(0)
    first = block // (group * across) * group
    height = tl.minimum(down - first, group)
    row, column = first + block % (group * across) % height, block % (group * across) // height
    i, j = row * tile_rows, column * tile_columns

    product = tl.zeros((tile_rows, tile_columns), tl.float32)
    for k in range(0, inner, tile_inner):
        product = tl.dot(grad.load([i, k]), weight.load([k, j]), product)

    columns = j + tl.arange(0, tile_columns)
    inside = columns < width
    z = x.load([i, j]).to(tl.float32) + tl.load(bias + columns, inside, 0.0).to(tl.float32)[None, :]
    # The normal distribution's cdf and exp(-z^2 / 2), as in csrc/bias_gelu/kernel.cuh for two-byte types.
    t = 1.0 / (tl.abs(z) * 0.325 + 1.0)
    p = t * -0.0631787177 + 0.1213928476
    p = p * t + 0.0624746463
    p = p * t + 0.1202439247
    p = p * t + 0.1294055228
    p = p * t + 0.1296585589
    bell = tl.exp2(z * z * -0.7213475204)
    tail = bell * t * p
    slope = tl.where(z < 0.0, tail, 1.0 - tail) + z * bell * 0.398942280
    result = product * slope  # 0 in rows beyond the last
    dx.store([i, j], result.to(dx.dtype))
    tl.store(sums + row * width + columns, tl.sum(result, 0), inside)


def product_gelu_gradient(grad: Tensor, weight: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """grad [N, D], weight [D, F], x [N, F], bias [F], of one type -> dx [N, F] and the sum over its rows [F].

    Sums have a fixed order. Raises ValueError for sizes whose rows do not begin at multiples of 16 bytes.
    """
    (rows, inner), width = grad.shape, weight.shape[1]
    if inner * x.element_size() % 16 or width * x.element_size() % 16:
        raise ValueError(
            f"ops.feed_forward=triton: the weight's sizes, {inner} and {width} columns, must be multiples of 8"
        )
    grad, weight, x = grad.contiguous(), weight.contiguous(), x.contiguous()
    dx, down = torch.empty_like(x), triton.cdiv(rows, TILE_ROWS)
    sums = x.new_empty(down, width, dtype=torch.float32)
    tensors = [
        TensorDescriptor.from_tensor(tensor, tile) for tensor, tile in zip((grad, weight, x, dx), tiles(), strict=True)
    ]
    grid = (down * triton.cdiv(width, TILE_COLUMNS),)
    _product_gelu_gradient[grid](
        *tensors, bias, sums, rows, inner, width, TILE_ROWS, TILE_COLUMNS, TILE_INNER, GROUP,
        **launch(torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else 0),
    )  # fmt: skip
    return dx, sums.sum(0).to(bias.dtype)


def tiles() -> list[list[int]]:
    """[rows, columns] of a tile of grad, weight, x and dx."""
    result = [TILE_ROWS, TILE_COLUMNS]
    return [[TILE_ROWS, TILE_INNER], [TILE_INNER, TILE_COLUMNS], result, result]


def launch(major: int) -> dict[str, int | bool]:
    """How the kernel is compiled for GPUs of a compute capability."""
    options: dict[str, int | bool] = {"num_warps": WARPS, "num_stages": STAGES, "enable_fp_fusion": True}
    return options | ({"maxnreg": HOPPER_REGISTERS} if major == 9 else {})
