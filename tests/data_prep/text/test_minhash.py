"""Signatures against exact similarity, candidates against all pairs, and copies planted among real articles."""

import random
from collections import defaultdict
from itertools import chain

import numpy as np
import pytest

from data_prep.filters.measures import describe_words
from data_prep.stages import minhash
from data_prep.stages.minhash import BANDS, PERMUTATIONS, ROWS, SHINGLE, THRESHOLD
from tests.helpers.prep_texts import articles, batch_of


def hashes_of(documents: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(uint64 [w], int64 [d + 1]) of documents that are arrays of uint64."""
    return np.concatenate(documents), np.cumsum([0, *map(len, documents)])


def similarity(a: set, b: set) -> float:
    return len(a & b) / len(a | b)


def test_shingles_equal_when_their_words_do_and_stay_inside_a_document() -> None:
    texts = ["a b c d", "b c d", "a b", "b a", "a", "", "d c b", "b c d a b c"]
    batch = batch_of(texts)
    found, edges = minhash.shingles(batch.facts["hash"], batch.documents)
    expected = []
    for text in texts:
        words = text.split()
        expected.append([tuple(words[i : i + SHINGLE]) for i in range(max(len(words) - SHINGLE + 1, bool(words)))])
    assert np.diff(edges).tolist() == [len(e) for e in expected] == [2, 1, 1, 1, 1, 0, 1, 4]
    flat = [shingle for e in expected for shingle in e]
    names = dict(zip(flat, found.tolist(), strict=True))
    assert [names[shingle] for shingle in flat] == found.tolist()
    assert len(set(names.values())) == len(names) == len(set(flat))
    none, edges = minhash.shingles(np.zeros(0, np.uint64), np.zeros(3, np.int64))
    assert len(none) == 0 and edges.tolist() == [0, 0, 0]


def test_signatures_estimate_the_exact_similarity() -> None:
    """600 pairs of similarity 0 to 1: no bias, and the error that PERMUTATIONS independent places would have."""
    rng = np.random.default_rng(11)
    documents = []
    for _ in range(600):
        words = rng.integers(1, 1 << 63, rng.integers(60, 900), dtype=np.uint64)
        copy = words.copy()
        changed = rng.random(len(copy)) < rng.uniform(0, 0.4)
        copy[changed] = rng.integers(1, 1 << 63, int(changed.sum()), dtype=np.uint64)
        documents += [words, copy]
    rows = minhash.signatures(*hashes_of(documents))
    assert rows.shape == (1200, PERMUTATIONS) and rows.dtype == np.uint32
    estimate = (rows[::2] == rows[1::2]).mean(1)
    sets = [set(zip(*(d[k:].tolist() for k in range(SHINGLE)), strict=False)) for d in documents]
    exact = np.array([similarity(a, b) for a, b in zip(sets[::2], sets[1::2], strict=True)])
    assert exact.min() < 0.15 and exact.max() > 0.95
    expected = np.sqrt((exact * (1 - exact)).mean() / PERMUTATIONS)
    error = estimate - exact
    assert abs(error.mean()) < 4 * expected / 600**0.5, error.mean()
    assert np.sqrt((error**2).mean()) < 1.1 * expected, (np.sqrt((error**2).mean()), expected)


def test_a_signature_depends_on_the_document_alone() -> None:
    texts = ["a", "a b", "", "a b c d e", "a b", "a b c d e " * 500]
    batch = batch_of(texts)
    together = minhash.signatures(batch.facts["hash"], batch.documents)
    for i, text in enumerate(texts):
        alone = batch_of([text])
        assert (minhash.signatures(alone.facts["hash"], alone.documents)[0] == together[i]).all()
    assert (together[1] == together[4]).all()
    assert not (together[0] == together[1]).any() and not (together[0] == together[2]).any()


def test_band_keys_are_equal_where_a_whole_band_is() -> None:
    rows = np.random.default_rng(2).integers(0, 1 << 32, (3, PERMUTATIONS), dtype=np.uint32)
    rows[1] = rows[0]
    rows[1, 2 * ROWS + 1] += 1  # in band 2
    rows[2] = rows[0]
    rows[2, [BANDS * ROWS - 1, -1]] += 1  # in the last band, and in a place that is in none
    keys = minhash.band_keys(rows)
    assert keys.shape == (3, BANDS) and keys.dtype == np.uint64
    assert np.flatnonzero(keys[1] != keys[0]).tolist() == [2]
    assert np.flatnonzero(keys[2] != keys[0]).tolist() == [BANDS - 1]
    assert len(np.unique(minhash.band_keys(np.zeros((1, PERMUTATIONS), np.uint32)))) == BANDS
    swapped = rows[:1].copy()
    swapped[0, [0, 1]] = swapped[0, [1, 0]]
    assert minhash.band_keys(swapped)[0, 0] != keys[0, 0]
    assert minhash.band_keys(rows[:0]).shape == (0, BANDS)


def test_the_smallest_id_of_every_key_stays() -> None:
    keys = np.array([5, 9, 5, 7, 9, 5], np.uint64)
    ids = np.array([30, 8, 10, 1, 2, 20], np.uint64)
    dropped, kept = minhash.exact_duplicates(keys, ids)
    assert dropped.tolist() == [8, 20, 30] and kept.tolist() == [2, 10, 10]
    dropped, kept = minhash.exact_duplicates(keys[:0], ids[:0])
    assert len(dropped) == len(kept) == 0 and dropped.dtype == kept.dtype == np.uint64


def test_candidates_are_the_first_of_the_key_and_the_one_before() -> None:
    keys = np.array([5, 9, 5, 7, 9, 5, 5], np.uint64)
    ids = np.array([30, 8, 10, 1, 2, 20, 40], np.uint64)
    pairs = minhash.near_candidates(keys, ids)
    assert sorted(map(tuple, pairs.tolist())) == [(2, 8), (10, 20), (10, 30), (10, 40), (20, 30), (30, 40)]
    rng = np.random.default_rng(4)
    keys, ids = rng.integers(0, 300, 2_000, dtype=np.uint64), rng.permutation(2_000).astype(np.uint64)
    pairs = minhash.near_candidates(keys, ids)
    of = dict(zip(ids.tolist(), keys.tolist(), strict=True))
    assert len(pairs) < 4_000 and len({tuple(pair) for pair in pairs.tolist()}) == len(pairs)
    assert all(a < b and of[a] == of[b] for a, b in pairs.tolist())
    first = {key: min(i for i in of if of[i] == key) for key in set(of.values())}
    assert {b for _, b in pairs.tolist()} == set(of) - set(first.values())


def test_a_pair_is_verified_from_the_threshold_on() -> None:
    a = np.zeros((2, PERMUTATIONS), np.uint32)
    b = a.copy()
    least = int(np.ceil(THRESHOLD * PERMUTATIONS))
    b[0, least:] = 1
    b[1, least - 1 :] = 1
    assert minhash.verified(a, b).tolist() == [True, False]
    assert minhash.verified(a[:0], b[:0]).tolist() == []


def plant(documents: list[list[int]], copies: int, seed: int) -> list[int]:
    """Append changed copies of `copies` documents that have words; returns their sources.

    In turn words are replaced, deleted, inserted; a uniform share of 1 to 10% of them, at least one.
    """
    rng = random.Random(seed)
    corpus = documents.copy()
    chosen = rng.sample([i for i, document in enumerate(corpus) if document], copies)

    def word() -> int:
        return rng.choice(corpus[rng.choice(chosen)])

    for turn, source in enumerate(chosen):
        words = list(corpus[source])
        at = rng.sample(range(len(words)), max(1, round(rng.uniform(0.01, 0.1) * len(words))))
        if turn % 3 == 0:
            for i in at:
                words[i] = word()
        elif turn % 3 == 1:
            gone = set(at)
            words = [w for i, w in enumerate(words) if i not in gone]
        else:
            for i in sorted(at, reverse=True):
                words.insert(i, word())
        documents.append(words)
    return chosen


def dropped_pairs(rows: np.ndarray) -> np.ndarray:
    """The verified pairs of all bands, as a build finds them."""
    keys, ids = minhash.band_keys(rows), np.arange(len(rows), dtype=np.uint64)
    pairs = np.unique(
        np.concatenate([minhash.near_candidates(keys[:, band], ids) for band in range(BANDS)]), axis=0
    ).astype(np.int64)
    return pairs[minhash.verified(rows[pairs[:, 0]], rows[pairs[:, 1]])]


def most_similar(shingles: np.ndarray, edges: np.ndarray, wanted: list[int], kept: list[int]) -> list[float]:
    """For each of `wanted` the exact similarity to the most similar document of `kept`, 0 where all are below 0.3."""
    sets = [set(shingles[edges[i] : edges[i + 1]].tolist()) for i in wanted]
    looked_for = np.array(sorted(set().union(*sets)), np.uint64)
    place = np.minimum(np.searchsorted(looked_for, shingles), len(looked_for) - 1)
    hits = np.concatenate([[0], np.cumsum(looked_for[place] == shingles)])
    smallest = min(map(len, sets))
    best = [0.0] * len(wanted)
    for j in kept:
        if hits[edges[j + 1]] - hits[edges[j]] < 0.3 * smallest:
            continue
        document = set(shingles[edges[j] : edges[j + 1]].tolist())
        for i, one in enumerate(sets):
            if len(one) >= 0.3 * len(document) and len(document) >= 0.3 * len(one):
                best[i] = max(best[i], similarity(one, document))
    return best


@pytest.mark.slow
def test_planted_copies_are_found_and_nothing_else_is(capsys) -> None:
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__
    documents = [
        list(map(numbers.__getitem__, chain.from_iterable(map(str.split, article)))) for article in articles(5_000)
    ]
    copies = 500
    plant(documents, copies, seed=9)
    table = describe_words(list(numbers), np.zeros(len(numbers), np.uint8))["hash"]
    words, edges = hashes_of([table[np.array(document, np.int64)] for document in documents])
    pairs = dropped_pairs(minhash.signatures(words, edges))
    full = np.diff(edges) > 0
    dropped = sorted({int(b) for b in pairs[:, 1] if full[b]})
    planted = [i for i in dropped if i >= 5_000]
    others = [i for i in dropped if i < 5_000]
    shingles, starts = minhash.shingles(words, edges)
    kept = sorted(set(np.flatnonzero(full).tolist()) - set(dropped))
    best = most_similar(shingles, starts, others, kept)
    right = sum(value >= THRESHOLD for value in best)
    recall, precision = len(planted) / copies, (len(planted) + right) / len(dropped)
    with capsys.disabled():
        print(
            f"\n5,000 articles and {copies} copies changed in 1-10% of their words: recall {recall:.3f}, precision "
            f"{precision:.4f} ({right} of {len(others)} other dropped documents have an exact similarity >= "
            f"{THRESHOLD} to a kept one), strict {len(planted) / len(dropped):.3f}"
        )
    assert recall >= 0.95
    assert precision >= 0.99


@pytest.mark.parametrize("changed", [0.0, 0.03])
def test_copies_of_pydoc_topics_are_found(topics, changed: float) -> None:
    """Without the real data: every copy with at most 3% of its words changed is found, and of the topics themselves
    only one that is like an earlier one."""
    rng = random.Random(1)
    vocabulary = " ".join(topics).split()
    originals = [text.split() for text in topics if len(text.split()) >= 100]
    copies = [[rng.choice(vocabulary) if rng.random() < changed else w for w in words] for words in originals]
    batch = batch_of([" ".join(words) for words in originals + copies])
    pairs = dropped_pairs(minhash.signatures(batch.facts["hash"], batch.documents))
    count = len(originals)
    assert count > 50
    assert {tuple(p) for p in pairs.tolist()} >= {(i, i + count) for i in range(count)}
    sets = [set(zip(words, words[1:], words[2:], strict=False)) for words in originals]
    alike = {b for b in range(count) for a in range(b) if similarity(sets[a], sets[b]) >= THRESHOLD}
    assert set(pairs[:, 1].tolist()) - set(range(count, 2 * count)) == alike
