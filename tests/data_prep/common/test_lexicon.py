"""The lexicon numbers words as a dictionary of strings would."""

import random

import numpy as np
import pyarrow as pa
import pytest

from data_prep.tokens.word_cache import WordNumbers, word_hashes


def words_of(rng, count):
    letters = "abcdefghijklmnopqrstuvwxyzäöü東\u0301.,"
    return ["".join(rng.choices(letters, k=rng.randint(1, 5))) for _ in range(count)]


def test_numbers_are_those_of_a_dictionary_over_many_batches():
    rng = random.Random(5)
    lexicon, expected = WordNumbers(), {}
    for _ in range(60):
        words = list(dict.fromkeys(words_of(rng, 4000)))
        unknown = [i for i, word in enumerate(words) if word not in expected]
        for i in unknown:
            expected[words[i]] = len(expected)
        numbers, new = lexicon.numbers(word_hashes(pa.array(words)))
        assert new.tolist() == unknown
        assert numbers.tolist() == [expected[word] for word in words]
    assert lexicon.size == len(expected) > 100_000


def test_colliding_places_are_resolved():
    """Hashes that all begin their search at one place, in one batch and over several, and while the table grows."""
    lexicon = WordNumbers()
    hashes = (np.arange(1, 301, dtype=np.uint64) << np.uint64(52)) | np.arange(1, 301, dtype=np.uint64)
    first, new = lexicon.numbers(hashes[:200])
    assert first.tolist() == list(range(200)) == new.tolist()
    again, new = lexicon.numbers(hashes[::-1])
    assert again.tolist() == [*range(200, 300), *range(199, -1, -1)] and new.tolist() == list(range(100))
    for size in (1 << 16, 1 << 17):
        many = np.random.default_rng(size).integers(1, 1 << 63, size, dtype=np.uint64)
        lexicon.numbers(np.unique(many))
    assert lexicon.numbers(hashes[:200])[0].tolist() == list(range(200))


def test_hashes_follow_from_the_bytes_and_tell_words_apart():
    rng = random.Random(1)
    words = list(dict.fromkeys(words_of(rng, 50_000) + ["a" * n for n in range(1, 300)]))
    hashes = word_hashes(pa.array(words))
    assert len(np.unique(hashes)) == len(words) and hashes.all()
    # Not from where a word lies: a slice, another order, alone.
    assert (word_hashes(pa.array(["x", *words])[1:]) == hashes).all()
    assert (word_hashes(pa.array(words[::-1]))[::-1] == hashes).all()
    assert word_hashes(pa.array([words[7]]))[0] == hashes[7]
    assert word_hashes(pa.array(["", "a", ""])).tolist() == [0, hashes[words.index("a")], 0]
    assert word_hashes(pa.array([], pa.string())).tolist() == [] and word_hashes(pa.array([""])).tolist() == [0]
    # Blocks of 64 bytes are not interchangeable.
    one, two = "p" * 64, "q" * 64
    assert len(np.unique(word_hashes(pa.array([one + two, two + one])))) == 2


def test_hashes_are_uniform():
    hashes = word_hashes(pa.array([f"word{i}" for i in range(65_536)]))
    for shift in (0, 20, 56):
        counts = np.bincount((hashes >> np.uint64(shift) & np.uint64(255)).astype(np.int64), minlength=256)
        # 256 cells of 256 expected: chi-square of 255 degrees, five deviations of sqrt(510) wide
        chi = ((counts - 256) ** 2 / 256).sum()
        assert chi == pytest.approx(255, abs=5 * 22.6)


def test_hashes_are_the_same_in_every_version():
    assert [hex(value) for value in word_hashes(pa.array(["the", "Größe"])).tolist()] == FIXED


FIXED = ["0x7ed06cd00e4c07ef", "0xb294306b5e07684a"]
