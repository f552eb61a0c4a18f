"""Cleaning of bytes and words, sentence ends."""

import pytest

from data_prep.text import clean, sentences


def test_controls_and_nuls_are_removed():
    assert clean.decode(b"a\x00b\x00\r\nc\rd\x07\x0ce\tf") == ("ab\nc\nd e\tf", False)
    with pytest.raises(UnicodeDecodeError) as error:
        clean.decode(b"good \xff bad")
    assert error.value.start == 5


def test_marks_of_other_scripts_are_detected():
    assert not clean.decode("\u201cbetter\u201d, caf\u00e9".encode())[1]
    assert all(clean.decode(f"ab{mark}".encode())[1] for mark in clean.GLUED)


def test_hard_wrapped_lines_are_rejoined():
    wrapped = "\n".join(["It was the best of times, it was the worst of times, it was"] * 3)
    assert clean.paragraphs(wrapped + "\n\n" + wrapped, False) == [wrapped, wrapped]
    assert (
        clean.paragraphs("A heading\nA paragraph that is one line. " + "x" * 200 + "\nAnother.", False)[0]
        == "A heading"
    )


def test_leftover_markup_goes_and_comparisons_stay():
    text = "One</dl> two<br clear=all> three <br\nif a < b and c > d then <ref name=x>e</ref>"
    assert [p.split() for p in clean.paragraphs(text, True)] == [
        ["One", "two", "three"],
        ["if", "a", "<", "b", "and", "c", ">", "d", "then", "e"],
    ]


def test_words_are_nfc_without_invisible_characters_and_entities():
    assert clean.clean_word("e\u0301t\u00ade\u200b") == "\u00e9te"
    assert clean.clean_word("AT&amp;T") == "AT&T"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("He left. She stayed.", ["He left.", "She stayed."]),
        (
            "Mr. Smith met Dr. Jones on Main St. today. It rained.",
            ["Mr. Smith met Dr. Jones on Main St. today.", "It rained."],
        ),
        ("J. R. R. Tolkien wrote it. Yes!", ["J. R. R. Tolkien wrote it.", "Yes!"]),
        ('"Go!" he said. "Why?" "Because."', ['"Go!" he said.', '"Why?"', '"Because."']),
        (
            "In the U.S. Army (cf. p. 5) e.g. this. 42 is next.",
            ["In the U.S. Army (cf. p. 5) e.g. this.", "42 is next."],
        ),
        ("Is it 3.5 or 4? no matter. end", ["Is it 3.5 or 4? no matter. end"]),
        ("He said no. Then he left. See No. 7.", ["He said no.", "Then he left.", "See No. 7."]),
        ("Wait... What? (Nothing.) Fine.", ["Wait...", "What?", "(Nothing.)", "Fine."]),
        ("", []),
    ],
)
def test_sentence_ends(text, want):
    assert sentences.split(text) == want
