"""Words added to a vocabulary: a tokenizer with tokens at its end, and the model's rows for them.

Where a model continues with text of another field or language, a word that would be many tokens becomes one. Its row of the
embedding (and of the decoder) starts as the mean of those of the tokens it was, so that the model begins with what it learned
of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabert.data.text import writes_without_spaces
from megabert.data.tokenizer import SPECIAL_TOKENS, WORD_START, Tokenizer

# steps of a unigram score in 1, as data_prep trains them: their sums are exact
STEPS = 256
# SentencePiece's numbers of the types of tokens and of models
NORMAL, UNIGRAM = 1, 1
# tensors with a row a token; the decoder's where it is not tied
ROWS = (
    *("bert.embeddings.word_embeddings.weight", "cls.predictions.bias", "cls.predictions.decoder.weight"),
    *("model.embeddings.tok_embeddings.weight", "decoder.bias", "decoder.weight"),
)


def read_words(path: Path) -> list[str]:
    """The words of a file, one a line, in their order. Raises ValueError naming the file where it holds none."""
    try:
        lines = list(dict.fromkeys(line.strip() for line in path.read_text(encoding="utf-8").splitlines()))
    except FileNotFoundError:
        raise ValueError(f"{path}: not found; name a file with a word a line") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8") from None
    words = [word for word in lines if word]
    if not words:
        raise ValueError(f"{path}: is empty; give a word a line")
    return words


def extended(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[Tokenizer, list[list[int]]]:
    """A tokenizer in which each of `words` is one token, and the ids that each new token was before.

    Existing ids stay. Words that are one token already are left out. Raises ValueError naming a word that cannot be one.
    """
    if tokenizer.kind == "wordpiece":
        return _wordpiece(tokenizer, words)
    return _unigram(tokenizer, words)


def rows_of(weights: dict[str, Tensor], parts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """`weights` under Hugging Face's names, with a row (a bias) for each of `parts`: the mean of theirs."""
    extended_weights = dict(weights)
    for name in weights.keys() & set(ROWS):
        new = [extended_weights[name][list(ids)].mean(0, keepdim=True) for ids in parts]
        extended_weights[name] = torch.cat([extended_weights[name], *new])
    return extended_weights


def _wordpiece(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[Tokenizer, list[list[int]]]:
    added: dict[str, list[int]] = {}
    normalizer, splitter = tokenizer.processor.normalizer, tokenizer.processor.pre_tokenizer
    for word, ids in zip(words, tokenizer.encode_batch(words), strict=True):
        token = normalizer.normalize_str(word).strip()
        parts = [part for part, _ in splitter.pre_tokenize_str(token)]
        if parts != [token] or token in SPECIAL_TOKENS:
            raise ValueError(
                f"{tokenizer.path}: {word!r:.40} is {len(parts)} words to BERT's tokenizer ({parts!r:.80}), so no token"
            )
        if len(ids) > 1 or ids == [tokenizer.unk_id]:
            added.setdefault(token, ids)
    lines = tokenizer.data if tokenizer.data.endswith(b"\n") else tokenizer.data + b"\n"
    data = lines + "".join(f"{token}\n" for token in added).encode()
    casing: Any = getattr(tokenizer, "casing")  # noqa: B009
    return Tokenizer.parse(data, tokenizer.path, asdict(casing)), list(added.values())


def _unigram(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[Tokenizer, list[list[int]]]:
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2
    proto = messages.ModelProto.FromString(tokenizer.data)
    if proto.trainer_spec.model_type != UNIGRAM:
        raise ValueError(f"{tokenizer.path}: is no unigram model; words can be added to unigram and WordPiece alone")
    added: dict[str, list[int]] = {}
    for word, apart, inside in zip(words, tokenizer.encode_batch(words), tokenizer.encode_inside(words), strict=True):
        if len(word.split()) != 1:
            raise ValueError(f"{tokenizer.path}: {word!r:.40} is no single word, so no token")
        # in a script without spaces it is found inside a text; elsewhere a word begins with its space
        glued = writes_without_spaces(word[0])
        ids = inside if glued else apart
        token = tokenizer.processor.normalize(word).replace(" ", WORD_START)
        if len(ids) > 1 or ids == [tokenizer.unk_id]:
            added.setdefault(token.removeprefix(WORD_START) if glued else token, ids)
    worst = min(piece.score for piece in proto.pieces)
    for token, ids in added.items():
        score = sum(proto.pieces[i].score if i != tokenizer.unk_id else worst for i in ids)
        # better than its parts by one step, so that it always wins against them and nothing else is changed
        proto.pieces.add(piece=token, score=math.floor(score * STEPS + 1) / STEPS, type=NORMAL)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return Tokenizer.parse(proto.SerializeToString(), tokenizer.path), list(added.values())
