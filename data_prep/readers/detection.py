"""What a file is by its content: the formats that are read, and a table of those that are not, each with what makes it readable.

A name decides only where content cannot: JSON lines, CSV, the index of a dump, and binary formats without a mark.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import replace

from data_prep.common.errors import UnknownFormat
from data_prep.common.records import AUTO, TABLES, FileRange, ReadOptions
from data_prep.readers import archives
from data_prep.readers.decompress import SUFFIXES, detect_compression
from data_prep.readers.files import open_regular
from data_prep.readers.streams import HEAD, SPACE
from megabert.common import storage
from megabert.common.tables import detect_kind

# first bytes of a file
HEAD_BYTES = 1 << 18
BOM = b"\xef\xbb\xbf"
TAR_MAGIC_AT = 257
# endings of compressed tars
TAR_NAME = re.compile(r"\.(tar\.\w+|tgz|tbz2?|txz|tzst)$", re.IGNORECASE)
# share of control characters, and for an unknown suffix also of bytes that are not UTF-8, up to which a file is text
MOST_NOISE = 0.1
TEXT_SUFFIXES = ("", ".txt", ".text")
# files of these names are not text, whatever they hold
MARKUP_SUFFIXES = (".json", ".html", ".htm", ".xhtml", ".xml")
CONTROLS = bytes(c for c in range(32) if c not in b"\t\n\v\f\r\x1b")
# a file beside a multistream dump, which is left out and counted: "offset:id:title" of each page
INDEX = "index of a dump, left out"
# before the root of an XML file; a comment has one end, else trying all ends of many comments would take exponential time
PROLOG = rb"(?:<\?xml[^>]*\?>\s*)?(?:<!--[^-]*(?:-(?!->)[^-]*)*-->\s*)*"
# what is not read, and what to do about it
Refusal = tuple[str, str]
MDS = (
    "convert it: python -c \"import json, streaming; [print(json.dumps({'text': r['text']})) for r in streaming.LocalDataset('DIR')]\" "
    "> DIR.jsonl"
)
MEGATRON = "it has token ids and no text; take the JSON lines from which it was made"
POSTS = (
    "its posts are HTML in the attribute Body: python -c \"import html,json,re,sys; [print(json.dumps({'text': re.sub('<[^>]+>', '', "
    'html.unescape(m[1]))})) for line in open(sys.argv[1]) if (m := re.search(\' Body=\\"([^\\"]*)\', line))]" FILE > FILE.jsonl'
)
SEQUENCES = (
    'for a line a sequence: awk \'/^>/ {if (s) print s; s = ""; next} {sub(/\\r$/, ""); s = s $0} END {print s}\' FILE > FILE.txt, '
    "and --text-documents line; or --format text"
)
MAIL = (
    "convert it: python -c \"import json, mailbox, sys; [print(json.dumps({'text': (p.get_payload(decode=True) or b'').decode("
    "p.get_content_charset('utf-8'), 'replace')})) for m in mailbox.mbox(sys.argv[1]) for p in m.walk() if p.get_content_type() == "
    "'text/plain']\" FILE > FILE.jsonl, or --format text"
)
SUBTITLES = "convert it: sed -E '/^[0-9]*\\r?$|-->|^WEBVTT/d' FILE > FILE.txt, or --format text"
XML = "convert it: xmlstarlet sel -t -m //ELEMENT -v . -n -n FILE > FILE.txt"
PLAIN = "convert it: pandoc -t plain FILE -o FILE.txt"
LATEX = (
    rb"(?:%[^\n]*\n\s*|\\(?:pdfoutput|RequirePackage|PassOptions)[^\n]*\n\s*)*"
    rb"\\(?:documentclass|documentstyle|begin|chapter|section|input|usepackage|newcommand|title)\*?[\[{]"
)
# pattern of the first bytes after white space, case-insensitive -> a format, or a refusal
BEGINNINGS: tuple[tuple[bytes, str | Refusal], ...] = (
    (rb"(?-i:<doc[ >])", "wiki"),
    (rb"(?-i:" + PROLOG + rb"<mediawiki\b)", "mediawiki"),
    (rb"(?:\d+:\d+:[^\n]+\n){3}", INDEX),
    (rb"version https://git-lfs\.", ("a pointer of Git LFS instead of the file", "fetch it: git lfs pull")),
    (rb"%PDF-", ("a PDF", "convert it: pdftotext FILE")),
    (rb"\{\\rtf", ("RTF", "convert it: pandoc -f rtf -t plain FILE -o FILE.txt")),
    (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", ("an Office file", "convert it: libreoffice --headless --convert-to txt:Text FILE")),
    (rb"MMIDIDX\0", ("the index of a Megatron dataset", MEGATRON)),
    (rb'\{\s*"shards"\s*:.{0,4000}"format"\s*:\s*"mds"', ("the index of a MosaicML MDS dataset", MDS)),
    (LATEX, ("LaTeX", "convert it: pandoc -f latex -t plain FILE -o FILE.txt, or detex FILE")),
    (PROLOG + rb"(?:<!DOCTYPE\s+html|<(?:html|head|body)\b)", ("HTML", "convert it: trafilatura < FILE > FILE.txt")),
    (PROLOG + rb"(?:<!DOCTYPE\s+article|<article\b|<pmc-articleset\b)",
     ("an article in JATS XML, as of PubMed Central", "convert it: pandoc -f jats -t plain FILE -o FILE.txt")),
    (PROLOG + rb"(?:<!DOCTYPE\s+PubmedArticleSet|<PubmedArticleSet\b)", ("PubMed XML", XML.replace("ELEMENT", "AbstractText"))),
    (PROLOG + rb"<(?:posts|comments|posthistory)>\s*<row\b", ("Stack Exchange XML", POSTS)),
    (PROLOG + rb"<!DOCTYPE", ("XML or HTML with a DOCTYPE, and not a MediaWiki dump", XML)),
    (rb"<\?xml", ("XML, and not a MediaWiki dump", XML)),
    (rb">[^\s>][^\n]*\n[a-z*-]{30,}(?:\r?\n|\Z)", ("FASTA", SEQUENCES)),
    (rb"From \S+ [^\n]{0,99}\d\d:\d\d[^\n]{0,99}\n[!-9;-~]+:", ("a mailbox", MAIL)),
    (rb"(?:WEBVTT\b|\d+\s*\n\d\d:\d\d:\d\d,\d{3} -->)", ("subtitles", SUBTITLES)),
    (rb"7z\xbc\xaf", ("a 7z archive", "convert it: 7z x FILE")),
    (rb"Rar!\x1a", ("a RAR archive", "convert it: unrar x FILE")),
    (rb"\x04\x22\x4d\x18", ("LZ4 data", "convert it: lz4 -d FILE")),
    (rb"SQLite format 3\0", ("an SQLite database", "convert it: sqlite3 -csv -header FILE 'select * from TABLE' > FILE.csv")),
    (rb"(?-i:ORC[\x00-\x08\x0e-\x1f]|Obj\x01)", ("an ORC or Avro table", "convert it to Parquet")),
    (rb"(?:\x93NUMPY|\x89HDF)", ("an array of numbers", "it has no text")),
    (rb"(?:\xff\xfe\0\0|\0\0\xfe\xff)", ("UTF-32 text", "convert it: iconv -f utf-32 -t utf-8 FILE > FILE.txt")),
    (rb"(?:\xff\xfe|\xfe\xff)", ("UTF-16 text", "convert it: iconv -f utf-16 -t utf-8 FILE > FILE.txt")),
    (rb"[^\x1b]*\x1b(?:\$[@AB()]|\(J)",
     ("text in ISO-2022-JP, -KR or -CN", "convert it: iconv -f iso-2022-jp -t utf-8 FILE > FILE.txt")),
)  # fmt: skip
# documents that are zip archives, by a member that identifies them
ZIPPED: dict[str, Refusal] = {
    "word/document.xml": ("a Word document", PLAIN),
    "xl/workbook.xml": ("an Excel workbook", "convert it: libreoffice --headless --convert-to csv FILE"),
    "ppt/presentation.xml": (
        "a PowerPoint presentation",
        "convert it: libreoffice --headless --convert-to pdf FILE, then pdftotext",
    ),
    "META-INF/container.xml": ("an EPUB", PLAIN),
    "content.xml": ("an OpenDocument file", PLAIN),
}


def identify(file: FileRange, options: ReadOptions) -> FileRange:
    """A whole file with compression and format by its first bytes; a compressed one keeps the format of the options, unless it is a tar.

    Raises UnknownFormat if the bytes don't determine the format.
    """
    with open_regular(file.path) as opened:
        head = opened.read(HEAD_BYTES)
    suffix = os.path.splitext(storage.public(file.path))[1].lower()
    compression = detect_compression(head)
    if suffix in SUFFIXES and compression != SUFFIXES[suffix]:
        raise UnknownFormat(
            f"{file.path}: byte 0: not {SUFFIXES[suffix]} data despite its suffix {suffix}; rename the file"
        )
    file = replace(file, compression=compression, opened=True)
    if compression:
        return replace(file, format="tar") if TAR_NAME.search(storage.public(file.path)) else file
    file = replace(file, format=detect(file.path, head, options))
    if file.format == "zip":
        names, _ = archives.names_and_size(file.path)
        for name in filter(names.__contains__, ZIPPED):
            raise _refused(file.path, *ZIPPED[name])
    return file


def detect(path: str, first: bytes, options: ReadOptions, compression: str = "") -> str:
    """Name of the format by the first unpacked bytes; at most HEAD bytes are taken for the whole text.

    Raises UnknownFormat naming the file, what it is and how to make it readable.
    """
    if first.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    if first[TAR_MAGIC_AT : TAR_MAGIC_AT + 5] == b"ustar":
        return "tar"
    if options.format in (AUTO, *TABLES) and (table := detect_kind(first)):
        if compression:
            raise UnknownFormat(f"{path}: a {table} table compressed with {compression}; decompress it first")
        return table
    if options.format in TABLES:
        raise UnknownFormat(
            f"{path}: not a Parquet or Arrow file, as --format {options.format} says; leave --format out"
        )
    if options.format == AUTO:
        return _detect_text(path, first[:HEAD], whole=len(first) <= HEAD)
    return options.format


def _refused(path: str, what: str, advice: str) -> UnknownFormat:
    return UnknownFormat(f"{path}: {what}, which is not supported; {advice} (--on-error skip leaves it out)")


def _detect_text(path: str, head: bytes, whole: bool) -> str:
    """Raises UnknownFormat for a file that is not text, or of a format that is not read."""
    # of a member `ARCHIVE: NAME` too
    stem, suffix = os.path.splitext(storage.public(path.rpartition(": ")[2]).lower())
    if suffix in SUFFIXES:
        suffix = os.path.splitext(stem)[1]
    start = head.removeprefix(BOM).lstrip()
    for beginning, known in BEGINNINGS:
        if not re.match(beginning, start, re.DOTALL | re.IGNORECASE):
            continue
        if known == INDEX and "index" not in os.path.basename(path).lower():
            continue  # verses of a book, or messages with their times
        if isinstance(known, str):
            return known
        raise _refused(path, *known)
    if suffix == ".mds" or (b'"format": "mds"' in head and b"\0" in head):
        raise _refused(path, "a shard of a MosaicML MDS dataset", MDS)
    if suffix == ".bin" and os.path.exists(path.removesuffix(".bin") + ".idx"):
        raise _refused(path, "a Megatron dataset", MEGATRON)
    if _controls(head) > MOST_NOISE * len(head.strip(SPACE)):
        what = "binary data, or text in another encoding such as UTF-16"
        raise _refused(path, what, "convert it: iconv -f NAME -t utf-8 FILE > FILE.txt")
    if re.match(rb"WARC/\d", start):
        types = {kind.lower() for kind in re.findall(rb"^warc-type:[ \t]*(\w+)", head, re.MULTILINE | re.IGNORECASE)}
        if b"response" in types and b"conversion" not in types:
            advice = "take its WET file (.warc.wet.gz), or extract the text with trafilatura"
            raise _refused(path, "a WARC of web pages", advice)
        return "wet"
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if suffix in (".csv", ".tsv"):
        return "csv"
    if re.match(rb'\[\s*(?:\{\s*["}]|\]\s*$)' if suffix != ".json" else rb"\[", start):
        return "json"
    if start.startswith(b"{") and _is_jsonl(path, suffix, start, whole):
        return "jsonl"
    if re.match(PROLOG + rb"<[a-z][\w:-]*(?:\s[^<>]*)?>", start, re.IGNORECASE) and start.count(b"</") >= 3:
        advice = "convert it by pandoc -t plain, xmlstarlet or trafilatura, or --format text if the tags are text"
        raise _refused(path, "XML or HTML", advice)
    if suffix in MARKUP_SUFFIXES and start:
        what = f"{suffix[1:].upper()} by its name, but of another kind"
        raise _refused(path, what, "convert it, or --format text if it is text")
    if suffix in TEXT_SUFFIXES or _is_text(head, whole):
        return "text"
    what = f"unknown suffix {suffix!r} and unrecognised content"
    raise _refused(path, what, "if it is text in another encoding, convert it: iconv -f NAME -t utf-8 FILE > FILE.txt")


def _is_jsonl(path: str, suffix: str, start: bytes, whole: bool) -> bool:
    """Whether text that begins with a brace has an object a line. Raises UnknownFormat for an object over several lines, or with all
    records in an array."""
    line, _, rest = start.partition(b"\n")
    array = re.match(rb'\{\s*"([^"\\]*)"\s*:\s*\[\s*\{', start)
    try:
        json.loads(line.decode(errors="replace"))  # invalid bytes cost a record, not the file
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
        what = "JSON that is neither an object a line nor an array of objects"
        raise _refused(path, what, f"convert it: jq -c {records} FILE > FILE.jsonl")
    return is_object


def _controls(head: bytes) -> int:
    return len(head) - len(head.translate(None, CONTROLS))


def _is_text(head: bytes, whole: bool) -> bool:
    undecoded = head.decode(errors="replace").count("\ufffd") - head.count(b"\xef\xbf\xbd")
    cut = 0 if whole else 1  # the last character may be cut
    return _controls(head) + undecoded - cut <= MOST_NOISE * len(head.strip(SPACE)) and head.count(0) == 0
