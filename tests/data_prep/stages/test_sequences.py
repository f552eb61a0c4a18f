"""Sentence pairs and filled rows, long sentences, checks of what was drawn; token values are corpus positions."""

import re
from dataclasses import replace

import numpy as np
import pytest

from data_prep.common.errors import BadInput
from data_prep.executor.work_files import ItemResult
from data_prep.stages import sequences
from data_prep.stages.packing import pack
from data_prep.stages.sequences import _truncate, filled_rows, sentence_pairs
from data_prep.tokens.encoder import Encoded
from megabert.data.tokenizer import Tokenizer
from tests.helpers import wordpiece


def documents(sentence_lengths):
    """Encoded from nested lists of sentence lengths; token k of the corpus has id k + 10."""
    lengths = np.array([n for d in sentence_lengths for n in d], np.int64)
    sizes = np.array([len(d) for d in sentence_lengths], np.int64)
    return Encoded(np.arange(10, 10 + lengths.sum()).astype(np.uint32), lengths, sizes)


def random_documents(count, seed, low=1, high=40):
    rng = np.random.default_rng(seed)
    return documents([rng.integers(low, high, rng.integers(1, 60)).tolist() for _ in range(count)])


def test_a_and_b_agree_with_the_label():
    encoded = random_documents(200, 0)
    ranges = sentence_pairs(encoded, 125, 0.1, np.random.default_rng(1))
    spans, labels, edges = ranges.spans, ranges.labels, np.cumsum(encoded.document_tokens())
    first, second = np.searchsorted(edges, spans[:, [0, 2]], side="right").T
    ends = np.searchsorted(edges, spans[:, [1, 3]] - 1, side="right").T
    assert (ends == (first, second)).all(), "a part crosses a document's end"
    assert ((first == second) == (labels == 0)).all() and set(labels) == {0, 1}
    lengths = np.diff(spans)[:, ::2]
    assert lengths.min() >= 1 and lengths.sum(1).max() == 125
    gap, whole = (spans[:, 2] - spans[:, 1])[labels == 0], lengths.sum(1)[labels == 0] < 125  # nothing was truncated
    assert whole.sum() > 50 and (gap[whole] == 0).all() and (gap >= 0).all()


def test_every_sentence_is_used_once():
    # Sentences of one token never need truncation, so A and true-next B parts tile the corpus.
    encoded = documents([[1] * n for n in (3, 50, 400, 1, 77, 1000)])
    ranges = sentence_pairs(encoded, 60, 0.1, np.random.default_rng(2))
    counts = np.zeros(len(encoded.tokens), int)
    for begin, end in [*ranges.spans[:, :2], *ranges.spans[ranges.labels == 0, 2:]]:
        counts[begin:end] += 1
    assert (counts == 1).all()


def test_half_is_random_a_tenth_short():
    rng = np.random.default_rng(3)
    encoded = documents([rng.integers(5, 12, 20_000).tolist() for _ in range(3)])
    pairs, full = (sentence_pairs(encoded, 125, share, np.random.default_rng(4)) for share in (0.1, 0.0))
    assert 0.49 < (pairs.labels == 1).mean() < 0.53
    # Uniform in [2, 125]: 10% of the targets, of them 47% below 60; no document ends in the way.
    assert 0.035 < (np.diff(pairs.spans)[:, ::2].sum(1) < 60).mean() < 0.055
    assert (np.diff(full.spans)[:, ::2].sum(1) == 125).mean() > 0.98


def test_random_b_starts_uniformly():
    encoded = documents([[10] * 20, [10] * 5])
    starts = []
    for seed in range(400):
        ranges = sentence_pairs(encoded, 40, 0.0, np.random.default_rng(seed))
        first = ranges.spans[:, 0] < 200
        starts += ((ranges.spans[first & (ranges.labels == 1), 2] - 200) // 10).tolist()
    share = np.bincount(starts, minlength=5) / len(starts)
    assert len(starts) > 1000 and np.abs(share - 0.2).max() < 0.04


@pytest.mark.parametrize("lengths", [[[4, 4, 4, 4]], [[7]], [[200]]])
def test_lone_document_is_halved(lengths):
    encoded = documents(lengths)
    ranges = sentence_pairs(encoded, 20, 0.0, np.random.default_rng(0))
    assert len(ranges.labels) >= 1 and (ranges.spans[:, 3] > ranges.spans[:, 2]).all()
    if len(lengths[0]) == 4:
        halves = ranges.spans[ranges.labels == 1] // 8
        assert (halves[:, 0] != halves[:, 2]).all()


def test_truncation_equals_one_token_at_a_time():
    rng = np.random.default_rng(5)
    for _ in range(300):
        a, b, capacity = rng.integers((1, 1, 2), 60).tolist()
        spans = np.array([[100, 100 + a, 300, 300 + b]])
        _truncate(spans, capacity, rng)
        left = [a, b]
        while sum(left) > capacity:
            left[left[0] <= left[1]] -= 1
        assert np.diff(spans)[0, ::2].tolist() == left
        assert 100 <= spans[0, 0] < spans[0, 1] <= 100 + a and 300 <= spans[0, 2] < spans[0, 3] <= 300 + b


def test_filled_rows_drop_nothing():
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
    lengths = none.spans[:, 1] - none.spans[:, 0] + 2  # of text without spaces a word is as long as its sentence
    assert lengths.sum() > 0.98 * pack(lengths, 128, 8)[3] * 128


def naive_best_fit(lengths, capacity, slots):
    """One sequence at a time, longest first, into the open row with the least space that holds it."""
    open_rows = []
    for length in sorted(lengths, reverse=True):
        fitting = [r for r in open_rows if r[0] >= length and r[1] < slots]
        best = min(fitting, key=lambda r: r[0], default=[capacity, 0])
        if not fitting:
            open_rows.append(best)
        best[0] -= length
        best[1] += 1
    return len(open_rows)


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_packing_equals_best_fit(slots):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        lengths = np.where(rng.random(700) < 0.5, 128, rng.integers(5, 129, 700))
        row, slot, offset, rows = pack(lengths, 128, slots)
        assert abs(rows - naive_best_fit(lengths.tolist(), 128, slots)) <= 1
        taken = np.zeros((rows, 128), int)
        for r, o, n in zip(row, offset, lengths, strict=True):
            taken[r, o : o + n] += 1
        assert taken.max() == 1 and taken.sum() == lengths.sum()
        assert np.bincount(row).max() <= slots and len({*zip(row, slot, strict=True)}) == len(row)
        first = taken.cumsum(1)[:, -1]
        assert all(taken[r, : first[r]].all() for r in range(rows)), "a gap before the last sequence"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(wordpiece.write(tmp_path_factory.mktemp("vocab") / "vocab.txt"))


def encoded(tokenizer, texts):
    """Documents as lists of sentences, each a string."""
    ids = [tokenizer.encode_batch(sentences) for sentences in texts]
    tokens = np.array([token for document in ids for sentence in document for token in sentence], np.uint16)
    return replace(documents([[*map(len, document)] for document in ids]), tokens=tokens)


def test_only_documents_without_sentence_ends_are_split_unasked(tokenizer):
    short = encoded(tokenizer, [["the fox over the river"] * 90, ["the sea " * 150]])
    assert 0.2 < 300 / len(short.tokens) < 0.5
    assert sequences.sentence_limit(short, 125) == 10
    assert sequences.sentence_limit(short, 150) == 0  # nothing is longer than two rows
    most = encoded(tokenizer, [["the fox over the river"] * 300, ["the sea " * 150]])
    assert sequences.sentence_limit(most, 125) == 0


def test_cuts_are_at_the_best_places(tokenizer):
    text = "the river over foxing, " * 40 + "the end"
    before = encoded(tokenizer, [["the fox", text], [], ["the sea " * 3]])
    after = sequences.split_long(before, 30, tokenizer)
    assert after.tokens is before.tokens and after.sentence_lengths.sum() == len(before.tokens)
    assert after.document_sizes.tolist()[1:] == [0, 1] and after.document_sizes[0] > 8
    assert after.sentence_lengths.max() <= 30 * 5 // 4 and after.sentence_lengths[1:-1].min() >= 10
    ends = np.cumsum(after.sentence_lengths)
    last = [tokenizer.tokens[i].strip() for i in before.tokens[ends[1 : after.document_sizes[0] - 1] - 1]]
    assert set(last) == {","}
    before = encoded(tokenizer, [["foxing rivers " * 200]])  # no clauses: words stay whole
    begins = np.cumsum(sequences.split_long(before, 16, tokenizer).sentence_lengths)[:-1]
    assert len(begins) > 30 and tokenizer.word_start[before.tokens[begins]].all()


def drawn(**changes: int) -> ItemResult:
    done = ItemResult()
    counts = {"pairs": 2000, "random next": 1000, "tokens": 99_000, "corpus tokens": 90_000}
    counts |= {
        "borrowed tokens": 10_000,
        "truncated tokens": 9000,
        "sentences": 4000,
        "documents": 400,
        "sequences": 1000,
    }
    done.counts.update(counts | {name.replace("_", " "): value for name, value in changes.items()})
    return done


def test_poor_pairs_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    sequences.check_totals(drawn(random_next=1200, truncated_tokens=20_000), 128)
    sequences.check_totals(drawn(pairs=0, random_next=0, truncated_tokens=90_000), 128)  # no pairs at all
    assert not capsys.readouterr().err
    sequences.check_totals(drawn(random_next=1201), 128)
    assert re.search(r"rows of 128: 60% of the pairs .*10\.0 sentences .*leave out --nsp", capsys.readouterr().err)
    sequences.check_totals(drawn(truncated_tokens=20_001), 128)
    assert re.search(r"20% of the tokens are cut off: .* 22 tokens .*--seq-len", capsys.readouterr().err)
    sequences.check_totals(drawn(sequences=24_749), 128)  # 16 of them fill half a row
    assert not capsys.readouterr().err
    sequences.check_totals(drawn(sequences=50_000), 128)
    assert re.search(r"at least 75% of the rows is padding: .* 2 tokens .*at most 16", capsys.readouterr().err)
    with pytest.raises(BadInput, match="less than one row of 128"):
        sequences.check_totals(drawn(tokens=127), 128)
