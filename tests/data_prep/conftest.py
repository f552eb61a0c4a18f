"""Real text that every Python has (pydoc's topics) and a small tokenizer trained on it by the real command."""

import pydoc_data.topics
import random

import pytest

from data_prep.executor.work_files import BuildJob
from data_prep.options import BuildOptions
from tests.helpers.prep_builds import build_here
from tests.helpers.prep_reading import write_all


@pytest.fixture(scope="session")
def topics():
    """About 80 documents of real English, 600 KB."""
    return list(pydoc_data.topics.topics.values())


@pytest.fixture(scope="session")
def corpus(topics, tmp_path_factory):
    """A folder of six WikiExtractor-like files, 12 MB together: documents of sentences drawn from the topics."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [" ".join(line.split()) for text in topics for line in text.split("\n\n") if len(line.strip()) > 30]
    rng = random.Random(7)
    number = 0
    for i in range(6):
        with open(folder / f"wiki_{i:02}", "w", encoding="utf-8") as file:
            while file.tell() < 2_000_000:
                number += 1
                body = "\n".join(rng.choices(lines, k=rng.randint(1, 30)))
                file.write(f'<doc id="{number}" url="u" title="Title {number}">\nTitle {number}\n\n')
                file.write(f"Marker{number} opens this text. {body}\n</doc>\n")
    return folder


@pytest.fixture(scope="session")
def tokenizer_file(topics, tmp_path_factory):
    """A unigram model of 3,000 tokens made by the command itself."""
    folder = write_all(tmp_path_factory.mktemp("tokenizer"), {f"{i:03}.txt": text for i, text in enumerate(topics)})
    build_here(folder / "*.txt", folder / "out", vocab_size=3000, workers=1)
    return folder / "out" / "tokenizer.model"


@pytest.fixture
def job(tmp_path):
    """A job with the default options and without a tokenizer, whose work files are in tmp_path."""
    return BuildJob(BuildOptions(), "", str(tmp_path), "stop")
