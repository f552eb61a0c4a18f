"""Cleaning of text: control characters, line ends, left-over markup, paragraphs, addresses, characters of words.

`decode`, `mask_addresses` and `paragraphs` do what needs a whole document. What is local to a word (Unicode normal form,
invisible characters, entities) is `clean_word`, run once for each distinct word by `tokens.encoder`.
"""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from collections import Counter
from itertools import pairwise
from typing import Literal, NamedTuple

from data_prep.text.sentences import CLOSERS, WIDE_CLOSERS
from megabert.data.text import plain_word

Form = Literal["NFC", "NFKC", "none"]

# C0 controls and DEL go, but tab and line feed stay and VT, FF become spaces.
_DELETED = bytes(c for c in (*range(32), 127) if c not in (9, 10, 11, 12, 13))
_SPACES = bytes.maketrans(b"\x0b\x0c", b"  ")
TAG = re.compile(
    r"</?(?:br|dl|dd|dt|ul|ol|li|p|ref|references|nowiki|noinclude|onlyinclude|includeonly|div|span|center|"
    r"small|big|sub|sup|table|tr|td|th|gallery|blockquote|poem|font|math|tt|code|pre|hr|em|strong|cite|i|b|u|s)"
    r"\b[^<>\n]{0,200}>?",
    re.IGNORECASE,
)
# whitespace that --keep-whitespace keeps
BLANKS = " \t\n"
# where a paragraph begins that keeps its whitespace: at a run of blanks with a line end, between other characters
KEPT_EDGE = re.compile(r"(?<=[^ \t\n])(?=[ \t]*\n[ \t\n]*[^ \t\n])")
KEPT_WORD = re.compile(r"[ \t\n]*[^ \t\n]+(?:[ \t\n]+\Z)?")
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

# what `mask_addresses` replaces: e-mail addresses by one that RFC 2606 sets aside for examples, IP addresses by those of RFC 5737 and
# RFC 3849 for documentation, and citation marks, which it removes
MASK_KINDS = ("emails", "ips", "citations")
EMAIL, IPV4, IPV6 = "email@example.com", "192.0.2.1", "2001:db8::1"
# The local part of RFC 5322 without quotes; a domain of labels of RFC 1035 with a top-level one of letters.
_EMAIL = re.compile(
    r"(?<![\w.!#$%&'*+/=?^`{|}~-])[\w.!#$%&'*+/=?^`{|}~-]{1,64}@"
    r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}(?![\w@-])"
)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])(?=[0-9A-Fa-f]*:)[0-9A-Fa-f:]{2,39}(?![\w:])")
# Wikipedia's marks as extractors leave them (Raffel et al. 2020, section 2.2).
_CITATION = re.compile(r"\[(?:\d{1,3}|edit|citation needed)\]")


class Decoded(NamedTuple):
    """Text with bare line feeds, and how many NULs and other control characters were removed from it.

    `glued`: whether it may hold one of the marks GLUED, which few texts do.
    """

    text: str
    nuls: int
    controls: int
    glued: bool


def decode(raw: bytes) -> Decoded:
    """UTF-8 bytes to text.

    Raises UnicodeDecodeError; its `start` counts from the first byte of `raw`.
    """
    text = raw.decode()
    nuls = raw.count(0)
    cleaned = raw.translate(_SPACES, _DELETED)
    if len(cleaned) != len(raw) or b"\x0b" in raw or b"\x0c" in raw:
        text = cleaned.decode()
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    glued = not text.isascii() and any(byte in raw for byte in _GLUED_BYTES)
    return Decoded(text, nuls, len(raw) - len(cleaned) - nuls, glued)


def is_hard_wrapped(text: str) -> bool:
    """Whether single line ends only wrap: lines that another line follows are 40 to 120 characters, mostly."""
    lines = text[:100_000].split("\n")
    followed = sorted(len(a) for a, b in pairwise(lines) if a.strip() and b.strip())
    if not followed:
        return False
    return followed[len(followed) // 2] >= 40 and followed[len(followed) * 19 // 20] <= 120


def paragraphs(
    text: str, markup: bool, counts: Counter[str] | None = None, keep_whitespace: bool = False, glued: bool = True
) -> list[str]:
    """Paragraphs of a document; whitespace inside them is still as it was.

    With `keep_whitespace` they are its lines, each with the line ends and blanks before it: joined they are the text with a
    space before it, as SentencePiece puts one there. `markup`: the text comes from an extractor, so that paragraphs are lines
    and tags may be left over, which are counted in `counts`. `glued` is that of `decode`.
    """
    if markup and "<" in text:
        text, tags = TAG.subn(" ", text)
        if counts is not None:
            counts["markup tags"] += tags
    if keep_whitespace:
        return KEPT_EDGE.split(" " + text) if text.strip(BLANKS) else [""]
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


def kept_words(paragraph: str) -> list[str]:
    """The words of a paragraph, each with the blanks before it and the last with those after it."""
    return KEPT_WORD.findall(paragraph)


def clean_word(word: str, form: Form = "NFC") -> str:
    """A word in a Unicode normal form, without invisible characters, with HTML entities resolved; by "none" as it is."""
    if form == "none":
        return word
    word = plain_word(word)
    return word if word.isascii() else unicodedata.normalize(form, word)


def _address(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


def mask_addresses(text: str, kinds: tuple[str, ...], counts: Counter[str]) -> str:
    """`text` with the `kinds` (of `MASK_KINDS`) replaced, which are counted in `counts`."""
    if "emails" in kinds and "@" in text:
        text, number = _EMAIL.subn(EMAIL, text)
        counts["masked e-mail addresses"] += number
    if "ips" in kinds:
        text = _mask_ips(_IPV4, text, 4, IPV4, counts)
        if text.count(":") > 1:
            text = _mask_ips(_IPV6, text, 6, IPV6, counts)
    if "citations" in kinds and "[" in text:
        text, number = _CITATION.subn("", text)
        counts["removed citation marks"] += number
    return text


def _mask_ips(pattern: re.Pattern[str], text: str, version: int, instead: str, counts: Counter[str]) -> str:
    def replace(match: re.Match[str]) -> str:
        # "a::b" and "::" are punctuation in some languages
        groups = len([part for part in match[0].split(":") if part])
        if (version == 4 or groups > 2) and _address(match[0], version):
            counts["masked IP addresses"] += 1
            return instead
        return match[0]

    return pattern.sub(replace, text)
