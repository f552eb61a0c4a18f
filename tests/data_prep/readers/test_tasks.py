"""Which documents are read, in which order, whatever they are packed in and wherever a file is cut."""

import gzip
import os
import random

import pytest

from data_prep.common.errors import BadInput, Problems
from data_prep.common.records import Corpus, ReadOptions
from data_prep.readers import pydoc_corpus, tasks
from tests.helpers.prep_reading import PACK, archive, plan, read_all, records, write, write_all
from tests.integration.conftest import command

WIKI = b'<doc id="1" title="One">\nOne\n\nFirst text.\nSecond line.\n</doc>\n<doc id="2" title="a > b">\nTwo\n\nOther.\n</doc>\n'
JSONL = b'{"text": "Alpha one."}\n\n{"n": 2, "text": "Beta \\u00e9."}\n'


@pytest.mark.parametrize("kind", ["", *PACK])
def test_formats_are_recognised_in_every_compression(kind, tmp_path):
    files = {"wiki_00": WIKI, "lines.dat": JSONL, "novel.txt": b"\xef\xbb\xbfOnce.\r\n\r\nTwice.\r\n"}
    write_all(tmp_path, {name + (kind and f".{kind}"): PACK.get(kind, bytes)(data) for name, data in files.items()})
    found, _ = read_all([tmp_path])
    assert found == ["Alpha one.", "Beta é.", "Once.\r\n\r\nTwice.\r\n", "\nFirst text.\nSecond line.\n", "\nOther.\n"]


def test_what_a_document_is_in_plain_text(tmp_path):
    path = write(tmp_path / "t.txt", b"a 1\na 2\n\n \r\nb 1\n\n\n\nc 1\nc 2\n")
    assert len(read_all([path])[0]) == 1
    assert read_all([path], text_documents="blank-line")[0] == ["a 1\na 2", "b 1", "c 1\nc 2\n"]
    assert read_all([path], text_documents="line")[0] == ["a 1", "a 2", "b 1", "c 1", "c 2"]


MODULE = '''"""Module text."""
raise SystemExit("imported")
class Thing:
    """Class text.

    >>> Thing()
    1

    More text.
    """
    def method(self):
        """Method text."""
'''


def test_pydoc_reads_docstrings_without_importing(tmp_path):
    path = str(write(tmp_path / "module.py", MODULE))
    assert pydoc_corpus.documents(path) == ["Module text.\n\nClass text.\n\n\nMore text.\n\nMethod text."]
    assert pydoc_corpus.documents(str(write(tmp_path / "broken.py", '"""x"""\ndef ('))) == []
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
LIMITED = r"""
import re, resource, sys
from tests.helpers.prep_reading import read_all
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
found, problems = read_all([sys.argv[1]], "skip", format=sys.argv[2], text_documents="blank-line")
print(sum(map(len, found)), dict(problems.counts))
print(int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) // 1024)
"""


SLOW = ("json", "mediawiki", "blank")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k in SLOW else k for k in OPENINGS])
def test_a_document_without_an_end_costs_bounded_memory(kind, tmp_path):
    opening, reason = OPENINGS[kind]
    path = write(tmp_path / "f.txt", opening)
    with open(path, "ab") as file:
        if kind == "blank":
            file.write(b"a line of a block\n" * 12_000_000)
        else:
            file.truncate(1 << 29 if kind == "text" else 1 << 28)  # a hole
    done = command("-c", LIMITED, path, "text" if kind == "blank" else kind)
    assert done.returncode == 0, done.stderr[-2000:]
    counts, peak = done.stdout.splitlines()
    assert int(counts.split()[0]) < 100 and counts.endswith(f"{{{reason!r}: 1}}")
    assert int(peak) < 300


def test_small_files_are_grouped_without_being_opened(tmp_path, monkeypatch):
    for i in range(600):
        record = gzip.compress(records([f"Record {i}."]).encode())
        write_all(tmp_path / str(i % 7), {f"{i}.txt": f"Text {i}.\n", f"{i}.jsonl.gz": record})
    opened, real = [], os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(path) or real(path, *rest, **more))
    monkeypatch.setattr(tasks, "TASK_BYTES", (4_096, 4_096))
    planned = plan([tmp_path])
    assert not opened and sum(len(task.ranges) for task in planned) == 1_200 and len(planned) > 20
    found, problems = read_all([tmp_path])
    want = [text for i in range(600) for text in (f"Text {i}.\n", f"Record {i}.")]
    assert len(opened) >= 1_200 and sorted(found) == sorted(want) and not problems.counts


def test_an_archive_counts_with_its_text(tmp_path):
    text = b"line of text\n" * 20_000
    path = write(tmp_path / "a.zip", archive("zip", {"a.txt": text, "b.txt": text}))
    assert path.stat().st_size < 0.2 * len(text) and tasks.unpacked_bytes(plan([path])) == 2 * len(text)


TEXT = b"text\n" + random.Random(1).randbytes(30_000).hex().encode()
LARGE = {"a.csv": TEXT, "a.tar": archive("tar", {"a.csv": TEXT}), "a.zip": archive("zip", {"a.csv": TEXT})}
LARGE |= {"a.tar.gz": gzip.compress(LARGE["a.tar"]), "a.csv.gz": gzip.compress(TEXT)}


@pytest.mark.parametrize("name", LARGE)
def test_large_files_for_one_worker_are_refused(name, tmp_path, monkeypatch):
    path = write(tmp_path / name, LARGE[name])
    monkeypatch.setattr(tasks, "RANGE_BYTES", 32_768)  # else such a small packed CSV file is not opened
    assert len(plan([path])) == 1
    monkeypatch.setattr(tasks, "MAX_UNCUT", 50_000)
    for policy in ("stop", "skip"):
        with pytest.raises(BadInput, match=rf"{name}: has about 0\.0 GiB of text; .*split it"):
            plan([path], Problems(policy))
    monkeypatch.setattr(tasks, "MAX_UNCUT", 100_000)
    assert len(plan([path])) == 1
    with pytest.raises(BadInput, match=rf"{name}: has about 0\.0 GiB of text 2 times; .*split it"):
        tasks.list_ranges([Corpus("input", (str(path),), 2.0)], ReadOptions(), Problems("stop"))
