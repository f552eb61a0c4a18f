"""A tokenizer is one SentencePiece model file, known by its SHA-256, with the five special pieces at ids 0 to 4.

The file is hashed before it is parsed, and what is parsed is what was hashed. Text never yields a special id other
than [UNK]: the special pieces are control symbols, so a document that spells "[MASK]" is text like any other.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import sentencepiece

SPECIAL_IDS = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
SPECIAL_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORD_START = "\u2581"  # SentencePiece's mark of a space before the piece
MAX_BYTES = 256 << 20  # a model of a million pieces takes about 20 MB


class Tokenizer:
    """SentencePiece behind a small interface. `word_start` is bool [vocab_size]: the piece starts a word."""

    pad_id, unk_id, cls_id, sep_id, mask_id = range(5)

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, path: Path, sha256: str) -> None:
        self.processor, self.path, self.sha256 = processor, path, sha256
        self.vocab_size: int = processor.get_piece_size()
        self.special_ids: dict[str, int] = dict(SPECIAL_IDS)
        self.word_start = np.array(
            [processor.id_to_piece(i).startswith(WORD_START) for i in range(self.vocab_size)], dtype=bool
        )

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Tokenizer:
        """Read, hash, parse and check a model file. ValueError names the file and what is wrong with it."""
        path = Path(path)
        try:
            with open(path, "rb") as file:
                model = file.read(MAX_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"{path}: tokenizer file not found") from None
        except IsADirectoryError:
            raise ValueError(f"{path}: is a folder; name the tokenizer.model in it") from None
        if not 0 < len(model) <= MAX_BYTES:
            raise ValueError(
                f"{path}: is empty or larger than {MAX_BYTES >> 20} MiB, so no SentencePiece model"
            )
        sha256 = hashlib.sha256(model).hexdigest()
        processor = sentencepiece.SentencePieceProcessor()
        try:
            parsed = processor.LoadFromSerializedProto(model)
        except (RuntimeError, OSError, ValueError) as error:
            raise ValueError(
                f"{path}: not a SentencePiece model ({str(error).splitlines()[0]:.100})"
            ) from None
        if not parsed or processor.get_piece_size() <= len(SPECIAL_PIECES):
            raise ValueError(f"{path}: not a SentencePiece model, or one without pieces")
        for i, piece in enumerate(SPECIAL_PIECES):
            if (found := processor.id_to_piece(i)) != piece:
                raise ValueError(
                    f"{path}: piece {i} must be {piece}, is {found!r:.40}; train with `python -m data_prep build`"
                )
        for i, piece in enumerate(SPECIAL_PIECES):
            if not (processor.is_unknown(i) if i == Tokenizer.unk_id else processor.is_control(i)):
                raise ValueError(f"{path}: piece {piece} must be a control symbol ([UNK]: the unknown one)")
        return Tokenizer(processor, path, sha256)

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Token ids of each text, without special tokens. `threads` is SentencePiece's own pool; -1 takes every core."""
        return self.processor.encode(list(texts), out_type=int, num_threads=threads)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of token ids; [PAD], [CLS], [SEP] and [MASK] vanish. ValueError for an id outside the vocabulary."""
        listed = [int(i) for i in ids]
        if listed and not (min(listed) >= 0 and max(listed) < self.vocab_size):
            raise ValueError(f"{self.path}: ids to decode must lie in 0..{self.vocab_size - 1}")
        return self.processor.decode(listed)
