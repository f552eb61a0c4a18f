"""What a file is by its content: refusals name it and what makes it readable; descriptions and test splits in a folder."""

import io
import zipfile

import pytest

from data_prep.common.errors import BadInput, Problems
from data_prep.readers import files
from megabert.common import logs
from tests.helpers.prep_reading import plan, read_all

XML = b'<?xml version="1.0" encoding="UTF-8"?>\n'
REFUSED = {
    "pdf": ("a.pdf", b"%PDF-1.4 text", r"a\.pdf: a PDF, which is not read; convert it: pdftotext"),
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
    "warc": ("a.warc", b"WARC/1.0\r\nWARC-Type: response\r\nContent-Length: 2\r\n\r\nHi\r\n\r\n", "WARC of web pages.*WET"),
    "unknown": ("a.xyz", bytes(range(128, 256)), r"unknown suffix '\.xyz'.*iconv"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_formats_are_named_with_a_remedy(case, tmp_path):
    name, content, message = REFUSED[case]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message) as error:
        read_all([path])
    assert str(error.value).startswith(f"{path}: ") and ("--format text" in str(error.value)) == (case == "tags")
    found, problems = read_all([path], "skip")
    assert not found and problems.counts == {"unknown format": 1}
    assert problems.lost == {"unknown format": {"bytes": len(content), "files": [str(path)]}}


def test_tokens_of_megatron_are_known_by_their_index(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"ab" * 99)
    assert read_all([tmp_path / "a.bin"])[0] == ["ab" * 99]
    (tmp_path / "a.idx").write_bytes(b"")
    with pytest.raises(BadInput, match="a Megatron dataset"):
        read_all([tmp_path / "a.bin"])


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ("word/document.xml", "a Word document.*pandoc"),
        ("xl/workbook.xml", "an Excel workbook"),
        ("META-INF/container.xml", "an EPUB.*pandoc"),
        ("content.xml", "an OpenDocument file"),
    ],
)
def test_documents_that_are_zip_archives(member, message, tmp_path):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("mimetype", "application/x")
        archive.writestr(member, "<x>Words.</x>")
    (tmp_path / "a.zip").write_bytes(data.getvalue())
    with pytest.raises(BadInput, match=rf"a\.zip: {message}"):
        read_all([tmp_path / "a.zip"])


@pytest.mark.parametrize("name", ["a.md", "a.rst", "a.dat", "a.py", "a", "a.tokens"])
def test_text_is_text_whatever_its_suffix(name, tmp_path):
    for text in (
        "# Häding\n\nSome words [1] {here}, 1 < 2.\n",
        "[ ] A task.\n",
        "{words}\n",
        "<b>Words</b> and more.",
        "Orchids.",
    ):
        (tmp_path / name).write_text(text)
        assert read_all([tmp_path / name])[0] == [text]
    (tmp_path / name).write_bytes("Some words, one of them déjà, in Latin-1.".encode("latin-1"))
    assert len(plan([tmp_path / name])) == 1  # its bad bytes are reported by their places


def test_descriptions_of_a_folder_are_left_out(tmp_path, capsys):
    for name in ("README.md", "LICENSE", "sub/dataset_infos.json", "sub/readme.txt", "SHA256SUMS"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "in" / name).write_text("About the data.")
    (tmp_path / "in" / "a.txt").write_text("Words.")
    (tmp_path / "in" / ".gitattributes").write_text("*.txt text")
    logs.setup()
    for item in (tmp_path / "in", f"{tmp_path}/in/"):
        assert read_all([item])[0] == ["Words."]
        line = capsys.readouterr().out
        assert line.count("\n") == 1 and "left out: 5 files that describe data" in line and "README.md" in line
    assert read_all([tmp_path / "in" / "README.md", tmp_path / "in" / "a.txt"])[0] == ["About the data.", "Words."]
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("split", "glob"),
    [
        ("test.jsonl", "train*"),
        ("data/validation-00000-of-00001.jsonl", "data/train*"),
        ("dev/a.jsonl", "train*"),
        ("wiki.valid.tokens.jsonl", "train*"),
        ("latest.jsonl", ""),
        ("testimony/a.jsonl", ""),
    ],
)
def test_a_split_for_evaluation_is_warned_of(split, glob, tmp_path, capsys):
    for name in ("train.jsonl", split):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "in" / name).write_text('{"text": "Words."}\n')
    logs.setup()
    assert len(read_all([tmp_path / "in"])[0]) == 2
    warned = capsys.readouterr().err
    assert bool(warned) == bool(glob)
    if glob:
        assert warned.count("\n") == 1 and "1 files of a test or validation split" in warned and split in warned
        assert f"--input '{tmp_path / 'in' / glob}'" in warned
    read_all([tmp_path / "in" / split])  # alone it is meant
    assert not capsys.readouterr().err


def test_names_of_splits():
    for name in ("test", "test.txt", "dev.jsonl", "val_0.parquet", "a-test-00001-of-00002.parquet", "wiki.test.raw"):
        assert files.EVALUATION_SPLIT.fullmatch(name), name
    for name in ("test_corpus", "latest.txt", "device.txt", "contest", "testing.txt", "train.txt"):
        assert not files.EVALUATION_SPLIT.fullmatch(name), name


def test_files_of_a_reason_are_the_first_five():
    problems = Problems("skip")
    for i in range(9):
        problems.bad(f"{i}.txt", 0, "invalid UTF-8", size=10)
    assert problems.lost == {"invalid UTF-8": {"bytes": 90, "files": [f"{i}.txt" for i in range(5)]}}
