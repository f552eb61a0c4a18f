"""What a file is by its content: refusals name it and what makes it readable; descriptions and test splits in a folder."""

import gzip

import pytest

from megabert.common import logs
from tests.helpers.prep_reading import archive, plan, read_all, refuse, write, write_all

XML = b'<?xml version="1.0" encoding="UTF-8"?>\n'
REFUSED = {
    "pdf": ("a.pdf", b"%PDF-1.4 text", "a PDF, which is not supported; convert it: pdftotext"),
    "rtf": ("a.txt", b"{\\rtf1\\ansi Hello}", "RTF.*pandoc -f rtf"),
    "doc": ("a.doc", bytes.fromhex("d0cf11e0a1b11ae1") + b"x" * 99, "an Office file.*libreoffice"),
    "lfs": ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "pointer of Git LFS.*git lfs pull"),
    "latex": ("a.tex", b"% a comment\n\n\\documentclass{article}\nWords.", "LaTeX.*pandoc -f latex.*detex"),
    "latex in txt": ("a.txt", b"\\documentclass{article}\nWords.", "LaTeX"),
    "a chapter of latex": ("a.tex", b"\\section*{One}\nWords.", "LaTeX"),
    "html": ("a.html", b"<!-- c --><html><body>Words.</body></html>", "HTML.*trafilatura"),
    "html in txt": ("a.txt", b"<!DOCTYPE HTML>\n<p>Words.", "HTML.*trafilatura"),
    "xhtml": ("a", XML + b'<html xmlns="x">', "HTML.*trafilatura"),
    "jats": ("a.nxml", XML + b'<!DOCTYPE article PUBLIC "-//NLM//DTD JATS">\n<article>', "JATS XML.*pandoc -f jats"),
    "jats without doctype": ("a.xml", b'<article article-type="research">', "JATS XML"),
    "pubmed": ("a.xml", XML + b"<PubmedArticleSet>", "PubMed XML.*xmlstarlet .*AbstractText"),
    "stack exchange": ("Posts.xml", XML + b'<posts>\n  <row Id="1" Body="x" />', "Stack Exchange XML.*python -c"),
    "xml": ("a.xml", XML + b"<corpus><p>Words.</p></corpus>", "XML, and not a MediaWiki dump.*xmlstarlet"),
    "tags": ("a.txt", b"<corpus><s>One.</s><s>Two.</s></corpus>", "XML or HTML"),
    "mds index": ("index.json", b'{"shards": [{"column_names": ["text"], "format": "mds"}]}', "MDS.*streaming"),
    "mds shard": ("shard.00000.mds", b"\1\0\0\0 words", "MDS.*streaming"),
    "megatron": ("a.idx", b"MMIDIDX\0\0\1\0\0\0", "Megatron.*no text"),
    "pretty": ("a.json", b'{\n  "text": "Words."\n}\n{\n  "text": "More."\n}\n', r"jq -c '\.' FILE"),
    "one object": ("a.json", b'{"data": [{"text": "Words."}]}', r"jq -c '\.data\[\]' FILE"),
    "an object of an odd name": ("a.json", b'{"it\'s": [{"text": "W."}]}', r"""jq -c '\."it'"'"'s"\[\]' FILE"""),
    "utf-16": ("a.txt", "Words.".encode("utf-16"), "UTF-16 text.*iconv -f utf-16"),
    "utf-32": ("a.txt", "Words.".encode("utf-32"), "UTF-32 text.*iconv -f utf-32"),
    "warc": ("a.warc", b"WARC/1.0\r\nWARC-Type: response\r\nContent-Length: 2\r\n\r\nHi\r\n\r\n", "WARC of web pages.*WET"),
    "warc in other case": ("a.warc", b"WARC/1.0\r\nwarc-type:Response\r\n\r\nHi\r\n\r\n", "WARC of web pages.*WET"),
    "word": ("a.zip", archive("zip", {"mimetype": "x", "word/document.xml": "<x>"}), "a Word document.*pandoc"),
    "excel": ("a.zip", archive("zip", {"mimetype": "x", "xl/workbook.xml": "<x>"}), "an Excel workbook"),
    "epub": ("a.zip", archive("zip", {"mimetype": "x", "META-INF/container.xml": "<x>"}), "an EPUB.*pandoc"),
    "opendocument": ("a.zip", archive("zip", {"mimetype": "x", "content.xml": "<x>"}), "an OpenDocument file"),
    "tags behind a comment": ("a.txt", b"<!-- c -->\n<TEI><s>One.</s><s>Two.</s></TEI>", "XML or HTML"),
    "html by its name": ("a.HTM", b"Words<br>\nand more.", "HTM by its name.*--format text"),
    "xml by its name": ("a.xml", b"<!-- c -->\n<TEI>Words.", "XML by its name.*--format text"),
    "loose json": ("a.json", b"{'text': 'abc'}\n{'text': 'd'}\n", "JSON by its name.*--format text"),
    "json on one line": ("a.JSON", b'{"text": "a"}{"text": "b"}', "JSON by its name.*--format text"),
    "utf-16 of cyrillic": ("a.txt", "Слова и ещё слова.".encode("utf-16-le"), "text in another encoding.*iconv"),
    "iso-2022-jp": ("a.txt", "Words, 言葉。".encode("iso-2022-jp"), "text in ISO-2022-JP.*iconv -f iso-2022-jp"),
    "text as fasta": ("a.fa", b">chr1 human\r\n" + b"ACGTN" * 14 + b"\r\nACGT\r\n", "FASTA.*awk.*--text-documents line"),
    "text as a mailbox": ("a", b"From a@b.c Mon Jan  1 00:00:00 2026\nSubject: x\n\nHi.\n", "a mailbox.*mailbox.mbox"),
    "text as srt": ("a.srt", b"1\r\n00:00:01,000 --> 00:00:02,900\r\nHi.\r\n", "subtitles.*sed"),
    "text as webvtt": ("a.vtt", b"WEBVTT\n\n00:01.000 --> 00:02.900\nHi.\n", "subtitles.*sed"),
    "unknown": ("a.xyz", bytes(range(128, 256)), r"unknown suffix '\.xyz'.*iconv"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_formats_are_named_with_a_remedy(case, tmp_path):
    name, content, message = REFUSED[case]
    path = write(tmp_path / name, content)
    as_text = case.startswith(("tags", "text as")) or case in (
        "html by its name",
        "xml by its name",
        "loose json",
        "json on one line",
    )
    remedy = "(?=.*--format text)" if as_text else "(?!.*--format text)"
    assert not as_text or read_all([path], format="text")[0]
    found, problems = refuse(path, f"^{path}: {remedy}.*{message}.*--on-error skip")
    assert not found and problems.counts == {"unknown format": 1}
    assert problems.lost == {"unknown format": {"bytes": len(content), "files": [str(path)]}}


def test_tokens_of_megatron_are_known_by_their_index(tmp_path):
    path = write(tmp_path / "a.bin", b"ab" * 99)
    assert read_all([path])[0] == ["ab" * 99]
    write(tmp_path / "a.idx", b"")
    refuse(path, "a Megatron dataset")


@pytest.mark.parametrize("name", ["a.md", "a.rst", "a.dat", "a.py", "a", "a.tokens"])
def test_text_is_text_whatever_its_suffix(name, tmp_path):
    words = "# Häding\n\nSome words [1] {here}, 1 < 2.\n"
    for text in (words, "[ ] A task.\n", "{words}\n", "<b>Words</b> and more.", "Orchids."):
        assert read_all([write(tmp_path / name, text)])[0] == [text]
    path = write(tmp_path / name, "Some words, one of them déjà, in Latin-1.".encode("latin-1"))
    assert len(plan([path])) == 1  # its bad bytes are reported by their places


def test_numbered_lines_are_no_index(tmp_path):
    for text in ("1:1:In the beginning.\n1:2:And then.\n1:3:And so on.\n", "10:32:07 <bob> Hello.\n" * 4):
        assert read_all([write(tmp_path / "a.txt", text)])[0] == [text]


def test_many_comments_are_read_in_linear_time(tmp_path):
    comments = "<!-- A line of a license - or so. -->\n" * 60
    path = write(tmp_path / "a.md", comments + "Words.")
    assert read_all([path], text_documents="file")[0] == [comments + "Words."]
    refuse(write(tmp_path / "a.html", comments + "<html>"), "HTML, which is not supported")


def test_descriptions_of_a_folder_are_left_out(tmp_path, capsys):
    names = ("README.md", "LICENSE", "sub/dataset_infos.json", "sub/readme.txt", "SHA256SUMS")
    folder = write_all(tmp_path / "in", dict.fromkeys(names, "About the data."))
    write_all(folder, {"a.txt": "Words.", ".gitattributes": "*.txt text"})
    logs.setup()
    assert read_all([f"{folder}/*E*", f"{folder}/*.txt", f"{folder}/sub/*"])[0] == ["Words."]
    assert "left out: 4 files that describe data" in capsys.readouterr().out
    assert read_all([f"{tmp_path}/*/README.md"])[0] == ["About the data."]
    for item in (folder, f"{folder}/"):
        assert read_all([item])[0] == ["Words."]
        line = capsys.readouterr().out
        assert line.count("\n") == 2 and "left out: 5 files that describe data" in line and "README.md" in line
        assert f"left out: 1 hidden name ({item}".rstrip("/") in line and ".gitattributes); to read" in line
    assert read_all([folder / "README.md", folder / "a.txt"])[0] == ["About the data.", "Words."]
    assert not capsys.readouterr().out


WARNED = "test.jsonl test/a.jsonl dev.jsonl dev/a.jsonl val_0.jsonl wiki.valid.tokens.jsonl x-test-01-of-02.jsonl"
OTHERS = "latest.jsonl testimony/a.jsonl test_corpus/a.jsonl device.jsonl contest/a.jsonl testing.jsonl"
SPLITS = dict.fromkeys(WARNED.split(), "train*") | dict.fromkeys(OTHERS.split(), "")
SPLITS["data/validation-00000-of-00001.jsonl"] = "data/train*"
SPLITS[f"test-{'7' * 60}x/a.jsonl"] = ""  # in linear time


@pytest.mark.parametrize(("split", "glob"), SPLITS.items())
def test_a_split_for_evaluation_is_warned_of(split, glob, tmp_path, capsys):
    folder = write_all(tmp_path / "in", dict.fromkeys(("train.jsonl", split), '{"text": "Words."}\n'))
    logs.setup()
    assert len(read_all([folder])[0]) == 2
    warned = capsys.readouterr().err
    assert bool(warned) == bool(glob)
    if glob:
        assert warned.count("\n") == 1 and "1 file of a test or validation split" in warned and split in warned
        assert f"--input '{folder / glob}'" in warned
    read_all([folder / split])  # alone it is meant
    assert not capsys.readouterr().err


@pytest.mark.parametrize("name", ["DATA.CSV", "DATA.Csv.GZ", "a.zip"])
def test_suffixes_of_any_case_name_a_format(name, tmp_path):
    rows = b"id,text\n1,Words.\n"
    content = archive("zip", {"X.CSV": rows}) if name == "a.zip" else gzip.compress(rows) if "GZ" in name else rows
    found, problems = read_all([write(tmp_path / name, content)])
    assert found == ["Words."] and problems.formats == {"csv": 1}
    assert read_all([write(tmp_path / "A.TSV", b'id\ttext\n1\t"Words\n')])[0] == ['"Words']
    assert read_all([write(tmp_path / "A.TAR.GZ", gzip.compress(archive("tar", {"a.txt": b"It."})))])[0] == ["It."]


def test_files_named_twice_are_counted(tmp_path, capsys):
    path = write(tmp_path / "a.txt", "Words.")
    logs.setup()
    assert read_all([path, tmp_path])[0] == ["Words."]
    assert f"left out: 1 file that an earlier input or link has ({path})" in capsys.readouterr().out
