"""Packing keeps every token, in its own sequence, and what a sequence gives does not depend on its neighbours."""

import numpy as np
import pytest
import torch

from megabert.config import ModelConfig
from megabert.data.packing import groups, pack
from tests.helpers import runs

SIZES = [3, 16, 1, 7, 9, 2, 8, 5, 12, 4]


def sequences(seed: int = 0) -> tuple[list[np.ndarray], list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(5, 90, n) for n in SIZES], [int(draw.integers(1, n + 1)) for n in SIZES]


def test_every_token_has_its_place_and_sequence():
    texts, seconds = sequences()
    packed = pack(texts, seconds, 16)
    assert packed.input_ids.shape == (5, 16)  # 67 tokens do not fit into four rows of 16
    flat = {name: tensor.flatten().numpy() for name, tensor in packed.inputs().items()}
    covered = np.zeros(packed.input_ids.numel(), bool)
    for ids, second, start in zip(texts, seconds, packed.starts, strict=True):
        place = slice(start, start + len(ids))
        assert not covered[place].any()
        covered[place] = True
        assert flat["input_ids"][place].tolist() == ids.tolist()
        assert flat["segment_ids"][place].tolist() == [0] * second + [1] * (len(ids) - second)
        assert flat["position_ids"][place].tolist() == list(range(len(ids)))
        assert set(flat["key_start"][place].tolist()) == {start % 16}
        assert set(flat["key_end"][place].tolist()) == {start % 16 + len(ids)}
    assert not flat["key_end"][~covered].any() and not flat["input_ids"][~covered].any()
    assert sorted(packed.lengths[packed.lengths > 0].tolist()) == sorted(SIZES)


def test_causal_packing_does_not_change_outputs():
    model = runs.model(ModelConfig(layers=2, hidden=32, heads=2, vocab_size=90, max_positions=16))
    texts, seconds = sequences(1)
    packed = pack(texts, seconds, 16, causal=True)

    def alone(ids, second):
        return model.encode(**pack([ids], [second], causal=True).inputs())[0]

    with torch.no_grad():
        together = model.encode(**packed.inputs()).flatten(0, 1)
        for ids, second, start in zip(texts, seconds, packed.starts, strict=True):
            torch.testing.assert_close(together[start : start + len(ids)], alone(ids, second), rtol=0, atol=2e-6)
        # what comes later changes nothing
        torch.testing.assert_close(alone(texts[1], 16)[:9], alone(texts[1][:9], 9), rtol=0, atol=2e-6)


def test_sequences_that_do_not_fit_are_refused():
    for length, message in ((9, "rows of 8"), (0, "0")):
        with pytest.raises(ValueError, match=message):
            pack([np.arange(length)], [length], 8)


def test_groups_hold_each_sequence_once_within_the_limit():
    lengths = np.random.default_rng(3).integers(3, 15, 100).tolist()
    found = groups(lengths, 50)
    assert sorted(i for group in found for i in group) == list(range(100))
    assert all(sum(lengths[i] for i in group) <= 50 for group in found)
    assert len(found) <= 1.2 * sum(lengths) / 50
    assert [len(group) for group in groups(lengths, 1)] == [1] * 100
