"""What a file is by its content: the formats that are read, and a table of those that are not, each with what makes it readable.

A name decides only where content cannot: JSON lines, CSV, and binary formats without a mark.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from typing import NamedTuple

from data_prep.common.errors import UnknownFormat
from data_prep.readers.decompress import SUFFIXES
from data_prep.readers.formats import BOM, INDEX, INDEX_LINES, SPACE

# share of bytes that are not UTF-8, or control characters, up to which a file of an unknown suffix is text
MOST_NOISE = 0.1
TEXT_SUFFIXES = ("", ".txt", ".text")
CONTROLS = bytes(c for c in range(32) if c not in b"\t\n\v\f\r\x1b")


class Refusal(NamedTuple):
    """Bytes at the beginning of a file, behind white space, what they mean, and what to do about it."""

    start: re.Pattern[bytes]
    what: str
    advice: str


def _refusal(start: bytes, what: str, advice: str) -> Refusal:
    return Refusal(re.compile(start, re.DOTALL | re.IGNORECASE), what, advice)


# before the root of an XML file
PROLOG = rb"(?:<\?xml[^>]*\?>\s*)?(?:<!--.*?-->\s*)*"
MEDIAWIKI = re.compile(PROLOG + rb"<mediawiki\b", re.DOTALL)
POSTS = (
    "its posts are HTML in the attribute Body: python -c \"import html,json,re,sys; [print(json.dumps({'text': re.sub('<[^>]+>', '', "
    'html.unescape(m[1]))})) for line in open(sys.argv[1]) if (m := re.search(\' Body=\\"([^\\"]*)\', line))]" FILE > FILE.jsonl'
)
MDS = (
    "convert it: python -c \"import json, streaming; [print(json.dumps({'text': r['text']})) for r in streaming.LocalDataset('DIR')]\" "
    "> DIR.jsonl"
)
MEGATRON = "it has token ids and no text; take the JSON lines from which it was made"
XML = "convert it: xmlstarlet sel -t -m //ELEMENT -v . -n -n FILE > FILE.txt"
PLAIN = "convert it: pandoc -t plain FILE -o FILE.txt"
REFUSALS = (
    _refusal(rb"version https://git-lfs\.", "a pointer of Git LFS instead of the file", "fetch it: git lfs pull"),
    _refusal(rb"%PDF-", "a PDF", "convert it: pdftotext FILE"),
    _refusal(rb"\{\\rtf", "RTF", "convert it: pandoc -f rtf -t plain FILE -o FILE.txt"),
    _refusal(
        rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
        "an Office file",
        "convert it: libreoffice --headless --convert-to txt:Text FILE",
    ),
    _refusal(rb"MMIDIDX\0", "the index of a Megatron dataset", MEGATRON),
    _refusal(rb'\{\s*"shards"\s*:.{0,4000}"format"\s*:\s*"mds"', "the index of a MosaicML MDS dataset", MDS),
    _refusal(
        rb"(?:%[^\n]*\n\s*|\\(?:pdfoutput|RequirePackage|PassOptions)[^\n]*\n\s*)*"
        rb"\\(?:documentclass|documentstyle|begin|chapter|section|input|usepackage|newcommand|title)\*?[\[{]",
        "LaTeX",
        "convert it: pandoc -f latex -t plain FILE -o FILE.txt, or detex FILE",
    ),
    _refusal(
        PROLOG + rb"(?:<!DOCTYPE\s+html|<(?:html|head|body)\b)", "HTML", "convert it: trafilatura < FILE > FILE.txt"
    ),
    _refusal(
        PROLOG + rb"(?:<!DOCTYPE\s+article|<article\b|<pmc-articleset\b)",
        "an article in JATS XML, as of PubMed Central",
        "convert it: pandoc -f jats -t plain FILE -o FILE.txt",
    ),
    _refusal(
        PROLOG + rb"(?:<!DOCTYPE\s+PubmedArticleSet|<PubmedArticleSet\b)",
        "PubMed XML",
        "convert it: xmlstarlet sel -t -m //AbstractText -v . -n -n FILE > FILE.txt",
    ),
    _refusal(PROLOG + rb"<(?:posts|comments|posthistory)>\s*<row\b", "Stack Exchange XML", POSTS),
    _refusal(PROLOG + rb"<!DOCTYPE", "XML or HTML with a DOCTYPE, and not a MediaWiki dump", XML),
    _refusal(rb"<\?xml", "XML, and not a MediaWiki dump", XML),
    _refusal(rb"7z\xbc\xaf", "a 7z archive", "convert it: 7z x FILE"),
    _refusal(rb"Rar!\x1a", "a RAR archive", "convert it: unrar x FILE"),
    _refusal(rb"\x04\x22\x4d\x18", "LZ4 data", "convert it: lz4 -d FILE"),
    _refusal(
        rb"SQLite format 3\0",
        "an SQLite database",
        "convert it: sqlite3 -csv -header FILE 'select * from TABLE' > FILE.csv",
    ),
    _refusal(rb"(?-i:ORC[\x00-\x08\x0e-\x1f]|Obj\x01)", "an ORC or Avro table", "convert it to Parquet"),
    _refusal(rb"(?:\x93NUMPY|\x89HDF)", "an array of numbers", "it has no text"),
    _refusal(rb"(?:\xff\xfe|\xfe\xff)", "UTF-16 text", "convert it: iconv -f utf-16 -t utf-8 FILE > FILE.txt"),
)
# members by which a zip archive is something else
ZIPPED = {
    "word/document.xml": ("a Word document", PLAIN),
    "xl/workbook.xml": ("an Excel workbook", "convert it: libreoffice --headless --convert-to csv FILE"),
    "ppt/presentation.xml": (
        "a PowerPoint presentation",
        "convert it: libreoffice --headless --convert-to pdf FILE, then pdftotext",
    ),
    "META-INF/container.xml": ("an EPUB", PLAIN),
    "content.xml": ("an OpenDocument file", PLAIN),
}


def refused(path: str, what: str, advice: str) -> UnknownFormat:
    return UnknownFormat(f"{path}: {what}, which is not read; {advice}")


def file_suffix(path: str) -> str:
    """The suffix of a file, or of a member `ARCHIVE: NAME`, without that of a compression."""
    stem, suffix = os.path.splitext(path.rpartition(": ")[2])
    return os.path.splitext(stem)[1] if suffix in SUFFIXES else suffix


def detect(path: str, suffix: str, head: bytes, whole: bool) -> str:
    """Format name of a file of text from its first unpacked bytes (at most HEAD) and its suffix. `whole`: these are all bytes.

    Raises UnknownFormat naming the file, what it is and how to make it readable.
    """
    start = head.removeprefix(BOM).lstrip()
    if start.startswith((b"<doc ", b"<doc>")):
        return "wiki"
    if MEDIAWIKI.match(start):
        return "mediawiki"
    if INDEX_LINES.match(start):
        return INDEX
    for refusal in REFUSALS:
        if refusal.start.match(start):
            raise refused(path, refusal.what, refusal.advice)
    if suffix == ".mds" or (b'"format": "mds"' in head and b"\0" in head):
        raise refused(path, "a shard of a MosaicML MDS dataset", MDS)
    if suffix == ".bin" and os.path.exists(path.removesuffix(".bin") + ".idx"):
        raise refused(path, "a Megatron dataset", MEGATRON)
    if head.count(0) > len(head) // 4:
        raise UnknownFormat(f"{path}: binary data (or UTF-16: convert it to UTF-8 first)")
    if re.match(rb"WARC/\d", start):
        if b"WARC-Type: response" in head and b"WARC-Type: conversion" not in head:
            raise refused(
                path, "a WARC of web pages", "take its WET file (.warc.wet.gz), or extract the text with trafilatura"
            )
        return "wet"
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if suffix in (".csv", ".tsv"):
        return "csv"
    if re.match(rb'\[\s*(?:\{\s*["}]|\]\s*$)' if suffix != ".json" else rb"\[", start):
        return "json"
    if start.startswith(b"{") and _is_jsonl(path, suffix, start, whole):
        return "jsonl"
    if re.match(rb"<[a-z][\w:-]*(?:\s[^<>]*)?>", start, re.IGNORECASE) and start.count(b"</") >= 3:
        raise refused(
            path,
            "XML or HTML",
            "convert it by pandoc -t plain, xmlstarlet or trafilatura, or --format text if the tags are text",
        )
    if suffix in TEXT_SUFFIXES or _is_text(head, whole):
        return "text"
    raise UnknownFormat(
        f"{path}: unknown suffix {suffix!r} and no known content; if it is text of another encoding: iconv -f NAME -t utf-8 FILE"
    )


def _is_jsonl(path: str, suffix: str, start: bytes, whole: bool) -> bool:
    """Whether text that begins with a brace has an object a line. Raises UnknownFormat for an object over several lines, or with all
    records in an array."""
    line, _, rest = start.partition(b"\n")
    array = re.match(rb'\{\s*"([^"\\]*)"\s*:\s*\[\s*\{', start)
    try:
        json.loads(line)
        is_object = True
    except (ValueError, RecursionError):
        is_object = len(line) == len(start) and not whole  # a line longer than the head
    several = bool(rest.strip())
    is_pretty = several and not is_object and re.match(rb'\{\s*"', start)
    is_one = array and not several and (whole or suffix == ".json")
    if is_pretty or is_one:
        records = "'.'"
        if array:
            name = array[1].decode(errors="replace")
            records = shlex.quote(f".{name}[]" if name.isidentifier() else f'."{name}"[]')
        raise refused(
            path,
            "JSON that is neither an object a line nor an array of objects",
            f"convert it: jq -c {records} FILE > FILE.jsonl",
        )
    return is_object


def _is_text(head: bytes, whole: bool) -> bool:
    controls = len(head) - len(head.translate(None, CONTROLS))
    undecoded = head.decode(errors="replace").count("\ufffd") - head.count(b"\xef\xbf\xbd")
    cut = 0 if whole else 1  # the last character may be cut
    return controls + undecoded - cut <= MOST_NOISE * len(head.strip(SPACE)) and head.count(0) == 0
