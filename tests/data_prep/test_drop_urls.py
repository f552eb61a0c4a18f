"""Builds with lists of URLs: listed documents go, whatever file they come in, and the lists are part of what a build is."""

import json
import random
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from data_prep.__main__ import main

OLD = Path(__file__).resolve().parents[1] / "data" / "old_formats"
NUMBER = 40


@pytest.fixture
def inputs(tmp_path):
    words, rng = (OLD / "text" / "notes.txt").read_text().split(), random.Random(1)
    texts = [" ".join(rng.sample(words, 50)) for _ in range(NUMBER)]
    urls = [f"http://site{i}.org/page" for i in range(NUMBER)]
    lines = [json.dumps({"text": text, "link": url}) for text, url in zip(texts[:20], urls, strict=False)]
    lines += [json.dumps({"text": "This one has no address at all.", "link": None})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    documents = [
        f'<doc id="1" url="{url}" title="a &gt; b">\n{text}\n</doc>\n' for text, url in zip(texts[20:30], urls[20:30], strict=True)
    ]  # fmt: skip
    (tmp_path / "b.txt").write_text("".join(documents))
    parquet.write_table(pa.table({"text": texts[30:], "link": urls[30:]}), tmp_path / "c.parquet")
    (tmp_path / "hosts").write_text("site3.org\nsite25.org\nsite35.org\nsite36.org\n")
    (tmp_path / "pages").write_text("https://site7.org/page/\nsite8.org/other\n")
    return tmp_path


def build(inputs, output, *options, files=("a.jsonl", "b.txt", "c.parquet")):
    return main(
        ["build", "--input", *(str(inputs / name) for name in files), "--no-nsp", "--seq-len", "32", "--held-out", "0",
         "--keep-titles", "--tokenizer", str(OLD / "dataset" / "tokenizer.model"), "--output", str(output), "--quiet", *options]
    )  # fmt: skip


def test_listed_documents_are_dropped_and_counted(inputs, tmp_path, capsys):
    lists = ("--drop-urls", f"{inputs}/hosts", f"{inputs}/pages", "--url-field", "link", "--workers", "1")
    assert build(inputs, tmp_path / "out", *lists) == 0
    assert "1 documents have no URL and stayed" in capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["dropped"]["reasons"] == {"listed URL": 5} and report["dropped"]["without_url"] == 1
    assert report["read"]["documents"] == NUMBER + 1 and report["datasets"]["32"]["documents"] == NUMBER - 4
    page = (tmp_path / "out" / "report.html").read_text()
    assert "listed URL" in page and "1 documents have no URL" in page
    assert build(inputs, tmp_path / "out", *lists) == 0
    (inputs / "pages").write_text("https://site9.org/page/\n")
    assert build(inputs, tmp_path / "out", *lists) == 2
    assert "holds a dataset of another build" in capsys.readouterr().err


def test_lists_are_no_part_of_a_build_without_them(inputs, tmp_path):
    assert build(inputs, tmp_path / "out", "--workers", "1") == 0
    account = json.loads((tmp_path / "out" / "build.json").read_text())
    assert "url lists" not in account and "drop_urls" not in account["options"]
    assert "url_field" not in account["options"]["read"]
    assert "without_url" not in json.loads((tmp_path / "out" / "report.json").read_text())["dropped"]


def test_a_build_of_which_no_document_has_a_url_stops(inputs, tmp_path, capsys):
    lists = ("--drop-urls", f"{inputs}/hosts", "--workers", "1")
    assert build(inputs, tmp_path / "out", *lists, files=("a.jsonl",)) == 2
    assert "none of 21 documents has a URL in its field 'url'; --url-field names another" in capsys.readouterr().err
    hosts = (inputs / "hosts").read_text()
    (inputs / "hosts").write_text(hosts + "site4.org\n")
    assert (
        build(inputs, tmp_path / "out", *lists, "--allow", files=("a.jsonl",)) == 2
    )  # an unfinished build of another list
    assert "url lists" in capsys.readouterr().err
    (inputs / "hosts").write_text(hosts)
    assert build(inputs, tmp_path / "out", *lists, "--allow", files=("a.jsonl",)) == 0
    assert build(inputs, tmp_path / "new", "--url-field", "link", files=("a.jsonl",)) == 2
    assert "--url-field: link takes --drop-urls" in capsys.readouterr().err
