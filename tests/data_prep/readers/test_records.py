"""Records: JSON arrays, lists of texts, WET, CSV without a header; what a bad one costs."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.common.errors import BadInput, Problems
from data_prep.readers import formats, json_records
from tests.helpers.prep_reading import PACK, read_all

ARRAY = b'\xef\xbb\xbf [{"text": "One, [two]"}, {"n": [1, {"a": 2}], "text": "a \\"b\\" \\\\"},\n"A string.",{"text":null}, {"text": "\\u00e9"}]\n'
ARRAY_TEXTS = ["One, [two]", 'a "b" \\', "A string.", "é"]


@pytest.mark.parametrize("kind", ["", *PACK])
def test_json_array_is_read_by_elements(kind, tmp_path):
    path = tmp_path / f"a.json{kind and '.' + kind}"
    path.write_bytes(PACK.get(kind, bytes)(ARRAY))
    found, problems = read_all([path])
    assert found == ARRAY_TEXTS and problems.dropped == {"null value": 1} and not problems.counts


def test_elements_do_not_depend_on_chunks():
    data = b' [ {"a": "]\\\\"},"x, \\"y" ,[1, [2]], null ]'
    want = [(3, b'{"a": "]\\\\"}'), (16, b'"x, \\"y"'), (26, b"[1, [2]]"), (36, b"null")]
    for size in range(1, len(data) + 1):
        chunks = (data[i : i + size] for i in range(0, len(data), size))
        assert list(json_records.split_array(chunks, 0, "p", problems := Problems("stop"))) == want
        assert not problems.counts


def test_a_bad_element_costs_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(json_records, "MAX_LINE", 100)
    path = tmp_path / "a.json"
    bad = [b'{"text": "\xff"}', b'{"text" "x"}', b'{"text": 5}', b'{"text": "' + b"x" * 200 + b'"}']
    path.write_bytes(b'[{"text": "One."}, ' + b", ".join(bad) + b', {"text": "Two."}]')
    with pytest.raises(BadInput, match=r"byte 29: invalid UTF-8"):
        read_all([path])
    found, problems = read_all([path], "skip")
    assert found == ["One.", "Two."]
    assert problems.counts == {"invalid UTF-8": 1, "bad JSON line": 1, "no text field": 1, "long record": 1}
    assert {reason: loss["bytes"] for reason, loss in problems.lost.items()} == {
        "invalid UTF-8": 13, "bad JSON line": 12, "no text field": 11, "long record": 213,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "size"), [(b'[{"text": "One."}, {"text": "T', 12), (b'[{"text": "One."}] and more', 8)]
)
def test_an_array_without_its_end(content, size, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(BadInput, match=r"a\.json: byte \d+: (the array is not closed|text outside of the array)"):
        read_all([tmp_path / "a.json"])
    found, problems = read_all([tmp_path / "a.json"], "skip")
    assert found == ["One."] and problems.lost["bad JSON"]["bytes"] == size


RECORDS = [
    {"text": ["One.", "Two."], "body": [{"text": "First.", "n": 1}, {"text": None, "n": 2}, {"text": "Last.", "n": 3}]},
    {"text": [], "body": []},
    {"text": None, "body": None},
    {"text": ["Alone."], "body": [{"text": "Body.", "n": 4}]},
]
LISTS = {
    "text": ["One.\n\nTwo.", "Alone."],
    "body[].text": ["First.\n\nLast.", "Body."],
    "text+body[].text": ["One.\n\nTwo.\n\nFirst.\n\nLast.", "Alone.\n\nBody."],
}


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
@pytest.mark.parametrize("field", LISTS)
def test_lists_of_texts_are_joined(kind, field, tmp_path):
    path = tmp_path / f"a.{kind}"
    if kind == "json":
        path.write_text(json.dumps(RECORDS))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(RECORDS), path)
    else:
        with pa.ipc.new_stream(str(path), (table := pa.Table.from_pylist(RECORDS)).schema) as writer:
            writer.write_table(table)
    found, problems = read_all([path], text_field=field)
    assert found == LISTS[field] and problems.dropped == {"null value": 2}
    for wrong in ("body[].n", "body"):
        with pytest.raises(BadInput, match=r"not (text|a string)"):
            read_all([path], text_field=wrong)


def test_a_list_of_a_batch_is_read_by_its_slice(tmp_path):
    """Batches are longer than the rows that are converted at once, and lists have other offsets then."""
    texts = [[f"Row {i}."] * (i % 3) for i in range(1000)]
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), (table := pa.table({"text": texts})).schema) as writer:
        writer.write_table(table)
    want = ["\n\n".join(row) for row in texts if row]
    assert read_all([tmp_path / "a.arrow"])[0] == want


def warc(kind, body, size=None):
    head = b"WARC/1.0\r\nWARC-Type: %s\r\nWARC-Target-URI: http://a/\r\nContent-Length: %d\r\n\r\n"
    return head % (kind, len(body) if size is None else size) + body + b"\r\n\r\n"


PAGES = [b"First page.\nWARC/1.0\r\nWARC-Type: conversion\r\n\r\nIts second line.", "Zweite Seite: é.".encode()]


@pytest.mark.parametrize("kind", ["", *PACK])
def test_wet_records_are_documents(kind, tmp_path):
    records = [warc(b"warcinfo", b"software: x"), warc(b"conversion", PAGES[0]), warc(b"response", b"<html>")]
    records.append(warc(b"conversion", PAGES[1]))
    path = tmp_path / f"a.warc.wet{kind and '.' + kind}"
    path.write_bytes(b"".join(map(PACK.get(kind, bytes), records)))  # a member a record
    found, problems = read_all([path])
    assert [text.encode() for text in found] == PAGES and not problems.counts
    assert problems.dropped == {"WARC record of type warcinfo": 1, "WARC record of type response": 1}


def test_a_damaged_wet_record_costs_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.readers.wet.MAX_DOCUMENT", 100)
    records = [
        warc(b"conversion", PAGES[0]),
        b"WARC/1.0\r\nWARC-Type: conversion\r\n\r\nlost words\r\n\r\n",
        warc(b"conversion", b"x" * 101),
        warc(b"conversion", PAGES[1]),
        warc(b"conversion", b"cut", 50),
    ]
    path = tmp_path / "a.warc.wet"
    path.write_bytes(b"".join(records))
    with pytest.raises(BadInput, match="a WARC record without its Content-Length"):
        read_all([path])
    found, problems = read_all([path], "skip")
    assert [text.encode() for text in found] == PAGES
    assert problems.counts == {"bad WARC record": 2, "long document": 1, "unclosed document": 1}
    assert {reason: loss["bytes"] for reason, loss in problems.lost.items()} == {
        "bad WARC record": 14, "long document": 101, "unclosed document": 7,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
def test_columns_without_names_have_numbers(name, tmp_path):
    rows = b"1\tx\tSome words\n2\ty\tMore words\n" if "tsv" in name else b'1,x,"Some\nwords"\n2,y,"More words"\n'
    (tmp_path / name).write_bytes(gzip.compress(rows) if name.endswith("gz") else rows)
    first = "Some words" if "tsv" in name else "Some\nwords"
    assert read_all([tmp_path / name], text_field="3")[0] == [first, "More words"]
    assert read_all([tmp_path / name], text_field="2+3")[0] == [f"x\n\n{first}", "y\n\nMore words"]
    with pytest.raises(BadInput, match=r"no column '4'.*or its number from 1"):
        read_all([tmp_path / name], text_field="4")


STRAY = [
    # (rows behind the header, texts, places, lost bytes)
    ('1,a\n2,"b\n3,c\n4,d\n', ["a", "c", "d"], 1, 5),
    ('1,a\n2,"b\n3,"c, c"\n4,"d\nd"\n', ["a", "c, c", "d\nd"], 1, 5),
    ('1,a\n2,"b" b\n3,c\n', ["a", "c"], 1, 8),
    ('1,a\n2,"b" and\nits rest",x\n3,"c"\n', ["a", "c"], 1, 22),
    ('1,a\n2,"b\n3,c,x\n4,d\n5,e,x\n', ["a", "d"], 2, 17),
    ('"2","b', [], 1, 6),
]


@pytest.mark.parametrize("case", range(len(STRAY)))
def test_a_stray_quote_costs_its_row(case, tmp_path):
    rows, texts, places, size = STRAY[case]
    path = tmp_path / "a.csv"
    path.write_text("n,text\n" + rows)
    with pytest.raises(BadInput, match=r"a\.csv: line \d: .*in the row that begins at line [23]"):
        read_all([path])
    found, problems = read_all([path], "skip")
    assert found == texts and problems.counts == {"bad CSV row": places}
    assert problems.lost == {"bad CSV row": {"bytes": size, "files": [str(path)]}}


def test_many_rows_behind_a_stray_quote_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.readers.csv_rows.MAX_DOCUMENT", 500)  # the quoted value then is too long
    rows = [f"{i},some words here\n" for i in range(200)]
    rows[5] = '5,"never closed\n'
    path = tmp_path / "a.csv"
    path.write_text("n,text\n" + "".join(rows))
    found, problems = read_all([path], "skip")
    assert len(found) == 199 and problems.counts == {"bad CSV row": 1} and problems.lost["bad CSV row"]["bytes"] == 16


def test_lone_surrogates_are_replaced_on_request(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a \\ud800 b \\udc00\\ud83d\\ude00"}\n')
    with pytest.raises(BadInput, match="half a surrogate pair"):
        read_all([path])
    found, problems = read_all([path], encoding_errors="replace")
    assert found == ["a \ufffd b \ufffd\U0001f600"] and problems.counts == {"invalid UTF-8 replaced": 2}


@pytest.mark.parametrize("limit", [8, 1 << 20])
def test_bytes_of_a_long_line_are_counted(limit, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_LINE", 40)
    monkeypatch.setattr(formats, "STEP", limit)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "One."}\n{"text": "' + b"x" * 90 + b'"}\n{"text": "Two."}\n')
    found, problems = read_all([path], "skip")
    assert found == ["One.", "Two."] and problems.counts == {"long line": 1}
    assert problems.lost == {"long line": {"bytes": 103, "files": [str(path)]}}


@pytest.mark.parametrize("format_", ["wiki", "mediawiki"])
def test_bytes_of_long_and_unclosed_elements_are_counted(format_, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MAX_DOCUMENT", 60)
    begin, end = (b'<doc id="1">', b"</doc>\n") if format_ == "wiki" else (b"<page>", b"</page>\n")
    long, unclosed = begin + b"x" * 90, begin + b"y"
    path = tmp_path / "a"
    path.write_bytes(long + end + unclosed + long + end + unclosed)
    _, problems = read_all([path], "skip", format=format_)
    assert problems.counts == {"long document": 2, "unclosed document": 2}
    assert problems.lost["long document"]["bytes"] == 2 * len(long)
    assert problems.lost["unclosed document"]["bytes"] == 2 * len(unclosed)
