"""Shares of repeated n-grams in documents, as Gopher limits them.

The cost is one count for each word, since only n-grams of documents that could break a limit are sorted. The screen counts n-grams
in a hash table without keys: a slot's count is at least that of an n-gram in it, so a document within its limits by those counts
is within them by the exact ones. Legend: w words, d documents. Whitespace is not counted as characters.
"""

from __future__ import annotations

import numpy as np

from megabert.common.random_numbers import GOLDEN64, mix64

# orders for which the most frequent n-gram counts, and for which all repeated n-grams count
TOP = (2, 3, 4)
REPEATED = (5, 6, 7, 8, 9, 10)


def shares(
    hashes: np.ndarray, characters: np.ndarray, documents: np.ndarray, limits: dict[int, float], wanted: np.ndarray
) -> dict[int, np.ndarray]:
    """n -> float64 [d] for n in 2..10: shares of characters, exact if one is above its limit, else exact or 0. Documents that are
    false in the bool array `wanted` [d] have 0.

    hashes: uint64 [w]; characters: [w]; documents: int64 [d + 1]; limits: n -> largest share, no limit for other n.
    For n in `TOP`: occurrences times characters of the most frequent repeated n-gram (the longest of several); overlapping
    occurrences count in full, so a share can exceed 1. For n in `REPEATED`: words inside any repeated n-gram of the document,
    each counted once. An n-gram may cross lines.
    """
    count = len(documents) - 1
    result = {n: np.zeros(count) for n in TOP + REPEATED}
    if not len(hashes):
        return result
    before = np.append(0, np.cumsum(characters, dtype=np.int64))  # characters before each word
    total = before[documents[1:]] - before[documents[:-1]]
    marked = hashes + np.repeat(mix64(np.arange(1, count + 1, dtype=np.uint64)), np.diff(documents))
    suspect = _screen(hashes, marked, before, documents, total, limits) & wanted
    if suspect.any():
        words = np.repeat(suspect, np.diff(documents))
        edges = np.concatenate([[0], np.cumsum(np.diff(documents)[suspect])])
        for n, covered in _exact(hashes[words], marked[words], characters[words], edges).items():
            result[n][suspect] = covered / np.maximum(total[suspect], 1)
    return result


def _screen(
    hashes: np.ndarray,
    marked: np.ndarray,
    before: np.ndarray,
    documents: np.ndarray,
    total: np.ndarray,
    limits: dict[int, float],
) -> np.ndarray:
    """bool [d], true if a share could be above its limit. `marked` are hashes that differ between documents."""
    words, count = len(hashes), len(documents) - 1
    suspect = np.zeros(count, bool)
    if words < 2:
        return suspect | (total > 0)
    shift = np.uint64(64 - max(8, (2 * words).bit_length()))
    place = ((marked[:-1] * GOLDEN64 + hashes[1:]) >> shift).view(np.int64)  # count of the 2-gram at each word
    bound = np.bincount(place).take(place)
    top = min((limits[n] for n in TOP if n in limits), default=None)
    if top is not None:
        # A 3- or 4-gram occurs at most as often as its first 2-gram.
        size = np.append(before[4:], np.full(3, before[-1]))[: words - 1] - before[: words - 1]
        full = documents[1:] > documents[:-1]
        most = np.maximum.reduceat(np.append(bound * size, 0), documents[:-1][full])
        suspect[full] = most + 1 > top * total[full]
    again = min((limits[n] for n in REPEATED if n in limits), default=None)
    if again is not None and words >= 5:
        twice = bound > 1
        at = np.flatnonzero(twice[:-3] & twice[1:-2] & twice[2:-1] & twice[3:])
        keys = marked[at]
        for k in range(1, 5):
            keys = keys * GOLDEN64 + hashes[at + k]
        place = (keys >> shift).view(np.int64)
        at = at[np.bincount(place).take(place) > 1]
        document = np.searchsorted(documents, at, side="right") - 1
        suspect |= _covered(at, 5, before, document, count) + 1 > again * total
    return suspect


def _covered(at: np.ndarray, n: int, before: np.ndarray, document: np.ndarray, documents: int) -> np.ndarray:
    """int64 [documents]: characters inside the n-grams at the words `at` (ascending), each counted once."""
    ends = before[at + n]
    begins = before[at]
    np.maximum(begins[1:], ends[:-1], out=begins[1:])
    return np.bincount(document, ends - begins, documents).astype(np.int64)


def _exact(hashes: np.ndarray, marked: np.ndarray, characters: np.ndarray, edges: np.ndarray) -> dict[int, np.ndarray]:
    """n -> int64 [d]: the numbers of characters for `shares`.

    A repeated n-gram begins with a repeated (n - 1)-gram, so each order examines only those of the order before.
    """
    lengths = np.diff(edges)
    before = np.concatenate([[0], np.cumsum(characters, dtype=np.int64)])
    document = np.repeat(np.arange(len(lengths)), lengths)
    end = np.repeat(edges[1:], lengths)
    at, keys = np.arange(len(hashes)), marked
    result = {}
    for n in TOP + REPEATED:
        inside = at + n <= end[at]
        at, keys = at[inside], keys[inside]
        keys = keys * GOLDEN64 + hashes[at + n - 1]
        order = np.argsort(keys, kind="stable")
        sorted_keys = keys[order]
        first = np.flatnonzero(np.concatenate([[True], sorted_keys[1:] != sorted_keys[:-1]])[: len(keys)])
        occurrences = np.diff(np.append(first, len(keys)))
        if n in TOP:
            member, times = at[order[first]], occurrences
            member, times = member[times > 1], times[times > 1]
            best = np.zeros(len(lengths), np.int64)  # occurrences, then characters
            np.maximum.at(best, document[member], (times << 32) + before[member + n] - before[member])
            result[n] = (best >> 32) * (best & 0xFFFFFFFF)
        keep = np.sort(order[np.repeat(occurrences > 1, occurrences)])
        at, keys = at[keep], keys[keep]
        if n in REPEATED:
            result[n] = _covered(at, n, before, document[at], len(lengths))
    return result
