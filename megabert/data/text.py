"""Text before tokens: invisible characters and HTML entities, scripts without spaces, and where a token lies in its text.

Used alike when a dataset is built and when a model reads text.
"""

from __future__ import annotations

import functools
import html
import re
import sys
import unicodedata
from collections.abc import Iterator

import numpy as np

INVISIBLE = re.compile("[\x80-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\ufeff\ufffe\uffff]")
# as HTML 5 finds them
ENTITY = re.compile(r"&(?:#[0-9]+|#[xX][0-9a-fA-F]+|[^\t\n\f <&#;]{1,32});?")
_WORD = re.compile(r"\S+")
# Blocks of scripts that put no space between words, first and last code point: Thai, Lao, Tibetan; Burmese; Khmer; Tai;
# Balinese; CJK radicals to bopomofo; their extensions; ideographs; Yi; Javanese, Burmese; Tai Viet; compatibility ideographs;
# full-width forms, half-width kana; ideographs beyond the first plane.
NO_SPACES = (
    (0x0E00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x1950, 0x1AAF), (0x1B00, 0x1B7F), (0x2E80, 0x312F),
    (0x31A0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA000, 0xA4CF), (0xA980, 0xA9FF), (0xAA60, 0xAADF),
    (0xF900, 0xFAFF), (0xFF00, 0xFF9F), (0x20000, 0x3FFFF),
)  # fmt: skip
# most of most texts comes before it
FIRST_WITHOUT = chr(NO_SPACES[0][0])
# letters of Thai and Lao that begin no syllable
TRAILING_VOWELS = "\u0e30\u0e32\u0e33\u0e45\u0eb0\u0eb2\u0eb3"


def plain_word(word: str) -> str:
    """A word, or a text, whose entities are resolved if it has a whole one; without invisible characters."""
    if "&" in word and ";" in word:
        word = html.unescape(word)
    return word if word.isascii() else INVISIBLE.sub("", word)


def plain(text: str) -> str:
    """`text` with `plain_word` applied to each of its words."""
    if "&" in text:
        text = _WORD.sub(lambda word: plain_word(word[0]) if "&" in word[0] else word[0], text)
    return text if text.isascii() else INVISIBLE.sub("", text)


def plain_with_places(text: str) -> tuple[str, np.ndarray]:
    """(`plain(text)`, int64 [its length, 2]: the characters of `text` that each of its characters stands for, first and end)."""
    parts: list[str] = []
    places: list[np.ndarray] = []
    at = 0
    for start, end, new in [*_replacements(text), (len(text), len(text), "")]:
        parts += [text[at:start], new]
        kept = np.arange(at, start)
        places += [np.stack([kept, kept + 1], 1), np.tile([start, end], (len(new), 1))]
        at = end
    return "".join(parts), np.concatenate(places).astype(np.int64)


def _replacements(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, replacement) of each place where `plain` changes `text`, in their order."""
    replacements = [(m.start(), m.end(), "") for m in INVISIBLE.finditer(text)]
    for word in _WORD.finditer(text) if "&" in text else ():
        if "&" in word[0] and ";" in word[0]:
            for entity in ENTITY.finditer(word[0]):
                new = html.unescape(entity[0])
                if new != entity[0]:
                    start = word.start() + entity.start()
                    replacements.append((start, start + len(entity[0]), INVISIBLE.sub("", new)))
    last = 0
    for start, end, new in sorted(replacements):
        if start >= last:  # an invisible character may be part of something that only looks like an entity
            yield start, end, new
            last = end


def offsets_in_original(text: str, encoded: str, offsets: np.ndarray) -> np.ndarray:
    """Offsets int64 [n, 2] in `encoded`, which is `plain(text)` or `text`, as offsets in `text`."""
    if encoded == text:
        return offsets
    same, places = plain_with_places(text)
    assert same == encoded
    starts, ends = np.append(places[:, 0], len(text)), np.append(0, places[:, 1])
    first = starts[offsets[:, 0]]
    last = ends[offsets[:, 1]]
    return np.stack([first, np.where(offsets[:, 0] == offsets[:, 1], first, last)], 1)


def without_blanks(text: str, offsets: np.ndarray) -> np.ndarray:
    """`offsets` int64 [n, 2] with each start moved past the blanks there, which SentencePiece counts to the token after."""
    blank = _blank()[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)]
    solid = np.append(np.flatnonzero(~blank), len(text))
    offsets[:, 0] = np.minimum(solid[np.searchsorted(solid, offsets[:, 0])], offsets[:, 1])
    return offsets


@functools.cache
def _blank() -> np.ndarray:
    """bool [every code point]: whether Unicode calls it a separator, a control or a format character."""
    kinds = {"Zs", "Zl", "Zp", "Cc", "Cf"}
    return np.array([unicodedata.category(chr(c)) in kinds for c in range(sys.maxunicode + 1)])


def writes_without_spaces(character: str) -> bool:
    """Whether a character's script puts no space between words."""
    return character >= FIRST_WITHOUT and any(first <= ord(character) <= last for first, last in NO_SPACES)


def words_of(text: str) -> list[tuple[int, int]]:
    """First character, and one past the last, of each word: a run of letters, marks and digits, or one other character that is
    not blank. In a script without spaces a character with its marks is a word."""
    words: list[tuple[int, int]] = []
    for at, character in enumerate(text):
        kind = unicodedata.category(character)[0]
        if kind in "ZC":
            continue
        before = text[at - 1 : at]
        if (
            words and words[-1][1] == at and kind in "LMN" and unicodedata.category(before)[0] in "LMN"
            and not begins_unit(character) and (writes_without_spaces(character) or not writes_without_spaces(before))
        ):  # fmt: skip
            words[-1] = words[-1][0], at + 1
        else:
            words.append((at, at + 1))
    return words


def stand_together(before: str, after: str) -> bool:
    """Whether a text has no space between two words: one is in a script without spaces, the other too or punctuation."""
    edges = before[-1:], after[:1]
    without = [bool(c) and writes_without_spaces(c) for c in edges]
    return any(without) and all(
        w or unicodedata.category(c or " ")[0] == "P" for w, c in zip(without, edges, strict=True)
    )


def begins_unit(token: str) -> bool:
    """Whether a token begins with a character of a script without spaces that does not belong to the one before it."""
    first = token[:1]
    if not first or not writes_without_spaces(first) or first in TRAILING_VOWELS:
        return False
    return unicodedata.category(first) not in ("Mn", "Mc", "Lm")
