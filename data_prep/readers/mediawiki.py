"""Splitter of MediaWiki dumps: which of the pages are articles, and their prose."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from xml.parsers import expat

from data_prep.common import utf8
from data_prep.readers.elements import split_elements
from data_prep.readers.streams import Stream
from data_prep.readers.wikitext import NO_TEXT, namespace, prose
from data_prep.text.clean import unescape

REDIRECT, NAMESPACE, DISAMBIGUATION = "redirect", "page of another namespace", "disambiguation page"
EMPTY, OTHER_MODEL = "page without prose", "page that is not wikitext"
# namespaces of media, files and categories
NAMES = re.compile(r'<namespace key="(?:-2|6|14)"[^<>]*>([^<>]*)</namespace>')
# bytes at the beginning of a dump that may hold its `<siteinfo>`
SITE_BYTES = 1 << 18
# "#WORD [[target]]" at the beginning of a page, the word in the dump's language
IS_REDIRECT = re.compile(r"\s*#(?:\s*redirect\b|[^\W\d_][^\[\]\n]{0,40}\[\[[^\[\]\n]+\]\])", re.IGNORECASE)
_DISAMBIGUATION = (
    "disambig|dab|disamb|hndis|geodis|(?:[\\w-]{1,40}[ -]){0,3}disambiguation(?: page)?|begriffsklärung|homonymie|desambiguación|desambiguação|"
    "desambig|disambigua|неоднозначность|багатозначність|doorverwijspagina|dp|anlam ayrımı|aimai|曖昧さ回避|人名の曖昧さ回避|توضيح|"
    "صفحة توضيح|ابهام‌زدایی|消歧义|消歧義|disambig-zh|동음이의|동명이인|ujednoznacznienie|förgrening|gren|grensida|flertydig|täsmennyssivu|"
    "egyért|rozcestník|dezambiguizare|αποσαφήνιση|פירושונים|định hướng|बहुविकल्पी|แก้กำกวม|desambiguació"
)
IS_DISAMBIGUATION = re.compile(rf"\{{\{{\s*(?:{_DISAMBIGUATION})\s*(?:\||\}}\}})", re.IGNORECASE)
DISAMBIGUATION_TITLE = re.compile(rf"\((?:disambiguation|значения|{_DISAMBIGUATION})\)$", re.IGNORECASE)


def split_mediawiki(stream: Stream) -> Iterator[tuple[int, str]]:
    """The prose of each article. Pages that are no articles, or have no prose, are dropped and counted."""
    no_text, problems = stream.no_text, stream.problems
    if no_text is None:
        no_text, stream.chunks = read_head(stream.chunks)
    for offset, body in split_elements(stream, "page", rb"<page>"):
        if stream.options.encoding_errors == "replace":  # else the XML parser reports invalid bytes
            body = utf8.decode(body, stream.options, problems, stream.path).encode()
        try:
            page = _read_fields(body + b"</page>")
        except (expat.ExpatError, ValueError) as error:
            stream.bad(offset, "bad page", f"a <page> that is not well-formed XML ({error})", len(body))
            continue
        changed: Counter[str] = Counter()
        if rule := _dropped_by(page):
            problems.dropped[rule] += 1
        elif text := prose(page.get("text", ""), no_text, changed):
            problems.changed += changed
            yield offset, text
        else:
            problems.dropped[EMPTY] += 1


def read_head(chunks: Iterator[bytes]) -> tuple[frozenset[str], Iterator[bytes]]:
    """(namespaces whose links have no text, from the `<siteinfo>` at the start of a dump, if any; an iterator over all
    of `chunks`, including those read here)."""
    seen, size, tail = [], 0, b""
    for chunk in chunks:
        seen.append(chunk)
        size, tail = size + len(chunk), tail[-16:] + chunk
        if size >= SITE_BYTES or b"<page>" in tail or b"</siteinfo>" in tail:
            break
    head = b"".join(seen)[:SITE_BYTES].partition(b"<page>")[0].decode(errors="replace")
    return NO_TEXT | {namespace(unescape(name)) for name in NAMES.findall(head)} - {""}, chain(seen, chunks)


def _read_fields(xml: bytes) -> dict[str, str]:
    """Fields of a `<page>`: title, ns, model and text of the last revision, which is the newest; redirect if the page is one.

    Raises ExpatError, and ValueError for a page that is deeper than any dump's.
    """
    fields: dict[str, list[str]] = {}
    path: list[str] = []

    def start(name: str, _: object) -> None:
        path.append(name)
        if len(path) > 16:
            raise ValueError("elements inside elements without end")
        if name in ("title", "ns", "text", "model") or path == ["page", "redirect"]:
            fields[name] = []

    def data(text: str) -> None:
        if path[-1] in fields:
            fields[path[-1]].append(text)

    parser = expat.ParserCreate("UTF-8")
    parser.buffer_text = True
    parser.StartElementHandler, parser.CharacterDataHandler = start, data
    parser.EndElementHandler = lambda _: path.pop()
    parser.Parse(xml, True)
    return {name: "".join(texts) for name, texts in fields.items()}


def _dropped_by(page: dict[str, str]) -> str:
    """The rule that drops a page that is not an article; "" for an article."""
    text = page.get("text", "")
    if page.get("ns", "").strip() not in ("", "0"):
        return NAMESPACE
    if "redirect" in page or IS_REDIRECT.match(text):
        return REDIRECT
    if page.get("model", "").strip() not in ("", "wikitext"):
        return OTHER_MODEL
    is_list = DISAMBIGUATION_TITLE.search(page.get("title", "")) or IS_DISAMBIGUATION.search(text)
    return DISAMBIGUATION if is_list or "__DISAMBIG__" in text else ""
