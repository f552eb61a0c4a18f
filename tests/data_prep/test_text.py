"""Cleaning of bytes and words, sentence ends."""

import pytest

from data_prep.readers import mediawiki
from data_prep.text import clean, sentences
from megabert.data.text import clean_word


def test_bytes_and_words_are_cleaned():
    assert clean_word("e\u0301t\u00ade\u200b") == "\u00e9te" and clean_word("AT&amp;T") == "AT&amp;T"
    assert not clean.decode("\u201cbetter\u201d, caf\u00e9".encode())[1]
    assert all(clean.decode(f"ab{mark}".encode())[1] for mark in clean.GLUED)
    assert clean.decode(b"a\x00b\x00\r\nc\rd\x07\x0ce\tf") == ("a b \nc\nd  e\tf", False, 4)
    assert clean.decode(b"".join(b"a%c" % byte for byte in (*range(32), 127)))[0].split() == ["a"] * 33
    with pytest.raises(UnicodeDecodeError) as error:
        clean.decode(b"good \xff bad")
    assert error.value.start == 5


def test_entities_are_resolved_in_markup_alone():
    text = "init(&params); /?a=1&copy=2 AT&amp;T &amp;amp;lt;b&gt; &#x41;&#66; &notit; &#12290;C"
    assert clean.paragraphs(text, False) == [text]
    assert clean.paragraphs(text, True, False) == ["init(&params); /?a=1&copy=2 AT&T <b> AB &notit; \u3002 C"]


def test_entities_are_complete_and_bounded():
    text = "&lt &lt; &para &para; &nosuch; &;&#; &#x; &amp"
    assert clean.unescape(text) == "&lt < &para ¶ &nosuch; &;&#; &#x; &amp"
    for escaped in ("&amp;lt;b&amp;gt;", "&amp;amp;amp;lt;b>", "&#38;l&#116;;b&gt;"):
        assert clean.unescape(escaped) == "<b>", escaped
    for depth, want in ((15, "<"), (16, "&lt;"), (17, "&amp;lt;")):
        assert clean.unescape(f"&{'amp;' * depth}lt;") == want
    assert clean.unescape("&" + "amp;" * 1_000_000) == "&" + "amp;" * (1_000_000 - clean.MAX_ESCAPES)


def test_hard_wrapped_lines_are_rejoined():
    wrapped = "\n".join(["It was the best of times, it was the worst of times, it was"] * 3)
    assert clean.paragraphs(wrapped + "\n\n" + wrapped, False) == [wrapped, wrapped]
    chinese = "\n".join(["中" * 45] * 3 + ["。" + "文" * 44])  # words have no spaces between them
    assert clean.paragraphs(chinese, False) == ["中" * 135 + "。 " + "文" * 44]
    text = "A heading\nA paragraph that is one line. " + "x" * 200 + "\nAnother."
    assert clean.paragraphs(text, False)[0] == "A heading"


def test_leftover_markup_goes_and_comparisons_stay():
    text = "One</dl> two<br clear=all> three<BR/> <br\nif a < b and c > d then <ref name=x>e</ref>\n<li class=a id=b"
    found = [" ".join(paragraph.split()) for paragraph in clean.paragraphs(f"{text}\nEnd.", True)]
    assert found == ["One two three", "if a < b and c > d then e", "", "End."]
    for comparison in ("If a<b then it is not empty. The converse is true.", "a<b and c>d", "x<s, 0<i<p."):
        assert clean.paragraphs(comparison, True) == mediawiki.prose(comparison).split("\n") == [comparison]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("He left. She stayed.", ["He left.", "She stayed."]),
        ("Mr. Lee met Dr. Jones on Main St. today. Rain.", ["Mr. Lee met Dr. Jones on Main St. today.", "Rain."]),
        ("J. R. R. Tolkien wrote it. Yes!", ["J. R. R. Tolkien wrote it.", "Yes!"]),
        ('"Go!" he said. "Why?" "Because."', ['"Go!" he said.', '"Why?"', '"Because."']),
        ("In the U.S. Army (cf. p. 5) e.g. this. 42 is.", ["In the U.S. Army (cf. p. 5) e.g. this.", "42 is."]),
        ("Is it 3.5 or 4? no matter. end", ["Is it 3.5 or 4? no matter. end"]),
        ("He said no. Then he left. See No. 7.", ["He said no.", "Then he left.", "See No. 7."]),
        ("Wait... What? (Nothing.) Fine.", ["Wait...", "What?", "(Nothing.)", "Fine."]),
        ("Er ging. „Komm mit!“ Sie blieb.", ["Er ging.", "„Komm mit!“", "Sie blieb."]),
        ("", []),
    ],
)
def test_sentence_ends(text, want):
    assert sentences.split(text) == want
