"""Pairs of texts in files, over the words of `finetune_problem`: what belongs to a word is the word 20 further."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.finetune_problem import WORDS, sentences


def partner(text: str) -> str:
    """The text that belongs to one."""
    return " ".join(WORDS[(WORDS.index(word) + 20) % len(WORDS)] for word in text.split())


def write(path: Path, count: int, seed: int) -> Path:
    """Columns `a`, `b` and `wrong`, which belongs to another one."""
    texts = list(dict.fromkeys(" ".join(words[:4]) for words in sentences(count, seed)))
    rows = [
        f"{text}\t{partner(text)}\t{partner(other)}" for text, other in zip(texts, texts[1:] + texts[:1], strict=True)
    ]
    path.write_text("a\tb\twrong\n" + "".join(f"{row}\n" for row in rows))
    return path
