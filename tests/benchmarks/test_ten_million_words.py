"""The cut of ten million words: its size, its order, and what is never in it."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import ten_million_words
from benchmarks.race.dataset import is_held_out


@pytest.fixture
def text(tmp_path):
    """Two novels of 30 words each and 300 articles of 5 (their title among them), some of which the race holds out."""
    (tmp_path / "novels").mkdir()
    (tmp_path / "enwiki/AA").mkdir(parents=True)
    for name in ("b", "a"):
        (tmp_path / f"novels/{name}.txt").write_bytes(b"\xef\xbb\xbf" + f"novel {name} x\r\n".encode() * 10)
    articles = [f'<doc id="{n}" title="t">\nT{n}\n\nfour\twords\u00a0of {n}.\n</doc>\n' for n in range(300)]
    (tmp_path / "enwiki/AA/wiki_00").write_text("".join(articles))
    return tmp_path


def test_cut_has_exactly_the_words_asked(text) -> None:
    for words in (1, 30, 31, 60, 64, 65, 700):
        assert sum(len(document.split()) for document in ten_million_words.cut(text, words)) == words
    with pytest.raises(ValueError, match="words; --words asks for 100,000"):
        list(ten_million_words.cut(text, 100_000))


def test_novels_first_then_articles_by_digest(text) -> None:
    documents = list(ten_million_words.cut(text, 700))
    assert [document[:7] for document in documents[:2]] == ["novel a", "novel b"]
    articles = "".join(documents[2:])
    assert "<doc" not in articles and "</doc" not in articles
    numbers = [int(document.split()[0][1:]) for document in documents[2:]]
    assert numbers != sorted(numbers) and len(set(numbers)) == len(numbers)
    (text / "enwiki/AA/wiki_00").rename(text / "enwiki/AA/wiki_99")
    assert list(ten_million_words.cut(text, 700)) == documents


def test_held_out_documents_are_left_out(text) -> None:
    raw = (text / "enwiki/AA/wiki_00").read_bytes()
    held_out = [part for part in raw.split(b"</doc>\n") if part and is_held_out(part + b"</doc>\n")]
    assert held_out
    taken = "".join(ten_million_words.documents(text))
    assert all(part.split()[-1].decode() not in taken.split() for part in held_out)


def test_another_text_is_cut_and_split_again(text, monkeypatch) -> None:
    """In the same --run, where the first one stays."""
    monkeypatch.setattr(ten_million_words.dataset, "build_both", lambda *given: given[2:4])  # folder and digest
    other = text / "other"
    for name in ("enwiki", "novels"):
        shutil.copytree(text / name, other / name)
    (other / "novels/a.txt").write_text("another novel " * 15)
    first, second, again = (
        ten_million_words.prepare(Namespace(run=text / "run", text=one, words=65), 600) for one in (text, other, text)
    )
    assert first == again and first[0] != second[0] and first[1] != second[1]


def test_other_pairs_are_scored_again(tmp_path, monkeypatch) -> None:
    def score(command: list[str], threads: int, log: Path) -> None:
        share = 0.5 if "one/" in command[command.index("--pairs") + 1] else 0.7
        table = {"accuracy": share, "pairs": 10, "ties": 0, "fields": {}}
        Path(command[command.index("--json") + 1]).write_text(json.dumps(table))

    monkeypatch.setattr(ten_million_words.hardware, "call", score)
    for name, share in (("one", 0.5), ("two", 0.7), ("one", 0.5)):
        found = ten_million_words.judged(tmp_path / "run", tmp_path / name, 1)
        assert [found[judge]["causal"]["accuracy"] for judge in ("blimp", "zorro")] == [share, share]
