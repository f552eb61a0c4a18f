"""Documents as the filters see them, made from plain strings, and the real articles where they are."""

import os
from pathlib import Path

import pytest

from data_prep.common.errors import Problems
from data_prep.common.records import Corpus, ReadOptions
from data_prep.readers import tasks
from data_prep.readers.documents import read_documents
from data_prep.text import clean
from data_prep.tokens import encoder

ROOT = Path(__file__).resolve().parents[2]


def batch_of(documents):
    """Facts of the words of documents, each a list of paragraphs or one string with line feeds between them."""
    return encoder.word_facts([d.split("\n") if isinstance(d, str) else d for d in documents], folded=True)


def articles(count):
    """The first `count` real articles as lists of paragraphs."""
    data = Path(os.environ.get("MEGABERT_DATA") or ROOT.parent / "shared" / "data")
    if not (data / "enwiki").is_dir():
        pytest.skip("no real articles: MEGABERT_DATA names no folder with enwiki")
    options, problems = ReadOptions(), Problems("stop")
    found = []
    for task in tasks.group(tasks.list_ranges([Corpus("wiki", (str(data / "enwiki"),))], options, problems)):
        for part in task.ranges:
            for document in read_documents(part, options, problems):
                found.append(clean.paragraphs(clean.decode(document.text)[0], document.markup))
                if len(found) == count:
                    return found
    raise AssertionError(f"only {len(found)} articles")
