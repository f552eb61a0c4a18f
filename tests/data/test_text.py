"""Invisible characters go, entities become characters, and every character has its place in the original."""

from __future__ import annotations

import random

from megabert.data.text import plain, plain_with_places, plain_word

PARTS = ["a", "&amp;", "&lt", "&", "; ", "\u200b", "\xad", "é", " ", "&#65;", "&notit;", "&shy;", "x;", "&nbsp;", "文", "&a\u200bmp;"]  # fmt: skip


def test_cleaned_characters_have_their_original_places() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices(PARTS, k=rng.randint(0, 9)))
        found, places = plain_with_places(text)
        assert found == plain(text) == " ".join(plain_word(word) for word in text.split(" "))
        assert places.shape == (len(found), 2) and (places[:, 0] < places[:, 1]).all()
        for character, (first, last) in zip(found, places.tolist(), strict=True):
            assert text[first:last] == character or text[first] == "&", (text, character)


def test_invisible_characters_and_entities() -> None:
    assert plain("AT&amp;T \u200bfoo\u200bbar\xad &lt;b&gt; a & b; R&D") == "AT&T foobar <b> a & b; R&D"
