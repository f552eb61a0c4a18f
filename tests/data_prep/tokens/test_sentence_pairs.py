"""Token values here are corpus positions, so every A and B says itself where it was taken from."""

import numpy as np
import pytest

from data_prep.stages.sequences import SequenceSpans, _truncate, assemble, filled_rows, sentence_pairs
from data_prep.stages.shuffle import pack
from data_prep.tokens.encoder import Encoded


def documents(sentence_lengths):
    """Encoded from nested lists of sentence lengths; token k of the corpus has id k + 10."""
    lengths = np.array([n for d in sentence_lengths for n in d], np.int64)
    sizes = np.array([len(d) for d in sentence_lengths], np.int64)
    return Encoded(np.arange(10, 10 + lengths.sum()).astype(np.uint32), lengths, sizes)


def random_documents(count, seed, low=1, high=40):
    rng = np.random.default_rng(seed)
    return documents([rng.integers(low, high, rng.integers(1, 60)).tolist() for _ in range(count)])


def test_each_a_and_b_is_from_where_its_label_says():
    encoded = random_documents(200, 0)
    capacity = 125
    ranges = sentence_pairs(encoded, capacity, 0.1, np.random.default_rng(1))
    spans, labels = ranges.spans, ranges.labels
    edges = np.cumsum(
        np.add.reduceat(encoded.sentence_lengths, np.cumsum(encoded.document_sizes) - encoded.document_sizes)
    )
    document = np.searchsorted(edges, spans[:, [0, 2]], side="right")
    same_end = np.searchsorted(edges, spans[:, [1, 3]] - 1, side="right")
    assert (document == same_end).all(), "a part crosses a document's end"
    assert (document[labels == 0, 0] == document[labels == 0, 1]).all()
    assert (document[labels == 1, 0] != document[labels == 1, 1]).all()
    follows = spans[labels == 0]
    gap = follows[:, 2] - follows[:, 1]
    whole = (follows[:, 1] - follows[:, 0] + follows[:, 3] - follows[:, 2]) < capacity  # nothing was truncated
    assert whole.sum() > 50 and (gap[whole] == 0).all()
    assert (gap >= 0).all()
    lengths = (spans[:, 1] - spans[:, 0], spans[:, 3] - spans[:, 2])
    assert min(lengths[0].min(), lengths[1].min()) >= 1
    assert (lengths[0] + lengths[1]).max() == capacity


def test_every_sentence_is_used_once_as_a_or_as_true_next():
    # Sentences of one token never need truncation, so A and true-next B parts tile the corpus.
    encoded = documents([[1] * n for n in (3, 50, 400, 1, 77, 1000)])
    ranges = sentence_pairs(encoded, 60, 0.1, np.random.default_rng(2))
    used = [spans[:2] for spans in ranges.spans] + [
        s[2:] for s, label in zip(ranges.spans, ranges.labels, strict=True) if label == 0
    ]
    counts = np.zeros(len(encoded.tokens), int)
    for begin, end in used:
        counts[begin:end] += 1
    assert (counts == 1).all()


def test_half_is_random_next_and_a_tenth_is_short():
    rng = np.random.default_rng(3)
    encoded = documents([rng.integers(5, 12, 20_000).tolist() for _ in range(3)])
    capacity = 125
    ranges = sentence_pairs(encoded, capacity, 0.1, np.random.default_rng(4))
    share = (ranges.labels == 1).mean()
    assert 0.49 < share < 0.53
    totals = (ranges.spans[:, 1] - ranges.spans[:, 0]) + (ranges.spans[:, 3] - ranges.spans[:, 2])
    # Uniform in [2, 125]: 10% of the targets, of them 47% below 60; no document ends in the way.
    assert 0.035 < (totals < 60).mean() < 0.055
    none = sentence_pairs(encoded, capacity, 0.0, np.random.default_rng(4))
    totals = (none.spans[:, 1] - none.spans[:, 0]) + (none.spans[:, 3] - none.spans[:, 2])
    assert (totals == capacity).mean() > 0.98


def test_random_b_starts_are_uniform_over_the_other_document():
    encoded = documents([[10] * 20, [10] * 5])
    starts = []
    for seed in range(400):
        ranges = sentence_pairs(encoded, 40, 0.0, np.random.default_rng(seed))
        first = ranges.spans[:, 0] < 200
        starts += ((ranges.spans[first & (ranges.labels == 1), 2] - 200) // 10).tolist()
    share = np.bincount(starts, minlength=5) / len(starts)
    assert len(starts) > 1000 and np.abs(share - 0.2).max() < 0.04


@pytest.mark.parametrize("lengths", [[[4, 4, 4, 4]], [[7]], [[200]]])
def test_a_lone_document_is_halved_and_a_lone_sentence_pairs_with_itself(lengths):
    encoded = documents(lengths)
    ranges = sentence_pairs(encoded, 20, 0.0, np.random.default_rng(0))
    assert len(ranges.labels) >= 1 and (ranges.spans[:, 3] > ranges.spans[:, 2]).all()
    if len(lengths[0]) == 4:
        halves = ranges.spans[ranges.labels == 1] // 8
        assert (halves[:, 0] != halves[:, 2]).all()


def test_truncation_counts_are_those_of_one_token_at_a_time():
    rng = np.random.default_rng(5)
    for _ in range(300):
        a, b, capacity = (int(v) for v in rng.integers(1, 60, 3))
        capacity = max(capacity, 2)
        spans = np.array([[100, 100 + a, 300, 300 + b]])
        _truncate(spans, capacity, rng)
        la, lb = a, b
        while la + lb > capacity:
            if la > lb:
                la -= 1
            else:
                lb -= 1
        assert (spans[0, 1] - spans[0, 0], spans[0, 3] - spans[0, 2]) == (la, lb)
        assert spans[0, 0] >= 100 and spans[0, 1] <= 100 + a and spans[0, 2] >= 300 and spans[0, 3] <= 300 + b


def test_truncation_takes_from_front_and_end_evenly():
    spans = np.tile(np.array([[0, 100, 200, 210]]), (2000, 1))
    _truncate(spans, 60, np.random.default_rng(6))
    assert abs(spans[:, 0].mean() - 25) < 0.5


def fill(ranges, seq_len):
    """Share of the rows that packed sequences with their two special tokens fill."""
    lengths = ranges.spans[:, 1] - ranges.spans[:, 0] + 2
    return lengths.sum() / (pack(lengths, seq_len, 8)[3] * seq_len)


def test_rows_of_articles_are_filled():
    """Documents and sentences as long as Wikipedia's: medians of 200 and 22 tokens, long tails."""
    rng = np.random.default_rng(11)
    counts = np.maximum(1, rng.lognormal(np.log(9), 1.2, 2000)).astype(int)
    encoded = documents([np.clip(rng.lognormal(np.log(22), 0.6, n), 2, 300).astype(int) for n in counts])
    word_start = rng.random(len(encoded.tokens) + 10) < 0.75
    for seq_len in (64, 128, 512):
        assert fill(filled_rows(encoded, seq_len - 2, 0.1, word_start, np.random.default_rng(1)), seq_len) > 0.98


def test_filled_rows_drop_nothing_stay_in_documents_and_begin_with_words():
    encoded = random_documents(100, 7, 1, 200)
    word_start = np.random.default_rng(9).random(len(encoded.tokens) + 10) < 0.7
    ranges = filled_rows(encoded, 126, 0.1, word_start, np.random.default_rng(8))
    begin, end = ranges.spans[:, 0], ranges.spans[:, 1]
    assert (ranges.labels == -1).all() and begin[0] == 0 and (begin[1:] == end[:-1]).all()
    assert end[-1] == len(encoded.tokens) and (end > begin).all() and (end - begin).max() == 126
    sentences = np.cumsum(encoded.sentence_lengths)
    assert set(sentences[np.cumsum(encoded.document_sizes) - 1]) <= set(end)
    inside = ~np.isin(begin, np.append(0, sentences))
    assert inside.sum() > 50 and word_start[encoded.tokens[begin[inside]]].all()
    none = filled_rows(encoded, 126, 0.0, np.zeros_like(word_start), np.random.default_rng(8))
    assert fill(none, 128) > 0.98  # of text without spaces a word is as long as its sentence


def test_assembled_sequences_hold_their_parts_between_the_special_tokens():
    tokens = np.arange(10, 40).astype(np.uint16)
    ranges = SequenceSpans(np.array([[0, 3, 20, 22], [5, 6, 0, 0]]), np.array([1, -1], np.int8))
    flat, lengths, first = assemble(tokens, ranges, np.array([1, 0]), 2, 3)
    assert flat.tolist() == [2, 15, 3, 2, 10, 11, 12, 3, 30, 31, 3]
    assert lengths.tolist() == [3, 8] and first.tolist() == [3, 5]


def test_packing_by_hand():
    # Capacity 10: 7+3, 6+4, 5+5; two of 2 share a row.
    row, slot, offset, rows = pack(np.array([5, 7, 4, 2, 6, 3, 5, 2]), 10, 4)
    assert rows == 4
    assert [sorted(np.flatnonzero(row == r).tolist()) for r in range(4)] == [[1, 5], [2, 4], [0, 6], [3, 7]]
    assert offset[[1, 5, 4, 2, 0, 6]].tolist() == [0, 7, 0, 6, 0, 5] and slot[[1, 5]].tolist() == [0, 1]


def naive_best_fit(lengths, capacity, slots):
    """One sequence at a time, longest first, into the open row with the least space that holds it."""
    open_rows = []
    for length in sorted(lengths, reverse=True):
        fitting = [r for r in open_rows if r[0] >= length and r[1] < slots]
        if fitting:
            best = min(fitting, key=lambda r: r[0])
        else:
            open_rows.append(best := [capacity, 0])
        best[0] -= length
        best[1] += 1
    return len(open_rows)


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_packing_is_as_tight_as_one_by_one_best_fit_and_never_overlaps(slots):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        lengths = np.where(rng.random(700) < 0.5, 128, rng.integers(5, 129, 700))
        row, slot, offset, rows = pack(lengths, 128, slots)
        assert abs(rows - naive_best_fit(lengths.tolist(), 128, slots)) <= 1
        taken = np.zeros((rows, 128), int)
        for r, o, n in zip(row, offset, lengths, strict=True):
            taken[r, o : o + n] += 1
        assert taken.max() == 1 and taken.sum() == lengths.sum()
        assert np.bincount(row).max() <= slots and set(zip(row, slot, strict=True)).__len__() == len(row)
        first = taken.cumsum(1)[:, -1]
        assert all(taken[r, : first[r]].all() for r in range(rows)), "a gap before the last sequence"
