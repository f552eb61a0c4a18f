"""Which documents are read, in which order, whatever they are packed in and wherever a file is cut."""

import gzip
import os
import random
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from data_prep.common.errors import BadInput, Problems
from data_prep.readers import documents, pydoc_corpus, tasks
from tests.helpers.prep_reading import PACK, plan, read_all

ROOT = Path(__file__).resolve().parents[3]
WIKI = b'<doc id="1" title="One">\nOne\n\nFirst text.\nSecond line.\n</doc>\n<doc id="2" title="a > b">\nTwo\n\nOther.\n</doc>\n'
JSONL = b'{"text": "Alpha one."}\n\n{"n": 2, "text": "Beta \\u00e9."}\n'


@pytest.mark.parametrize("kind", ["", *PACK])
def test_formats_are_recognised_in_every_compression(kind, tmp_path):
    suffix, pack = (f".{kind}", PACK[kind]) if kind else ("", bytes)
    (tmp_path / f"wiki_00{suffix}").write_bytes(pack(WIKI))
    (tmp_path / f"lines.dat{suffix}").write_bytes(pack(JSONL))
    (tmp_path / f"novel.txt{suffix}").write_bytes(pack(b"\xef\xbb\xbfOnce.\r\n\r\nTwice.\r\n"))
    found, _ = read_all([tmp_path])
    assert found == ["Alpha one.", "Beta é.", "Once.\r\n\r\nTwice.\r\n", "\nFirst text.\nSecond line.\n", "\nOther.\n"]


def test_what_a_document_is_in_plain_text(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes(b"a 1\na 2\n\n \r\nb 1\n\n\n\nc 1\nc 2\n")
    assert len(read_all([path])[0]) == 1
    assert read_all([path], text_documents="blank-line")[0] == ["a 1\na 2", "b 1", "c 1\nc 2\n"]
    assert read_all([path], text_documents="line")[0] == ["a 1", "a 2", "b 1", "c 1", "c 2"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pdf", b"%PDF-1.4 text", r"a\.pdf: a PDF, which is not read"),
        ("a.txt", "utf-16 text".encode("utf-16-le"), r"a\.txt: binary data \(or UTF-16: convert"),
        ("a.gz", b"plain text", r"a\.gz: byte 0: no gz data in spite of its suffix"),
        ("a.jsonl", b'{"body": "x"}\n', r"a\.jsonl: byte 0: no field 'text' in the JSON line \(it has body\)"),
        ("a.jsonl", b'{"text": "\xc3\xa9"}\n{"text": "\xff"}\n', r"a\.jsonl: byte 25: invalid UTF-8"),
        ("a.jsonl", b'{"te\0xt": 1}\n', r"a\.jsonl: byte 0: not a JSON object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 5}\n', r"a\.jsonl: byte 14: field 'text' is not a string"),
        ("a", b"<!DOCTYPE html><html>", r"a: HTML, which is not read"),
        ("a.jsonl", b'{"text": "\\ud83d"}\n', r"a\.jsonl: byte 0: half a surrogate pair"),
        ("a", b'<doc id="1">\nT\n\nbody\n</doc>\n<doc id="2">\nT\n', r"a: byte 28: a <doc> without </doc>"),
    ],
)
def test_bad_files_are_named_or_counted(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=message):
        read_all([tmp_path / name])
    _, problems = read_all([tmp_path / name], policy="skip")
    assert sum(problems.counts.values()) == 1


def test_pydoc_reads_docstrings_without_importing(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('''"""Module text."""
raise SystemExit("imported")
class Thing:
    """Class text.

    >>> Thing()
    1

    More text.
    """
    def method(self):
        """Method text."""
''')
    assert pydoc_corpus.documents(str(path)) == ["Module text.\n\nClass text.\n\n\nMore text.\n\nMethod text."]
    (tmp_path / "broken.py").write_text('"""x"""\ndef (')
    assert pydoc_corpus.documents(str(tmp_path / "broken.py")) == []
    files = pydoc_corpus.files()
    assert files == pydoc_corpus.files() and len(files) > 300
    assert any(name.endswith("topics.py") for name, _ in files)


OPENINGS = {
    "text": (b"words of a first line\n", "long line"),
    "jsonl": (b'{"text": "words"}\n{"text": "', "long line"),
    "wiki": (b'<doc id="1">\nT\n\nwords\n</doc>\n<doc id="2">\n', "long document"),
    "mediawiki": (b"<mediawiki><page><text>words</text></page><page><text>", "long document"),
    "json": (b'[{"text": "words"}, {"text": "', "bad JSON"),
    "wet": (b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: 536870912\r\n\r\n", "long document"),
    "blank": (b"words\n\n" + b"a line of a block\n", "long document"),
}


@pytest.mark.parametrize("kind", OPENINGS)
def test_a_document_without_an_end_costs_bounded_memory(kind, tmp_path):
    opening, reason = OPENINGS[kind]
    path = tmp_path / "f.txt"
    with open(path, "wb") as file:
        file.write(opening)
        if kind == "blank":
            file.write(b"a line of a block\n" * 12_000_000)
        else:
            file.truncate(1 << 30 if kind == "text" else 1 << 28)  # a hole
    code = (
        "import re, resource, sys; from tests.helpers.prep_reading import read_all; "
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); "
        "found, problems = read_all([sys.argv[1]], 'skip', format=sys.argv[2], text_documents='blank-line'); "
        "print(sum(map(len, found)), dict(problems.counts)); "
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024)"
    )
    format_ = "text" if kind == "blank" else kind
    done = subprocess.run([sys.executable, "-c", code, path, format_], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    counts, peak = done.stdout.splitlines()
    assert int(counts.split()[0]) < 100 and counts.endswith(f"{{{reason!r}: 1}}")
    assert int(peak) < 300


def test_small_files_are_grouped_without_being_opened(tmp_path, monkeypatch):
    for i in range(600):
        folder = tmp_path / "in" / str(i % 7)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.txt").write_text(f"Text {i}.\n")
        (folder / f"{i}.jsonl.gz").write_bytes(gzip.compress(b'{"text": "Record %d."}\n' % i))
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(path) or real(path, *rest, **more))
    monkeypatch.setattr(tasks, "TASK_BYTES", (4_096, 4_096))
    planned = plan([tmp_path / "in"])
    assert not opened and sum(len(task.ranges) for task in planned) == 1_200 and len(planned) > 20
    found, problems = read_all([tmp_path / "in"])
    want = [text for i in range(600) for text in (f"Text {i}.\n", f"Record {i}.")]
    assert len(opened) >= 1_200 and sorted(found) == sorted(want) and not problems.counts


@pytest.mark.parametrize("kind", ["a.csv", "a.tar", "a.zip", "a.tar.gz", "a.csv.gz"])
def test_large_files_for_one_worker_are_refused(kind, tmp_path, monkeypatch):
    text = b"text\n" + random.Random(1).randbytes(30_000).hex().encode()
    (tmp_path / "a.csv").write_bytes(text)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "a.csv", "a.csv")
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tmp_path / "a.csv", "a.csv")
    for name in ("a.csv", "a.tar"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    monkeypatch.setattr(documents, "RANGE_BYTES", 32_768)  # else such a small packed CSV file is not opened
    assert len(plan([tmp_path / kind])) == 1
    monkeypatch.setattr(tasks, "MAX_UNCUT", 50_000)
    for policy in ("stop", "skip"):
        with pytest.raises(BadInput, match=rf"{kind}: has about 0\.0 GiB of text; .*split it"):
            plan([tmp_path / kind], Problems(policy))
