"""Sentences far longer than a row, split at the best places: after a comma or the like, else before a word.

Where no sentence end is found (speech that was typed without punctuation, tables, a script whose marks nobody knows) pairs
would lose most of a text to truncation. What is a good place is a fact of the pieces on either side of it.
Legend: t tokens, s sentences, c cuts.
"""

from __future__ import annotations

import unicodedata

import numpy as np

from data_prep.tokens.encoder import Encoded
from megabert.data.tokenizer import Tokenizer

FAR = 2  # rows
LONG_SHARE = 0.2  # of a unit's tokens in sentences longer than that: what no text with sentence ends has
SHORTEST = 8  # tokens of a part
PARTS = 12  # of a row: what its long sentences are split into, so that one more than fits loses little


def limit_of(encoded: Encoded, capacity: int, wanted: int) -> int:
    """Tokens that a sentence may have; 0: any number. `wanted`: as asked for, 0 to judge by the documents themselves."""
    if wanted:
        return wanted
    lengths = encoded.sentence_lengths
    if lengths[lengths > FAR * capacity].sum() <= LONG_SHARE * len(encoded.tokens):
        return 0
    return max(SHORTEST, capacity // PARTS)


def places(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [vocab]: how good a place is after each piece; the same before each piece)."""
    after = [2.0 * _ends_clause(piece) for piece in tokenizer.tokens]
    return np.array(after, np.float32), tokenizer.unit_start.astype(np.float32)


def _ends_clause(piece: str) -> bool:
    last = piece.strip()[-1:]
    return bool(last) and unicodedata.category(last) in ("Po", "Pd", "Pe", "Pf") and last not in "'\"*#%&@/\\."


def split(encoded: Encoded, limit: int, tokenizer: Tokenizer) -> Encoded:
    """The same documents, their sentences of more than `limit` tokens in parts of about `limit`, at most a quarter more."""
    lengths = encoded.sentence_lengths
    cuts = _cuts(encoded, limit, tokenizer)
    ends = np.cumsum(lengths)
    edges = np.sort(np.concatenate([[0], ends, cuts]))
    sentence = np.searchsorted(ends, cuts, side="right")
    document = np.searchsorted(np.cumsum(encoded.document_sizes), sentence, side="right")
    more = np.bincount(document, minlength=len(encoded.document_sizes))
    return Encoded(encoded.tokens, np.diff(edges), encoded.document_sizes + more)


def _cuts(encoded: Encoded, limit: int, tokenizer: Tokenizer) -> np.ndarray:
    """int64 [c], ascending: the tokens that parts begin at. Each is the best place near one of equal distances."""
    lengths = encoded.sentence_lengths
    parts = -(-lengths // limit)
    inner = parts - 1
    sentence = np.repeat(np.arange(len(lengths)), inner)
    number = np.arange(inner.sum()) - np.repeat(np.cumsum(inner) - inner, inner) + 1
    starts = np.cumsum(lengths) - lengths
    middle = starts[sentence] + number * lengths[sentence] // parts[sentence]
    reach = max(1, limit // 8)
    near = np.arange(-reach, reach + 1)
    at = middle[:, None] + near  # (c, 2 reach + 1)
    after, before = places(tokenizer)
    value = after[encoded.tokens[at - 1]] + before[encoded.tokens[at]] - np.abs(near) / (4 * reach)
    return at[np.arange(len(at)), value.argmax(1)] if len(at) else np.zeros(0, np.int64)
