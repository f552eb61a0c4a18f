"""Documents as the filters see them, made from plain strings, and the real articles where they are."""

import os
from pathlib import Path

import pytest

from data_prep import clean, sources, words
from data_prep.problems import Problems

ROOT = Path(__file__).resolve().parents[2]


def batch_of(documents):
    """A Batch of documents, each a list of paragraphs or one string with line feeds between them."""
    return words.batch_of([d.split("\n") if isinstance(d, str) else d for d in documents], "NFC")


def articles(count):
    """The first `count` real articles as lists of paragraphs."""
    data = Path(os.environ.get("MEGABERT_DATA") or ROOT.parent / "shared" / "data")
    if not (data / "enwiki").is_dir():
        pytest.skip("no real articles: MEGABERT_DATA names no folder with enwiki")
    options, problems = sources.ReadOptions(), Problems("stop")
    found = []
    for task in sources.plan([sources.Corpus("wiki", (str(data / "enwiki"),))], options, problems):
        for piece in task.pieces:
            for document in sources.read(piece, options, problems):
                found.append(clean.paragraphs(clean.decode(document.text)[0], document.markup))
                if len(found) == count:
                    return found
    raise AssertionError(f"only {len(found)} articles")
