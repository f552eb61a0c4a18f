"""Training of a WordPiece vocabulary: the pieces that SentencePiece's merges make of BERT's words, the same each time.

(The trainer of Hugging Face's tokenizers depends on the order of a hash table: two runs on the same text differ.)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from data_prep.options import BuildOptions
from megabert.data.tokenizer import CONTINUATION, SPECIAL_PIECES, WORD_START, Tokenizer


def words_of(lines: list[str], options: BuildOptions) -> list[str]:
    """The lines as BERT's tokenizer sees them: lower-cased if asked for, accents kept, its words parted by spaces."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import normalizers, pre_tokenizers

    normalizer = normalizers.BertNormalizer(lowercase=options.lowercase, strip_accents=False)
    parted = pre_tokenizers.BertPreTokenizer()
    normal = (normalizer.normalize_str(line) for line in lines)
    return [" ".join(word for word, _ in parted.pre_tokenize_str(line)) for line in normal]


def vocabulary(model: Any, options: BuildOptions) -> Tokenizer:
    """A tokenizer from a parsed SentencePiece BPE model of such words, its merges in their order.

    Every character that the model knows may begin a word and go on with one, so that what is known is never [UNK].
    """
    pieces = [piece.piece for piece in model.pieces if piece.type == 1]
    characters = sorted(piece for piece in pieces if len(piece) == 1 and piece != WORD_START)
    made = dict.fromkeys((*SPECIAL_PIECES, *characters, *(CONTINUATION + c for c in characters)))
    for piece in pieces:
        if len(made) >= options.vocab_size:
            break
        bare = piece.removeprefix(WORD_START)
        if bare:
            made[bare if piece != bare else CONTINUATION + bare] = None
    said = {"lowercase": options.lowercase, "strip_accents": False}
    return Tokenizer.parse("".join(f"{piece}\n" for piece in made).encode(), Path("vocab.txt"), said)
