"""`megabert.load`: the Python face of a trained model."""

from __future__ import annotations

import numpy as np
import pytest

import megabert
from tests.helpers import runs


def test_a_loaded_run_encodes_and_fills(tmp_path) -> None:
    loaded = megabert.load(runs.make(tmp_path))
    texts = ["the quick brown fox", "she sells sea shells by the sea shore"]
    vectors = loaded.encode(texts)
    assert vectors.shape == (2, loaded.model.cfg.hidden) and vectors.dtype == np.float32
    np.testing.assert_allclose(loaded.encode(texts[1:])[0], vectors[1], atol=1e-5)
    assert not np.allclose(loaded.encode(texts, pool="cls"), vectors, atol=1e-3)
    ((first, *others),) = loaded.fill("the [MASK] fox", top=3)
    assert len(others) == 2 and 1 >= first[1] >= others[0][1] > 0 and isinstance(first[0], str)
    assert loaded.tokenizer.vocab_size == loaded.model.cfg.vocab_size
    with pytest.raises(ValueError, match=r"the text has no \[MASK\]"):
        loaded.fill("the fox")
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        megabert.load("nowhere")
