"""Sums and counts over segments, and the bytes of words."""

from itertools import pairwise

import numpy as np

from data_prep.common import arrays


def test_sums_of_empty_segments_are_zero() -> None:
    values = np.array([1, 2, 4, 8], np.uint8)
    assert arrays.segment_sums(values, np.array([0, 0, 1, 1, 4, 4])).tolist() == [0, 1, 0, 14, 0]
    assert arrays.segment_sums(values[:0], np.array([0, 0, 0])).tolist() == [0, 0]


def test_places_are_counted_by_range() -> None:
    assert arrays.segment_counts(np.array([0, 2, 2, 5]), np.array([0, 0, 2, 5, 6])).tolist() == [0, 1, 2, 1]


def test_words_are_bytes_with_a_nul_after_each() -> None:
    text, edges = arrays.word_bytes(["ab", "", "\u00e9", "\ud800"])
    cut = [text[a:b].tobytes() for a, b in pairwise(edges)]
    assert cut == [b"ab\0", b"\0", b"\xc3\xa9\0", b"\xed\xa0\x80\0"]
    assert [array.tolist() for array in arrays.word_bytes([])] == [[], [0]]
