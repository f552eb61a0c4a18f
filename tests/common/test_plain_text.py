"""What nobody sees goes, entities are characters, and every character that is left knows where it was."""

from __future__ import annotations

import random

from megabert.common.plain_text import plain, plain_with_places, plain_word

PARTS = ["a", "&amp;", "&lt", "&", "; ", "\u200b", "\xad", "é", " ", "&#65;", "&notit;", "&shy;", "x;", "&nbsp;", "文", "&a\u200bmp;"]  # fmt: skip


def test_a_text_is_its_words_and_its_characters_know_their_places() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices(PARTS, k=rng.randint(0, 9)))
        found, places = plain_with_places(text)
        assert found == plain(text) == " ".join(plain_word(word) for word in text.split(" "))
        assert places.shape == (len(found), 2) and (places[:, 0] < places[:, 1]).all()
        for character, (first, last) in zip(found, places.tolist(), strict=True):
            assert text[first:last] == character or text[first] == "&", (text, character)


def test_what_is_removed_and_what_stays() -> None:
    assert plain("AT&amp;T \u200bfoo\u200bbar\xad &lt;b&gt; a & b; R&D") == "AT&T foobar <b> a & b; R&D"
