"""Words and tokens of a text with their places in it: int64 [n, 2], the first character of each and one past its last.

Places are in the text as given, before normalisation, without blanks before a token. Both are equal for a token without characters: a
blank, or one of several tokens of a single character.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence

import numpy as np

from megabert.data.text import RULES, Form, Replacement, begins_unit, prepared, segments, writes_without_spaces
from megabert.data.tokenizer import Tokenizer
from megabert.hf import tokenizer_export


def encode_with_offsets(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
    """`tokenizer_export.encode` of each text, and the places of its tokens, as the exported tokenizer has them, but for the space
    before a token."""
    library = tokenizer_export.exported(tokenizer)
    if library is None:
        return encode_by_sentencepiece(tokenizer, texts)
    encoded = library.encode_batch(list(texts), add_special_tokens=False)
    found = []
    for text, one in zip(texts, encoded, strict=True):
        offsets = np.array(one.offsets, np.int64).reshape(-1, 2)
        bare = without_blanks(text, offsets.copy(), False)
        found.append((one.ids, np.where(bare[:, :1] < bare[:, 1:], bare, offsets)))
    return found


def encode_by_sentencepiece(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
    """Ids of each text as of `Tokenizer.encode_texts`, and the places of its tokens, for a SentencePiece model that cannot be
    exported."""
    cleaned = [prepared(text, tokenizer.form) for text in texts]
    encoded = tokenizer.processor.encode(cleaned, return_type="offset_mapping", num_threads=1)
    found = []
    for text, clean, one in zip(texts, cleaned, encoded, strict=True):
        offsets = without_blanks(clean, np.array(one["offsets"], np.int64).reshape(-1, 2))
        found.append((one["ids"], offsets if clean == text else offsets_in_original(text, offsets, tokenizer.form)))
    return found


def offsets_in_original(text: str, offsets: np.ndarray, form: Form) -> np.ndarray:
    """Offsets in `prepared(text, form)` as offsets in `text`."""
    _, places = prepared_with_places(text, form)
    starts, ends = np.append(places[:, 0], len(text)), np.append(0, places[:, 1])
    first = starts[offsets[:, 0]]
    last = ends[offsets[:, 1]]
    return np.stack([first, np.where(offsets[:, 0] == offsets[:, 1], first, last)], 1)


def prepared_with_places(text: str, form: Form) -> tuple[str, np.ndarray]:
    """`prepared(text, form)`, and for each of its characters the place in `text` that it came from.

    An inserted space has the place of the character before it.
    """
    place = np.arange(len(text))
    places = np.stack([place, place + 1], 1)
    for rule in (*RULES, functools.partial(_normalized, form=form)):
        parts = [places[:0]]
        replaced = list(segments(text, rule(text)))
        for start, end, new in replaced:
            same = new == text[start:end]
            parts.append(places[start:end] if same else np.tile([places[start, 0], places[end - 1, 1]], (len(new), 1)))
        places = np.concatenate(parts)
        text = "".join(new for *_, new in replaced)
    return text, places


def _normalized(text: str, form: Form) -> Iterator[Replacement]:
    """Characters with the marks that follow them, where the form changes them."""
    if not form or unicodedata.is_normalized(form, text):
        return
    for match in _composable().finditer(text):
        if (new := unicodedata.normalize(form, match[0])) != match[0]:
            yield match.start(), match.end(), new


@functools.cache
def _composable() -> re.Pattern[str]:
    """A character with all that may compose with it or be reordered: marks, second halves of compositions, Hangul's vowels and
    finals, and characters that a form replaces by one of these and more."""
    joins = [*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)]
    for code in range(sys.maxunicode + 1):
        parts = unicodedata.decomposition(chr(code)).split()
        if unicodedata.combining(chr(code)):
            joins.append(code)
        elif len(parts) == 2 and parts[0][0] != "<":
            joins.append(int(parts[1], 16))
    known = {*map(chr, joins)}
    replaced = (c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.decomposition(c))
    joins += [ord(c) for c in replaced if unicodedata.normalize("NFKD", c)[0] in known]
    return re.compile(f".[{''.join(map(chr, joins))}]*", re.DOTALL)


def without_blanks(text: str, offsets: np.ndarray, formats: bool = True) -> np.ndarray:
    """`offsets` with each start moved past blanks, which SentencePiece and some tokenizers include in the token after them; `formats`:
    as of `_blank`."""
    blank = _blank(formats)[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)]
    solid = np.append(np.flatnonzero(~blank), len(text))
    offsets[:, 0] = np.minimum(solid[np.searchsorted(solid, offsets[:, 0])], offsets[:, 1])
    return offsets


@functools.cache
def _blank(formats: bool) -> np.ndarray:
    """bool [all code points]: whether it is a space, with `formats` any separator, control or format character of Unicode."""
    kinds = ("Zs", "Zl", "Zp", "Cc", "Cf") if formats else ()
    return np.array([chr(c).isspace() or unicodedata.category(chr(c)) in kinds for c in range(sys.maxunicode + 1)])


def find_words(text: str) -> list[tuple[int, int]]:
    """The place of each word: a run of letters, marks and digits, or one other non-blank character. In a script without spaces a
    character with its marks is a word."""
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
