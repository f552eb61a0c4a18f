"""Invisible characters go, and controls become spaces."""

import unicodedata

from megabert.data.text import GLUED_END, MAX_WORD, clean_word, prepared


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
