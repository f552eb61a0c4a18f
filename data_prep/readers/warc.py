"""Documents of WARC and WET files (ISO 28500): texts that were converted already, and the pages of responses.

A record is one document. Of a page in HTML that is the text of its main content, as `resiliparse` finds it. Records are read in
the order of the file, one in memory at a time; a file is never cut, crawls come as many.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from data_prep.common.errors import BadInput, Problems
from data_prep.common.records import Document
from data_prep.readers.formats import MAX_DOCUMENT

MAGIC = b"WARC/"
HTML = ("text/html", "application/xhtml+xml")
NO_PAGE = "no text page"  # the rule by which a response is left out: an error, an image, a script


class _Stream:
    """Chunks of bytes as a file to read from. What fails below is kept in `error`, and is an end to the parser."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest, self._at = chunks, b"", 0
        self.error: Exception | None = None

    def read(self, size: int = -1) -> bytes:
        while not self._rest:
            try:
                chunk = next(self._chunks, None)
            except (ValueError, OSError) as error:
                self.error, chunk = error, None
            if chunk is None:
                return b""
            self._rest = chunk
        size = len(self._rest) if size < 0 else size
        found, self._rest = self._rest[:size], self._rest[size:]
        self._at += len(found)
        return found

    def tell(self) -> int:
        return self._at


def check(path: str) -> None:
    """Raises BadInput naming the packages where they are not installed."""
    try:
        import fastwarc
        import resiliparse
    except ImportError:
        raise BadInput(f"{path}: WARC takes two packages: pip install fastwarc resiliparse") from None
    assert fastwarc and resiliparse


def documents(chunks: Iterator[bytes], path: str, problems: Problems) -> Iterator[Document]:
    """Documents of an unpacked file, their `path` the file's and then the record's URI.

    Raises BadInput where a record is damaged or cut.
    """
    check(path)
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    kinds = (WarcRecordType.conversion, WarcRecordType.response, WarcRecordType.resource)
    stream = _Stream(chunks)
    with _one_line(path):
        for record in ArchiveIterator(cast(BinaryIO, stream), parse_http=False, stream_detect=False):
            place, size = int(record.stream_pos), record.headers.get("Content-Length") or ""
            if size.isdigit() and int(size) > MAX_DOCUMENT:
                problems.bad(path, place, "long document", f"a record longer than {MAX_DOCUMENT / 2**20:g} MiB")
                continue
            record.freeze()
            if not size.isdigit() or int(size) != record.content_length:
                if stream.error:
                    break
                raise BadInput(f"{path}: truncated or damaged: the WARC record at byte {place} is cut")
            text, uri = None, record.headers.get("WARC-Target-URI", "")
            if record.record_type in kinds:
                try:
                    text = _text(record, problems)
                except (OSError, RuntimeError) as error:
                    problems.bad(path, place, "damaged page", f"a page that can't be unpacked ({error})")
            if text is not None:
                yield Document(f"{path}: {uri}", place, text, False, uri)
    if stream.error:
        raise stream.error
    if stream.read(1):
        raise BadInput(f"{path}: damaged: no WARC record after byte {stream.tell()}")


@contextlib.contextmanager
def _one_line(path: str) -> Iterator[None]:
    """What fastwarc raises for bytes that are no records, as BadInput."""
    try:
        yield
    except (OSError, RuntimeError, LookupError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system or the network
        raise BadInput(f"{path}: damaged WARC record ({error})") from None


def _text(record: Any, problems: Problems) -> str | None:
    """The text of a record that is in memory, None where it holds none. Raises OSError where its page can't be unpacked."""
    from fastwarc.warc import WarcRecord, WarcRecordType
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.encoding import bytes_to_str

    body: bytes = record.reader.read()
    charset: str | None = "utf-8"  # as WET files are
    kind = (record.headers.get("Content-Type") or "").partition(";")[0].strip().lower()
    if record.is_http:
        page = WarcRecord()  # of its own: what can't be unpacked would end the file's records
        page.init_headers(WarcRecordType.response)
        page.is_http = True
        page.set_bytes_content(body)
        page.parse_http(auto_decode="all")
        kind = (page.http_content_type or "").lower() if page.http_headers.status_code == 200 else ""
        body, charset = page.reader.read(), page.http_charset
    if kind not in ("text/plain", *HTML):
        problems.dropped[NO_PAGE] += 1
        return None
    text = bytes_to_str(body, _encoding(body, charset, kind in HTML))
    return extract_plain_text(text, main_content=True) if kind in HTML else text


def _encoding(body: bytes, charset: str | None, html: bool) -> str:
    """What a page is encoded in: as its header says, in UTF-8 where that fits, as it says itself, as it looks."""
    from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

    named = map_encoding_to_html5(charset, fallback_utf8=False) if charset else None
    for name in (named, "utf-8"):
        try:
            if name and body.decode(name) is not None:
                return name
        except (LookupError, UnicodeError):
            continue
    return detect_encoding(body, from_html_meta=html) or "utf-8"
