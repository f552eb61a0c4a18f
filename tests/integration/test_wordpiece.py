"""Masking of WordPiece rows, whose special ids are not 0 to 4."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from megabert.data.loader import Loader
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from tests.helpers import wordpiece
from tests.helpers.rows import make_dataset

ROWS, LENGTH = 48, 32


def test_special_ids_are_neither_masked_nor_drawn(tmp_path):
    """In pairs of 28 tokens, followed by padding."""
    tokenizer = Tokenizer.load(wordpiece.write(tmp_path / "vocab.txt"))
    ids = np.random.default_rng(0).integers(10, tokenizer.vocab_size, (ROWS, LENGTH)).astype(np.uint16)
    ids[:, 0], ids[:, [16, 27]], ids[:, 28:] = tokenizer.cls_id, tokenizer.sep_id, 0
    bounds, isnext = np.zeros((ROWS, 2, 2), np.uint16), np.full((ROWS, 2), -1, np.int8)
    bounds[:, 0], isnext[:, 0] = (28, 17), np.arange(ROWS) % 2
    entry = {"kind": tokenizer.kind, "file": "vocab.txt", "sha256": tokenizer.sha256}
    entry |= {"vocab_size": tokenizer.vocab_size, "special_ids": tokenizer.special_ids}
    arrays = (ids, bounds, isnext)
    dataset = Dataset(make_dataset(tmp_path, ROWS, seq_len=LENGTH, slots=2, arrays=arrays, tokenizer=entry))
    loader = Loader(dataset, tokenizer, global_batch=ROWS, micro_batch=ROWS, seed=3)
    special = torch.tensor(sorted(tokenizer.special_ids.values()))
    shown_as = Counter[str]()
    for _ in range(20):
        (batch,) = next(loader).batches
        original = torch.from_numpy(dataset.read(batch.row_ids).ids.astype(np.int32))
        used = batch.mlm_labels >= 0
        at, labels = batch.mlm_positions[used].long(), batch.mlm_labels[used]
        shown = batch.input_ids.ravel()[at]
        assert (original.ravel()[at] == labels).all() and not torch.isin(labels, special).any()
        masked = shown == tokenizer.mask_id
        assert not torch.isin(shown[~masked], special).any()
        assert ((batch.input_ids != original).sum(1) <= used.sum(1)).all()
        shown_as["mask"] += int(masked.sum())
        shown_as["random"] += int((~masked & (shown != labels)).sum())
        shown_as["kept"] += int((shown == labels).sum())
    total = shown_as.total()
    assert 0.75 < shown_as["mask"] / total < 0.85 and min(shown_as.values()) > 0.05 * total, shown_as
