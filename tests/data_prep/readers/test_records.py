"""Records: JSON arrays, WET, CSV without a header; what a bad one costs."""

import gzip

import pyarrow as pa
import pyarrow.parquet
import pytest

from data_prep.common.errors import Problems
from data_prep.common.records import ReadOptions
from data_prep.readers import json_records, lines, streams, tasks
from data_prep.readers.streams import Stream
from tests.helpers.prep_reading import PACK, read_all, refuse, write, write_all, write_table

ARRAY = b'\xef\xbb\xbf [{"text": "One, [two]"}, {"n": [1, {"a": 2}], "text": "a \\"b\\" \\\\"},\n"A string.",{"text":null}, {"text": "\\u00e9"}]\n'
PAGES = [b"First page.\nWARC/1.0\r\nWARC-Type: conversion\r\n\r\nIts second line.", "Zweite Seite: é.".encode()]


def warc(kind, body, size=None):
    head = b"WARC/1.0\r\nWARC-Type: %s\r\nWARC-Target-URI: http://a/\r\nContent-Length: %d\r\n\r\n"
    return head % (kind, len(body) if size is None else size) + body + b"\r\n\r\n"


def lost_bytes(problems):
    return {reason: loss["bytes"] for reason, loss in problems.lost.items()}


@pytest.mark.parametrize("kind", ["", *PACK])
def test_arrays_and_wet_records_are_documents(kind, tmp_path):
    suffix, pack = kind and f".{kind}", PACK.get(kind, bytes)
    found, problems = read_all([write(tmp_path / f"a.json{suffix}", pack(ARRAY))])
    assert found == ["One, [two]", 'a "b" \\', "A string.", "é"]
    assert problems.dropped == {"null value": 1} and not problems.counts
    texts = {b"warcinfo": [b"software: x"], b"conversion": PAGES, b"response": [b"<html>"]}
    members = (pack(warc(type_, text)) for type_ in texts for text in texts[type_])
    found, problems = read_all([write(tmp_path / f"a.warc.wet{suffix}", b"".join(members))])
    assert [text.encode() for text in found] == PAGES and not problems.counts
    assert problems.dropped == {"WARC record of type warcinfo": 1, "WARC record of type response": 1}
    for kind_ in (b"Conversion", b"CONVERSION"):  # a value that the standard compares without case
        assert read_all([write(tmp_path / "b.wet", warc(kind_, PAGES[1]))])[0] == [PAGES[1].decode()]


def test_elements_do_not_depend_on_chunks():
    data = b' [ {"a": "]\\\\"},"x, \\"y" ,[1, [2]], null ]'
    want = [(3, b'{"a": "]\\\\"}'), (16, b'"x, \\"y"'), (26, b"[1, [2]]"), (36, b"null")]
    for size in range(1, len(data) + 1):
        chunks = (data[i : i + size] for i in range(0, len(data), size))
        stream = Stream("p", chunks, ReadOptions(), Problems("stop"))
        assert list(json_records.split_array(stream)) == want and not stream.problems.counts


def test_a_bad_record_costs_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "MAX_LINE", 100)
    monkeypatch.setattr(streams, "MAX_DOCUMENT", 100)
    bad = [b'{"text": "\xff"}', b'{"text" "x"}', b'{"text": 5}', b'{"text": "' + b"x" * 200 + b'"}']
    array = b'[{"text": "One."}, ' + b", ".join(bad) + b', {"text": "Two."}]'
    found, problems = refuse(write(tmp_path / "a.json", array), r"byte 29: invalid UTF-8")
    assert found == ["One.", "Two."] and set(problems.counts.values()) == {1}
    assert lost_bytes(problems) == {"invalid UTF-8": 13, "bad JSON line": 12, "no text field": 11, "long record": 213}
    wet = warc(b"conversion", PAGES[0]) + b"WARC/1.0\r\nWARC-Type: conversion\r\n\r\nlost words\r\n\r\n"
    wet += warc(b"conversion", b"x" * 101) + warc(b"conversion", PAGES[1]) + warc(b"conversion", b"cut", 50)
    found, problems = refuse(write(tmp_path / "a.warc.wet", wet), "a WARC record without its Content-Length")
    assert [text.encode() for text in found] == PAGES
    assert problems.counts == {"bad WARC record": 2, "long document": 1, "unclosed document": 1}
    assert lost_bytes(problems) == {"bad WARC record": 14, "long document": 101, "unclosed document": 7}


def test_a_wrong_content_length_merges_no_records(tmp_path):
    second = warc(b"conversion", b"Two.")
    wet = warc(b"conversion", b"One.", len(b"One.\r\n\r\n" + second) - 4) + second + warc(b"conversion", b"Three.")
    found, problems = refuse(write(tmp_path / "a.wet", wet), "Content-Length reaches into the next record")
    assert found == ["One.", "Three."] and lost_bytes(problems) == {"bad WARC record": len(second)}
    page = second.decode().strip().replace("\r\n", "\n")  # of a text about such files
    found, problems = read_all([write(tmp_path / "b.wet", warc(b"conversion", f"One.\n\n{page}".encode()))])
    assert found == [f"One.\n\n{page}"] and not problems.counts


def test_a_field_that_is_there_twice_is_bad(tmp_path):
    lines = '{"text": "One.", "text": "Two.", "n": 1}\n{"text": "Three.", "n": 1, "n": 2}\n'
    found, problems = refuse(write(tmp_path / "a.jsonl", lines), "byte 0: field 'text' .*, or is there twice")
    assert found == ["Three."] and problems.counts == {"no text field": 1}


@pytest.mark.parametrize(
    ("content", "message", "texts", "size"),
    [
        (b'[{"text": "One."}, {"text": "T', "the array is not closed", ["One."], 12),
        (b'[{"text": "One."}] and more', "text outside of the array", ["One."], 8),
        (b'[{"text": "One."}] more [{"text": "Two."}] ]', "text outside of the array", ["One.", "Two."], 5),
    ],
)
def test_an_array_without_its_end_and_text_outside(content, message, texts, size, tmp_path):
    found, problems = refuse(write(tmp_path / "a.json", content), rf"a\.json: byte \d+: {message}")
    assert found == texts and problems.lost["bad JSON"]["bytes"] == size


def test_text_behind_a_second_end_tag_is_counted(tmp_path):
    content = b'<doc id="1">Ends with </doc> in it.</doc>\n<doc id="2">Two.</doc>\n'
    found, problems = read_all([write(tmp_path / "wiki_00", content)])
    assert found == ["Ends with ", "Two."] and problems.changed == {"text after an end tag": 1}


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
def test_columns_without_names_have_numbers(name, tmp_path):
    rows = b"1\tx\tSome words\n2\ty\tMore words\n" if "tsv" in name else b'1,x,"Some\nwords"\n2,y,"More words"\n'
    path = write(tmp_path / name, gzip.compress(rows) if name.endswith("gz") else rows)
    first = "Some words" if "tsv" in name else "Some\nwords"
    assert read_all([path], text_field="3")[0] == [first, "More words"]
    assert read_all([path], text_field="2+3")[0] == [f"x\n\n{first}", "y\n\nMore words"]
    _, problems = refuse(path, r"no column '4'.*or its number from 1", text_field="4")
    assert problems.counts == {"no text field": 1}


def test_a_header_that_is_too_long_is_no_header(tmp_path):
    path = write(tmp_path / "a.csv", b'"' + (b"x" * 1_000_000 + b"\n") * 20)
    refuse(path, "no column 'text'")


@pytest.mark.parametrize("separator", list(",\t;|"))
def test_separator_of_columns_without_names(separator, tmp_path):
    quote = '"' if separator == "," else ""
    path = write(tmp_path / "a.csv", f"{quote}Hello, you{quote}{separator}en\nGood day{separator}en\n")
    assert read_all([path], text_field="1")[0] == ["Hello, you", "Good day"]
    rows = [f'"Text {i}\nof two lines, quoted"{separator}en\n' for i in range(99)]
    assert len(read_all([write(tmp_path / "long.csv", f"x{separator}y\n" + "".join(rows))], text_field="1")[0]) == 100
    path = write(tmp_path / "b.csv", "One; two.\nThree.\n")
    assert read_all([path], text_field="1")[0] == ["One; two.", "Three."]


@pytest.mark.parametrize(
    ("rows", "texts", "places", "size"),
    [
        ('1,a\n2,"b\n3,c\n4,d\n', ["a", "c", "d"], 1, 5),
        ('1,a\n2,"b\n3,"c, c"\n4,"d\nd"\n', ["a", "c, c", "d\nd"], 1, 5),
        ('1,a\n2,"b" b\n3,c\n', ["a", "c"], 1, 8),
        ('1,a\n2,"b" and\nits rest",x\n3,"c"\n', ["a", "c"], 1, 22),
        ('1,a\n2,"b\n3,c,x\n4,d\n5,e,x\n', ["a", "d"], 2, 17),
        ('"2","b', [], 1, 6),
        # the quoted value then is too long
        ('5,"never closed\n' + "".join(f"{i},some words here\n" for i in range(199)), ["some words here"] * 199, 1, 16),
    ],
)
def test_a_stray_quote_costs_its_row(rows, texts, places, size, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "MAX_DOCUMENT", 500)
    path = write(tmp_path / "a.csv", "n, text\n" + rows)  # names of columns are without the space around them
    found, problems = refuse(path, r"a\.csv: line \d+: .*in the row that begins at line [23]")
    assert found == texts and problems.counts == {"bad CSV row": places}
    assert problems.lost == {"bad CSV row": {"bytes": size, "files": [str(path)]}}


def test_lone_surrogates_are_replaced_on_request(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text": "a \\ud800 b \\udc00\\ud83d\\ude00"}\n')
    found, problems = read_all([path], encoding_errors="replace")
    assert found == ["a \ufffd b \ufffd\U0001f600"] and problems.counts == {"invalid UTF-8 replaced": 2}


@pytest.mark.parametrize("limit", [8, 1 << 20])
def test_bytes_of_a_long_line_are_counted(limit, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "MAX_LINE", 40)
    monkeypatch.setattr(lines, "STEP", limit)
    content = b'{"text": "One."}\n{"text": "' + b"x" * 90 + b'"}\n{"text": "Two."}\n'
    found, problems = read_all([write(tmp_path / "a.jsonl", content)], "skip")
    assert found == ["One.", "Two."] and problems.counts == {"long line": 1}
    assert problems.lost == {"long line": {"bytes": 103, "files": [f"{tmp_path}/a.jsonl"]}}


@pytest.mark.parametrize(
    ("format_", "begin", "end"), [("wiki", b'<doc id="1">', b"</doc>\n"), ("mediawiki", b"<page>", b"</page>\n")]
)
def test_bytes_of_long_and_unclosed_elements_are_counted(format_, begin, end, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "MAX_DOCUMENT", 60)
    long, unclosed = begin + b"x" * 90, begin + b"y"
    _, problems = read_all([write(tmp_path / "a", 2 * (long + end + unclosed))], "skip", format=format_)
    assert problems.counts == {"long document": 2, "unclosed document": 2}
    assert lost_bytes(problems) == {"long document": 2 * len(long), "unclosed document": 2 * len(unclosed)}


def test_text_outside_of_elements_is_counted(tmp_path, monkeypatch):
    content = b'<doc id="1">One.</doc>\nLost.\n<doc id="2">Two.</doc>\n \n<doc id="3">Three.</doc>\nLost too.\n'
    path = write(tmp_path / "wiki_00", content)
    for size in (1 << 20, 48, 25, 10, 3):
        monkeypatch.setattr(tasks, "RANGE_BYTES", size)
        found, problems = read_all([path])
        assert found == ["One.", "Two.", "Three."] and problems.changed == {"text outside of a <doc>": 2}


@pytest.mark.parametrize(("format_", "tag"), [("wiki", "doc"), ("mediawiki", "page")])
@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_file_without_elements_is_bad(format_, tag, size, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "RANGE_BYTES", size)
    path = write(tmp_path / "a", b"Words that are in no element.")
    found, problems = refuse(path, f"byte 0: no <{tag}> in it", format=format_)
    assert not found and problems.counts == {"no document in markup": 1}


def test_files_without_a_document_are_counted(tmp_path):
    files = {"b.csv": "id,text\n", "c.json": "[]", "d.jsonl": '{"text": null}\n', "e.txt": "Words."}
    folder = write_all(tmp_path / "in", files)
    write_table(folder / "f.parquet", pa.table({"text": pa.array([], pa.string())}))
    pyarrow.parquet.ParquetWriter(folder / "g.pq", pa.schema([("text", pa.string())])).close()  # without a row group
    found, problems = read_all([folder])
    assert found == ["Words."] and problems.counts == {"file without a document": 4}
    names = {path.rpartition("/")[2] for path in problems.lost["file without a document"]["files"]}
    assert names == {"b.csv", "c.json", "f.parquet", "g.pq"}
    assert problems.formats == dict.fromkeys(("text", "csv", "json", "jsonl"), 1) | {"parquet": 2}
