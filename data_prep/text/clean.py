"""Cleaning of text: control characters, line ends, left-over markup and entities, paragraphs.

These steps need a whole document. Steps local to a word (Unicode normal form, invisible characters) are in
`megabert.data.text.clean_word`, which `tokens.encoder` runs once for each distinct word.
"""

from __future__ import annotations

import html
import re
from html.entities import html5
from itertools import pairwise

from megabert.data.text import CONTROLS, GLUED, GLUED_END, NO_SPACES

# the bytes of CONTROLS, and all bytes, in which these are spaces
_CONTROLS = bytes(byte for byte in range(256) if CONTROLS.match(chr(byte)))
_SPACED = bytes(32 if byte in _CONTROLS else byte for byte in range(256))
# A tag with `>`, which is bare or has attributes, or one that is cut off at the end of a line; a comparison (a<b) is neither.
TAG = re.compile(
    r"</?(?:br|dl|dd|dt|ul|ol|li|p|ref|references|nowiki|noinclude|onlyinclude|includeonly|div|span|center|"
    r"small|big|sub|sup|table|tr|td|th|gallery|blockquote|poem|font|math|tt|code|pre|hr|em|strong|cite|i|b|u|s)"
    r"\b(?:[ \t]*/?>|[ \t]+[\w:-]+[ \t]*=[^<>\n]{0,200}>|(?:[ \t]+[\w:-]+=[^\s<>]+)*[ \t]*$)",
    re.IGNORECASE | re.MULTILINE,
)
# a complete entity; `&copy=2` and `&para` in code and addresses are text
ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});")
# most times that an entity was escaped; more would take quadratic time for a long `&amp;amp;amp;…`
MAX_ESCAPES = 16
BLANK_LINES = re.compile(r"\n\s*\n")
UNSPACED = "".join(f"{chr(first)}-{chr(last)}" for first, last in NO_SPACES)
# a line end inside text of a script without spaces between words
UNSPACED_WRAP = re.compile(rf"(?<=[{UNSPACED}])[ \t]*\n[ \t]*(?=[{UNSPACED}])")
# first bytes of these marks
_GLUED_BYTES = sorted({mark.encode()[0] for mark in GLUED})


def decode(raw: bytes) -> tuple[str, bool, int]:
    """(text with bare line feeds and spaces for control characters, whether it may contain one of the marks GLUED, the number of control
    characters) of UTF-8 bytes.

    Raises UnicodeDecodeError, whose `start` counts from the first byte of `raw`.
    """
    text = raw.decode()
    if controls := len(raw) - len(raw.translate(None, _CONTROLS)):
        text = raw.translate(_SPACED).decode()
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text, not text.isascii() and any(byte in raw for byte in _GLUED_BYTES), controls


def unescape(text: str) -> str:
    """`text` with the characters of its complete HTML entities, also of escaped ones (`&amp;lt;`)."""
    for _ in range(MAX_ESCAPES):
        before, text = text, ENTITY.sub(_character, text)
        if text == before:
            break
    return text


def _character(entity: re.Match[str]) -> str:
    name = entity[0]
    return html.unescape(name) if name[1] == "#" or name[1:] in html5 else name


def is_hard_wrapped(text: str) -> bool:
    """Whether single line ends are only wrapping: most lines that another line follows have 40 to 120 characters."""
    lines = text[:100_000].split("\n")
    followed = sorted(len(a) for a, b in pairwise(lines) if a.strip() and b.strip())
    if not followed:
        return False
    return followed[len(followed) // 2] >= 40 and followed[len(followed) * 19 // 20] <= 120


def paragraphs(text: str, markup: bool, glued: bool = True) -> list[str]:
    """Paragraphs of a document, with unchanged whitespace inside.

    `markup`: the text comes from an extractor, so paragraphs are lines, and tags and entities may be left over. `glued`: as of
    `decode`.
    """
    if markup and "<" in text:
        text = TAG.sub(" ", text)
    if markup and "&" in text:
        text = unescape(text)
        glued = glued or any(mark in text for mark in GLUED)
    wrapped = not markup and is_hard_wrapped(text)
    if wrapped and not text.isascii():
        text = UNSPACED_WRAP.sub("", text)
    if glued:
        text = GLUED_END.sub(r"\1 ", text)
    if wrapped:
        return BLANK_LINES.split(text)
    return text.split("\n")
