"""Saved documents: what goes into the rows, and the same tokens when a build reads them."""

import csv
import os
from pathlib import Path

import pyarrow.parquet as parquet

from tests.helpers.prep_builds import build_here
from tests.helpers.prep_reading import contents, write_all


def test_saved_documents_build_the_same_tokens(topics, tokenizer_file, tmp_path):
    """Exact, near and paragraph duplicates are gone; another build reads the same documents again."""
    inputs = write_all(tmp_path / "in", {f"{i:02}.txt": text for i, text in enumerate(topics[:40])})
    short, greeting = "A short line stands here, and no other follows.", "“你好。”再见 &amp; so. &amp;lt;b&amp;gt;"
    last = "\n\n".join([short, topics[5].split("\n\n")[1], greeting])
    write_all(inputs, {"40.txt": topics[3], "41.txt": last})  # a document twice
    Path(os.fsdecode(bytes(inputs) + b"/0\xe9.txt")).write_text(topics[40])

    def save(source, output, **options):
        options |= {"tokenizer": tokenizer_file, "save_text": True, "held_out": 0.05}
        facts = build_here(source, tmp_path / output, **options)
        return parquet.read_table(tmp_path / output / "text"), facts

    dedup = ("documents", "near", "paragraphs")
    first, facts = save(inputs, "first", dedup=dedup, workers=2)
    dataset, dropped, tokens = facts["datasets"]["128"], facts["dropped"], sum(first["tokens"].to_pylist())
    assert dropped["reasons"]["exact duplicate"] == 1 and dropped["repeated_paragraphs"] > 0
    assert tokens == dataset["corpus_tokens"] + dataset["held_out"]["tokens"]
    assert first["text"][-1].as_py() == f"{short}\n\n{greeting.replace('”', '” ')}"
    rows = list(csv.DictReader((tmp_path / "first" / "sources.csv").open()))
    sources = {row["source"] for row in rows}
    assert sources == set(first["source"].to_pylist()) and f"{inputs}/40.txt" not in sources
    assert f"{inputs}/0\ufffd.txt" in sources  # a name that is not Unicode
    assert sum(int(row["tokens"]) for row in rows) == tokens
    again, facts = save(tmp_path / "first" / "text", "again", workers=1)
    assert again["text"].equals(first["text"]) and again["tokens"].equals(first["tokens"])
    assert facts["dropped"]["documents"] == 0
    save(inputs, "one", dedup=dedup, workers=1)
    assert contents(tmp_path / "one") == contents(tmp_path / "first")
