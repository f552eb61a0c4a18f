"""Members of zip and tar archives and rows of CSV files are documents; what is damaged is named with its place."""

import gzip
import io
import os
import tarfile
import zipfile

import pytest

from data_prep.common.errors import BadInput
from tests.helpers.prep_reading import PACK, read_all

MEMBERS = {
    "a/one.txt": b"Once upon a time.",
    "a/.hidden.txt": b"not this",
    "b.jsonl": b'{"text": "Alpha one."}\n{"text": "Beta two."}\n',
    "c.txt.gz": gzip.compress(b"Packed text."),
    "d.csv": b'id,text\n1,"A row, quoted\nover lines."\n2,Another.\n',
    "empty.txt": b"",
}
TEXTS = ["Once upon a time.", "Alpha one.", "Beta two.", "Packed text.", "A row, quoted\nover lines.", "Another."]


def tar(members):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return data.getvalue()


def packed_zip(members):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return data.getvalue()


@pytest.mark.parametrize("kind", ["zip", "tar", *PACK])
def test_members_are_read_in_their_order(kind, tmp_path):
    path = tmp_path / {"zip": "a.zip", "tar": "a.tar"}.get(kind, f"a.tar.{kind}")
    path.write_bytes(packed_zip(MEMBERS) if kind == "zip" else PACK.get(kind, bytes)(tar(MEMBERS)))
    found, problems = read_all([path])
    assert found == TEXTS and problems.counts == {"empty file": 1}
    assert len(read_all([path], format="text")[0]) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tar", tar({"b.jsonl": b'{"text": "\xff"}\n'}), r"a\.tar: b\.jsonl: byte 10: invalid UTF-8"),
        ("a.tar", tar({"b.jsonl": b'{"text": "x"}\n{"body": 1}\n'}), r"a\.tar: b\.jsonl: byte 14: no field 'text'"),
        ("a.tar", tar(MEMBERS)[:700], r"a\.tar: a/one\.txt: damaged in its archive|tar archive behind a/one\.txt"),
        ("a.tar", tar({"x.txt": b"x" * 600})[:1536], r"a\.tar: damaged or truncated tar archive behind x\.txt"),
        (
            "a.tar",
            tar({"x.txt": b"x", "y.txt": b"y"})[:1024] + b"\1" * 2048,
            r"a\.tar: damaged or truncated .* behind x\.txt",
        ),
        ("a.tar.gz", gzip.compress(tar(MEMBERS), mtime=0)[:-40], r"a\.tar\.gz: truncated: the gz stream ends early"),
        ("a.zip", packed_zip({"x.txt": b"x"})[:-4], r"a\.zip: damaged zip archive"),
        ("a.zip", packed_zip({"x.txt": bytes(200 << 20)}), r"a\.zip: x\.txt: unpacks to more than 200 times"),
        ("a.zip", packed_zip({"x.parquet": b"PAR1" + bytes(20) + b"PAR1"}), r"a parquet file inside another"),
        ("a.csv", b'text,n\n"one",1\ntwo\n', r"a\.csv: line 3: a row of 1 values, the first line names 2 columns"),
        ("a.csv", b'text,n\none,1\n"two" x,2\n', r"a\.csv: line 3: "),
        ("a.csv", b'text,n\n"one,1\ntwo,2\n', r"a\.csv: line 4?3?: unexpected end of data"),
        ("a.csv", b"body;n\none;1\n", r"a\.csv: line 1: no column 'text' \(it has body;n\)"),
        ("a.tsv", b"text\tn\none\t1\nt\xffo\t1\n", r"a\.tsv: line 3: invalid UTF-8"),
    ],
)
def test_damage_is_named_with_its_place(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=message):
        read_all([tmp_path / name])
    assert sum(read_all([tmp_path / name], policy="skip")[1].counts.values()) == 1


def test_a_wrong_checksum_of_a_member_is_named(tmp_path):
    data = bytearray(packed_zip({"x.txt": os.urandom(999).hex().encode()}))
    data[500] ^= 1
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(BadInput, match=r"a\.zip: x\.txt: damaged in its archive"):
        read_all([tmp_path / "a.zip"])


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_members_that_cannot_be_read_are_skipped_alone(kind, tmp_path):
    members = {
        "1.txt": b"First.",
        "logo.png": b"\x89PNG",
        "cut.txt.gz": gzip.compress(b"Gone." * 99)[:-20],
        "2.txt": b"Last.",
    }
    path = tmp_path / f"a.{kind}"
    path.write_bytes(packed_zip(members) if kind == "zip" else tar(members))
    with pytest.raises(BadInput, match=r"logo\.png: unknown suffix '\.png'"):
        read_all([path])
    found, problems = read_all([path], policy="skip")
    assert [found[0], found[-1]] == ["First.", "Last."]
    assert problems.counts == {"unreadable member of an archive": 2}
    assert problems.lost["unreadable member of an archive"]["files"] == [f"{path}: logo.png", f"{path}: cut.txt.gz"]


def test_suffixes_of_members_are_those_of_their_names(tmp_path):
    members = {"notes": b"Some words.", "v1.2/README": b"About it.", "a.b/rows.tsv": b'text\n"A row\n'}
    (tmp_path / "a.zip").write_bytes(packed_zip(members))
    assert read_all([tmp_path / "a.zip"])[0] == ["Some words.", "About it.", '"A row']


def test_text_before_the_damage_of_a_member_is_kept(tmp_path):
    lines = [b"Line %d of %d.\n" % (i, i * i * 7919) for i in range(300_000)]
    data = bytearray(packed_zip({"a.txt": b"".join(lines), "b.txt": b"Last."}))
    data[len(data) - 1000] ^= 0x55  # in the last block of a.txt
    path = tmp_path / "a.zip"
    path.write_bytes(data)
    found, problems = read_all([path], "skip", text_documents="line")
    assert problems.counts == {"unreadable member of an archive": 1} and found[-1] == "Last."
    kept = len(found) - 1
    assert kept > 200_000 and [text.encode() + b"\n" for text in found[:kept]] == lines[:kept]
    assert 0 <= problems.lost["unreadable member of an archive"]["bytes"] < sum(map(len, lines)) / 3


def test_columns_of_a_csv_are_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbftitle;body;n\r\nOne;"Text; of one";1\r\n\r\nTwo;;2\r\n')
    assert read_all([path], text_field="body")[0] == ["Text; of one"]
    assert read_all([path], text_field="title+body")[0] == ["One\n\nText; of one", "Two"]


def test_an_invalid_byte_costs_one_csv_record(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,n\nOne.,1\n"Two\nl\xe9nes.",2\nThree.,3\n"Four.",4\n')
    with pytest.raises(BadInput, match=r"a\.csv: line 4: invalid UTF-8; convert"):
        read_all([path])
    found, problems = read_all([path], policy="skip")
    assert found == ["One.", "Three.", "Four."] and problems.counts == {"invalid UTF-8": 1}


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz", "a.zip"])
def test_tsv_has_no_quoting(name, tmp_path):
    content = b'text\n"To be, or not," he said.\n"One more\nLast.\n'
    pack = {"a.tsv": bytes, "a.tsv.gz": gzip.compress, "a.zip": lambda data: packed_zip({"a.tsv": data})}
    (tmp_path / name).write_bytes(pack[name](content))
    assert read_all([tmp_path / name])[0] == ['"To be, or not," he said.', '"One more', "Last."]
