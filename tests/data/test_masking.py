"""Masks: the published statistics, whole words, no special token, and independence from everything but the row."""

from __future__ import annotations

import numpy as np
import pytest

from megabert.data.masking import SPAN_BELOW, Masking, MaskingVocabulary, mask, stream_keys
from tests.helpers.rows import VOCAB, make_rows, vocabulary
from tests.helpers.streams import key

STRATEGIES = ("token", "word", "span")
ROWS, LENGTH = 8200, 128  # 1,049,600 tokens


@pytest.fixture(scope="module")
def million():
    ids, bounds, _ = make_rows(ROWS, LENGTH)
    return ids, bounds, np.arange(ROWS)


def masked(rows, strategy, seed=11, epoch=0, **options):
    ids, bounds, row_ids = rows
    return mask(
        ids, bounds, row_ids, seed=seed, epoch=epoch, vocabulary=vocabulary(), masking=Masking(strategy, **options)
    )


def word_spans(ids, bounds, starts):
    """(first, past the last) of each word of one row, by a plain walk over its tokens."""
    spans, open_at = [], None
    for i in range(int(bounds[:, 0].sum()) + 1):
        special = i == len(ids) or ids[i] < 5 or i == bounds[:, 0].sum()
        if open_at is not None and (special or starts[ids[i]]):
            spans.append((open_at, i))
            open_at = None
        if not special and open_at is None:
            open_at = i
    return spans


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_statistics_on_a_million_tokens_are_as_published(million, strategy, seed):
    ids, *_ = million
    out = masked(million, strategy, seed)
    used = out.labels >= 0
    flat = (np.arange(ROWS)[:, None] * LENGTH + out.positions)[used]
    shown, label = out.ids.ravel()[flat], out.labels[used]
    shares = {
        "predicted": used.sum() / (ids > 4).sum() - 0.15,
        "[MASK]": (shown == 4).mean() - 0.8,
        "random": ((shown != 4) & (shown != label)).mean() - 0.1,
        "kept": (shown == label).mean() - 0.1,
    }
    assert max(abs(v) for v in shares.values()) < 0.002, shares


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_labels_are_originals_and_nothing_else_changes(million, strategy):
    ids, bounds, _ = million
    out = masked(million, strategy)
    used = np.arange(out.labels.shape[1]) < out.counts[:, None]
    assert ((out.labels >= 0) == used).all() and (out.labels[~used] == -100).all()
    assert (out.positions[~used] == 0).all()
    row = np.broadcast_to(np.arange(ROWS)[:, None], used.shape)
    assert (out.labels[used] == ids[row[used], out.positions[used]]).all()
    assert (out.labels[used] > 4).all(), "a special token is predicted"
    assert (np.diff(out.positions, axis=1)[used[:, 1:]] > 0).all(), "positions ascend"
    assert (out.positions < bounds[:, :, 0].sum(1)[:, None]).all()
    changed = out.ids != ids
    chosen = np.zeros_like(changed)
    chosen[row[used], out.positions[used]] = True
    assert not (changed & ~chosen).any()
    assert ((out.ids[changed] == 4) | (out.ids[changed] > 4)).all(), "a replacement is a special token"
    assert out.ids.max() < VOCAB


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_mask_does_not_depend_on_its_batch(million, strategy):
    ids, bounds, row_ids = million
    whole = masked(million, strategy)
    rng = np.random.default_rng(3)
    for pick in (np.array([77]), rng.permutation(ROWS)[:50], np.arange(300, 100, -1), np.array([5, 5, 5])):
        part = masked((ids[pick], bounds[pick], row_ids[pick]), strategy)
        for name in ("ids", "positions", "labels", "counts"):
            assert (getattr(part, name) == getattr(whole, name)[pick]).all(), (name, pick[:3])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_epoch_and_seed_and_row_id_each_change_the_mask(million, strategy):
    rows = tuple(a[:200] for a in million)
    base = masked(rows, strategy)
    others = [
        masked(rows, strategy, epoch=1),
        masked(rows, strategy, seed=12),
        masked((*rows[:2], rows[2] + 1000), strategy),
    ]
    for other in others:
        same = (other.positions == base.positions).all(1).mean()
        assert same < 0.01, f"{same:.0%} of the rows have the same mask"
    epochs = np.arange(200) % 2
    mixed = masked(rows, strategy, epoch=epochs)
    assert (mixed.ids == np.where(epochs[:, None] == 1, others[0].ids, base.ids)).all()


def test_every_position_is_as_likely_as_any_other(million):
    """A fixed row under 4,000 row ids: 125 maskable positions, 600 draws expected each, 5 standard deviations allowed."""
    ids, bounds, _ = make_rows(1, LENGTH, slots=1, seed=4, shortest=LENGTH)
    n = 4000
    out = masked((np.repeat(ids, n, 0), np.repeat(bounds, n, 0), np.arange(n)), "token")
    hits = np.bincount(out.positions[out.labels >= 0], minlength=LENGTH)
    maskable = ids[0] > 4
    assert not hits[~maskable].any()
    assert np.abs(hits[maskable] - 0.15 * n).max() < 5 * np.sqrt(n * 0.15 * 0.85)


def test_random_replacements_cover_the_vocabulary_evenly(million):
    out = masked(million, "token")
    changed = (out.ids != million[0]) & (out.ids != 4)
    hits = np.bincount(out.ids[changed], minlength=VOCAB)
    mean = changed.sum() / (VOCAB - 5)
    assert not hits[:5].any() and abs(hits[5:].var() / mean - 1) < 0.15, (mean, hits[5:].var())


def test_budgets_are_rounded_shares_and_at_least_one(million):
    ids, bounds, _ = million
    out = masked(million, "token")
    for i in range(0, ROWS, 41):
        start = 0
        for length, _ in bounds[i].tolist():
            inside = (out.positions[i] >= start) & (out.positions[i] < start + length) & (out.labels[i] >= 0)
            maskable = int((ids[i, start : start + length] > 4).sum())
            want = 0.15 * maskable
            if length:
                assert max(1, np.floor(want)) <= inside.sum() <= max(1, np.ceil(want))
            start += length


@pytest.mark.parametrize("strategy", ("word", "span"))
def test_words_are_never_split(million, strategy):
    ids, bounds, _ = million
    out = masked(million, strategy)
    starts = vocabulary().word_start
    multi = 0
    for i in range(0, ROWS, 11):
        chosen = set(out.positions[i][out.labels[i] >= 0].tolist())
        for first, end in word_spans(ids[i], bounds[i], starts):
            inside = sum(p in chosen for p in range(first, end))
            assert inside in (0, end - first), f"row {i}: {inside} of the {end - first} tokens of a word"
            multi += end - first > 1 and inside > 0
    assert multi > 1000


def test_a_word_over_budget_gives_its_first_tokens():
    starts = np.zeros(VOCAB, bool)  # nothing starts a word: each segment is one word
    ids = np.full((1, 64), 9, np.uint16)
    ids[0, [0, 20, 63]] = 2, 3, 3
    bounds = np.array([[[64, 21]]], np.uint16)
    for strategy in ("word", "span"):
        out = mask(
            ids,
            bounds,
            np.array([5]),
            seed=1,
            epoch=0,
            vocabulary=MaskingVocabulary(VOCAB, 4, range(5), starts),
            masking=Masking(strategy),
        )
        n = int(out.counts[0])  # 61 maskable: 9.15
        assert n in (9, 10) and out.positions[0, 0] in (1, 21)
        assert (np.diff(out.positions[0, :n]) == 1).all()


def test_spans_have_the_published_lengths():
    """Anchors far apart in a long row of one-token words: span lengths 1 to 10 with mean 3.8 (Joshi et al. 2020)."""
    lengths = np.diff(np.concatenate(([0], SPAN_BELOW, [2**32])).astype(np.float64)) / 2**32
    assert lengths == pytest.approx([0.2 * 0.8**k / (1 - 0.8**10) for k in range(10)], rel=1e-6)
    assert (lengths * np.arange(1, 11)).sum() == pytest.approx(3.8, abs=0.01)
    n, length = 400, 512
    ids = np.full((n, length), 9, np.uint16)
    ids[:, [0, length - 1]] = 2, 3
    bounds = np.tile(np.array([[[length, length]]], np.uint16), (n, 1, 1))
    starts = np.ones(VOCAB, bool)
    out = mask(
        ids,
        bounds,
        np.arange(n),
        seed=1,
        epoch=0,
        vocabulary=MaskingVocabulary(VOCAB, 4, range(5), starts),
        masking=Masking("span", rate=0.02),
    )
    runs = []
    for i in range(n):
        chosen = out.positions[i, : out.counts[i]]
        cuts = np.flatnonzero(np.diff(chosen) > 1) + 1
        runs += [len(part) for part in np.split(chosen, cuts)][:-1]
    assert 2.5 < np.mean(runs) < 4.5 and max(runs) > 6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_capacity_is_kept_and_spreads_over_the_row(million, strategy):
    rows = tuple(a[:1000] for a in million)
    out = masked(rows, strategy, rate=0.4, max_predictions=9)
    assert out.labels.shape == (1000, 9) and out.counts.max() == 9 and out.counts.mean() > 8.5
    late = out.positions[out.labels >= 0] >= LENGTH // 2
    assert 0.4 < late.mean() < 0.6, "a small capacity must not cut off the end of the row"


def test_awkward_rows():
    """Nothing to predict, one maskable token, an empty row, no rows; unknown tokens are never predicted."""
    ids = np.zeros((4, 8), np.uint16)
    ids[0, :2] = 2, 3
    ids[1, :3] = 2, 9, 3
    ids[2, :6] = 2, 1, 1, 1, 9, 3
    bounds = np.array([[[2, 2]], [[3, 3]], [[6, 6]], [[0, 0]]], np.uint16)
    for strategy in STRATEGIES:
        out = masked((ids, bounds, np.arange(4)), strategy)
        assert out.counts.tolist() == [0, 1, 1, 0]
        assert out.positions[1, 0] == 1 and out.positions[2, 0] == 4 and out.labels[2, 0] == 9
        assert masked((ids[:0], bounds[:0], np.arange(0)), strategy).ids.shape == (0, 8)


def test_the_random_numbers_are_pinned():
    """Masks of a published run can be drawn again only if these never change; computed with plain Python integers."""
    rows = np.array([0, 1, 123456789012])
    assert stream_keys(42, 3, rows).tolist() == [key(42, 3, r) for r in rows.tolist()]


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
    again = masked((ids, bounds, row_ids + 7), "causal", seed=12, epoch=3)
    assert (again.labels == out.labels).all()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"strategy": "words"}, "masking.strategy"),
        ({"rate": 0.0}, "masking.rate"),
        ({"mask": 0.9, "random": 0.2}, "masking.mask"),
    ],
)
def test_a_wrong_option_is_named(options, field):
    with pytest.raises(ValueError, match=field):
        Masking(**options)
