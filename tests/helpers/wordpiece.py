"""Small vocab.txt files, the published one where it is at hand, text to try them on, and transformers' tokenizer."""

from __future__ import annotations

import os
import random
import string
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("MEGABERT_DATA", ROOT.parent / "shared" / "data"))
SPECIAL = {"[PAD]": 0, "[UNK]": 6, "[CLS]": 7, "[SEP]": 8, "[MASK]": 9}  # with [unused] pieces between, as published
WORDS = ("over", "the", "fox", "sea", "river", "words", "##es", "##ing", "##er", "cafe", "strasse", "##ox", "中")
RANGES = [  # of code points: everything a cleaner treats differently
    (0x00, 0x20), (0x20, 0x7F), (0x7F, 0xA1), (0xA1, 0x250), (0x300, 0x370), (0x370, 0x400), (0x400, 0x500),
    (0x590, 0x700), (0x1E00, 0x1F00), (0x2000, 0x2070), (0x2100, 0x2200), (0x3000, 0x3100), (0x4E00, 0x9FFF),
    (0xAC00, 0xAD00), (0xE000, 0xE010), (0xFB00, 0xFB07), (0xFE00, 0xFE10), (0xFEFF, 0xFF20), (0xFFF0, 0x10000),
    (0x1F300, 0x1F650), (0x20000, 0x20010), (0x1D400, 0x1D420), (0xE0100, 0xE0110),
]  # fmt: skip


def write(path: Path, cased: bool = False) -> Path:
    """A vocab.txt of about 150 pieces, special ids 0 and 6 to 9; every ASCII word can be spelled with it."""
    letters = string.ascii_lowercase + string.digits + (string.ascii_uppercase if cased else "")
    order = {i: piece for piece, i in SPECIAL.items()}
    pieces = [order.get(i, f"[unused{i}]") for i in range(10)]
    pieces += [*WORDS, *letters, *string.punctuation, *(f"##{letter}" for letter in letters), "é", "##é"]
    path.write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")
    return path


def write_letters(path: Path, text: str) -> Path:
    """A cased vocab.txt with a token for each character of a text, to begin a word and inside one."""
    letters = sorted({*text} - {" "})
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    path.with_name("tokenizer_config.json").write_text('{"do_lower_case": false}')
    path.write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    return path


def published() -> Path:
    path = DATA / "bert-base-uncased-vocab.txt"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in {DATA}; MEGABERT_DATA names the folder")
    return path


def peer(path: Path):
    """transformers' BertTokenizer over the same file, cased if the file holds a letter A."""
    from transformers import BertTokenizer

    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return BertTokenizer(vocab={p: i for i, p in enumerate(lines)}, do_lower_case="A" not in lines)


def odd_texts(count: int, seed: int = 0) -> list[str]:
    """Texts of words, accents, CJK, control characters, emoji and words around BERT's limit of 100 characters."""
    rng = random.Random(seed)
    texts = ["", " ", "naïve café Strasse", "a" * 100, "a" * 101, "é" * 101, "fox\u0301es", "\ufeffthe", "中文fox"]
    texts += ["the\x00fox", "\u200bsea", "ﬁne İstanbul ΣΑΣ", "👩‍👩‍👧 river", "the\u2028fox", "Ⅳ ℝ ǅ", "x" * 5000]
    while len(texts) < count:
        parts = []
        for _ in range(rng.randint(1, 12)):
            low, high = rng.choice(RANGES)
            run = "".join(chr(rng.randrange(low, high)) for _ in range(rng.randint(1, 6)))
            parts.append(rng.choice([run, rng.choice(WORDS), rng.choice(WORDS).title(), " ", "\t\n"]))
        texts.append("".join(parts))
    return texts
