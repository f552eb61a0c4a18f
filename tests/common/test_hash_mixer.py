"""The mixer is SplitMix64's, by its authors' own figures, and leaves what it is given alone."""

import numpy as np

from megabert.common.hash_mixer import GOLDEN64, mix64


def test_the_mixer_is_splitmix64() -> None:
    # The first outputs of SplitMix64 seeded with 0, as its authors' reference prints them.
    state = np.array([1, 2, 3], np.uint64) * GOLDEN64
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    before = state.copy()
    assert mix64(state).tolist() == expected
    assert np.array_equal(state, before)
