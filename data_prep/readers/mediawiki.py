"""Pages of a MediaWiki dump: which of them are articles, and their prose."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from xml.parsers import expat

from data_prep.common.errors import Problems
from data_prep.readers.wikitext import NO_TEXT, namespace, prose
from data_prep.text.entities import unescape

REDIRECT, NAMESPACE, DISAMBIGUATION = "redirect", "page of another namespace", "disambiguation page"
EMPTY, OTHER_MODEL = "page without prose", "page that is not wikitext"
# namespaces of media, files and categories
NAMES = re.compile(r'<namespace key="(?:-2|6|14)"[^<>]*>([^<>]*)</namespace>')
# bytes at the beginning of a dump that may hold its `<siteinfo>`
SITE_BYTES = 1 << 18
# "#WORD [[target]]" at the beginning of a page, the word in the dump's language
IS_REDIRECT = re.compile(r"\s*#(?:\s*redirect\b|[^\W\d_][^\[\]\n]{0,40}\[\[[^\[\]\n]+\]\])", re.IGNORECASE)
_DISAMBIGUATION = (
    "disambig|dab|disamb|hndis|geodis|(?:[\\w-]+[ -]){0,3}disambiguation(?: page)?|begriffsklärung|homonymie|desambiguación|desambiguação|"
    "desambig|disambigua|неоднозначность|багатозначність|doorverwijspagina|dp|anlam ayrımı|aimai|曖昧さ回避|人名の曖昧さ回避|توضيح|"
    "صفحة توضيح|ابهام‌زدایی|消歧义|消歧義|disambig-zh|동음이의|동명이인|ujednoznacznienie|förgrening|gren|grensida|flertydig|täsmennyssivu|"
    "egyért|rozcestník|dezambiguizare|αποσαφήνιση|פירושונים|định hướng|बहुविकल्पी|แก้กำกวม|desambiguació"
)
IS_DISAMBIGUATION = re.compile(rf"\{{\{{\s*(?:{_DISAMBIGUATION})\s*(?:\||\}}\}})", re.IGNORECASE)
DISAMBIGUATION_TITLE = re.compile(rf"\((?:disambiguation|значения|{_DISAMBIGUATION})\)$", re.IGNORECASE)


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


def read_head(chunks: Iterator[bytes]) -> tuple[frozenset[str], Iterator[bytes]]:
    """The namespaces of links without text by the `<siteinfo>` at the beginning of a dump, if it has one; and all of `chunks`."""
    seen, size, tail = [], 0, b""
    for chunk in chunks:
        seen.append(chunk)
        size, tail = size + len(chunk), tail[-16:] + chunk
        if size >= SITE_BYTES or b"<page>" in tail or b"</siteinfo>" in tail:
            break
    head = b"".join(seen)[:SITE_BYTES].partition(b"<page>")[0].decode(errors="replace")
    return NO_TEXT | {namespace(unescape(name)) for name in NAMES.findall(head)} - {""}, chain(seen, chunks)


def article(body: bytes, offset: int, path: str, problems: Problems, no_text: frozenset[str] = NO_TEXT) -> str | None:
    """Prose of a `<page>` element (without its end tag), or None for a dropped one, which is counted.

    Rules drop redirects, pages of other namespaces, disambiguation pages and pages without prose. `no_text`: as of `prose`.
    """
    try:
        page = _Page(body + b"</page>")
    except (expat.ExpatError, _Refused) as error:
        problems.bad(path, offset, "bad page", f"a <page> that is not well-formed XML ({error})", size=len(body))
        return None
    title, text, dropped = page.get("title"), page.get("text"), problems.dropped
    changed: Counter[str] = Counter()
    if page.get("ns").strip() not in ("", "0"):
        dropped[NAMESPACE] += 1
    elif page.is_redirect or IS_REDIRECT.match(text):
        dropped[REDIRECT] += 1
    elif page.get("model").strip() not in ("", "wikitext"):
        dropped[OTHER_MODEL] += 1
    elif "__DISAMBIG__" in text or DISAMBIGUATION_TITLE.search(title) or IS_DISAMBIGUATION.search(text):
        dropped[DISAMBIGUATION] += 1
    elif not (text_of_page := prose(text, no_text, changed)):
        dropped[EMPTY] += 1
    else:
        problems.changed += changed
        return text_of_page
    return None
