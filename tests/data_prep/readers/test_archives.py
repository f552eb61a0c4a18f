"""Members of zip and tar archives and rows of CSV files are documents; what is damaged in any file is named with its place."""

import io
import random
from collections import Counter
from functools import partial

import pytest

from data_prep.common.errors import Problems
from data_prep.common.records import ReadOptions
from data_prep.readers import archives, decompress
from data_prep.readers.csv_rows import split_csv
from data_prep.readers.documents import ABOUT_MEMBER, HIDDEN_MEMBER
from data_prep.readers.streams import Stream
from megabert.common.errors import Failed
from tests.helpers.prep_reading import PACK, archive, read_all, refuse, write

gz, tar, packed_zip = PACK["gz"], partial(archive, "tar"), partial(archive, "zip")
MEMBERS = {
    "a/one.txt": b"Once upon a time.",
    "a/.hidden.txt": b"not this",
    "b.jsonl": b'{"text": "Alpha one."}\n{"text": "Beta two."}\n',
    "c.txt.gz": gz(b"Packed text."),
    "d.csv": b'id,text\n1,"A row, quoted\nover lines."\n2,Another.\n',
    "empty.txt": b"",
}
TEXTS = ["Once upon a time.", "Alpha one.", "Beta two.", "Packed text.", "A row, quoted\nover lines.", "Another."]


def name_of(value):
    return value if isinstance(value, str) else type(value).__name__


@pytest.mark.parametrize("kind", ["zip", "tar", *PACK])
def test_members_are_read_in_their_order(kind, tmp_path):
    data = packed_zip(MEMBERS) if kind == "zip" else PACK.get(kind, bytes)(tar(MEMBERS))
    path = write(tmp_path / {"zip": "a.zip", "tar": "a.tar"}.get(kind, f"a.tar.{kind}"), data)
    found, problems = read_all([path])
    left_out = {HIDDEN_MEMBER: 1 if kind == "zip" else 2}  # the archive's link
    assert found == TEXTS and problems.counts == {"empty file": 1} | left_out
    assert problems.lost[HIDDEN_MEMBER]["files"][0] == f"{path}: a/.hidden.txt"
    assert problems.formats == {"text": 2, "jsonl": 1, "csv": 1}
    assert len(read_all([path], format="text")[0]) == 4


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_descriptions_in_an_archive_are_left_out(kind, tmp_path):
    names = ("LICENSE", "a/README.md", "dataset_infos.json")
    path = write(tmp_path / f"a.{kind}", archive(kind, dict.fromkeys(names, b"About.\n\n" * 99) | {"a.txt": b"Words."}))
    found, problems = read_all([path])
    assert found == ["Words."] and problems.counts[ABOUT_MEMBER] == 3 and problems.formats == {"text": 1}


DAMAGED = bytearray(packed_zip({"x.txt": random.Random(1).randbytes(999).hex().encode()}))
DAMAGED[500] ^= 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tar", tar({"b.jsonl": b'{"text": "\xff"}\n'}), r"a\.tar: b\.jsonl: byte 10: invalid UTF-8"),
        ("a.tar", tar(MEMBERS)[:700], r"a\.tar: a/one\.txt: damaged in its|tar archive after a/one\.txt"),
        ("a.tar", tar({"x.txt": b"x" * 600})[:1536], r"a\.tar: damaged or truncated tar archive after x\.txt"),
        ("a.tar", tar({"x.txt": b"x", "y.txt": b"y"})[:1024] + b"\1" * 2048, r"a\.tar: damaged or .* after x\.txt"),
        ("a.tar", tar({"x.txt": b"x"}) + tar({"y.txt": b"y"}), r"a\.tar: more data after the end of the tar"),
        ("a.tar", tar({"x.txt": b"x"}).rstrip(b"\0") + bytes(2048) + b"rest", r"a\.tar: more data after the end"),
        ("a.tar.gz", gz(tar(MEMBERS))[:-40], r"a\.tar\.gz: truncated: the gz stream"),
        ("a.zip", packed_zip({"x.txt": b"x"})[:-4], r"a\.zip: damaged zip archive"),
        ("a.zip", packed_zip({"x.txt": bytes(200 << 20)}), r"a\.zip: x\.txt: unpacks to more than 200 times"),
        ("a.zip", packed_zip({"x.parquet": b"PAR1" + bytes(20) + b"PAR1"}), r"a parquet file inside another"),
        ("a.zip", DAMAGED, r"a\.zip: x\.txt: damaged in its archive"),  # a wrong checksum
        ("a.csv", b'text,n\n"one",1\ntwo\n', r"a\.csv: line 3: a row of 1 values, the first line names 2 columns"),
        ("a.csv", b'text,n\none,1\n"two" x,2\n', r"a\.csv: line 3: "),
        ("a.csv", b'text,n\n"one,1\ntwo,2\n', r"a\.csv: line 4?3?: unexpected end of data"),
        ("a.csv", b"text,text\none,two\n", r"a\.csv: line 1: two columns 'text'; rename one$"),
        ("a.csv", b"body;n\none;1\n", r"a\.csv: line 1: no column 'text' \(it has body;n\)"),
        ("a.txt", "utf-16 text".encode("utf-16-le"), r"a\.txt: binary data, or text in another encoding"),
        ("a.gz", b"plain text", r"a\.gz: byte 0: not gz data despite its suffix"),
        ("a.gz", gz(tar({"x.txt": b"x"})), r"a\.gz: a tar file inside another; extract it first"),
        ("a.jsonl", b'{"body": "x"}\n', r"a\.jsonl: byte 0: no field 'text' in the JSON line \(it has body\)"),
        ("a.jsonl", b'{"text": "\xc3\xa9"}\n{"text": "\xff"}\n', r"a\.jsonl: byte 25: invalid UTF-8"),
        ("a.jsonl", b'{"te\0xt": 1}\n', r"a\.jsonl: byte 0: not a JSON object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 5}\n', r"a\.jsonl: byte 14: field 'text' is not a string"),
        ("a.jsonl", b'{"text": "\\ud83d"}\n', r"a\.jsonl: byte 0: half a surrogate pair"),
        ("a", b'<doc id="1">\nT\n\nbody\n</doc>\n<doc id="2">\nT\n', r"a: byte 28: a <doc> without </doc>"),
    ],
    ids=name_of,
)
def test_damage_is_named_with_its_place(name, content, message, tmp_path):
    _, problems = refuse(write(tmp_path / name, content), message)
    assert (problems.counts - Counter({HIDDEN_MEMBER: 1})).total() == 1
    assert ("unknown format" in problems.counts) == (name in ("a.txt", "a.gz"))


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_members_that_cannot_be_read_are_skipped_alone(kind, tmp_path):
    members = {"1.txt": b"First.", "logo.png": b"\x89PNG", "cut.txt.gz": gz(b"Gone." * 99)[:-20]}
    members |= {"a.csv": b"body,n\nOne.,1\n", "2.txt": b"Last."}
    path = write(tmp_path / f"a.{kind}", archive(kind, members))
    found, problems = refuse(path, r"logo\.png: unknown suffix '\.png'")
    assert [found[0], found[-1]] == ["First.", "Last."]
    left_out = {HIDDEN_MEMBER: 1} if kind == "tar" else {}
    assert problems.counts == {"unreadable member of an archive": 2, "no text field": 1} | left_out
    assert problems.lost["unreadable member of an archive"]["files"] == [f"{path}: logo.png", f"{path}: cut.txt.gz"]


def test_text_before_damage_of_a_member_is_kept(tmp_path):
    lines = [b"Line %d of %d.\n" % (i, i * i * 7919) for i in range(300_000)]
    data = bytearray(packed_zip({"a.txt": b"".join(lines), "b.txt": b"Last."}))
    data[len(data) - 1000] ^= 0x55  # in the last block of a.txt
    found, problems = read_all([write(tmp_path / "a.zip", data)], "skip", text_documents="line")
    assert problems.counts == {"unreadable member of an archive": 1} and found[-1] == "Last."
    kept = len(found) - 1
    assert kept > 200_000 and [text.encode() + b"\n" for text in found[:kept]] == lines[:kept]
    assert 0 <= problems.lost["unreadable member of an archive"]["bytes"] < sum(map(len, lines)) / 3


class Failing(io.FileIO):
    """A file of which a part cannot be read, for a reason that is not in it."""

    def readinto(self, buffer):
        if 3 << 20 < self.tell() < 5 << 20:
            raise Failed("the store did not answer")
        return super().readinto(buffer)


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_failing_store_is_no_damage(kind, policy, tmp_path, monkeypatch):
    members = {f"{i}.txt": random.Random(i).randbytes(2 << 20).hex().encode() for i in range(4)}
    path = write(tmp_path / f"a.{kind}", archive(kind, members))
    for module in (archives, decompress):
        monkeypatch.setattr(module, "open_regular", lambda path: io.BufferedReader(Failing(path)))
    with pytest.raises(Failed, match="the store did not answer"):
        read_all([path], policy)


QUOTES = b'text\n"To be, or not," he said.\n"One more\nLast.\n'
COLUMNS = b'\xef\xbb\xbftitle;body;n\r\nOne;"Text; of one";1\r\n\r\nTwo;;2\r\n'


@pytest.mark.parametrize(
    ("name", "content", "field", "texts"),
    [
        # TSV has no quoting; suffixes of members are those of their names
        ("a.tsv", QUOTES, "text", ['"To be, or not," he said.', '"One more', "Last."]),
        ("a.tsv.gz", gz(QUOTES), "text", ['"To be, or not," he said.', '"One more', "Last."]),
        ("a.zip", packed_zip({"a.tsv": QUOTES}), "text", ['"To be, or not," he said.', '"One more', "Last."]),
        ("a.zip", packed_zip({"notes": b"Some words.", "v1.2/words": b"It."}), "text", ["Some words.", "It."]),
        ("a.zip", packed_zip({"a.b/rows.tsv": b'text\n"A row\n'}), "text", ['"A row']),
        ("a.csv", COLUMNS, "body", ["Text; of one"]),
        ("a.csv", COLUMNS, "title+body", ["One\n\nText; of one", "Two"]),
    ],
    ids=name_of,
)
def test_columns_and_names_of_members(name, content, field, texts, tmp_path):
    assert read_all([write(tmp_path / name, content)], text_field=field)[0] == texts


@pytest.mark.parametrize("path", ["https://x.org/a.tsv?key=1", "https://x.org/a.zip?key=1: a.tsv"])
def test_a_tsv_with_a_query_in_its_address_has_no_quoting(path):
    stream = Stream(path, iter([QUOTES]), ReadOptions(), Problems("stop"))
    assert [text for _, text in split_csv(stream)] == ['"To be, or not," he said.', '"One more', "Last."]


def test_an_invalid_byte_costs_one_csv_record(tmp_path):
    path = write(tmp_path / "a.csv", b'text,n\nOne.,1\n"Two\nl\xe9nes.",2\nThree.,3\n"Four.",4\n')
    found, problems = refuse(path, r"a\.csv: line 4: invalid UTF-8; convert")
    assert found == ["One.", "Three.", "Four."] and problems.counts == {"invalid UTF-8": 1}
