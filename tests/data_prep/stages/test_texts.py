"""Saved documents: what goes into the rows, and the same tokens when a build reads them."""

import csv
import json
import os
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from tests.helpers.prep_reading import contents


@pytest.fixture(scope="module")
def inputs(topics, tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    for i, text in enumerate(topics[:40]):
        (folder / f"{i:02}.txt").write_text(text)
    (folder / "40.txt").write_text(topics[3])  # a document twice
    lines = "\n\n".join(
        [
            "A short line stands here, and no other follows.",
            topics[5].split("\n\n")[1],
            "“你好。”再见 &amp; so. &amp;lt;b&amp;gt;",
        ]
    )
    (folder / "41.txt").write_text(lines)
    return folder


def test_saved_documents_build_the_same_tokens(inputs, command, tokenizer_file, tmp_path):
    """Exact, near and paragraph duplicates are gone; another build reads the same documents again."""

    def build(source, output, *extra):
        result = command(
            "build", "--input", source, "--output", tmp_path / output, "--tokenizer", tokenizer_file, "--quiet", "--save-text",
            "--held-out", 0.05, *extra,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        return parquet.read_table(tmp_path / output / "text"), json.loads(
            (tmp_path / output / "report.json").read_text()
        )

    first, report = build(inputs, "first", "--dedup", "documents", "near", "paragraphs", "--workers", 2)
    dataset = report["datasets"]["128"]
    assert report["dropped"]["reasons"]["exact duplicate"] == 1 and report["dropped"]["repeated_paragraphs"] > 0
    assert sum(first["tokens"].to_pylist()) == dataset["corpus_tokens"] + dataset["held_out"]["tokens"]
    assert first["text"][-1].as_py().startswith("A short line stands here, and no other follows.\n\n“你好。")
    assert "再见 &amp; so. &amp;lt;b&amp;gt;" in first["text"][-1].as_py()
    rows = list(csv.DictReader((tmp_path / "first" / "sources.csv").open()))
    assert {row["source"] for row in rows} == set(first["source"].to_pylist()) and str(inputs / "40.txt") not in str(
        rows
    )
    assert sum(int(row["tokens"]) for row in rows) == sum(first["tokens"].to_pylist())
    again, report = build(tmp_path / "first" / "text", "again", "--workers", 1)
    assert again["text"].equals(first["text"]) and again["tokens"].equals(first["tokens"])
    assert report["dropped"]["documents"] == 0
    build(inputs, "one", "--dedup", "documents", "near", "paragraphs", "--workers", 1)
    assert contents(tmp_path / "one") == contents(tmp_path / "first")


def test_a_name_that_is_not_unicode_is_shown(topics, command, tokenizer_file, tmp_path):
    (tmp_path / "in").mkdir()
    Path(os.fsdecode(bytes(tmp_path / "in") + b"/caf\xe9.txt")).write_text(topics[0])
    result = command(
        "build", "--input", tmp_path / "in", "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--save-text", "--quiet",
        "--workers", 1,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (source,) = set(parquet.read_table(tmp_path / "out" / "text")["source"].to_pylist())
    assert source == f"{tmp_path}/in/caf\ufffd.txt" and source in (tmp_path / "out" / "sources.csv").read_text()
