"""Cleaning of text: control characters, line ends, left-over markup, paragraphs, characters of words.

`decode` and `paragraphs` do what needs a whole document. What is local to a word (Unicode normal form,
invisible characters, entities) is `clean_word`, run once for each distinct word by `tokens.encoder`.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise

from data_prep.text.sentences import CLOSERS, WIDE_CLOSERS
from megabert.data.text import plain_word

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
# ideographic full stops, which no space follows
FULL_STOPS = ("\u3002", "\uff01", "\uff1f")
# Marks that end a sentence and that a space need not follow: ideographic, Devanagari, Urdu, Arabic, Armenian, Ethiopic,
# Burmese, Khmer and Tibetan ones.
GLUED = "\u3002\uff01\uff1f\uff61\u0964\u0965\u06d4\u061f\u0589\u1362\u1367\u1368\u104b\u17d4\u17d5\u0f0d\u0f0e"
_CLOSING = re.escape(CLOSERS + WIDE_CLOSERS)
GLUED_END = re.compile(rf"([{GLUED}]+[{_CLOSING}]*)(?=[^\s{GLUED}{_CLOSING}])")
# first bytes of these marks
_GLUED_BYTES = sorted({mark.encode()[0] for mark in GLUED})
# characters a mark at most where a text is in such a script and does not merely quote it
GLUED_SHARE = 200


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
        text = _separate_sentences(text)
    if not markup and is_hard_wrapped(text):
        return BLANK_LINES.split(text)
    return text.split("\n")


def _separate_sentences(text: str) -> str:
    """`text` with a space where a sentence ends without one, its closing quotation marks before it.

    A text that merely quotes a line in such a script is cut there, quotation marks or not, into paragraphs.
    """
    marks = sum(text.count(mark) for mark in GLUED if mark in text)
    if not marks:
        return text
    if marks * GLUED_SHARE >= len(text):
        return GLUED_END.sub(r"\1 ", text)
    for stop in FULL_STOPS:
        text = text.replace(stop, stop + "\n")
    return text


def clean_word(word: str) -> str:
    """A word in NFC, without invisible characters, with HTML entities resolved."""
    word = plain_word(word)
    return word if word.isascii() else unicodedata.normalize("NFC", word)
