"""Small real-shaped datasets for loader tests, made row by row in plain Python through the public writers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from megabert.data.masking import MaskingVocabulary
from megabert.data.shards import write_manifest, write_shard

VOCAB = 2000
SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
TOKENIZER = b"a stand-in: these tests never parse it"
BLOCK_ROWS = 8
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def vocabulary() -> MaskingVocabulary:
    """Seven in ten tokens begin a word."""
    return MaskingVocabulary(np.arange(VOCAB) % 10 < 7, SPECIAL["mask"], SPECIAL.values())


def make_rows(rows: int, seq_len: int = 128, slots: int = 8, seed: int = 0, shortest: int = 12) -> Arrays:
    """ids, bounds, isnext: sequences of `shortest`.. tokens until the row is full or nearly so, 5 in 6 of them pairs."""
    rng = np.random.default_rng(seed)
    ids, bounds = np.zeros((rows, seq_len), np.uint16), np.zeros((rows, slots, 2), np.uint16)
    isnext = np.full((rows, slots), -1, np.int8)
    for i in range(rows):
        start = 0
        for s in range(slots):
            room = seq_len - start
            if room < shortest:
                break
            length = room if rng.random() < 0.5 else int(rng.integers(shortest, room + 1))
            ids[i, start : start + length] = rng.integers(len(SPECIAL), VOCAB, length)
            ids[i, start], ids[i, start + length - 1] = SPECIAL["cls"], SPECIAL["sep"]
            first = length
            if rng.random() < 5 / 6:
                first = int(rng.integers(3, length - 2))
                ids[i, start + first - 1] = SPECIAL["sep"]
                isnext[i, s] = rng.integers(0, 2)
            bounds[i, s] = length, first
            start += length
    return ids, bounds, isnext


def make_dataset(
    folder: Path,
    rows: int,
    *,
    seq_len: int = 32,
    slots: int = 3,
    shard_rows: int = 64,
    seed: int = 0,
    arrays: Arrays | None = None,
    **changes: Any,
) -> Path:
    """A dataset of `rows` rows in `folder`; `changes` replace fields of its manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = arrays or make_rows(rows, seq_len, slots, seed)
    shards = []
    for first in range(0, rows, shard_rows):
        path, part = folder / f"shard-{first // shard_rows:06d}.tar", [a[first : first + shard_rows] for a in arrays]
        shards.append(write_shard(path, first // BLOCK_ROWS, *part, block_rows=BLOCK_ROWS))
    (folder / "tokenizer.model").write_bytes(TOKENIZER)
    write_manifest(folder, manifest(rows, seq_len, slots, BLOCK_ROWS, shards) | changes)
    return folder


def manifest(rows: int, seq_len: int, slots: int, block_rows: int, shards: list[dict[str, Any]]) -> dict[str, Any]:
    tokenizer = {"kind": "sentencepiece", "file": "tokenizer.model", "sha256": hashlib.sha256(TOKENIZER).hexdigest()}
    sizes = {"seq_len": seq_len, "max_sequences": slots, "rows": rows, "block_rows": block_rows, "dtype": "uint16"}
    rest = {"statistics": {}, "options": {}, "shards": shards, "held_out": None, "order": 2}
    return {"schema": 1, "tokenizer": tokenizer | {"vocab_size": VOCAB, "special_ids": SPECIAL}} | sizes | rest


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flip one bit of a file in place: a second call takes it back, and maps that are open see it."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
