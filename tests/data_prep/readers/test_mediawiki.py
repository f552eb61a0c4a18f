"""A dump becomes prose without markup, wherever it is cut, and no page makes it slow."""

import bz2
import html
import os
import random
import re
import time
from pathlib import Path

import mwparserfromhell
import pytest

from data_prep.common.errors import BadInput
from data_prep.readers import mediawiki
from data_prep.readers.mediawiki import prose
from tests.helpers.prep_reading import read_all

DATA = Path(os.environ.get("MEGABERT_DATA", Path(__file__).resolve().parents[4] / "shared" / "data"))
DUMP = DATA / "wikidump" / "enwiki-pages-articles1-shortened.xml.bz2"
MARKUP = ("{{", "}}", "[[", "]]", "<ref", "{|", "|}", "|-", "__", "''", "==", "Category:", "File:", "&nbsp;")
HEAD = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" xml:lang="en">\n<siteinfo><sitename>W</sitename></siteinfo>\n'


def page(title, text, ns=0, extra=""):
    return (
        f"  <page>\n    <title>{html.escape(title)}</title>\n    <ns>{ns}</ns>\n    <id>1</id>\n{extra}    <revision>\n"
        f"      <model>wikitext</model>\n      <text xml:space=\"preserve\">{html.escape(text)}</text>\n    </revision>\n  </page>\n"
    )  # fmt: skip


def dump(pages):
    return (HEAD + "".join(pages) + "</mediawiki>\n").encode()


ARTICLE = """{{Infobox planet
| name = Mars
| moons = {{plainlist|
* [[Phobos]]
}}
}}
<!-- a comment with {{ braces -->
[[File:Mars.jpg|thumb|A ''picture'' with a [[link|label]] in it.]]
'''Mars''' is the fourth [[planet]] from the [[Sun]]<ref name="a">{{cite web|title=x}}</ref> and
is [[Iron oxide|red]]<ref name="b" />, {{convert|227|e6km}} away ({{lang|la|Mars}}; {{IPA|x}}). See [http://x.org/a its page] and AT&amp;T.

== Moons ==
{| class="wikitable"
|-
! Name !! Size
|-
| Phobos || 22
|}
It has two moons&nbsp;<math>a^{2}</math>with names.
* Phobos is the larger and the inner of the two.
* Deimos

=== Empty ===
== See also ==
* This is a line of a list of links.
=== Below ===
More of the same kind here.
== Surface ==
:An indented sentence stands here too.
__NOTOC__
[[Category:Planets| ]]
[[fr:Mars]]
"""
PROSE = """Mars is the fourth planet from the Sun and
is red, 227 e6km away (Mars). See its page and AT&T.
Moons
It has two moons\xa0with names.
Phobos is the larger and the inner of the two.
Surface
An indented sentence stands here too."""


@pytest.mark.parametrize(
    ("wikitext", "want"),
    [
        (ARTICLE, PROSE),
        ("[[a|b]] [[c]]s [[d (e)|]]", "b cs d (e)"),
        ("[[:Category:Art|art]] [[wikt:word|word]] [[de:Wort]][[Star Trek: Voyager]]", "art word Star Trek: Voyager"),
        ("[[File:a|thumb|x [[File:b|y [[c]]]] z]]after", "after"),
        ("one {{a|{{b|{{{c|}}}}}|[[d]]}} two", "one two"),
        ("before {{never closed\nafter", "before never closed\nafter"),
        ("text [[never closed\nmore", "text never closed\nmore"),
        ("a<ref>never closed\nb", "anever closed\nb"),
        ("a<ref>x</ref >b<REF name=x/>c<ref name='y'>d</Ref>e", "abce"),
        ("{|\n| never closed\n! head\n|-\ntext", "text"),
        ("{|\n| a {|\n| b\n|}\n|}\ntext", "text"),
        ("<div class='x'>one</div>two<br/>three", "one\ntwo\nthree"),
        ("a <nowiki>b</nowiki> c < d and e > f", "a b c < d and e > f"),
        ("x<gallery>\nFile:a.jpg|text\n</gallery>y", "xy"),
        ("[http://a.b] [//c.d e] [mailto:x@y write]", "e write"),
        ("* one\n# This item is a whole sentence, really.\n; term", "This item is a whole sentence, really."),
        ("text (born ; {{x}}) and ( , x)", "text (born) and (x)"),
        ("12 | 13", ""),
        ("&lt;ref&gt;x&lt;/ref&gt;&amp;nbsp;y", "&nbsp;y"),
    ],
)  # fmt: skip
def test_wikitext(wikitext, want):
    assert prose(wikitext) == want


def test_left_out_pages_are_counted(tmp_path):
    pages = [
        page("A", "Text of the article A is here."),
        page("B", "#REDIRECT [[A]]"),
        page("C", "Text.", extra='    <redirect title="A" />\n'),
        page("Talk:A", "Chatter.", ns=1),
        page("D", "'''D''' may be:\n* [[A]]\n{{Disambiguation}}"),
        page("E (disambiguation)", "E may be this or that."),
        page("F", "{{Infobox|x=y}}"),
        page("G", "'''G'''{{disambiguation needed|date=x}} is text."),
        page("H", "Old text.").replace("  </page>", "<revision><text>New text.</text></revision></page>"),
    ]
    (tmp_path / "d.xml").write_bytes(dump(pages))
    for policy in ("stop", "skip"):
        found, problems = read_all([tmp_path], policy)
        assert found == ["Text of the article A is here.", "G is text.", "New text."]
        assert not problems.counts
        assert problems.dropped == {
            mediawiki.REDIRECT: 2, mediawiki.NAMESPACE: 1, mediawiki.DISAMBIGUATION: 2, mediawiki.EMPTY: 1,
        }  # fmt: skip


BOMB = (
    b'<?xml version="1.0"?>\n<!DOCTYPE lolz [<!ENTITY lol "lol">'
    + b"".join(b'<!ENTITY l%d "%s">' % (i + 1, b"&l%d;" % i * 10) for i in range(1, 10))
    + b"]>\n<mediawiki><page><title>&l9;</title></page></mediawiki>"
)


@pytest.mark.parametrize(
    ("content", "message", "reason"),
    [
        (BOMB, r"d\.xml: XML or HTML with a DOCTYPE", "unknown format"),
        (dump(["<page><title>&lol9;</title></page>"]), r"d\.xml: byte \d+: a <page> that is not well-formed XML .*undefined entity", "bad page"),
        (dump(["<page><!DOCTYPE x></page>"]), r"byte \d+: a <page> that is no", "bad page"),
        (dump(["<page><a></b></page>"]), r"mismatched tag", "bad page"),
        (dump(["<page>" + "<a>" * 99_999 + "</page>"]), r"elements inside elements", "bad page"),
        (dump(["<page>\n", page("A", "Text.")]), r"byte \d+: a <page> without </page>", "unclosed document"),
        (dump([page("A", "x" * (17 << 20))]), r"a <page> longer than 16 MiB", "long document"),
        (dump(["<page>", "?", "</page>"]).replace(b">?<", b">\xff<"), r"d\.xml: byte \d+: a <page> that is not well-formed XML .*invalid token", "bad page"),
    ],
    ids=["bomb", "entity", "doctype", "tags", "depth", "unclosed", "long", "bytes"],
)  # fmt: skip
def test_bad_xml_is_named_or_counted(content, message, reason, tmp_path):
    (tmp_path / "d.xml").write_bytes(content)
    began = time.monotonic()
    with pytest.raises(BadInput, match=message):
        read_all([tmp_path])
    assert read_all([tmp_path], "skip")[1].counts == {reason: 1}
    assert time.monotonic() - began < 5


TOKENS = (
    "{{", "}}", "[[", "]]", "{|\n", "\n|}", "<b>", "<b ", "<ref>", "<ref", "</ref>", "<!--", "-->", "''", "[http://a ", "[//",
    "[[a|", "[[a|x", "{{a|", "=", "\n=", "= =", "=a\n", "*", "\n*", "(", "( ,", " ", "\t ", "\n|", "__A", "-{", "&", "&amp;", "{{{", "<", "|",
    "[[File:", "'", "a",
)  # fmt: skip


@pytest.mark.parametrize("tail", ["", "]]", "}}", "\n|}", "</ref>"])
def test_no_wikitext_costs_more_than_linear_time(tail):
    size = 100_000
    for token in TOKENS:
        text = token * (size // len(token)) + tail * (size // 4)
        began = time.process_time()
        prose(text)
        assert time.process_time() - began < 1, f"{token!r} with {tail!r}"


def test_random_markup_never_fails_and_never_stays():
    rng = random.Random(5)
    for _ in range(300):
        found = prose("".join(rng.choices([*TOKENS, "\n", "word ", "Text.", "|", ":"], k=200)))
        assert not [token for token in ("{{", "}}", "[[", "]]", "{|", "|}", "|-") if token in found]


@pytest.mark.skipif(not DUMP.exists(), reason="no real dump: MEGABERT_DATA names no folder with wikidump")
def test_real_articles_hold_the_words_a_parser_finds():
    """Nearly every word of ours is in the text that mwparserfromhell leaves; no markup is."""
    found = read_all([DUMP])[0]
    assert len(found) == 97
    for text in found:
        assert not [token for token in MARKUP if token in text] and not re.search(r"^[|!*#]|\|\|", text, re.MULTILINE)
        assert not re.search(r"\b(?:cite web|infobox|reflist|defaultsort|wikitable|thumb\|)", text, re.IGNORECASE)
    compared = 0
    data = bz2.decompress(DUMP.read_bytes()).decode()
    for title, text in re.findall(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", data, re.DOTALL):
        source = html.unescape(text)
        if len(source) > 12_000 or prose(source) not in found:  # the parser is slow
            continue
        compared += 1
        want = mwparserfromhell.parse(source).strip_code(keep_template_params=True)
        words = re.findall(r"\w+", prose(source))
        assert len(set(words) - set(re.findall(r"\w+", want))) <= 0.02 * len(words) + 1, title
    assert compared >= 3
