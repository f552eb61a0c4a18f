"""Text before tokens: its cleaning, sentence ends of all scripts, and scripts without spaces.

The same functions clean text for a dataset and for a model's input. A `form` is Unicode's normal form of the text: NFC, NFKC, or ""
for text that stays as it is composed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Literal

# Marks of direction, soft hyphens, byte order marks, C1 controls and noncharacters. The zero-width joiner and non-joiner are not among
# them: emoji, Persian and scripts of India are spelled with them.
INVISIBLE = re.compile(
    "[\x80-\x84\x86-\x9f\xad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufdd0-\ufdef\ufeff\ufffe\uffff]"
)
# C0 controls and DEL, which separate fields or are damage; they become spaces
CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
# whitespace between words, other than a single space
SPACES = re.compile(r"\s{2,}|[^\S ]")
# characters; a longer word is encoded in slices of at most this size
MAX_WORD = 512
_LONG_WORD = re.compile(rf"(?<!\S)\S{{{MAX_WORD + 1},}}")
# (start, end, replacement)
Replacement = tuple[int, int, str]
Form = Literal["NFC", "NFKC", ""]

# marks that close a quotation or bracket
CLOSERS = "\"')]}\u201d\u2019\u00bb*_"
# 」』】）〉》〕｣›
WIDE_CLOSERS = "\u300d\u300f\u3011\uff09\u3009\u300b\u3015\uff63\u203a"
# Code points of Unicode 14's Sentence_Terminal without ASCII and without those that also occur inside numbers; and marks that
# it lacks: Tibetan's shads (0F0D-0F11) and Khmer's khan and bariyoosan (17D4-17D5).
_SENTENCE_TERMINAL = """
    0589 061D-061F 06D4 0700-0702 07F9 0837 0839 083D-083E 0964-0965 0F0D-0F11 104A-104B 1362 1367-1368 166E 1735-1736
    17D4-17D5 1803 1809 1944-1945 1AA8-1AAB 1B5A-1B5B 1B5E-1B5F 1B7D-1B7E 1C3B-1C3C 1C7E-1C7F 203C-203D 2047-2049 2E2E
    2E3C 2E53-2E54 3002 A4FF A60E-A60F A6F3 A6F7 A876-A877 A8CE-A8CF A92F A9C8-A9C9 AA5D-AA5F AAF0-AAF1 ABEB FE56-FE57
    FF01 FF1F FF61 10A56-10A57 10F55-10F59 10F86-10F89 11047-11048 110BE-110C1 11141-11143 111C5-111C6 111CD 111DE-111DF
    11238-11239 1123B-1123C 112A9 1144B-1144C 115C2-115C3 115C9-115D7 11641-11642 1173C-1173E 11944 11946 11A42-11A43
    11A9B-11A9C 11C41-11C42 11EF7-11EF8 16A6E-16A6F 16AF5 16B37-16B38 16B44 16E98 1BC9F 1DA88
"""
_EDGES = [[int(edge, 16) for edge in item.split("-")] for item in _SENTENCE_TERMINAL.split()]
# without Burmese's comma
SCRIPT_TERMINALS = frozenset(chr(c) for edges in _EDGES for c in range(edges[0], edges[-1] + 1)) - {"\u104a"}
# Marks that end a sentence and need no space after them: ideographic, Devanagari, Urdu, Arabic, Armenian, Ethiopic,
# Burmese, Khmer and Tibetan ones.
GLUED = "\u3002\uff01\uff1f\uff61\u0964\u0965\u06d4\u061f\u0589\u1362\u1367\u1368\u104b\u17d4\u17d5\u0f0d\u0f0e"
CLOSING = CLOSERS + WIDE_CLOSERS
# such a mark with text directly after it: a space is inserted
GLUED_END = re.compile(rf"(?<![{GLUED}])([{GLUED}]++[{re.escape(CLOSING)}]*+)(?=[^\s{GLUED}{re.escape(CLOSING)}])")
# Blocks of scripts without spaces between words, first and last code point: Thai, Lao, Tibetan; Burmese; Khmer; Tai;
# Balinese; CJK radicals to bopomofo; their extensions; ideographs; Yi; Javanese, Burmese; Tai Viet; compatibility ideographs;
# full-width forms, half-width kana; ideographs beyond the first plane.
NO_SPACES = (
    (0x0E00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x1950, 0x1AAF), (0x1B00, 0x1B7F), (0x2E80, 0x312F),
    (0x31A0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA000, 0xA4CF), (0xA980, 0xA9FF), (0xAA60, 0xAADF),
    (0xF900, 0xFAFF), (0xFF00, 0xFF9F), (0x20000, 0x3FFFF),
)  # fmt: skip
# first code point of these blocks; most text is below it, which is fast to test
FIRST_WITHOUT = chr(NO_SPACES[0][0])
# letters of Thai and Lao that cannot begin a syllable
TRAILING_VOWELS = "\u0e30\u0e32\u0e33\u0e45\u0eb0\u0eb2\u0eb3"
# What belongs to the character before it, besides Unicode's marks: these vowels, joiners, half-width voicing marks, skin tones;
# and to the one after it: leading vowels of Thai and Lao, a joiner, signs that stack consonants (Burmese, Khmer, Tai Tham,
# Balinese, Javanese).
ATTACHED = TRAILING_VOWELS + "\u200c\u200d\uff9e\uff9f\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"
ATTACHING = "\u0e40\u0e41\u0e42\u0e43\u0e44\u0ec0\u0ec1\u0ec2\u0ec3\u0ec4\u200d\u1039\u17d2\u1a60\u1b44\ua9c0"


def clean_word(word: str, form: Form = "NFC") -> str:
    """A word in the form, without invisible characters, so that cleaning it again changes nothing."""
    if word.isascii():
        return word
    word = INVISIBLE.sub("", word)
    return unicodedata.normalize(form, word) if form else word


def prepared(text: str, form: Form = "NFC") -> str:
    """`text` cleaned as for a dataset.

    Control characters are spaces; sentences, words and slices of long words are separated by single spaces, and each word is
    cleaned by `clean_word`. Spaces around the text become single ones.
    """
    for rule in RULES:
        text = "".join(new for *_, new in segments(text, rule(text)))
    return unicodedata.normalize(form, text) if form else text


def segments(text: str, replacements: Iterator[Replacement]) -> Iterator[Replacement]:
    """All of `text` in order: the ranges that are replaced, and the unchanged ones between them."""
    at = 0
    for start, end, new in replacements:
        yield at, start, text[at:start]
        yield start, end, new
        at = end
    yield at, len(text), text[at:]


def _replacing(pattern: re.Pattern[str], new: str) -> Callable[[str], Iterator[Replacement]]:
    """A rule that replaces each match."""
    return lambda text: ((match.start(), match.end(), new) for match in pattern.finditer(text))


def _separations(text: str) -> Iterator[Replacement]:
    for match in GLUED_END.finditer(text):
        yield match.end() - 1, match.end(), f"{match[0][-1]} "


def _long_words(text: str) -> Iterator[Replacement]:
    for match in _LONG_WORD.finditer(text) if len(text) > MAX_WORD else ():
        for end in slice_ends(match[0])[:-1]:
            end += match.start()
            yield end - 1, end, f"{text[end - 1]} "


def slice_ends(word: str) -> list[int]:
    """Ends of the slices of a word: each the longest of at most MAX_WORD characters that ends between syllables, if there is one."""
    ends = [0]
    while len(word) - ends[-1] > MAX_WORD:
        most = ends[-1] + MAX_WORD
        ends.append(next((end for end in range(most, ends[-1], -1) if _is_border(word, end)), most))
    return [*ends[1:], len(word)]


def _is_border(word: str, at: int) -> bool:
    """Whether no character with its marks, and no syllable of Thai, Lao, Burmese or Khmer, reaches across `at`."""
    after = word[at]
    return unicodedata.category(after)[0] != "M" and after not in ATTACHED and word[at - 1] not in ATTACHING


def escaped(characters: str) -> str:
    """Characters for a set in a regular expression of the tokenizers library."""
    return "".join(rf"\x{{{ord(c):X}}}" for c in characters)


# `_is_border` as such a regular expression
BORDER = rf"(?![\p{{M}}{escaped(ATTACHED)}])(?<![{escaped(ATTACHING)}])"


# the steps of `prepared` before the form, in order
RULES = (_replacing(CONTROLS, " "), _separations, _replacing(SPACES, " "), _long_words, _replacing(INVISIBLE, ""))


def writes_without_spaces(character: str) -> bool:
    """Whether a character's script has no spaces between words."""
    return character >= FIRST_WITHOUT and any(first <= ord(character) <= last for first, last in NO_SPACES)


def begins_unit(token: str) -> bool:
    """Whether a token begins with a character of a script without spaces that is not attached to the one before it."""
    first = token[:1]
    if not first or not writes_without_spaces(first) or first in TRAILING_VOWELS:
        return False
    return unicodedata.category(first) not in ("Mn", "Mc", "Lm")
