"""Arbitrary bytes in every format and compression: only BadInput, always an end, the same documents however cut."""

import bz2
from itertools import pairwise
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_prep.common.errors import BadInput, Problems
from data_prep.common.records import AUTO, FORMATS, TABLES, ReadOptions
from data_prep.readers import documents, lines, streams, tasks
from data_prep.readers.documents import read_documents
from tests.helpers.prep_reading import PACK, plan, records, write, write_table

few = settings(derandomize=True, max_examples=150, deadline=None, database=None)
SNIPPETS = {
    "wiki": (b"<doc ", b"</doc>", b'id="1">\n', b"T\n\n", b"text ", b"<d", b"oc ", b"</", b"doc>", b"\n", b">", b"\xff", b"\xc3\xa9"),
    "mediawiki": (b"<page>", b"</page>", b"<title>", b"</title>", b"<text>", b"</text>", b"word ", b"&l;", b"[[", b"]]", b"{{", b"}}",
                  b"<pa", b"ge>", b"\n", b"\xff", b"\0"),
    "line": (b"a", b"line of words", b"\n", b"\r\n", b" ", b"\t", b"\x0c", b"\xff", b"\0", b"\xc3\xa9"),
    "file": (b"a", b"line of words", b"\n", b"\n\n", b" ", b"\xc3\xa9"),
    "blank-line": (b"a", b"two words", b"\n", b"\n\n", b"\r\n", b" ", b"  \t", b"\x0c", b"\x0b", b"\xff", b"\n \n"),
    "heading": (b"a", b"two words", b"\n", b"\n ", b" = T = \n", b"= T =", b" = = S = = \n", b"\r\n", b" \n", b"=", b"\xff"),
    "jsonl": (b'{"text": "', b'"}', b"\n", b"\\ud800", b"a", b"[", b"{", b"null", b"\xff", b'{"text": null}\n', b'{"text": "x"}\n'),
}  # fmt: skip
# of formats that one worker reads from the beginning
UNCUT_SNIPPETS = {
    "json": (b"[", b"]", b",", b"{", b"}", b'"', b"\\", b'{"text": "', b'"}', b'{"text": "a, b"}', b"\n", b"\xff", b" "),
    "csv": (b"text", b",", b'"', b"\n", b"\r\n", b"a,b\n", b'"a\nb"', b"text,n\n", b"\xff", b"\0"),
    "wet": (b"WARC/1.0\r\n", b"WARC-Type: conversion\r\n", b"WARC-Type: response\r\n", b"Content-Length: 5\r\n", b"\r\n", b"words", b"\xff"),
}  # fmt: skip


def soup(kind):
    parts = st.sampled_from((SNIPPETS | UNCUT_SNIPPETS)[kind]) | st.binary(max_size=3)
    return st.lists(parts, max_size=60).map(b"".join)


def read(path, problems, **options):
    """(number of ranges, (offset, text) of each document) of a file."""
    ranges = [part for task in plan([path], problems, **options) for part in task.ranges]
    found = [d for part in ranges for d in read_documents(part, ReadOptions(**options), problems)]
    for counts in (problems.counts, problems.lost):  # only of a file in one range
        counts.pop(documents.NO_DOCUMENT, None)
    return len(ranges), [(d.offset, d.text) for d in found]


def test_every_format_has_a_splitter():
    assert (*documents.SPLITTERS, *TABLES) == FORMATS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("format_", [AUTO, *FORMATS])
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) if k in ("bz2", "xz") else k for k in ("", *PACK)]
)
@settings(few, max_examples=40)
@given(data=st.data())
def test_arbitrary_bytes_raise_nothing_but_bad_input(kind, format_, folder, data):
    content = data.draw(st.binary(max_size=300) | soup(format_ if format_ in SNIPPETS | UNCUT_SNIPPETS else "wiki"))
    packed = PACK.get(kind, bytes)(content)
    damage = data.draw(st.integers(0, 3))
    if damage == 1:
        packed = packed[: data.draw(st.integers(0, len(packed)))]
    elif damage == 2 and packed:
        at = data.draw(st.integers(0, len(packed) - 1))
        packed = packed[:at] + data.draw(st.binary(min_size=1, max_size=4)) + packed[at + 1 :]
    elif damage == 3:
        packed += data.draw(st.binary(max_size=20))
    path = write(folder / "file", packed)
    _, found = read(path, skipping := Problems("skip"), format=format_)
    assert all(isinstance(text, bytes) or text.encode() is not None for _, text in found)
    try:
        _, stopped = read(path, problems := Problems("stop"), format=format_)
    except BadInput as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
        # Under skip a byte without meaning outside of documents is left out with what is around it.
        assert skipping.counts or ": invalid " in str(error)
    else:
        assert stopped == found and problems.dropped == skipping.dropped
        assert not set(skipping.counts) - {"empty file"}


@pytest.mark.parametrize("kind", SNIPPETS)
@few
@given(data=st.data())
def test_any_ranges_give_the_same_documents(kind, folder, data):
    content = b"\n" + data.draw(soup(kind))  # no magic number of a compression
    step = data.draw(st.integers(3, 40))
    line, document = data.draw(st.sampled_from([(4, 9), (20, 30), (1 << 20, 1 << 20)]))
    path = write(folder / "cut", content)
    format_ = kind if kind in FORMATS else "text"
    options = {"format": format_, "text_documents": kind if format_ == "text" else "auto"}
    part = data.draw(st.sampled_from([9, 30, 1 << 20]))
    with (
        mock.patch.multiple(streams, MAX_LINE=line, MAX_DOCUMENT=document),
        mock.patch.object(lines, "FILE_PART", part),
    ):
        one, want = read(path, whole := Problems("skip"), **options)
        many, small = mock.patch.object(tasks, "RANGE_BYTES", step), data.draw(st.integers(1, 50))
        with many, mock.patch.object(lines, "STEP", small):
            parts, found = read(path, cut := Problems("skip"), **options)
    assert one == 1 and (parts > 1 or len(content) <= step * 3 // 2)
    assert found == want
    assert cut.counts == whole.counts and cut.dropped == whole.dropped and cut.lost == whole.lost
    if kind == "file":  # a line of any length is cut at spaces
        assert b"".join(text for _, text in want) == content and not whole.counts
    if kind == "file" and line == 1 << 20:
        ends = [0]  # of lines, each the first at or after a multiple of `part`
        while end := content.find(b"\n", (ends[-1] // part + 1) * part - 1) + 1:
            ends.append(end)
        assert [text for _, text in want] == [content[a:b] for a, b in pairwise([*ends, len(content)]) if a < b]


@pytest.mark.parametrize("kind", ["wiki", "mediawiki"])
@settings(few, max_examples=60)
@given(data=st.data())
def test_any_bzip2_cut_gives_the_same_documents(kind, folder, data):
    head = b"<doc " if kind == "wiki" else b"<mediawiki>"
    content = head + data.draw(soup(kind))
    ends = sorted(data.draw(st.sets(st.integers(0, len(content)), max_size=12)) | {0, len(content)})
    packed = b"".join(bz2.compress(content[a:b]) for a, b in pairwise(ends))
    path = write(folder / "streams", packed)
    _, want = read(path, whole := Problems("skip"), format=kind)
    with (
        mock.patch.object(tasks, "RANGE_BYTES", 4 * data.draw(st.integers(2, 200))),
        mock.patch.object(tasks, "_can_be_cut", lambda file: True),
    ):
        parts, found = read(path, cut := Problems("skip"), format=kind)
    assert parts > 1 or len(packed) < 400
    assert [text for _, text in found] == [text for _, text in want]
    assert cut.counts == whole.counts and cut.dropped == whole.dropped


TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)


@settings(few, max_examples=100)
@given(values=st.lists(TEXTS, min_size=1, max_size=20))
@example(values=["\ud7ff\ufeff", "\u2028", ""])
def test_records_come_back_as_they_were_written(folder, values):
    path = write(folder / "records", records(values))
    assert [text for _, text in read(path, Problems("stop"), format="jsonl")[1]] == values


@settings(few, max_examples=30)
@given(values=st.lists(st.none() | TEXTS, min_size=1, max_size=30), group=st.integers(1, 10))
def test_tables_come_back_as_they_were_written(folder, values, group):
    table = pa.table({"text": pa.array(values, pa.string())})
    want = [(i, value) for i, value in enumerate(values) if value is not None]
    for name in ("t.parquet", "t.arrow"):
        write_table(folder / name, table, group)
        for size in (1, 300, 1 << 20):
            with mock.patch.object(tasks, "RANGE_BYTES", size):
                assert read(folder / name, problems := Problems("stop"))[1] == want
            assert problems.dropped["null value"] == values.count(None)
