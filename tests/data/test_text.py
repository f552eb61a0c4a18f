"""Invisible characters go, entities become characters, and every character has its place in the original."""

from __future__ import annotations

import random
import re

from megabert.data.text import MAX_WORD, clean_word, prepared, prepared_with_places

PARTS = ["a", "&amp;", "&lt", "&", "; ", "\u200b", "\xad", "é", " ", "&#65;", "&notit;", "&shy;", "x;", "&nbsp;", "文", "&a\u200bmp;", "&#38;", "amp;", "lt;", "\u0301", "\u0323", "\u1112\u1161", "\u11ab", "か", "\u3099", "。", "」", "\x0b", "\x01"]  # fmt: skip


def test_cleaned_characters_have_their_original_places() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices(PARTS, k=rng.randint(0, 9)))
        found, places = prepared_with_places(text)
        assert found == prepared(text)
        cleaned = re.sub(r"(。+」*)(?=[^\s。」])", r"\1 ", text.replace("\x01", "").replace("\x0b", " "))
        assert found.split() == " ".join(map(clean_word, cleaned.split())).split()
        assert all(clean_word(word) == word for word in found.split()), text
        assert places.shape == (len(found), 2) and (places[:, 0] < places[:, 1]).all()
        for character, (first, last) in zip(found, places.tolist(), strict=True):
            of = text[first:last]
            assert of == "\x0b" or "&" in of or character in f"{prepared(of)} ", (text, character)


def test_invisible_characters_and_entities() -> None:
    for escaped in ("&amp;lt;b&amp;gt;", "&amp;amp;amp;lt;b>", "&#38;l&#116;;b&gt;", "&a\xadmp;lt;b>"):
        assert clean_word(escaped) == prepared(escaped) == "<b>", escaped
    assert prepared("AT&amp;T \u200bfoo\u200bbar\xad &lt;b&gt; a & b; R&D") == "AT&T foobar <b> a & b; R&D"


def test_long_words_are_cut_as_a_build_cuts_them() -> None:
    assert prepared("a " + "文" * (2 * MAX_WORD + 1)) == " ".join(["a", "文" * MAX_WORD, "文" * MAX_WORD, "文"])
