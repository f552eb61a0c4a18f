"""Reader of pages of a MediaWiki dump: wikitext to prose.

One pass in linear time that removes all markup. Markup without sentences (templates, tables, references, files, categories,
formulas, lists of links) is dropped with its content; links, emphasis and tags keep their text. The
grammar is that of https://www.mediawiki.org/wiki/Help:Formatting and Help:Links, Help:Tables, Help:Templates. The parser
library mwparserfromhell is only the tests' oracle: it reads 0.7 MB/s, can't be interrupted, and needs 7 s for 32 KB of `<b>`.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from xml.parsers import expat

from data_prep.common.errors import Problems

REDIRECT, NAMESPACE, DISAMBIGUATION = "redirect", "page of another namespace", "disambiguation page"
EMPTY, OTHER_MODEL = "page without prose", "page that is no wikitext"

# Tags that are dropped with their content; unpaired ones are dropped alone.
OPAQUE = (
    "ref|references|math|chem|ce|gallery|timeline|source|syntaxhighlight|score|imagemap|hiero|graph|mapframe|maplink|"
    "templatedata|templatestyles|categorytree|inputbox|indicator|pre|code|del|table|noinclude"
)
EXTENSION = re.compile(rf"<!--|-->|<(/?)({OPAQUE})\b([^<>]*)>", re.IGNORECASE)
BRACES = re.compile(r"\{\{|\}\}|\[\[|\]\]|\{\||\|\}(?!\})")
# characters before a table's mark in its line: spaces and list marks
INDENT = 64
KINDS = {"{{": "}}", "[[": "]]", "{|": "|}"}
# depth of links inside links; deeper ones are not text
LINK_DEPTH = 8
# most characters of a template whose text is kept
SHORT = 400
# Namespaces whose links have no text, in the languages with most articles; nor have bare links to other languages.
DROPPED_LINK = re.compile(
    r"\s*(?:file|image|media|category|datei|bild|kategorie|fichier|catégorie|archivo|imagen|categoría|ficheiro|imagem|"
    r"categoria|immagine|bestand|afbeelding|categorie|plik|grafika|kategoria|файл|изображение|категория|ファイル|画像|"
    r"カテゴリ|文件|分类|分類)\s*:",
    re.IGNORECASE,
)
OTHER_WIKI = re.compile(r"\s*:?[a-z][a-z-]{1,14}:")
# possessive, since an unclosed one would be tried at every length
EXTERNAL = re.compile(r"\[(?:(?:https?:|ftp:)?//|mailto:)[^\s\[\]]*+[ \t]*+([^\[\]\n]*+)\]", re.IGNORECASE)
BREAK = re.compile(r"<(?:br|p|hr|/p|/div|div|li|/li|blockquote|/blockquote|poem|/poem|center|/center)\b[^<>]*>", re.IGNORECASE)  # fmt: skip
# bare or with attributes; a comparison (a<b) is no tag
TAG = re.compile(r"</?[a-zA-Z][\w-]*(?:\s*/?>|\s[^<>]{0,200}=[^<>]*>)|<ref\b[^<>\n]*", re.IGNORECASE)
QUOTES = re.compile(r"'{2,}")
MAGIC = re.compile(r"__[A-Z]{3,}__|-\{|\}-")
LEFT_OVER = re.compile(r"\{\{+|\}\}+|\[\[+|\]\]+|\{\||\|\}|\|-+")
HOLLOW = re.compile(r"\([\s,;:]*\)")
OPENED = re.compile(r"\([\s,;]+")
TIDIED = ((" ,", ","), (" .", "."), (" )", ")"), (",)", ")"), (";)", ")"), (" )", ")"))
SPACES = re.compile(r"[ \t\xa0]{2,}")
LIST_END = (".", "!", "?", '."', ".”", ".)", "…")
LIST_WORDS = 5
ENDING = {
    "references", "notes", "notes and references", "references and notes", "footnotes", "citations", "sources",
    "external links", "see also", "further reading", "bibliography", "works cited", "gallery", "literature",
    "publications", "discography", "filmography", "einzelnachweise", "weblinks", "literatur", "siehe auch",
    "références", "voir aussi", "liens externes", "bibliographie", "notes et références", "referencias",
    "enlaces externos", "véase también", "bibliografía", "note", "collegamenti esterni", "voci correlate",
}  # fmt: skip
# Templates whose text is part of the sentence: index (from 1) of the argument with it.
SPOKEN = {"lang": 2, "transl": 2, "nowrap": 1, "nobr": 1, "nobold": 1, "em": 1, "strong": 1, "abbr": 1, "smallcaps": 1, "sic": 1, "tlit": 2, "small": 1}  # fmt: skip
IS_REDIRECT = re.compile(r"\s*#\s*(?:redirect|weiterleitung|redirection|redirección|rinvia|перенаправление)\b", re.I)
IS_DISAMBIGUATION = re.compile(
    r"\{\{\s*(?:disambig|dab|disamb|hndis|geodis|(?:[\w-]+[ -]){0,3}disambiguation(?: page)?|begriffsklärung|homonymie|"
    r"desambiguación|desambiguação|disambigua|неоднозначность|doorverwijspagina)\s*(?:\||\}\})",
    re.IGNORECASE,
)


class _Refused(ValueError):
    pass


class _Page:
    """Fields of one `<page>`: the text of the last revision, which is the newest."""

    def __init__(self, xml: bytes) -> None:
        self.fields: dict[str, list[str]] = {}
        self.is_redirect = False
        self._path: list[str] = []
        parser = expat.ParserCreate("UTF-8")
        parser.buffer_text = True
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._data
        parser.StartDoctypeDeclHandler = self._refuse
        parser.EntityDeclHandler = self._refuse
        parser.Parse(xml, True)

    def _refuse(self, *_: object) -> None:
        raise _Refused("a DOCTYPE or an entity declaration")

    def _start(self, name: str, _: object) -> None:
        self._path.append(name)
        if len(self._path) > 16:
            raise _Refused("elements inside elements without end")
        self.is_redirect |= name == "redirect" and len(self._path) == 2
        if name in ("title", "ns", "text", "model"):
            self.fields[name] = []

    def _end(self, _: str) -> None:
        self._path.pop()

    def _data(self, data: str) -> None:
        if self._path[-1] in self.fields:
            self.fields[self._path[-1]].append(data)

    def get(self, name: str) -> str:
        return "".join(self.fields.get(name, ()))


def article(body: bytes, offset: int, path: str, problems: Problems) -> str | None:
    """Prose of a `<page>` element (without its end tag), or None for a dropped one, which is counted.

    Rules drop redirects, pages of other namespaces, disambiguation pages and pages without prose.
    """
    try:
        page = _Page(body + b"</page>")
    except (expat.ExpatError, _Refused) as error:
        problems.bad(path, offset, "bad page", f"a <page> that is not well-formed XML ({error})", size=len(body))
        return None
    title, text, dropped = page.get("title"), page.get("text"), problems.dropped
    if page.get("ns").strip() not in ("", "0"):
        dropped[NAMESPACE] += 1
    elif page.is_redirect or IS_REDIRECT.match(text):
        dropped[REDIRECT] += 1
    elif page.get("model").strip() not in ("", "wikitext"):
        dropped[OTHER_MODEL] += 1
    elif title.endswith("(disambiguation)") or IS_DISAMBIGUATION.search(text):
        dropped[DISAMBIGUATION] += 1
    elif not (text_of_page := prose(text)):
        dropped[EMPTY] += 1
    else:
        return text_of_page
    return None


def prose(wikitext: str) -> str:
    """Plain text of wikitext: a paragraph a line, headings before prose, list items that are sentences."""
    text = _without_extensions(wikitext)
    if "&" in text:
        unescaped = html.unescape(text)
        text = _without_extensions(unescaped) if "&lt;" in text else unescaped
    text = _without_braces(text)
    if "[" in text:
        text = EXTERNAL.sub(r"\1", text)
    if "<" in text:
        text = TAG.sub("", BREAK.sub("\n", text))
    if "''" in text:
        text = QUOTES.sub("", text)
    text = OPENED.sub("(", HOLLOW.sub("", LEFT_OVER.sub(" ", MAGIC.sub("", text))))
    text = SPACES.sub(" ", text)
    for old, new in TIDIED:
        text = text.replace(old, new)
    return _lines(text)


def _without_extensions(text: str) -> str:
    """Text without comments and without the tags of OPAQUE and their content. Of an unclosed tag only the tag is removed."""
    if "<" not in text:
        return text
    tags = list(EXTENSION.finditer(text))
    last_end: dict[str, int] = {}
    for match in tags:
        if match[0] == "-->" or match[1]:
            last_end[(match[2] or "!").lower()] = match.start()
    out: list[str] = []
    at, inside = 0, ""  # inside: name of the open tag, "!" for a comment
    for match in tags:
        name = (match[2] or "!").lower()
        closes = match[0] == "-->" or bool(match[1])
        if inside:
            if closes and name == inside:
                at, inside = match.end(), ""
            continue
        out.append(text[at : match.start()])
        at = match.end()
        if not closes and not (match[3] or "").endswith("/") and last_end.get(name, -1) > match.start():
            inside = name
    out.append(text[at:])
    return "".join(out)


def _without_braces(text: str) -> str:
    """Text without templates and tables; links become their labels. Unclosed ones keep their text, without the mark."""
    out: list[str] = []
    opened: list[tuple[str, int]] = []  # (closing mark, length of `out` at the opening)
    depth: Counter[str] = Counter()
    at = 0
    for match in BRACES.finditer(text):
        token = match[0]
        if token in ("{|", "|}"):  # a table's mark only at the start of a line
            before = text[max(match.start() - INDENT, 0) : match.start()].rpartition("\n")[2]
            if before.strip(" \t:*#;"):
                continue
        if at < match.start():
            out.append(text[at : match.start()])
        at = match.end()
        if token in KINDS:
            if token != "[[" or depth["]]"] < LINK_DEPTH:
                opened.append((KINDS[token], len(out)))
                depth[KINDS[token]] += 1
        elif depth[token]:
            while True:
                kind, start = opened.pop()
                depth[kind] -= 1
                if kind == token:
                    break
            inner, left = out[start:], ""
            if token == "]]":
                left = _link("".join(inner))
            elif token == "}}" and len(inner) <= 8:
                left = _template("".join(inner))
            del out[start:]
            if left:
                out.append(left)
    out.append(text[at:])
    return "".join(out)


def _link(inner: str) -> str:
    """The text of a link: its label, else its target; nothing for files, categories and other wikis."""
    target, _, label = inner.partition("|")
    if DROPPED_LINK.match(target) or (not label and OTHER_WIKI.match(target)):
        return ""
    return label.rpartition("|")[2] if label else target.lstrip(" :")


def _template(inner: str) -> str:
    """The text of a template of SPOKEN or {{convert}}, else nothing."""
    if len(inner) > SHORT:
        return ""
    name, *arguments = (part.strip() for part in inner.split("|"))
    name = name.lower()
    values = [argument for argument in arguments if "=" not in argument]
    if name in ("convert", "cvt") and len(values) >= 2:
        return " ".join(values[: 4 if values[1] in ("-", "–", "to", "and", "by", "x") else 2])
    position = SPOKEN.get(name) or (1 if name.startswith("lang-") else 0)
    return values[position - 1] if 0 < position <= len(values) else ""


def _lines(text: str) -> str:
    """Lines of prose: without table rows, list items that are not sentences, and sections of links."""
    kept: list[str] = []
    headings: list[str] = []  # not yet followed by prose
    skipped = 0  # level of the heading of the dropped section
    for raw in text.split("\n"):
        line = raw.strip()
        if not line or line[0] in "|!}":
            continue
        if line[0] == line[-1] == "=":
            level, name = len(line) - len(line.lstrip("=")), line.strip("= ")
            if skipped and level > skipped:
                continue
            skipped = level if name.lower() in ENDING else 0
            headings = [] if skipped or not name else [name]
            continue
        if skipped:
            continue
        if line[0] in "*#:;":
            line = line.lstrip("*#:; ")
            if not line.endswith(LIST_END) or line.count(" ") + 1 < LIST_WORDS:
                continue
        if not any(map(str.isalpha, line)):
            continue
        kept += headings
        headings = []
        kept.append(line)
    return "\n".join(kept)
