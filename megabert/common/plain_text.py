"""Text without what nobody sees: invisible characters are removed and HTML entities resolved, in training and in use alike."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import numpy as np

INVISIBLE = re.compile("[\x80-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\ufeff\ufffe\uffff]")
ENTITY = re.compile(r"&(?:#[0-9]+|#[xX][0-9a-fA-F]+|[^\t\n\f <&#;]{1,32});?")  # as HTML 5 finds them
_WORD = re.compile(r"\S+")


def plain_word(word: str) -> str:
    """A word, or a text, whose entities are resolved if it has a whole one; without invisible characters."""
    if "&" in word and ";" in word:
        word = html.unescape(word)
    return word if word.isascii() else INVISIBLE.sub("", word)


def plain(text: str) -> str:
    """`text` with each of its words as `plain_word` has it."""
    if "&" in text:
        text = _WORD.sub(lambda word: plain_word(word[0]) if "&" in word[0] else word[0], text)
    return text if text.isascii() else INVISIBLE.sub("", text)


def plain_with_places(text: str) -> tuple[str, np.ndarray]:
    """(`plain(text)`, int64 [its length, 2]: first character in `text` that each of its characters is of, and one past the last)."""
    parts: list[str] = []
    places: list[np.ndarray] = []
    at = 0
    for start, end, new in [*_changes(text), (len(text), len(text), "")]:
        parts += [text[at:start], new]
        kept = np.arange(at, start)
        places += [np.stack([kept, kept + 1], 1), np.tile([start, end], (len(new), 1))]
        at = end
    return "".join(parts), np.concatenate(places).astype(np.int64)


def _changes(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, what stands there instead) of each place where `plain` changes `text`, in their order."""
    found = [(m.start(), m.end(), "") for m in INVISIBLE.finditer(text)]
    for word in _WORD.finditer(text) if "&" in text else ():
        if "&" in word[0] and ";" in word[0]:
            for entity in ENTITY.finditer(word[0]):
                new = html.unescape(entity[0])
                if new != entity[0]:
                    start = word.start() + entity.start()
                    found.append((start, start + len(entity[0]), INVISIBLE.sub("", new)))
    last = 0
    for start, end, new in sorted(found):
        if start >= last:  # an invisible character may be part of an entity that is none
            yield start, end, new
            last = end
