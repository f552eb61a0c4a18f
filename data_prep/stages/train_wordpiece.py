"""Training of a WordPiece vocabulary: the pieces that SentencePiece's merges make of BERT's words, the same each time.

(The trainer of Hugging Face's tokenizers depends on the order of a hash table: two runs on the same text differ.)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from data_prep.common.errors import BadInput
from data_prep.options import BuildOptions
from megabert.data.tokenizer import CONTINUATION, SPECIAL_TOKENS, WORD_START, Tokenizer


def words_of(lines: list[str], options: BuildOptions) -> list[str]:
    """The lines as BERT's tokenizer sees them: lower-cased if asked for, accents kept, its words parted by spaces."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import normalizers, pre_tokenizers

    normalizer = normalizers.BertNormalizer(lowercase=options.lowercase, strip_accents=False)
    parted = pre_tokenizers.BertPreTokenizer()
    normal = (normalizer.normalize_str(line) for line in lines)
    return [" ".join(word for word, _ in parted.pre_tokenize_str(line)) for line in normal]


def too_few(options: BuildOptions, least: int) -> BadInput:
    """What to say where `vocab_size` is less than the characters alone take."""
    return BadInput(
        f"--vocab-size: {options.vocab_size} pieces are too few, as the corpus' characters alone take {least}; give more, or a "
        "lower --character-coverage"
    )


def vocabulary(model: Any, options: BuildOptions) -> Tokenizer:
    """A tokenizer from a parsed SentencePiece BPE model of such words, its merges in their order.

    Every character that the model knows may begin a word and go on with one, so that what is known is never [UNK]. Where
    that is more than `vocab_size`, those that BERT's tokenizer makes words of their own (ideographs, punctuation) begin one
    only. Raises BadInput naming the least size where that is too many still.
    """
    pieces = [piece.piece for piece in model.pieces if piece.type == 1]
    characters = sorted(piece for piece in pieces if len(piece) == 1 and piece != WORD_START)
    longer = [piece for piece in pieces if len(piece) > 1]
    inner = characters
    if len(SPECIAL_TOKENS) + len(characters) + len(inner) > options.vocab_size:
        inner = [c for c in characters if words_of([f"a{c}a"], options) != [f"a {c} a"]]
    made = dict.fromkeys((*SPECIAL_TOKENS, *characters, *(CONTINUATION + c for c in inner)))
    if len(made) > options.vocab_size:
        raise too_few(options, len(made))
    for piece in longer:
        if len(made) >= options.vocab_size:
            break
        bare = piece.removeprefix(WORD_START)
        made[bare if piece != bare else CONTINUATION + bare] = None
    said = {"lowercase": options.lowercase, "strip_accents": False}
    return Tokenizer.parse("".join(f"{piece}\n" for piece in made).encode(), Path("vocab.txt"), said)
