"""MinHash signatures of documents, and exact and near duplicates by hashes.

Whether a document is dropped follows from hashes of its words and its number, in any order of work. MinHash (Broder 1997):
two documents agree in a place of their signatures with the probability that is the Jaccard similarity of their sets of
shingles (runs of words). Those that agree in all places of a band are compared (Indyk, Motwani 1998): with 48 bands of 4, a
pair of similarity 0.45 is found with probability 0.87, of 0.55 with 0.99, of 0.05 with 0.0003. Signatures are rensa's:
shingles included, 220 MB/s of Wikipedia's text a core, where datasketch does 11 from the same shingle hashes (256 places;
EPYC, 2026-11). Legend: w words, s shingles, d documents, c pairs, n keys.
"""

from __future__ import annotations

import os

import numpy as np

from megabert.common.random_numbers import GOLDEN64, mix64

# words; one changed word breaks three shingles
SHINGLE = 3
# places of a signature; 128 often mistake 0.33 for 0.45, and many pairs of stubs have 0.33 ("X may refer to:")
PERMUTATIONS = 256
# places a band; fewer make too many false candidates in a large corpus, more miss copies
ROWS = 4
# of the first BANDS * ROWS places; the rest only sharpens the comparison
BANDS = 48
# share of equal places: about one word in seven differs
THRESHOLD = 0.45
SEED = 1


def shingles(words: np.ndarray, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(uint64 [s], int64 [d + 1]): hashes of each document's runs of SHINGLE words and where each document's begin.

    words: uint64 [w] hashes of words; documents: int64 [d + 1]. A shorter document is one shingle, an empty one none.
    """
    count = len(words)
    lengths = np.diff(documents)
    keys = mix64(words)
    for k in range(1, SHINGLE):
        keys *= GOLDEN64
        keys[: count - k] += words[k:]
    whole = np.ones(count, bool)  # whether all of the shingle that begins here is in the document
    for k in range(1, SHINGLE):
        whole[documents[1:][lengths >= k] - k] = False
    for size in range(1, SHINGLE):
        first = documents[:-1][lengths == size]
        key = mix64(words[first])
        for k in range(1, size):
            key = key * GOLDEN64 + words[first + k]
        keys[first], whole[first] = key, True
    sizes = np.where(lengths > 0, np.maximum(lengths - SHINGLE + 1, 1), 0)
    return mix64(keys[whole]), np.concatenate([[0], np.cumsum(sizes)])


def signatures(words: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """uint32 [d, PERMUTATIONS] from hashes of words, uint64 [w], and the documents' edges, int64 [d + 1].

    The share of equal places of two rows estimates the similarity s of two documents with a standard error of
    at most sqrt(s (1 - s) / PERMUTATIONS). All documents without words have the same row.
    """
    # Every core has a worker process, so that more threads would only compete.
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    from rensa import RMinHash

    hashes, edges = shingles(words, documents)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(hashes, edges.astype(np.uint64), PERMUTATIONS, SEED)
    return np.array(matrix.to_rows(), np.uint32).reshape(len(documents) - 1, PERMUTATIONS)


def band_keys(signatures: np.ndarray) -> np.ndarray:
    """uint64 [d, BANDS], uniform: equal where two documents agree in all ROWS places of a band, differing between bands."""
    places = signatures[:, : BANDS * ROWS].reshape(len(signatures), BANDS, ROWS).astype(np.uint64)
    keys = np.broadcast_to(mix64(np.arange(1, BANDS + 1, dtype=np.uint64)), places.shape[:2])
    for row in range(ROWS):
        keys = mix64(keys * GOLDEN64 + places[:, :, row])
    return keys


def _groups(keys: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids ordered by key and then id [n]; whether one has the key of the one before [n]; the first id of its key [n]."""
    order = np.lexsort((ids, keys))
    keys, ids = keys[order], ids[order]
    again = np.zeros(len(keys), bool)
    again[1:] = keys[1:] == keys[:-1]
    first = np.maximum.accumulate(np.where(again, 0, np.arange(len(keys))))
    return ids, again, ids[first]


def exact_duplicates(keys: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The ids to drop, ascending: all but the smallest of every key. keys, ids: uint64 [n], all of a range of keys; no id twice."""
    ids, again, _ = _groups(keys, ids)
    return np.sort(ids[again])


def near_candidates(keys: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """[c, 2], c < 2 n: pairs (smaller id, larger id) worth comparing, no pair twice.

    keys, ids: uint64 [n], all of one band in a range of keys. Each document is paired with the first of its key
    and with the one before it, not with all of them: a key that a million share costs two million pairs and not 10^12.
    """
    ids, again, first = _groups(keys, ids)
    at = np.flatnonzero(again)
    with_first = np.stack([first[at], ids[at]], 1)
    with_before = np.stack([ids[at - 1], ids[at]], 1)
    return np.concatenate([with_first, with_before[with_before[:, 0] != with_first[:, 0]]])


def verified(a: np.ndarray, b: np.ndarray, threshold: float = THRESHOLD) -> np.ndarray:
    """bool [c]: whether the signatures `a` and `b`, both [c, PERMUTATIONS], agree in at least this share of places.

    The larger id of each verified pair is dropped, and nothing else is concluded. That needs no table of all documents
    and no order of pairs, and a dropped document resembles an earlier one. Joining pairs to components
    (union-find) would also drop a document that is like none of those before it, only because a later one is like both.
    """
    return (a == b).sum(1) >= threshold * PERMUTATIONS
