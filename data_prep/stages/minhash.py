"""MinHash signatures of documents, and the keys by which near duplicates are found (`stages.dedup` compares them).

MinHash (Broder 1997): the probability that two documents agree at an index of their signatures is the Jaccard similarity of their sets
of shingles, which are runs of words, or of characters in scripts without spaces. Those that agree in a whole band are compared (Indyk,
Motwani 1998): with 48 bands of 4, a pair of similarity 0.3 is found with probability 0.32, of 0.45 with 0.87, of 0.55 with 0.99, of
0.05 with 0.0003. Signatures are rensa's: with shingles 220 MB/s of Wikipedia's text a core, while datasketch does 11 from the same
shingle hashes (256 values; EPYC, 2026-11). Legend: w units, s shingles, d documents.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data_prep.common.arrays import segment_hashes, segment_sums, word_bytes
from data_prep.text.clean import UNSPACED
from data_prep.tokens.encoder import DocumentBatch
from megabert.common.random_numbers import GOLDEN64, mix64
from megabert.data.text import Form, clean_word, writes_without_spaces

UNIT = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")

# values in a signature; with 128, pairs of similarity 0.33 (stubs: "X may refer to:") often exceed a threshold of 0.45
PERMUTATIONS = 256
# values in a band; fewer make too many false candidates in a large corpus, more miss copies
ROWS = 4
# bands of the first BANDS * ROWS values; the others are only for the comparison
BANDS = 48
SEED = 1


class Units(NamedTuple):
    """Units of shingles: words of documents, or characters of words in scripts without spaces.

    hashes: uint64 [w]; characters: bool [w], whether a unit is a character; documents: int64 [d + 1], edges in units.
    """

    hashes: np.ndarray
    characters: np.ndarray
    documents: np.ndarray


def units(batch: DocumentBatch, documents: Sequence[Sequence[str]], form: Form = "NFC") -> Units:
    """The units of a batch with the paragraphs `documents`; `form`: as of `clean_word`.

    Only documents with words in a script without spaces are read again; hashes of words in other scripts stay the same.
    """
    edges, left = batch.words.documents, np.diff(batch.words.paragraphs) > 0
    of_words = Units(np.ascontiguousarray(batch.words.facts["hash"]), np.zeros(edges[-1], bool), edges)
    if not batch.unspaced.any():
        return of_words
    last = np.cumsum([len(paragraphs) for paragraphs in documents])
    hashes, characters = (np.split(items, edges[1:-1]) for items in of_words[:2])
    for d in np.flatnonzero(batch.unspaced).tolist():
        first = last[d] - len(documents[d])
        text = "\n".join(p for p, kept in zip(documents[d], left[first : last[d]], strict=True) if kept)
        text_units = UNIT.findall(" ".join(clean_word(word, form) for word in text.split()))
        hashes[d] = segment_hashes(*word_bytes(text_units))
        characters[d] = np.fromiter(map(writes_without_spaces, (unit[0] for unit in text_units)), bool, len(text_units))
    sizes = np.cumsum([0, *map(len, hashes)])
    return Units(np.concatenate(hashes), np.concatenate(characters), sizes)


def shingles(units: Units, words: int, characters: int) -> tuple[np.ndarray, np.ndarray]:
    """(uint64 [s], int64 [d + 1]): hashes of the runs of units, and their edges by document.

    A run that begins with a word has `words` units, with a character `characters`. A document too short for a run is one shingle,
    an empty one none.
    """
    count = len(units.hashes)
    lengths = np.diff(units.documents)
    # units to the end of the document, including this one
    left = np.repeat(units.documents[1:], lengths) - np.arange(count)
    size = np.where(units.characters, characters, words)
    whole = left >= size
    none = segment_sums(whole, units.documents) == 0
    first = units.documents[:-1][none & (lengths > 0)]
    size[first], whole[first] = left[first], True
    keys = mix64(units.hashes)
    for k in range(1, max(words, characters)):
        reaches = np.flatnonzero(size[: count - k] > k)
        keys[reaches] = keys[reaches] * GOLDEN64 + units.hashes[reaches + k]
    return mix64(keys[whole]), np.append(0, np.cumsum(segment_sums(whole, units.documents)))


def signatures(units: Units, words: int, characters: int) -> np.ndarray:
    """uint32 [d, PERMUTATIONS] of documents by their `shingles`.

    The share of equal values in two rows estimates the similarity s of two documents with a standard error of at most
    sqrt(s (1 - s) / PERMUTATIONS). All documents without words have the same row.
    """
    # Every core has a worker process, so more threads would only compete.
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    from rensa import RMinHash

    hashes, edges = shingles(units, words, characters)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(hashes, edges.astype(np.uint64), PERMUTATIONS, SEED)
    return np.array(matrix.to_rows(), np.uint32).reshape(len(edges) - 1, PERMUTATIONS)


def band_keys(signatures: np.ndarray) -> np.ndarray:
    """uint64 [d, BANDS], uniform: equal if two documents agree in all ROWS values of a band, different between bands."""
    places = signatures[:, : BANDS * ROWS].reshape(len(signatures), BANDS, ROWS).astype(np.uint64)
    keys = np.broadcast_to(mix64(np.arange(1, BANDS + 1, dtype=np.uint64)), places.shape[:2])
    for row in range(ROWS):
        keys = mix64(keys * GOLDEN64 + places[:, :, row])
    return keys
