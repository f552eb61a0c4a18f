"""A small task in files, and a tiny pre-trained run folder, made without data_prep."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from megabert import checkpoint
from tests.helpers import tiny

WORDS = [f"w{i}" for i in range(40)]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


def write_run(folder: Path, **overrides: object) -> Path:
    """A run folder whose checkpoint of step 0 is a random 4-layer model over `VOCABULARY`; gives the folder."""
    from megabert.data.tokenizer import Tokenizer

    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCABULARY))
    settings = {"model__layers": 4, "model__vocab_size": len(VOCABULARY), "model__max_positions": 32}
    cfg, tokenizer = tiny.config(**settings | overrides), Tokenizer.load(folder / "vocab.txt")
    state = {"config": cfg.model_dump(), "dataset": "none", "tokenizer": tokenizer.sha256, "seconds": 0.0}
    checkpoint.write_start(folder, tiny.model(cfg).state_dict(), state)
    return folder


def sentences(count: int, seed: int) -> list[list[str]]:
    draw = np.random.default_rng(seed)
    return [[WORDS[i] for i in draw.integers(0, 40, draw.integers(3, 12))] for _ in range(count)]


def write_texts(path: Path, count: int, seed: int) -> Path:
    """Label `even` or `odd`: the number of the first word."""
    rows = [("even", "odd")[int(words[0][1:]) % 2] + "\t" + " ".join(words) for words in sentences(count, seed)]
    path.write_text("label\ttext\n" + "".join(f"{row}\n" for row in rows))
    return path


def write_label_sets(path: Path, count: int, seed: int) -> Path:
    """Texts of a word, and their labels with commas between: whether its number is `even`, whether it is `high`."""
    numbers = [int(words[0][1:]) for words in sentences(count, seed)]
    rows = [",".join(["even"] * (n % 2 == 0) + ["high"] * (n >= 20)) + f"\tw{n}\n" for n in numbers]
    path.write_text("label\ttext\n" + "".join(rows))
    return path


def write_tags(path: Path, count: int, seed: int) -> Path:
    """Words from w30 on are entities of one word, of kind A or B by parity."""
    blocks = []
    for words in sentences(count, seed):
        numbers = [int(word[1:]) for word in words]
        tags = ["O" if n < 30 else ("B-A", "B-B")[n % 2] for n in numbers]
        blocks.append("".join(f"{w}\t{t}\n" for w, t in zip(words, tags, strict=True)))
    path.write_text("\n".join(blocks))
    return path


def write_questions(path: Path, count: int, seed: int) -> Path:
    """The answer to a question of one word is the word behind it in the context."""
    paragraphs = []
    for number, words in enumerate(sentences(count, seed)):
        context = " ".join(words)
        at = words.index(words[1])
        start = len(" ".join(words[: at + 1])) + 1 if at + 1 < len(words) else 0
        answer = {"text": words[at + 1] if at + 1 < len(words) else words[0], "answer_start": start}
        entry = {"id": f"q{number}", "question": words[1], "answers": [answer]}
        paragraphs.append({"context": context, "qas": [entry]})
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    return path
