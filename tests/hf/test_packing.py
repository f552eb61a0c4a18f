"""Packing keeps every token, in its own sequence."""

import numpy as np
import pytest

from megabert.hf.packing import groups, pack


@pytest.mark.parametrize("causal", [False, True])
def test_every_token_has_its_place_and_sequence(causal):
    draw, sizes = np.random.default_rng(0), [3, 16, 1, 7, 9, 2, 8, 5, 12, 4]
    texts, seconds = [draw.integers(5, 90, n) for n in sizes], [int(draw.integers(1, n + 1)) for n in sizes]
    packed = pack(texts, seconds, 16, causal)
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
        ends = range(1, len(ids) + 1) if causal else [len(ids)] * len(ids)
        assert (flat["key_end"][place] - start % 16).tolist() == list(ends)
    assert not flat["key_end"][~covered].any() and not flat["input_ids"][~covered].any()
    assert sorted(packed.lengths[packed.lengths > 0].tolist()) == sorted(sizes)


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
