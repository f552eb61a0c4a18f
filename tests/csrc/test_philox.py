"""Dropout masks: the published Philox, the same mask from oracle and native code, the right share, no visible pattern."""

from __future__ import annotations

import pytest
import torch

from megabert import ops
from tests.ops import reference
from tests.ops.oracle import needs_library

SEED = 0x0123456789ABCDEF


def test_philox_gives_the_published_values() -> None:
    """Known answers of philox4x32-10 from the Random123 distribution."""
    known = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ]
    for counter, key, words in known:
        assert tuple(map(int, reference.philox(tuple(torch.tensor([c]) for c in counter), key))) == words


def native_mask(seed: int, stream: int, rows: int, columns: int, p: float, dtype=torch.float32) -> torch.Tensor:
    """The factor that the native operation multiplies with."""
    return ops.dropout(torch.ones(rows, columns, dtype=dtype), p, torch.tensor([seed]), stream, "native")


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_mask_is_the_oracles(dtype: torch.dtype) -> None:
    shapes = [(1, 1, 0.5, 0), (3, 1023, 0.1, 7), (257, 64, 0.9, 2**31), (5, 100, 1e-9, 1), (4, 9, 0.0, 1)]
    for rows, columns, p, stream in shapes:
        expected = reference.keep_mask(SEED, stream, rows, columns, p)
        assert native_mask(SEED, stream, rows, columns, p, dtype).equal(expected.to(dtype))


@needs_library
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_share_and_independence_of_the_mask(p: float) -> None:
    rows, columns = 1000, 1000
    kept = (native_mask(SEED, 3, rows, columns, p) != 0).double()
    sigma = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(1 - kept.mean().item() - p) < 4 * sigma + 2**-17  # p is rounded to 16 bits
    centred = (kept - kept.mean()) / kept.std()
    others = {
        "next column": centred.roll(1, 1),
        "eight columns on": centred.roll(8, 1),
        "next row": centred.roll(1, 0),
        "next seed": (native_mask(SEED + 1, 3, rows, columns, p) != 0).double() - (1 - p),
        "next stream": (native_mask(SEED, 4, rows, columns, p) != 0).double() - (1 - p),
    }
    for name, other in others.items():
        correlation = (centred * other / other.std()).mean().item()
        assert abs(correlation) < 5e-3, f"{name}: correlation {correlation:.4f}"  # 5 sigma
    for share in (kept.mean(0), kept.mean(1)):  # no column or row is special
        assert (share - (1 - p)).abs().max() < 5.5 * (p * (1 - p) / rows) ** 0.5
