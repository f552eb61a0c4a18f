"""Places of tokens in a text: as libraries give them, without the blanks before a token, in the text before it was cleaned."""

from __future__ import annotations

import functools
import sys
import unicodedata

import numpy as np

from megabert.common.plain_text import plain_with_places


@functools.cache
def _blank() -> np.ndarray:
    """bool [every code point]: whether Unicode calls it a separator, a control or a format character."""
    kinds = {"Zs", "Zl", "Zp", "Cc", "Cf"}
    return np.array([unicodedata.category(chr(c)) in kinds for c in range(sys.maxunicode + 1)])


def without_blanks(text: str, offsets: np.ndarray) -> np.ndarray:
    """`offsets` with each first character moved past the blanks at it: SentencePiece counts them to the token after."""
    blank = _blank()[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)]
    solid = np.append(np.flatnonzero(~blank), len(text))  # characters that are none
    offsets[:, 0] = np.minimum(solid[np.searchsorted(solid, offsets[:, 0])], offsets[:, 1])
    return offsets


def places_in(text: str, seen: str, offsets: np.ndarray) -> np.ndarray:
    """`offsets` in the text as it was `seen` (`plain`), as offsets in the text itself."""
    if seen == text:
        return offsets
    found, places = plain_with_places(text)
    assert found == seen, "a text's plain form is one"
    starts, ends = np.append(places[:, 0], len(text)), np.append(0, places[:, 1])
    first = starts[offsets[:, 0]]
    last = ends[offsets[:, 1]]
    return np.stack([first, np.where(offsets[:, 0] == offsets[:, 1], first, last)], 1)
