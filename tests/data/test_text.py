"""Invisible characters go, controls become spaces, and every character has its place in the original."""

import random
import re
import unicodedata

import pytest

from megabert.data.text import GLUED_END, MAX_WORD, Form, clean_word, prepared, prepared_with_places

PARTS = ["a", "&amp;", "&lt", "\u200b", "\u2066", "\xad", "é", " ", "文", "\u0301", "\u0323", "\u1112\u1161", "\u11ab", "か", "\u3099", "。", "」", "\x0b", "\x01", "\x00", "ﬁ", "x²", "\uff76", "\uff9e", "㈱", "\u314f", "\u3131", "\u200c", "\xa8"]  # fmt: skip


@pytest.mark.parametrize("form", ["NFC", "NFKC", ""])
def test_cleaned_characters_have_their_original_places(form: Form) -> None:
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices(PARTS, k=rng.randint(0, 9)))
        found, places = prepared_with_places(text, form)
        assert found == prepared(text, form)
        cleaned = re.sub(r"(。+」*)(?=[^\s。」])", r"\1 ", re.sub("[\x00\x01\x0b]", " ", text))
        assert found.split() == " ".join(clean_word(word, form) for word in cleaned.split()).split()
        assert all(clean_word(word, form) == word for word in found.split()), text
        assert places.shape == (len(found), 2) and (places[:, 0] < places[:, 1]).all()
        for character, (first, last) in zip(found, places.tolist(), strict=True):
            assert character in f"{prepared(text[first:last], form)} ", (text, character)


def test_vowels_of_two_marks_are_reordered() -> None:
    """Of Tibetan; their own combining class is 0."""
    for form in ("NFC", "NFKC"):
        found, places = prepared_with_places("\u0f40\u0f74\u0f73", form)
        assert found == prepared("\u0f40\u0f74\u0f73", form) == "\u0f40\u0f71\u0f72\u0f74"
        assert places.tolist() == [[0, 3]] * 4


def test_a_long_run_of_sentence_ends_is_searched_once() -> None:
    """It took minutes in a time that grows with the square of its length."""
    marks = "。" * 200_000
    assert GLUED_END.sub(r"\1 ", f"{marks}\n{marks}」a") == f"{marks}\n{marks}」 a"


def test_code_and_addresses_stay_as_they_are() -> None:
    addresses = ("/?a=1&copy=2&region=3&timestamp=4", "AT&amp;T &#38; &lt;b&gt; R&D;")
    for text in ("init(&params);", *addresses, "\u0661 &para;"):
        assert clean_word(text) == prepared(text) == text


def test_invisible_characters_go_and_controls_become_spaces() -> None:
    for control in map(chr, (*range(0x20), 0x7F)):
        assert prepared(f"foo{control}bar") == "foo bar", control
    for mark in "\u061c\u200b\u200e\u200f\u202a\u202e\u2060\u2066\u2067\u2068\u2069\ufeff\xad\ufdd0\uffff":
        assert prepared(f"foo{mark}bar") == clean_word(f"foo{mark}bar") == "foobar", mark
    for kept in ("خانه\u200cها", "👩\u200d👧", "क्\u200dष"):
        assert prepared(kept) == clean_word(kept) == kept


def test_the_form_is_a_choice() -> None:
    text = "x² ㈱ e\u0301 ﬁ"
    assert prepared(text) == "x² ㈱ é ﬁ" and prepared(text, "NFKC") == "x2 (株) é fi" and prepared(text, "") == text
    assert clean_word(text, "") == text
    for form in ("NFC", "NFKC"):
        assert clean_word(text, form) == unicodedata.normalize(form, text)


def test_long_words_are_cut_between_syllables() -> None:
    assert prepared("a " + "文" * (2 * MAX_WORD + 1)) == " ".join(["a", "文" * MAX_WORD, "文" * MAX_WORD, "文"])
    for syllable in ("กำ", "น้ำ", "เกาะ", "ກຳ", "ເກົາ", "က္ကို", "ក្ក", "👍🏽", "👩\u200d👩\u200d👧", "e\u0323\u0302"):
        for before in range(len(syllable)):
            parts = prepared("x" * before + syllable * 600).split()
            assert len(parts) > 1 and all(len(part) <= MAX_WORD for part in parts)
            whole = unicodedata.normalize("NFC", syllable)
            assert all(part.startswith(whole) for part in parts[1:]), (syllable, before)
    # nowhere to cut but in the middle
    assert list(map(len, prepared("x" + "\u0323" * 1200).split(" "))) == [512, 512, 177]
