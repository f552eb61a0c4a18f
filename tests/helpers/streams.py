"""Random streams with plain Python integers: what `stream_keys` and the orders of rows are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def key(*parts: int) -> int:
    """A number below 2^64 from the parts, each mixed in by SplitMix64's step (Steele, Lea and Flood 2014)."""
    value, top = 0, 2**64
    for part in parts:
        value = ((value ^ part) + 0x9E3779B97F4A7C15) % top
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % top
        value = (value ^ value >> 27) * 0x94D049BB133111EB % top
        value ^= value >> 31
    return value


def shuffled(items: Sequence[Any], *stream: int) -> list[Any]:
    """The items in the order of their keys' high bits."""
    low = 2 ** len(items).bit_length()
    return [items[i] for i in sorted(range(len(items)), key=lambda i: (key(*stream, i) // low, i))]
