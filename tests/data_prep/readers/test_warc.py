"""WARC and WET: which records are documents, their text, and files that are cut or are none."""

import gzip
import sys

import pytest

from data_prep.common.errors import BadInput, Problems
from data_prep.readers import tasks
from tests.helpers.prep_reading import plan, read_all

HEAD = "WARC/1.0\r\nWARC-Type: {}\r\nWARC-Target-URI: {}\r\nWARC-Record-ID: <urn:uuid:{}>\r\nContent-Type: {}\r\nContent-Length: {}\r\n\r\n"
PARAGRAPH = "The river runs from the hills to the sea, and the people of the valley have lived by it since long ago. "
PAGE = f"""<html><head><title>River</title><script>var x = 1;</script></head><body>
<nav><a href="/">Home</a> <a href="/a">About</a></nav>
<main><article><h1>Rivers</h1><p>{PARAGRAPH * 3}</p><p>Caf\xe9 by the water. {PARAGRAPH * 3}</p></article></main>
<footer>All rights reserved</footer></body></html>"""
FIRST = "Der Fluß fließt ins Meer.\nEr ist lang.\n"
SECOND = "A second text.\n"


def record(kind, content, body, uri="http://example.org/page"):
    return HEAD.format(kind, uri, hash(uri), content, len(body)).encode() + body + b"\r\n\r\n"


def response(body, content="text/html; charset=utf-8", status="200 OK", extra=""):
    http = f"HTTP/1.1 {status}\r\nContent-Type: {content}\r\n{extra}\r\n".encode() + body
    return record("response", "application/http; msgtype=response", http)


def wet():
    return [
        record("warcinfo", "application/warc-fields", b"software: x\r\n"),
        record("conversion", "text/plain", FIRST.encode(), "http://a.example/1"),
        record("conversion", "text/plain", SECOND.encode(), "http://a.example/2"),
    ]


def test_the_texts_of_a_wet_file_are_documents_as_they_are(tmp_path):
    (tmp_path / "a.warc").write_bytes(b"".join(wet()))
    (tmp_path / "b.warc.wet.gz").write_bytes(b"".join(gzip.compress(part) for part in wet()))
    for name in ("a.warc", "b.warc.wet.gz"):
        path = tmp_path / name
        assert read_all([path])[0] == [FIRST, SECOND]
        pieces = [piece for task in plan([path]) for piece in task.pieces]
        found = [d for piece in pieces for d in tasks.read_piece(piece, tasks.ReadOptions(), Problems("stop"))]
        assert [d.path for d in found] == [f"{path}: http://a.example/1", f"{path}: http://a.example/2"]
        assert [d.url for d in found] == ["http://a.example/1", "http://a.example/2"]
        assert found[1].offset == len(wet()[0] + wet()[1])


def test_a_large_file_is_read_whole_by_one_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "RANGE_BYTES", 1 << 10)
    monkeypatch.setattr(tasks, "SMALL", 1 << 8)
    many = [record("conversion", "text/plain", f"Text {i}".encode()) for i in range(400)]
    (tmp_path / "a.warc").write_bytes(b"".join(many))
    (tmp_path / "b.warc.gz").write_bytes(b"".join(map(gzip.compress, many)))
    assert [(p.format, p.end, p.stream) for t in plan([tmp_path]) for p in t.pieces] == [("warc", None, False)] * 2
    assert read_all([tmp_path / "b.warc.gz"])[0] == [f"Text {i}" for i in range(400)]


def test_pages_become_the_text_of_their_main_content(tmp_path):
    packed = gzip.compress(PAGE.encode("latin-1"))
    chunked = f"{len(packed):x}\r\n".encode() + packed + b"\r\n0\r\n\r\n"
    coded = "Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n"
    declared = PAGE.replace("<head>", '<head><meta charset="iso-8859-1">').encode("latin-1")
    (tmp_path / "a.warc").write_bytes(
        response(PAGE.encode())
        + response(chunked, "text/html; charset=iso-8859-1", extra=coded)
        + response(declared, "text/html")
        + response(PAGE.encode(), "text/html; charset=no-such")
        + response("Καλημέρα".encode(), "text/plain; charset=utf-8")
        + record("resource", "text/html", PAGE.encode())
    )
    texts = read_all([tmp_path / "a.warc"])[0]
    assert texts[4] == "Καλημέρα" and len(texts) == 6
    for text in (*texts[:4], texts[5]):
        assert "Café by the water." in text and text.count(PARAGRAPH.strip()) == 6
        assert not any(word in text for word in ("<p>", "var x", "Home", "All rights reserved"))


def test_what_is_no_page_is_counted(tmp_path):
    (tmp_path / "a.warc").write_bytes(
        response(PAGE.encode(), status="404 Not Found")
        + response(b"\x89PNG", "image/png")
        + record("request", "application/http; msgtype=request", b"GET / HTTP/1.1\r\n\r\n")
        + response(PAGE.encode())
    )
    texts, problems = read_all([tmp_path / "a.warc"])
    assert len(texts) == 1 and problems.dropped == {"no text page": 2}


@pytest.mark.parametrize("cut", [3 + len(SECOND), 60 + len(SECOND), len(SECOND) + 100])
def test_a_file_that_is_cut_is_one_error_with_its_name(tmp_path, cut):
    data = b"".join(wet())
    for name, damaged in (("a.warc", data[:-cut]), ("b.warc.gz", gzip.compress(data)[:-cut])):
        path = tmp_path / name
        path.write_bytes(damaged)
        with pytest.raises(BadInput, match=rf"^{path}: (truncated|damaged)"):
            read_all([path])
        texts, problems = read_all([path], policy="skip")
        assert FIRST in texts or name == "b.warc.gz"
        assert problems.counts == {"damaged or truncated file": 1}


def test_a_record_that_is_too_long_is_bad_input(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.readers.warc.MAX_DOCUMENT", 30)
    (tmp_path / "a.warc").write_bytes(b"".join(wet()))
    with pytest.raises(BadInput, match=r"a\.warc: byte \d+: a record longer than"):
        read_all([tmp_path / "a.warc"])
    assert read_all([tmp_path / "a.warc"], policy="skip")[0] == [SECOND]


def test_a_format_that_is_forced_must_be_there(tmp_path):
    (tmp_path / "a.txt").write_text("No archive.")
    with pytest.raises(BadInput, match=r"a\.txt: no WARC file"):
        read_all([tmp_path / "a.txt"], format="warc")


def test_missing_packages_are_named(tmp_path, monkeypatch):
    (tmp_path / "a.warc").write_bytes(b"".join(wet()))
    monkeypatch.setitem(sys.modules, "fastwarc", None)
    with pytest.raises(BadInput, match=r"a\.warc: WARC takes two packages: pip install fastwarc resiliparse$"):
        plan([tmp_path / "a.warc"])


def test_a_page_that_cannot_be_unpacked_is_bad_input(tmp_path):
    bad = response(b"no chunk", extra="Transfer-Encoding: chunked\r\n")
    (tmp_path / "a.warc").write_bytes(wet()[1] + bad + wet()[2])
    with pytest.raises(BadInput, match=rf"a\.warc: byte {len(wet()[1])}: a page that can't be unpacked"):
        read_all([tmp_path / "a.warc"])
    texts, problems = read_all([tmp_path / "a.warc"], policy="skip")
    assert texts == [FIRST, SECOND] and problems.counts == {"damaged page": 1}
