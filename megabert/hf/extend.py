"""More words for a vocabulary: a tokenizer with pieces added at its end, and the model's rows for them.

Where a model goes on with text of another field or language, a word that would be many pieces becomes one. Its row of the
embedding (and of the decoder) starts as the mean of those of the pieces it was, so that the model begins
with what it knew of them.

A BPE model finds a piece by merges of two: a word of three pieces or more takes further pieces on the way to it. They are marked
unused, which SentencePiece merges and takes apart again where they end, so that they never come out; and all that is new is merged
after all that was there, so that a text without a new word keeps its ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megabert.data.text import writes_without_spaces
from megabert.data.tokenizer import SPECIAL_TOKENS, WORD_START, Tokenizer

STEPS = 256  # of a unigram score in 1, as data_prep trains them: their sums are exact
NORMAL, USER_DEFINED, UNUSED = 1, 4, 5  # SentencePiece's numbers of kinds of pieces
UNIGRAM, BPE = 1, 2  # and of kinds of models
ROWS = (  # a row a piece; the decoder's own where it is not tied
    *("bert.embeddings.word_embeddings.weight", "cls.predictions.bias", "cls.predictions.decoder.weight"),
    *("model.embeddings.tok_embeddings.weight", "decoder.bias", "decoder.weight"),
)


def read_words(path: Path) -> list[str]:
    """The words of a file, one a line, in their order. Raises ValueError naming the file where it holds none."""
    try:
        found = list(dict.fromkeys(line.strip() for line in path.read_text(encoding="utf-8").splitlines()))
    except FileNotFoundError:
        raise ValueError(f"{path}: not found; name a file with a word a line") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8") from None
    words = [word for word in found if word]
    if not words:
        raise ValueError(f"{path}: is empty; give a word a line")
    return words


def extended(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[Tokenizer, list[list[int]]]:
    """A tokenizer in which each of `words` is one piece, and of each piece that is new the ids of the pieces it was.

    The ids of the pieces that were there stay.

    Words that are one piece already are left out. Raises ValueError naming a word that cannot be one.
    """
    if tokenizer.kind == "wordpiece":
        return _wordpiece(tokenizer, words)
    return _sentencepiece(tokenizer, words)


def rows_of(weights: dict[str, Tensor], parts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """`weights` under Hugging Face's names, with a row (a bias) for each of `parts`: the mean of theirs."""
    found = dict(weights)
    for name in weights.keys() & set(ROWS):
        new = [found[name][list(ids)].mean(0, keepdim=True) for ids in parts]
        found[name] = torch.cat([found[name], *new])
    return found


def _wordpiece(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[Tokenizer, list[list[int]]]:
    added: dict[str, list[int]] = {}
    normalizer, parts = tokenizer.processor.normalizer, tokenizer.processor.pre_tokenizer
    for word, ids in zip(words, tokenizer.encode_batch(words), strict=True):
        piece = normalizer.normalize_str(word).strip()
        seen = [part for part, _ in parts.pre_tokenize_str(piece)]
        if seen != [piece] or piece in SPECIAL_TOKENS:
            raise ValueError(
                f"{tokenizer.path}: {word!r:.40} is {len(seen)} words to BERT's tokenizer ({seen!r:.80}), so no piece"
            )
        if len(ids) > 1 or ids == [tokenizer.unk_id]:
            added.setdefault(piece, ids)
    lines = tokenizer.data if tokenizer.data.endswith(b"\n") else tokenizer.data + b"\n"
    data = lines + "".join(f"{piece}\n" for piece in added).encode()
    casing: Any = getattr(tokenizer, "casing")  # noqa: B009
    return Tokenizer.parse(data, tokenizer.path, asdict(casing)), list(added.values())


def _sentencepiece(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[Tokenizer, list[list[int]]]:
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2
    proto = messages.ModelProto.FromString(tokenizer.data)
    if proto.trainer_spec.model_type not in (UNIGRAM, BPE):
        raise ValueError(f"{tokenizer.path}: is a model of words or characters; only unigram and BPE take more")
    added: dict[str, list[int]] = {}
    for word, apart, inside in zip(words, tokenizer.encode_batch(words), tokenizer.encode_inside(words), strict=True):
        if len(word.split()) != 1:
            raise ValueError(f"{tokenizer.path}: {word!r:.40} is no single word, so no piece")
        glued = writes_without_spaces(word[0])  # found inside of a text; elsewhere a word begins with its space
        ids = inside if glued else apart
        piece = tokenizer.processor.normalize(word).replace(" ", WORD_START)
        if len(ids) > 1 or ids == [tokenizer.unk_id]:
            added.setdefault(piece.removeprefix(WORD_START) if glued else piece, ids)
    merges = proto.trainer_spec.model_type == BPE
    if merges:
        added = _add_merges(proto, added, tokenizer.unk_id)
    else:
        _add_scores(proto, added, tokenizer.unk_id)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    found = Tokenizer.parse(proto.SerializeToString(), tokenizer.path)
    if merges:
        _check(found, words)
    return found, list(added.values())


def _add_scores(proto: Any, added: dict[str, list[int]], unknown: int) -> None:
    """Add the pieces `added`, each with the ids it was, to a unigram model."""
    worst = min(piece.score for piece in proto.pieces)
    for piece, ids in added.items():
        score = sum(proto.pieces[i].score if i != unknown else worst for i in ids)
        # Better than what it is made of by one step, so that it always wins against that and nothing else is changed.
        proto.pieces.add(piece=piece, score=math.floor(score * STEPS + 1) / STEPS, type=NORMAL)


def _add_merges(proto: Any, words: dict[str, list[int]], unknown: int) -> dict[str, list[int]]:
    """Add the pieces `words`, and what they are merged from, to a BPE model. Returns the ids that each new piece was."""
    known = {p.piece: p for p in proto.pieces if p.type in (NORMAL, USER_DEFINED, UNUSED)}
    ids = {p.piece: [i] for i, p in enumerate(proto.pieces)}
    score = min(p.score for p in proto.pieces)
    added: dict[str, list[int]] = {}
    for word, was in words.items():
        parts = _merged(word, {text: piece.score for text, piece in known.items()})
        for count in range(2, len(parts) + 1):
            score -= 1
            piece = "".join(parts[:count])
            proto.pieces.add(piece=piece, score=score, type=UNUSED)
            known[piece] = proto.pieces[-1]
            added[piece] = [i for part in parts[:count] for i in added.get(part, ids.get(part, [unknown]))]
        known[word].type = NORMAL  # also one that was merely on the way to another word
        if word in added:
            added[word] = was
    return added


def _merged(word: str, scores: dict[str, float]) -> list[str]:
    """The pieces that SentencePiece's BPE makes of a word: again and again the best pair of neighbours, the first of equal ones."""
    parts = list(word)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def _check(tokenizer: Tokenizer, words: Sequence[str]) -> None:
    """Raises ValueError for a word that is not one piece."""
    for word, apart, inside in zip(words, tokenizer.encode_batch(words), tokenizer.encode_inside(words), strict=True):
        if len(inside if writes_without_spaces(word[0]) else apart) != 1:
            raise ValueError(f"{tokenizer.path}: {word!r:.40} can be no one piece of this model; leave it out")
