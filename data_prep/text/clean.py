"""Cleaning of text: control characters, line ends, left-over markup, paragraphs.

This is what needs a whole document. What is local to a word (Unicode normal form, invisible characters, entities) is
`megabert.data.text.clean_word`, run once for each distinct word by `tokens.encoder`.
"""

from __future__ import annotations

import re
from itertools import pairwise

from megabert.data.text import GLUED, GLUED_END

# C0 controls and DEL go, but tab and line feed stay and VT, FF become spaces.
_DELETED = bytes(c for c in (*range(32), 127) if c not in (9, 10, 11, 12, 13))
_SPACES = bytes.maketrans(b"\x0b\x0c", b"  ")
TAG = re.compile(
    r"</?(?:br|dl|dd|dt|ul|ol|li|p|ref|references|nowiki|noinclude|onlyinclude|includeonly|div|span|center|"
    r"small|big|sub|sup|table|tr|td|th|gallery|blockquote|poem|font|math|tt|code|pre|hr|em|strong|cite|i|b|u|s)"
    r"\b[^<>\n]{0,200}>?",
    re.IGNORECASE,
)
BLANK_LINES = re.compile(r"\n\s*\n")
# first bytes of these marks
_GLUED_BYTES = sorted({mark.encode()[0] for mark in GLUED})


def decode(raw: bytes) -> tuple[str, bool]:
    """(text with bare line feeds and without control characters, whether it may hold one of the marks GLUED) of UTF-8 bytes.

    Raises UnicodeDecodeError; its `start` counts from the first byte of `raw`.
    """
    text = raw.decode()
    cleaned = raw.translate(_SPACES, _DELETED)
    if len(cleaned) != len(raw) or b"\x0b" in raw or b"\x0c" in raw:
        text = cleaned.decode()
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text, not text.isascii() and any(byte in raw for byte in _GLUED_BYTES)


def is_hard_wrapped(text: str) -> bool:
    """Whether single line ends only wrap: lines that another line follows are 40 to 120 characters, mostly."""
    lines = text[:100_000].split("\n")
    followed = sorted(len(a) for a, b in pairwise(lines) if a.strip() and b.strip())
    if not followed:
        return False
    return followed[len(followed) // 2] >= 40 and followed[len(followed) * 19 // 20] <= 120


def paragraphs(text: str, markup: bool, glued: bool = True) -> list[str]:
    """Paragraphs of a document; whitespace inside them is still as it was.

    `markup`: the text comes from an extractor, so that paragraphs are lines and tags may be left over. `glued` is that of `decode`.
    """
    if markup and "<" in text:
        text = TAG.sub(" ", text)
    if glued:
        text = GLUED_END.sub(r"\1 ", text)
    if not markup and is_hard_wrapped(text):
        return BLANK_LINES.split(text)
    return text.split("\n")
