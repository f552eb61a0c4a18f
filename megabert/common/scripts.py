"""Scripts that put no space between words."""

from __future__ import annotations

import unicodedata

# Blocks of scripts that put no space between words, first and last code point: Thai, Lao, Tibetan; Burmese; Khmer; Tai;
# Balinese; CJK radicals to bopomofo; their extensions; ideographs; Yi; Javanese, Burmese; Tai Viet; compatibility ideographs;
# full-width forms, half-width kana; ideographs beyond the first plane.
NO_SPACES = (
    (0x0E00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x1950, 0x1AAF), (0x1B00, 0x1B7F), (0x2E80, 0x312F),
    (0x31A0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA000, 0xA4CF), (0xA980, 0xA9FF), (0xAA60, 0xAADF),
    (0xF900, 0xFAFF), (0xFF00, 0xFF9F), (0x20000, 0x3FFFF),
)  # fmt: skip
FIRST_WITHOUT = chr(NO_SPACES[0][0])  # most of most texts comes before it
TRAILING_VOWELS = "\u0e30\u0e32\u0e33\u0e45\u0eb0\u0eb2\u0eb3"  # letters of Thai and Lao that no syllable begins with


def writes_without_spaces(character: str) -> bool:
    """Whether a character's script puts no space between words."""
    return character >= FIRST_WITHOUT and any(first <= ord(character) <= last for first, last in NO_SPACES)


def stand_together(before: str, after: str) -> bool:
    """Whether no space is between two words of a text: one is in a script without spaces, the other too or punctuation."""
    edges = before[-1:], after[:1]
    without = [bool(c) and writes_without_spaces(c) for c in edges]
    return any(without) and all(
        w or unicodedata.category(c or " ")[0] == "P" for w, c in zip(without, edges, strict=True)
    )


def begins_unit(piece: str) -> bool:
    """Whether a piece begins with a character of `NO_SPACES` that does not belong to the one before it."""
    first = piece[:1]
    if not first or not writes_without_spaces(first) or first in TRAILING_VOWELS:
        return False
    return unicodedata.category(first) not in ("Mn", "Mc", "Lm")
