"""Text before tokens: its cleaning, sentence ends of all scripts, scripts without spaces, and offsets of tokens in the text.

The same functions clean text for a dataset and for a model's input.
"""

from __future__ import annotations

import functools
import html
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator

import numpy as np

INVISIBLE = re.compile("[\x80-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\ufeff\ufffe\uffff]")
# as HTML 5 finds them
ENTITY = re.compile(r"&(?:#[0-9]+|#[xX][0-9a-fA-F]+|[^\t\n\f <&#;]{1,32});?")
# most times that an entity was escaped; more would take quadratic time for a long `&amp;amp;amp;…`
MAX_ESCAPES = 16
# as separated by `_spaces`; an entity of a space is inside a word
_WORD = re.compile(r"[^ ]+")
# characters that `data_prep` removes from the bytes of a document
CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
# whitespace between words, other than a single space
SPACES = re.compile(r"\s{2,}|[^\S ]")
# characters; a longer word is encoded in slices of this size
MAX_WORD = 512
_LONG_WORD = re.compile(rf"(?<!\S)\S{{{MAX_WORD + 1},}}")
# (start, end, replacement)
Replacement = tuple[int, int, str]
Rule = Callable[[str], Iterator[Replacement]]

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


def _characters(ranges: str) -> str:
    edges = [[int(edge, 16) for edge in item.split("-")] for item in ranges.split()]
    return "".join(chr(c) for edge in edges for c in range(edge[0], edge[-1] + 1))


# without Burmese's comma
SCRIPT_TERMINALS = frozenset(_characters(_SENTENCE_TERMINAL)) - {"\u104a"}
# Marks that end a sentence and need no space after them: ideographic, Devanagari, Urdu, Arabic, Armenian, Ethiopic,
# Burmese, Khmer and Tibetan ones.
GLUED = "\u3002\uff01\uff1f\uff61\u0964\u0965\u06d4\u061f\u0589\u1362\u1367\u1368\u104b\u17d4\u17d5\u0f0d\u0f0e"
CLOSING = CLOSERS + WIDE_CLOSERS
# such a mark with text directly after it: a space is inserted
GLUED_END = re.compile(rf"([{GLUED}]+[{re.escape(CLOSING)}]*)(?=[^\s{GLUED}{re.escape(CLOSING)}])")
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


def clean_word(word: str) -> str:
    """A word in NFC, without invisible characters, with complete HTML entities resolved, also escaped ones (`&amp;lt;`), so that
    cleaning it again changes nothing."""
    for _ in range(MAX_ESCAPES):
        before = word
        if "&" in word and ";" in word:
            word = html.unescape(word)
        if not word.isascii():
            word = unicodedata.normalize("NFC", INVISIBLE.sub("", word))
        if "&" not in word or word == before:
            break
    return word


def prepared(text: str) -> str:
    """`text` cleaned as for a dataset.

    Control characters are removed, sentences, words and slices of long words are separated by single spaces, and each word is
    cleaned by `clean_word`. Spaces around the text become single ones.
    """

    def apply(text: str, rule: Rule) -> str:
        if rule is _composed:  # faster without the places
            return unicodedata.normalize("NFC", text)
        return "".join(new for *_, new in _segments(text, rule))

    return _by_rules(text, apply)


def _by_rules(text: str, apply: Callable[[str, Rule], str]) -> str:
    """`text` after RULES, each applied by `apply(text, rule)`; the last two as often as `clean_word` does."""
    for rule in RULES:
        text = apply(text, rule)
    for _ in range(MAX_ESCAPES - 1):
        if "&" not in text or ";" not in text:
            break
        before = text
        for rule in RULES[-2:]:
            text = apply(text, rule)
        if text == before:
            break
    return text


def prepared_with_places(text: str) -> tuple[str, np.ndarray]:
    """`prepared(text)`, and int64 [its length, 2]: for each of its characters the range of characters of `text` that it came from.

    An inserted space has the range of the character before it.
    """
    place = np.arange(len(text))
    places = np.stack([place, place + 1], 1)

    def apply(text: str, rule: Rule) -> str:
        nonlocal places
        parts = [places[:0]]
        segments = list(_segments(text, rule))
        for start, end, new in segments:
            same = new == text[start:end]
            parts.append(places[start:end] if same else np.tile([places[start, 0], places[end - 1, 1]], (len(new), 1)))
        places = np.concatenate(parts)
        return "".join(new for *_, new in segments)

    return _by_rules(text, apply), places


def _segments(text: str, rule: Rule) -> Iterator[Replacement]:
    """All of `text` in order: the ranges that `rule` replaces, and the unchanged ones between them."""
    at = 0
    for start, end, new in rule(text):
        yield at, start, text[at:start]
        yield start, end, new
        at = end
    yield at, len(text), text[at:]


def _controls(text: str) -> Iterator[Replacement]:
    for match in CONTROLS.finditer(text):
        yield match.start(), match.end(), " " if match[0] in "\x0b\x0c" else ""


def _separations(text: str) -> Iterator[Replacement]:
    for match in GLUED_END.finditer(text):
        yield match.end() - 1, match.end(), f"{match[0][-1]} "


def _spaces(text: str) -> Iterator[Replacement]:
    for match in SPACES.finditer(text):
        yield match.start(), match.end(), " "


def _long_words(text: str) -> Iterator[Replacement]:
    for match in _LONG_WORD.finditer(text) if len(text) > MAX_WORD else ():
        for end in range(match.start() + MAX_WORD, match.end(), MAX_WORD):
            yield end - 1, end, f"{text[end - 1]} "


def _resolved(text: str) -> Iterator[Replacement]:
    """Complete entities in words, and invisible characters."""
    replacements = [(m.start(), m.end(), "") for m in (() if text.isascii() else INVISIBLE.finditer(text))]
    for word in _WORD.finditer(text) if "&" in text else ():
        if "&" in word[0] and ";" in word[0]:
            for entity in ENTITY.finditer(word[0]):
                new = html.unescape(entity[0])
                if new != entity[0]:
                    start = word.start() + entity.start()
                    replacements.append((start, start + len(entity[0]), INVISIBLE.sub("", new)))
    last = 0
    for start, end, new in sorted(replacements):
        if start >= last:  # an invisible character may interrupt an apparent entity
            yield start, end, new
            last = end


def _composed(text: str) -> Iterator[Replacement]:
    """Characters with the marks that follow them, where NFC changes them."""
    for match in () if unicodedata.is_normalized("NFC", text) else _composable().finditer(text):
        if (new := unicodedata.normalize("NFC", match[0])) != match[0]:
            yield match.start(), match.end(), new


@functools.cache
def _composable() -> re.Pattern[str]:
    """A character with all that may compose with it or be reordered: marks, second halves of compositions, Hangul's vowels and
    finals."""
    joins = [*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)]
    for code in range(sys.maxunicode + 1):
        parts = unicodedata.decomposition(chr(code)).split()
        if unicodedata.combining(chr(code)):
            joins.append(code)
        elif len(parts) == 2 and parts[0][0] != "<":
            joins.append(int(parts[1], 16))
    return re.compile(f".[{''.join(map(chr, joins))}]*", re.DOTALL)


# the steps of `prepared`, in order
RULES = (_controls, _separations, _spaces, _long_words, _resolved, _composed)


def offsets_in_original(text: str, encoded: str, offsets: np.ndarray) -> np.ndarray:
    """Offsets int64 [n, 2] in `encoded`, which is `prepared(text)` or `text`, as offsets in `text`."""
    if encoded == text:
        return offsets
    same, places = prepared_with_places(text)
    assert same == encoded
    starts, ends = np.append(places[:, 0], len(text)), np.append(0, places[:, 1])
    first = starts[offsets[:, 0]]
    last = ends[offsets[:, 1]]
    return np.stack([first, np.where(offsets[:, 0] == offsets[:, 1], first, last)], 1)


def without_blanks(text: str, offsets: np.ndarray) -> np.ndarray:
    """`offsets` int64 [n, 2] with each start moved past blanks, which SentencePiece includes in the token after them."""
    blank = _blank()[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)]
    solid = np.append(np.flatnonzero(~blank), len(text))
    offsets[:, 0] = np.minimum(solid[np.searchsorted(solid, offsets[:, 0])], offsets[:, 1])
    return offsets


@functools.cache
def _blank() -> np.ndarray:
    """bool [all code points]: whether it is a separator, control or format character of Unicode."""
    kinds = {"Zs", "Zl", "Zp", "Cc", "Cf"}
    return np.array([unicodedata.category(chr(c)) in kinds for c in range(sys.maxunicode + 1)])


def writes_without_spaces(character: str) -> bool:
    """Whether a character's script has no spaces between words."""
    return character >= FIRST_WITHOUT and any(first <= ord(character) <= last for first, last in NO_SPACES)


def words_of(text: str) -> list[tuple[int, int]]:
    """First character, and one past the last, of each word: a run of letters, marks and digits, or one other non-blank
    character. In a script without spaces a character with its marks is a word."""
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
    """Whether two words have no space between them: one is in a script without spaces, the other too or punctuation."""
    edges = before[-1:], after[:1]
    without = [bool(c) and writes_without_spaces(c) for c in edges]
    return any(without) and all(
        w or unicodedata.category(c or " ")[0] == "P" for w, c in zip(without, edges, strict=True)
    )


def begins_unit(token: str) -> bool:
    """Whether a token begins with a character of a script without spaces that is not attached to the one before it."""
    first = token[:1]
    if not first or not writes_without_spaces(first) or first in TRAILING_VOWELS:
        return False
    return unicodedata.category(first) not in ("Mn", "Mc", "Lm")
