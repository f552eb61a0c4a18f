"""Masks: the published statistics, no special token, independence from everything but the row; what updates predict."""

from __future__ import annotations

import numpy as np
import pytest

from megabert import config as configuration
from megabert.config import Config, MaskingConfig
from megabert.data.masking import held_out_masking, largest_capacity, mask
from tests.helpers.rows import VOCAB, make_rows, vocabulary

ROWS, LENGTH = 8200, 128  # 1,049,600 tokens
EACH = pytest.mark.parametrize("strategy", ["token", "word", "span"])


@pytest.fixture(scope="module")
def million():
    ids, bounds, _ = make_rows(ROWS, LENGTH)
    return ids, bounds, np.arange(ROWS)


def masked(rows, strategy="token", seed=11, epoch=0, **options):
    ids, bounds, row_ids = rows
    masking = MaskingConfig(strategy=strategy, **options)
    return mask(ids, bounds, row_ids, seed=seed, epoch=epoch, vocabulary=vocabulary(), masking=masking)


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
    for i in range(0, ROWS, 41):
        start = 0
        for length, _ in bounds[i].tolist():
            inside = (out.positions[i] >= start) & (out.positions[i] < start + length) & used[i]
            want = rate * int((ids[i, start : start + length] > 4).sum())
            if length:
                # of words, some do not fit
                assert strategy != "token" or max(1, np.floor(want)) <= inside.sum()
                assert inside.sum() <= max(1, np.ceil(want))
            start += length


@EACH
def test_masks_depend_on_seed_epoch_and_row_alone(million, strategy):
    ids, bounds, row_ids = million
    whole = masked(million, strategy)
    rng = np.random.default_rng(3)
    for pick in (np.array([77]), rng.permutation(ROWS)[:50], np.arange(300, 100, -1), np.array([5, 5, 5])):
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


def test_every_position_is_as_likely_as_any_other():
    """A fixed row under 4,000 row ids: 125 maskable positions, 600 draws expected each, 5 standard deviations allowed."""
    ids, bounds, _ = make_rows(1, LENGTH, slots=1, seed=4, shortest=LENGTH)
    n = 4000
    out = masked((np.repeat(ids, n, 0), np.repeat(bounds, n, 0), np.arange(n)))
    hits = np.bincount(out.positions[out.labels >= 0], minlength=LENGTH)
    maskable = ids[0] > 4
    assert not hits[~maskable].any()
    assert np.abs(hits[maskable] - 0.15 * n).max() < 5 * np.sqrt(n * 0.15 * 0.85)


@EACH
def test_capacity_is_kept_and_spreads_over_the_row(million, strategy):
    out = masked(tuple(a[:1000] for a in million), strategy, rate=0.4, max_predictions=9)
    assert out.labels.shape == (1000, 9) and out.counts.max() == 9 and out.counts.mean() > 8.5
    late = out.positions[out.labels >= 0] >= LENGTH // 2
    assert 0.4 < late.mean() < 0.6, "a small capacity must not cut off the end of the row"


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


# -- in the phases of a run -------------------------------------------------------------------------------------------


def config(*overrides: str) -> Config:
    return configuration.load("", ["model.nsp=false", *overrides])


@pytest.mark.parametrize("strategy", ["word", "span"])
def test_held_out_rows_are_masked_by_token(strategy: str) -> None:
    cfg = config(f"data.masking.strategy={strategy}", "data.masking.rate=0.2", "data.masking.causal_every=3")
    assert held_out_masking(cfg) == MaskingConfig(rate=0.2, causal_every=3) and largest_capacity(cfg, 128) == 128
    assert [cfg.data.masking.of_update(step).strategy for step in range(4)] == [strategy, strategy, "causal", strategy]
    cfg = config(f'phases=[{{share=0.5}},{{share=0.5, data.masking.strategy="{strategy}"}}]', "eval.rate=0.25")
    assert held_out_masking(cfg) == MaskingConfig(rate=0.25)
    cfg = config(f"data.masking.strategy={strategy}", "objective.causal_share=0.4")
    assert held_out_masking(cfg) == MaskingConfig()


def test_held_out_rows_are_masked_as_in_the_last_phase() -> None:
    cfg = config("data.masking.rate=0.2")
    assert held_out_masking(cfg) == cfg.data.masking and largest_capacity(cfg, 128) == 27
    whole = config("data.masking.strategy=causal")
    assert held_out_masking(whole) == MaskingConfig(strategy="causal") and largest_capacity(whole, 128) == 128
    cfg = config("objective.causal_share=0.4", "eval.rate=0.25")
    assert held_out_masking(cfg) == MaskingConfig(rate=0.25) and largest_capacity(cfg, 128) == 128
    cfg = config("data.masking.causal_every=4", "eval.rate=0.25")
    assert not held_out_masking(cfg).causal and largest_capacity(cfg, 128) == 128
    late = config("phases=[{share=0.5},{share=0.5, data.masking.causal_every=4}]")
    assert not held_out_masking(late).causal and largest_capacity(late, 128) == 128
    cfg = config("phases=[{share=0.5, data.masking.rate=0.4},{share=0.5, data.masking.rate=0.3}]")
    assert held_out_masking(cfg) == MaskingConfig(rate=0.3) and largest_capacity(cfg, 128) == 53
    cfg = config("data.masking.max_predictions=20", "eval.rate=0.4")
    assert held_out_masking(cfg).capacity(128) == 53, "the most predictions are for the run's rate"
