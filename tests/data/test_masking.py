"""Masks: the published statistics, no special token, independence from everything but the row; what updates predict.

Chosen positions: against a walk in plain Python. Of whole words and spans: evenly drawn, with every vocabulary."""

from collections import Counter
from itertools import accumulate, pairwise

import numpy as np
import pytest

from megabert import config as configuration
from megabert.commands.plan.workload import largest_capacity
from megabert.config import MaskingConfig
from megabert.data.masking import MaskingVocabulary, held_out_masking, mask
from megabert.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from tests.helpers import fast_tokenizers, runs, streams
from tests.helpers.rows import VOCAB, make_rows, vocabulary

ROWS, LENGTH = 8200, 128  # 1,049,600 tokens
STARTS = [token > 4 and token % 10 < 7 for token in range(VOCAB)]  # of `vocabulary()`
EACH = pytest.mark.parametrize("strategy", ["token", "word", "span"])
BOTH = pytest.mark.parametrize("strategy", ["word", "span"])


@pytest.fixture(scope="module")
def million():
    ids, bounds, _ = make_rows(ROWS, LENGTH)
    return ids, bounds, np.arange(ROWS)


def masked(rows, strategy="token", seed=11, epoch=0, known=None, **options):
    masking = MaskingConfig(strategy=strategy, **options)
    return mask(*rows, seed=seed, epoch=epoch, vocabulary=known or vocabulary(), masking=masking)


@EACH
@pytest.mark.parametrize("rate", [0.15, 0.3])
def test_statistics_are_as_published_and_nothing_else_changes(million, strategy, rate):
    ids, bounds, _ = million
    out = masked(million, strategy, rate=rate)
    used = out.labels >= 0
    row = np.broadcast_to(np.arange(ROWS)[:, None], used.shape)[used]
    position, label = out.positions[used], out.labels[used]
    shown = out.ids[row, position]
    shares = {
        "predicted": used.sum() / (ids > 4).sum() - rate,
        "[MASK]": (shown == 4).mean() - 0.8,
        "random": ((shown != 4) & (shown != label)).mean() - 0.1,
        "kept": (shown == label).mean() - 0.1,
    }
    # a span's treatment is drawn once for all of its tokens
    assert max(abs(v) for v in shares.values()) < (0.005 if strategy == "span" else 0.002), shares
    assert abs(shares["predicted"]) < 0.002 * rate
    assert (used == (np.arange(used.shape[1]) < out.counts[:, None])).all() and (out.labels[~used] == -100).all()
    assert (out.positions[~used] == 0).all() and (position < bounds[row, :, 0].sum(1)).all()
    assert (label == ids[row, position]).all() and (label > 4).all(), "a special token is predicted"
    assert (np.diff(out.positions, axis=1)[used[:, 1:]] > 0).all(), "positions ascend"
    changed, chosen = out.ids != ids, np.zeros(ids.shape, bool)
    chosen[row, position] = True
    assert not (changed & ~chosen).any()
    hits = np.bincount(out.ids[changed & (out.ids != 4)], minlength=VOCAB)
    mean = hits.sum() / (VOCAB - 5)
    assert not hits[:5].any() and abs(hits[5:].var() / mean - 1) < 0.15, "replacements cover the vocabulary evenly"


@EACH
def test_masks_depend_on_seed_epoch_and_row_alone(million, strategy):
    ids, bounds, row_ids = million
    whole = masked(million, strategy)
    some = np.random.default_rng(3).permutation(ROWS)[:50]
    for pick in (np.array([77]), some, np.arange(300, 100, -1), np.array([5, 5, 5])):
        part = masked((ids[pick], bounds[pick], row_ids[pick]), strategy)
        for name in ("ids", "positions", "labels", "counts"):
            assert (getattr(part, name) == getattr(whole, name)[pick]).all(), (name, pick[:3])
    rows = tuple(a[:200] for a in million)
    moved = (*rows[:2], rows[2] + 1000)
    others = [masked(rows, strategy, epoch=1), masked(rows, strategy, seed=12), masked(moved, strategy)]
    for other in others:
        same = (other.positions == whole.positions[:200]).all(1).mean()
        assert same < 0.01, f"{same:.0%} of the rows have the same mask"
    epochs = np.arange(200) % 2
    mixed = masked(rows, strategy, epoch=epochs)
    assert (mixed.ids == np.where(epochs[:, None] == 1, others[0].ids, whole.ids[:200])).all()


@EACH
@pytest.mark.parametrize("length", [8, 32, LENGTH])
def test_every_position_is_as_likely_as_any_other(strategy, length):
    """A fixed row of words of one token under 4,000 row ids, at 128: 125 maskable positions, 600 draws expected each, 5 standard
    deviations allowed."""
    ids, bounds, _ = make_rows(1, length, slots=1, seed=4, shortest=length)
    ids[ids > 4] = 10
    n, maskable = 4000, ids[0] > 4
    out = masked((np.repeat(ids, n, 0), np.repeat(bounds, n, 0), np.arange(n)), strategy)
    hits = np.bincount(out.positions[out.labels >= 0], minlength=length)
    assert not hits[~maskable].any()
    rate = max(0.15, 1 / maskable.sum())  # at least one
    assert np.abs(hits[maskable] - rate * n).max() < 5 * np.sqrt(n * rate * (1 - rate))


@EACH
def test_capacity_is_kept_and_spreads_over_the_row(million, strategy):
    out = masked(tuple(a[:1000] for a in million), strategy, rate=0.4, max_predictions=9)
    assert out.labels.shape == (1000, 9) and out.counts.max() == 9 and out.counts.mean() > 8.5
    late = out.positions[out.labels >= 0] >= LENGTH // 2
    assert 0.4 < late.mean() < 0.6, "a small capacity must not cut off the end of the row"
    short = np.tile(np.array([2, 5, 5, 3], np.uint16), (2000, 16)), np.full((2000, 16, 2), 4, np.uint16)
    out = masked((*short, np.arange(2000)), strategy)
    assert (out.counts == 11).all(), "fewer than sequences"
    assert np.abs(np.bincount(out.positions.ravel() // 4) / 2000 - 11 / 16).max() < 0.06


@EACH
def test_awkward_rows(strategy):
    """Nothing to predict, one maskable token, an empty row, no rows; unknown tokens are never predicted."""
    ids = np.zeros((4, 8), np.uint16)
    ids[0, :2] = 2, 3
    ids[1, :3] = 2, 9, 3
    ids[2, :6] = 2, 1, 1, 1, 9, 3
    bounds = np.array([[[2, 2]], [[3, 3]], [[6, 6]], [[0, 0]]], np.uint16)
    out = masked((ids, bounds, np.arange(4)), strategy)
    assert out.counts.tolist() == [0, 1, 1, 0]
    assert out.positions[1, 0] == 1 and out.positions[2, 0] == 4 and out.labels[2, 0] == 9
    ids[ids == 0] = 9  # padding of another id
    assert masked((ids, bounds, np.arange(4)), strategy).positions.tolist() == out.positions.tolist()
    assert masked((ids[:0], bounds[:0], np.arange(0)), strategy).ids.shape == (0, 8)


def test_causal_predicts_every_next_id():
    """Against a plain walk over each row: [SEP]s are predicted, [CLS] and padding never are."""
    ids, bounds, row_ids = make_rows(40, 48, 4)
    out = masked((ids, bounds, row_ids), "causal", rate=0.01, max_predictions=3)
    assert out.ids.dtype == np.int32 and (out.ids == ids).all() and out.labels.shape == (40, 48)
    for row in range(40):
        expected, at = [], 0
        for length in bounds[row, :, 0].tolist():
            expected += [(p, int(ids[row, p + 1])) for p in range(at, at + length - 1)]
            at += length
        count = int(out.counts[row])
        assert list(zip(out.positions[row, :count].tolist(), out.labels[row, :count].tolist(), strict=True)) == expected
        assert (out.labels[row, count:] == -100).all() and (out.positions[row, count:] == 0).all()
        assert 2 not in out.labels[row] and (out.labels[row] == 3).sum() == (ids[row] == 3).sum()
    assert masked((ids[:0], bounds[:0], row_ids[:0]), "causal").labels.shape == (0, 48)


def chosen(out, row):
    """The predicted positions of a row."""
    return out.positions[row, : out.counts[row]].tolist()


def one_sequence(tokens, copies):
    """`copies` rows of `[CLS] tokens [SEP]`."""
    ids = np.array([[2, *tokens, 3]] * copies, np.uint16)
    return ids, np.full((copies, 1, 2), ids.shape[1], np.uint16), np.arange(copies)


def list_runs(positions):
    """Neighbouring positions together."""
    runs = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    return [run for run in runs if len(run)]


def hash32(key, counter):
    low, high, top = key % 2**32, key >> 32, 2**32
    x = (low + counter * 0x9E3779B9) % top
    x = (x ^ x >> 16) * 0x7FEB352D % top ^ high
    x = (x ^ x >> 15) * 0x846CA68B % top
    return x ^ x >> 16


def segments_of(ids, lengths, apart):
    """Of each sequence its segments, of these their words, of these their positions; `apart`: every token is a word."""
    sequences, at = [], 0
    for length in lengths:
        segments = [[]]
        for position in range(at, at + length):
            if ids[position] < 5:
                segments.append([])
            elif apart or not segments[-1] or STARTS[ids[position]]:
                segments[-1].append([position])
            else:
                segments[-1][-1].append(position)
        sequences.append(segments)
        at += length
    return sequences


def span_words(random):
    """The length whose share of all lengths, in order, contains the random number of 32 bits."""
    ends = list(accumulate(0.8**k for k in range(10)))
    return 1 + sum(end / ends[-1] <= (random >> 16) / 2**16 for end in ends)


def expected(ids, lengths, key, strategy, rate, capacity):
    """A walk in plain Python."""
    sequences = segments_of(ids, lengths, strategy == "token")
    maskable = [sum(len(word) for segment in segments for word in segment) for segments in sequences]
    share, offset = min(rate, capacity / sum(maskable)), (key >> 40) / 2**24
    rounded = [int(total * share + offset) for total in accumulate(maskable, initial=0)]
    budgets = [max(b - a, tokens > 0) for (a, b), tokens in zip(pairwise(rounded), maskable, strict=True)]
    owners, found = [number for number, budget in enumerate(budgets) for _ in range(budget)], []
    start = key % 2**24 * len(owners) >> 24
    owners = (owners[start:] + owners[:start])[max(len(owners) - capacity, 0) :]
    for number, segments in enumerate(sequences):
        budget = owners.count(number)
        words = [word for segment in segments for word in segment]
        spans = [[word] for word in words]
        if strategy == "span" and words:
            draws = [hash32(key, (3 << 16) + word[0]) for word in words]
            turn = draws[0] % 2**16 * len(words) >> 16
            spans, rest = [], words[turn:] + words[:turn]
            while rest:
                spans.append(rest[: span_words(draws[len(spans)])])
                rest = rest[len(spans[-1]) :]
        # random bits between those of the sequence's number (3: four sequences) and of the position (6: 48): those of the word that
        # is in a span's place when the circle is not turned
        places, order = [word[0] for word in words], []
        for span in spans:
            bits = hash32(key, places[len(order)]) >> 9
            order += [(bits, len(order) + number, word) for number, word in enumerate(span)]
        for *_, word in sorted(order):
            if len(word) <= budget:
                found += word
                budget -= len(word)
    return sorted(found)


@EACH
@pytest.mark.parametrize(("rate", "most"), [(0.15, 0), (0.3, 0), (0.6, 0), (0.3, 3)])
def test_chosen_positions_are_those_of_a_walk(strategy, rate, most):
    """So each sequence has its budget, and no word is predicted in part."""
    ids, bounds, _ = make_rows(300, 48, 4, seed=8)
    out = masked((ids, bounds, np.arange(300)), strategy, rate=rate, max_predictions=most)
    for row in range(len(ids)):
        lengths, key = bounds[row, :, 0].tolist(), streams.key(11, 0, row)
        assert chosen(out, row) == expected(ids[row].tolist(), lengths, key, strategy, rate, out.labels.shape[1])


@BOTH
def test_words_of_a_length_are_equally_likely(strategy):
    """60 words of 1, 2 and 3 tokens alternately under 4,000 row ids; 5 standard deviations allowed."""
    tokens = [token for _ in range(20) for token in (10, 11, 17, 12, 18, 19)]
    out = masked(one_sequence(tokens, 4000), strategy)
    hits = np.bincount(out.positions[out.labels >= 0], minlength=122)
    for first in (1, 2, 4):  # of the first word of that length
        of_length = hits[first::6][:20]
        mean = of_length.mean()
        assert abs(of_length - mean).max() < 5 * np.sqrt(mean), (first, of_length)
    assert out.counts.sum() / (4000 * 120) == pytest.approx(0.15, rel=0.005)


def test_spans_have_the_published_lengths():
    """Runs in long rows of one-token words at 1%, of which few are cut by the budget or touch: within 2% of 0.2 * 0.8^(k-1)
    without its tail (Joshi et al. 2020: a mean of 3.8)."""
    out = masked(one_sequence([10] * 32_766, 60), "span", rate=0.01)
    lengths = [len(run) for row in range(60) for run in list_runs(chosen(out, row))]
    shares = Counter(lengths)
    for k in range(1, 11):
        assert shares[k] / len(lengths) == pytest.approx(0.2 * 0.8 ** (k - 1) / (1 - 0.8**10), abs=0.02)
    assert np.mean(lengths) == pytest.approx(3.8, abs=0.15) and len(lengths) > 4500


def test_a_span_is_shown_in_one_way():
    ids, bounds, _ = make_rows(3000, 128, seed=6)
    out = masked((ids, bounds, np.arange(3000)), "span")
    kinds = Counter()
    for row in range(len(ids)):
        for run in list_runs(chosen(out, row)):
            hidden, kept = out.ids[row, run] == 4, out.ids[row, run] == ids[row, run]
            assert hidden.all() or not hidden.any()
            # a random token may be the one it replaces
            kinds["hidden" if hidden.all() else "kept" if kept.all() else "mixed" if kept.any() else "random"] += 1
    shares = {kind: count / kinds.total() for kind, count in kinds.items()}
    assert shares["hidden"] == pytest.approx(0.8, abs=0.005) and shares["kept"] == pytest.approx(0.1, abs=0.005)
    assert shares["random"] == pytest.approx(0.1, abs=0.005) and shares.get("mixed", 0.0) < 0.001


@BOTH
def test_words_above_the_budget_are_skipped(strategy):
    long, short = [10, *[17] * 29], [11, 12]
    out = masked(one_sequence([*long, *short], 200), strategy)  # 32 tokens: 4 or 5 predictions
    assert all(chosen(out, row) == [31, 32] for row in range(200))
    for most in (0, 1):  # a row of one word
        out = masked(one_sequence(long, 20), strategy, max_predictions=most)
        assert not out.counts.any() and (out.labels == -100).all() and (out.ids[:, 1:31] == long).all()


@BOTH
@pytest.mark.parametrize("kind", ["unigram", "uncased", "bytes", "chinese"])
def test_words_are_those_of_the_text(strategy, kind, tmp_path):
    """Between spaces, and in Chinese every character."""
    text = "she sells lazy foxes naïvely near wordy rivers by the banking quickness follow jumps surely"
    words = text.split()
    if kind == "bytes":
        tokenizer = Tokenizer.load(fast_tokenizers.write(tmp_path / "tokenizer.json"))
    elif kind == "chinese":
        (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *"中文的大小", "##文", "fox", "##es"]) + "\n")
        tokenizer, text = Tokenizer.load(tmp_path / "vocab.txt"), "中文 foxes 的大小中文文大foxes的"
        words = ["中", "文", "foxes", *"的大小中文文大", "foxes", "的"]
    else:
        tokenizer = runs.tokenizer(tmp_path, kind)
    (tokens,) = tokenizer.encode_texts([text])
    assert tokenizer.unk_id not in tokens
    last = np.cumsum([len(ids) for ids in (*tokenizer.encode_batch(words[:1]), *tokenizer.encode_words(words[1:]))])
    assert last[-1] == len(tokens) and (kind == "chinese" or last[-1] > 1.5 * len(words))
    of_word = np.repeat(np.arange(len(words)), np.diff(last, prepend=0))
    ids, *rest = one_sequence(tokens, 400)
    ids[:, 0], ids[:, -1] = tokenizer.cls_id, tokenizer.sep_id
    out = masked((ids, *rest), strategy, known=MaskingVocabulary.of(tokenizer), rate=0.3)
    seen = Counter()
    for row in range(400):
        found = Counter(of_word[position - 1] for position in chosen(out, row))
        assert all(count == (of_word == word).sum() for word, count in found.items())
        seen.update(found.keys())
    assert len(seen) == len(words) and out.counts.mean() / len(tokens) == pytest.approx(0.3, rel=0.05)
    special = list(tokenizer.special_ids.values())
    for one in (out, masked((ids, *rest), known=MaskingVocabulary.of(tokenizer))):
        drawn = one.ids[:, 1:-1][one.ids[:, 1:-1] != tokenizer.mask_id]
        assert not np.isin(one.labels, special).any() and not np.isin(drawn, special).any()


PHASES = "phases=[{share=0.5},{share=0.5, %s}]"


@pytest.mark.parametrize(
    ("overrides", "masking", "capacity"),
    [
        (["data.masking.rate=0.2"], {"rate": 0.2}, 27),
        (["data.masking.strategy=causal"], {"strategy": "causal"}, 128),
        (["objective.causal_share=0.4", "eval.rate=0.25"], {"rate": 0.25}, 128),
        (["data.masking.causal_every=4", "eval.rate=0.25"], {"rate": 0.25, "causal_every": 4}, 128),
        ([PHASES % "data.masking.causal_every=4"], {"causal_every": 4}, 128),
        (["phases=[{share=0.5, data.masking.rate=0.4},{share=0.5, data.masking.rate=0.3}]"], {"rate": 0.3}, 53),
        # the most predictions are for the run's rate
        (["data.masking.max_predictions=20", "eval.rate=0.4"], {"rate": 0.4}, 20),
        (["data.masking.strategy=word", "data.masking.causal_every=3"], {"causal_every": 3}, 128),
        ([PHASES % 'data.masking.strategy="span"', "eval.rate=0.25"], {"rate": 0.25}, 21),
        (["data.masking.strategy=span", "objective.causal_share=0.4"], {}, 128),
    ],
)
def test_held_out_rows_have_the_last_phases_masks(overrides, masking, capacity):
    """But by token, whatever the strategy."""
    config = configuration.load("", ["model.nsp=false", *overrides])
    assert held_out_masking(config) == MaskingConfig(**masking) and largest_capacity(config, 128) == capacity
