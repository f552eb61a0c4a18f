"""A dump becomes prose without markup, wherever it is cut, and no page makes it slow."""

import bz2
import gzip
import html
import os
import random
import re
import time
from collections import Counter
from pathlib import Path

import mwparserfromhell
import pytest

from data_prep.common.errors import Problems
from data_prep.common.records import Corpus, ReadOptions
from data_prep.executor.journal import Stages
from data_prep.executor.pool import Pool
from data_prep.executor.work_files import BuildJob
from data_prep.options import BuildOptions
from data_prep.readers import inline_templates, mediawiki, tasks
from data_prep.readers.documents import read_documents
from data_prep.readers.wikitext import prose
from data_prep.stages import unpack
from tests.helpers.prep_builds import build_here
from tests.helpers.prep_reading import archive, plan, read_all, refuse, write

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
is red, 227 million km away (Mars). See its page and AT&T.
Moons
It has two moons\xa0a²with names.
Phobos is the larger and the inner of the two.
Surface
An indented sentence stands here too."""


# short ones keep a form in text
FORMULAS = [
    ("x", "x"), ("E = mc^2", "E = mc²"), (r"\alpha_{ij} \leq \frac{a+b}{2} \cdot \sqrt{c}", "α_ij ≤ (a+b)/2 · √c"),
    (r"x_1, \ldots, x_{n-1}", "x_1, …, x_(n-1)"), (r"\sin^{-1} \theta + \bar{x}", "sin⁻¹ θ + x̄"),
    (r"\left\{ 1,2 \right\}\,", "{ 1,2 }"), (r"e^{i\pi} + 1 = 0", "e^iπ + 1 = 0"), (r"\mathrm{H_2O}", "H_2O"),
    (r"3\frac{1}{2} x", "3 1/2 x"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("wikitext", "want"),
    [
        (ARTICLE, PROSE),
        *((f"Let <math>{tex}</math> be given.", f"Let {text} be given.") for tex, text in FORMULAS),
        ("[[a|b]] [[c]]s [[d (e)|]]", "b cs d (e)"),
        ("[[:Category:Art|art]] [[wikt:word|word]] [[de:Wort]][[Star Trek: Voyager]]", "art word Star Trek: Voyager"),
        ("[[File:a|thumb|x [[File:b|y [[c]]]] z]]after", "after"),
        ("one {{efn|{{b|{{{c|}}}}}|[[d]]}} two", "one two"),
        ("before {{never closed\nafter", "before never closed\nafter"),
        ("text [[never closed\nmore", "text never closed\nmore"), ("a<ref>never closed\nb", "anever closed\nb"),
        ("a<ref>x</ref >b<REF name=x/>c<ref name='y'>d</Ref>e", "abce"),
        ("'''!!!''' is an American rock band that was formed in California.\n! head",
         "!!! is an American rock band that was formed in California."),
        ("{|\n| never closed\n! head\n|-\ntext", "text"), ("{|\n| a {|\n| b\n|}\n|}\ntext", "text"),
        ("<div class='x'>one</div>two<br/>three", "one\ntwo\nthree"),
        ("a <nowiki>b</nowiki> c < d and e > f", "a b c < d and e > f"),
        ("x<gallery>\nFile:a.jpg|text\n</gallery>y", "xy"), ("[http://a.b] [//c.d e] [mailto:x@y write]", "e write"),
        ("* one\n# This item is a whole sentence, really.\n; term", "This item is a whole sentence, really."),
        ("text (born ; {{cn}}) and ( , x)", "text (born) and (x)"), ("12 | 13", ""),
        ("&lt;ref&gt;x&lt;/ref&gt;z&amp;nbsp;y", "z\xa0y"),
        ("a?x=1&copy=2 &region and &lt;b> AT&T &eacute;&#233;&#xe9; &nosuch;", "a?x=1&copy=2 &region and AT&T ééé &nosuch;"),
        ("He read ''Time'''s page and '''cat'''s in ''Eagle''{{'s}} cabin.", "He read Time's page and cats in Eagle's cabin."),
        ("10<sup>6</sup> m<sup>2</sup> of H<sub>2</sub>O, 101<sub>2</sub>, 1<sup>st</sup> XIX<sup>e</sup>", "10⁶ m² of H2O, 101₂, 1st XIXe"),
        ("10{{sup|9}} or 10<sup>6.5</sup>, word<sup>1,2</sup>", "10⁹ or 10^6.5, word1,2"),
        ("3{{frac|1|2}} inches, spin-{{frac|1|2}}, {{frac|4}}", "3 1/2 inches, spin-1/2, 1/4"),
        ("the .NET one, a .22 rifle , main() and f ( ) .{{br}}one", "the .NET one, a .22 rifle, main() and f.\none"),
        ("The word <code>for</code> begins a loop.", "The word for begins a loop."),
        ('Type <syntaxhighlight lang="c" inline>x = 1;</syntaxhighlight> here.', "Type x = 1; here."),
        ("a -{zh-hans:计算机; zh-hant:電腦}- b -{c}-", "a 计算机 b c"),
    ],
)  # fmt: skip
def test_wikitext(wikitext, want):
    assert prose(wikitext) == want


# a sentence with a template, and the text of the template as Wikipedia shows it (without links and conversions of units)
INLINE = [
    ("He lived there (1900{{snd}}1910) alone.", " – "), ("The years 1900{{ndash}}1910 were good.", "–"),
    ("He came{{mdash}}and left.", "—"), ("It was{{nbsp}}good.", " "),
    ("They sank {{HMS|Victory|1765|6}} at night.", "HMS Victory"),
    ("They sank {{USS|Nimitz|CVN-68}} at night.", "USS Nimitz (CVN-68)"),
    ("They sank {{ship|SS|Titanic||2}} at night.", "Titanic"),
    ("The word {{lang|fr|chat noir}} is French.", "chat noir"), ("The word {{Lang-ru|кот}} is Russian.", "кот"),
    ("The word {{langx|ru|кот}} is Russian.", "кот"), ("The word {{transl|ar|DIN|qahwa}} is Arabic.", "qahwa"),
    ("About {{frac|3|1|2}} of them.", "3 1/2"), ("About {{frac|2}} of them.", "1/2"),
    ("It is {{convert|100|km|mi|abbr=on}} away.", "100 km"), ("It is {{cvt|8|-|12|km2}} large.", "8–12 km²"),
    ("He is {{convert|5|ft|11|in}} tall.", "5 ft 11 in"), ("It is {{convert|25|C|F}} there.", "25 °C"),
    ("Born {{circa|1900}} in Rome.", "c. 1900"), ("There are {{formatnum:1234567}} of them.", "1234567"),
    ("He is {{nowrap|15 years}} old.", "15 years"), ("The {{abbr|UN|United Nations}} met.", "UN"),
    ("The {{w|Roma|città}} is old.", "città"), ("Il fait {{unité|10|km|2}} ici.", "10 km²"),
    ("Au {{s|XIX}} ici.", "XIXe siècle"),
    ("The term {{nihongo|turning|転換|tenkan}} is known.", "turning (転換, tenkan)"),
    ("The acid {{chem|H|2|SO|4}} is strong.", "H2SO4"), ("The ion {{chem|Si|4|4-}} is rare.", "Si4⁴⁻"),
    ("A mass of 5.98{{e|24}} kg.", "×10²⁴"), ("A charge of {{val|6.241|e=18|u=C}} flows.", "6.241×10¹⁸ C"),
    ("{{As of|2010|7}}, all was well.", "As of July 2010"),
    ("All was well, {{as of|2010|lc=y}}, in Rome.", "as of 2010"),
    ("It lies at {{coord|30|12|N|74|7|W|display=inline}} in the sea.", "30°12′N 74°7′W"),
    ("It lies at {{coord|52.5|13.4}} in the sea.", "52.5, 13.4"),
    ("It lies at sea.{{coord|52.5|13.4|display=title}}", ""),
    ("It began {{start date|1969|7|16}} there.", "16 July 1969"),
    ("A {{sclass|Nimitz|aircraft carrier}} came.", "Nimitz-class aircraft carrier"),
    ("The view of {{harvtxt|Boolos|Jeffrey|1974}} is that.", "Boolos and Jeffrey (1974)"),
    ("It costs {{US$|100}} now.", "US$100"), ("Das Wort ({{ang.}} cat) ist kurz.", "ang."),
    ("Das Wort {{enS|cat}} ist kurz.", "cat"), ("The vowel {{IPA|/a/}} is open.", "/a/"),
    ("The phoneme {{IPA-de|ʃ|}} is common.", "[ʃ]"), ("The town ''Mars'' {{IPA-fr|maʁs}} is old.", ""),
    ("The town (it; {{IPA|/mars/}}) is old.", ""), ("The rune {{Script|Runr|ᚨ}} is old.", "ᚨ"),
    ("It was said.{{citation needed|date=May 2010}} It was so.", ""), ("It was{{sfn|Smith|2001|p=3}} said.", ""),
    ("He was {{which|date=May 2010}} there.", ""), ("It is{{any tag of editors|date=May 2010}} so.", ""),
    ("A note{{efn|With {{lang|fr|text}} in it.}} here.", ""),
    ("He sang {{nowrap|{{lang|fr|la {{lang|it|mer}}}} twice}} there.", "la mer twice"),
]  # fmt: skip


@pytest.mark.parametrize(("wikitext", "text"), INLINE)
def test_template_in_a_sentence_becomes_its_text(wikitext, text):
    changed = Counter()
    code = mwparserfromhell.parse(wikitext)
    (template,) = code.filter_templates(recursive=code.RECURSE_OTHERS)
    code.replace(template, text)
    want = " ".join(code.strip_code().split()).replace(" ,", ",").replace("; )", ")")
    assert " ".join(prose(wikitext, changed=changed).split()) == want
    assert not +changed


def test_calls_without_arguments_never_fail():
    """Of every name of the tables: no arguments, empty ones, only named ones; the text is nothing, known, or a gap."""
    tables = ("FUNCTIONS", "SHIPS", "BEFORE", "CHARACTERS", "JOINED", "ARGUMENT")
    names = sorted({name for table in tables for name in getattr(inline_templates, table)})
    assert len(names) > 300
    for name in names:
        for given in ("", "|", "|||", "|a=b", "|1=", "||x", "|x|y|z|1|2|3", f"|{'1|' * 999}"):
            assert isinstance(inline_templates.expand_call(name + given), str | None), name + given


def test_sentence_with_a_gap_is_dropped_and_counted():
    changed = Counter()
    text = (
        "{{Unknown box}}\n{{Unknown infobox\n| a = b\n}}'''Mars''' is a planet. It is {{age|1969|7|20}} years old. It is red.\n"
        "It has moons.{{unknown tag|x}} They are small.{{unknown tag}}\n== A {{unknown}} heading ==\n"
        "{{unknown}} begins a sentence. The second one stays.\n"
        "The map <math>g_b : I_b \\mapsto \\begin{cases}x\\end{cases}</math> is odd. The rest stays.\n"
        "The tag <code>&lt;b&gt;</code> makes it bold. {{quote|That stays.}} And this.\n"
        "{{unknown list|a}}\n:<math>\\begin{matrix}a\\end{matrix}</math>\n"
        "* An item\n* This item with {{unknown|text}} is a sentence.\n* This item is a sentence too.\n"
        "== References ==\n* This is a reference that has five words.\n"
    )
    assert prose(text, changed=changed) == (
        "Mars is a planet. It is red.\nIt has moons. They are small.\nA heading\nThe second one stays.\n"
        "The rest stays.\nThat stays.\nAnd this.\nThis item is a sentence too."
    )
    assert +changed == {
        "sentences with a template of unknown text": 3,
        "templates of unknown text after a sentence": 2,
        "sentences with a formula or a tag as text": 3,
        "list items that are not sentences": 1,
        "sections of references and links": 1,
    }
    changed.clear()
    assert prose("これは{{不明|x}}です。これは文です。", changed=changed) == "これは文です。"
    assert +changed == {"sentences with a template of unknown text": 1}


SITES = {
    "en": ("Media File Category", [
        ("[[File:K.jpg|thumb|200px|A caption]]", ""), ("'''Mars''' is a [[planet]] ({{lang-la|Mars}}).", "Mars is a planet (Mars)."),
        ("* It has two small moons now.", "It has two small moons now."), ("* Phobos", ""),
        ("== External links ==\n* This is a link to another page.", ""), ("[[Category:Planets]]", ""),
    ]),
    "de": ("Medium Datei Kategorie", [
        ("[[Datei:K.jpg|mini|hochkant|Eine Bildunterschrift.]]", ""), ("[[Bild:K.jpg|links]]", ""),
        ("Der '''Mars''' ist{{Belege fehlen}} rot, {{nowrap|227 Mio.&nbsp;km}} entfernt.", "Der Mars ist rot, 227 Mio.\xa0km entfernt."),
        ("== Einzelnachweise ==\n<references />\nEin Satz, der keiner ist.", ""), ("[[Kategorie:Planet]]", ""),
    ]),
    "tr": ("Medya Dosya Kategori", [
        ("[[Dosya:K.jpg|sağ|200px|Bir açıklama [[link|var]].]]", ""), ("[[File:K.jpg|thumb|x]]", ""),
        ("'''Ankara''', [[Türkiye|Türkiye'nin]] başkentidir ({{dil|en|Angora}}).{{Kaynak belirt}}", "Ankara, Türkiye'nin başkentidir (Angora)."),
        ("== Kaynakça ==\nBu bir kaynaktır.", ""), ("[[Kategori:İl]]", ""), ("[[kategori:il|*]]", ""),
    ]),
    "ja": ("メディア ファイル Category", [
        ("[[ファイル:K.jpg|サムネイル|右|説明文。]]", ""), ("'''火星'''は[[惑星]]である。{{要出典|date=2010年}}", "火星は惑星である。"),
        ("* これは短い文である、と思います。", "これは短い文である、と思います。"), ("* フォボス", ""), ("* 短い。", ""),
        ("== 脚注 ==\n* これは脚注の中の文であります。", ""), ("[[Category:惑星]]", ""), ("[[カテゴリ:惑星]]", ""),
    ]),
    "ar": ("وسائط ملف تصنيف", [
        ("[[ملف:K.jpg|تصغير|يسار|تعليق على الصورة.]]", ""), ("'''المريخ''' هو [[كوكب]] أحمر.{{بحاجة لمصدر}}", "المريخ هو كوكب أحمر."),
        ("* هل هذا هو الكوكب الأحمر حقا؟", "هل هذا هو الكوكب الأحمر حقا؟"), ("== مراجع ==\nجملة في المراجع هنا.", ""), ("[[تصنيف:كواكب]]", ""),
    ]),
    "xx": ("Quux Foo_Bar Baz", [("[[foo bar:K.jpg|thumb|A caption]]", ""), ("[[:Baz:X|text]] stays.", "text stays."), ("[[Baz:X]]", "")]),
}  # fmt: skip


def site(language):
    names = zip((-2, 6, 14), SITES[language][0].split(), strict=True)
    spaces = (f'<namespace key="{key}" case="first-letter">{name.replace("_", " ")}</namespace>' for key, name in names)
    return f'<mediawiki xml:lang="{language}">\n<siteinfo><namespaces>{"".join(spaces)}</namespaces></siteinfo>\n'


@pytest.mark.parametrize("language", SITES)
def test_prose_of_a_language_by_its_siteinfo(language, tmp_path):
    lines = SITES[language][1]
    text, want = "\n".join(a for a, _ in lines), "\n".join(b for _, b in lines if b)
    pages = page("A", text), page("B", "#WEITER [[A]]"), page("C", "#転送[[A]]"), page("D", "#Yönlendirme [[A b]]")
    found, problems = read_all([write(tmp_path / "d.xml", site(language) + "".join(pages) + "</mediawiki>\n")])
    assert found == [want] and problems.dropped == {mediawiki.REDIRECT: 3}
    if language != "xx":  # a dump without its head: by the names of all these languages
        path = write(tmp_path / "d.xml", "<mediawiki>\n" + page("A", text) + "</mediawiki>\n")
        assert read_all([path])[0] == [want]


@pytest.mark.parametrize("kind", ["plain", "bz2", "gz", "zip"])
def test_every_range_knows_the_siteinfo(kind, tmp_path, monkeypatch):
    """A name that only the head of the file says: in ranges, in streams behind the first one, in spools, in an archive."""
    head, rng = site("xx"), random.Random(3)
    want = [f"Page {i} is {rng.random()} here." for i in range(400)]
    texts = (f"[[Foo Bar:K.jpg|{rng.random()}|Caption]]{text}[[Baz:C{i}]]" for i, text in enumerate(want))
    pages = [page(f"P{i}", text) for i, text in enumerate(texts)]
    streams = [head[:40], head[40:], *("".join(pages[i : i + 10]) for i in range(0, 400, 10)), "</mediawiki>"]
    text = "".join(streams).encode()
    pack = {
        "plain": bytes,
        "bz2": lambda _: b"".join(bz2.compress(stream.encode()) for stream in streams),
        "gz": gzip.compress,
        "zip": lambda text: archive("zip", {"d.xml": text}),
    }
    path = write(tmp_path / f"d.{kind}", pack[kind](text))
    monkeypatch.setattr(tasks, "RANGE_BYTES", 20_000)
    if kind == "bz2":
        monkeypatch.setattr(tasks, "_can_be_cut", lambda file: True)
    if kind != "gz":
        parts = [part for task in plan([path]) for part in task.ranges]
        assert (len(parts) > 3) == (kind != "zip")
        assert read_all([path])[0] == want
        return
    monkeypatch.setattr(tasks, "MOST_UNCUT", 1)
    job = BuildJob(BuildOptions(), "", str(tmp_path), "stop")
    ranges = tasks.list_ranges([Corpus("i", (str(path),))], ReadOptions(), Problems("stop"))
    with Stages(tmp_path, Pool(1), progress=False) as stages:
        (parts,) = unpack.run(stages, job, ranges)
    assert len(parts) > 3
    found = [d.text for part in parts for d in read_documents(part, ReadOptions(), Problems("stop"), str(tmp_path))]
    assert found == want


@pytest.mark.parametrize("pack", [bytes, bz2.compress], ids=["txt", "bz2"])
@pytest.mark.parametrize("size", [5, 400_000])
def test_index_of_a_multistream_dump_is_left_out(size, pack, tmp_path):
    lines = "".join(f"{i * 700}:{i}:Title: {i * 7919 % 10**9}\n" for i in range(size)).encode()
    write(tmp_path / f"w-multistream-index.txt{'.bz2' if pack is bz2.compress else ''}", pack(lines))
    write(tmp_path / "w-multistream.xml.bz2", bz2.compress(dump([page("A", "Text of A.")])))
    found, problems = read_all([tmp_path])
    assert found == ["Text of A."] and problems.counts == {"index of a dump, left out": 1}


def test_report_counts_what_was_dropped_from_pages(tokenizer_file, tmp_path, capsys):
    pages = [page(f"P{i}", f"Page {i} is long. It is {{{{unknown|{i}}}}} old.\n* Item") for i in range(30)]
    path = write(tmp_path / "d.xml", dump(pages))
    report = build_here(path, tmp_path / "out", tokenizer=tokenizer_file, seq_len=64, workers=1)
    want = {"list items that are not sentences": 30, "sentences with a template of unknown text": 30}
    assert report["changed"] == want
    counts = "list items that are not sentences 30, sentences with a template of unknown text 30\n"
    assert counts in capsys.readouterr().out


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
        page("I", "# See [[A]] for the first of these two items.\n# Here is the second of these two items."),
        page("H", "Old text.").replace("  </page>", "<revision><text>New text.</text></revision></page>"),
    ]
    items = "See A for the first of these two items.\nHere is the second of these two items."
    dropped = {mediawiki.REDIRECT: 2, mediawiki.NAMESPACE: 1, mediawiki.DISAMBIGUATION: 2, mediawiki.EMPTY: 1}
    for policy in ("stop", "skip"):
        found, problems = read_all([write(tmp_path / "d.xml", dump(pages))], policy)
        assert found == ["Text of the article A is here.", "G is text.", items, "New text."]
        assert problems.dropped == dropped and not problems.counts


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
    began = time.monotonic()
    assert refuse(write(tmp_path / "d.xml", content), message)[1].counts == {reason: 1}
    assert time.monotonic() - began < 5


TOKENS = (
    "{{", "}}", "[[", "]]", "{|\n", "\n|}", "<b>", "<b ", "<ref>", "<ref", "</ref>", "<!--", "-->", "''", "[http://a ", "[//",
    "[[a|", "[[a|x", "{{a|", "=", "\n=", "= =", "=a\n", "*", "\n*", "(", "( ,", " ", "\t ", "\n|", "__A", "-{", "&", "&amp;", "{{{", "<", "|",
    "[[File:", "'", "a", "{{nowrap|", "{{lang|x|", "{{convert|1|-|", "{{quote|x", "{{x}}.", "<sup>", "<sup>2</sup>", "<math>", "<math>\\frac{",
    "</math>", "<code>", "</code>", "''x'''s", "&amp;amp;", "&#", "\n* .", "x {{x}} Y.",
)  # fmt: skip


@pytest.mark.parametrize(
    "tail", ["", "]]", *(pytest.param(t, marks=pytest.mark.slow) for t in ("}}", "\n|}", "</ref>"))]
)
def test_no_wikitext_costs_more_than_linear_time(tail):
    size = 100_000
    for token in (*TOKENS, "{{val|" + " " * 3_900 + "!=x}} here. "):
        text = token * (size // len(token)) + tail * (size // 4)
        began = time.process_time()
        prose(text)
        assert time.process_time() - began < 1, f"{token!r} with {tail!r}"


def test_disambiguation_is_found_in_linear_time():
    began = time.process_time()
    assert not mediawiki.IS_DISAMBIGUATION.search("{{" + "-" * 100_000)
    assert mediawiki.IS_DISAMBIGUATION.search("{{Human-name place disambiguation}}")
    assert time.process_time() - began < 1


def test_random_markup_never_fails_and_never_stays():
    rng = random.Random(5)
    for _ in range(300):
        found = prose("".join(rng.choices([*TOKENS, "\n", "word ", "Text.", "|", ":"], k=200)))
        assert not [token for token in ("{{", "}}", "[[", "]]", "{|", "|}", "|-") if token in found]


@pytest.mark.skipif(not DUMP.exists(), reason="no real dump: MEGABERT_DATA names no folder with wikidump")
def test_real_articles_hold_the_words_a_parser_finds():
    """Nearly every word of ours is in the text that mwparserfromhell leaves; no markup is."""
    found, _ = read_all([DUMP])
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
