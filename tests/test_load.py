"""The Python face of the project: trained models and datasets."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import megabert
from megabert.data.loader import Loader
from megabert.data.packing import pack
from megabert.data.tokenizer import Tokenizer
from tests.helpers import runs
from tests.helpers.golden_runs import DATA


def test_a_loaded_run_encodes_and_fills(tmp_path) -> None:
    loaded = megabert.load(runs.make(tmp_path))
    texts = ["the quick brown fox", "she sells sea shells by the sea shore"]
    vectors = loaded.encode(texts)
    assert vectors.shape == (2, loaded.model.cfg.hidden) and vectors.dtype == np.float32
    np.testing.assert_allclose(loaded.encode(texts[1:])[0], vectors[1], atol=1e-5)
    np.testing.assert_array_equal(loaded.encode(texts[1]), loaded.encode(texts[1:]))
    assert not np.allclose(loaded.encode(texts, pool="cls"), vectors, atol=1e-3)
    ((first, *others),) = loaded.fill("the [MASK] fox", top=3)
    assert len(others) == 2 and 1 >= first[1] >= others[0][1] > 0 and isinstance(first[0], str)
    assert loaded.tokenizer.vocab_size == loaded.model.cfg.vocab_size
    with pytest.raises(ValueError, match=r"the text has no \[MASK\]"):
        loaded.fill("the fox")
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        megabert.load("nowhere")


@pytest.mark.parametrize("shape", [{}, {"causal": True}, {"kind": "uncased", "norm": "pre"}])
def test_ids_alone_give_the_logits_of_packed_rows(shape: dict[str, object], tmp_path) -> None:
    loaded, causal = megabert.load(runs.make(tmp_path, **shape)), "causal" in shape
    texts = ["the quick [MASK] fox", "she sells", "[MASK][MASK] by the sea shore."]
    ids = loaded.tokenizer(texts)
    assert ids.dtype == torch.int32 and (ids == loaded.tokenizer.mask_id).sum(1).tolist() == [1, 0, 2]
    logits = loaded.logits(texts)
    assert logits.shape == (*ids.shape, loaded.tokenizer.vocab_size) and logits.equal(loaded.logits(ids.long()))
    with torch.no_grad():
        for row, want in zip(ids, logits, strict=True):
            alone = row[row != 0].numpy()
            hidden = loaded.model.encode(**pack([alone], [len(alone)], causal=causal).inputs())
            torch.testing.assert_close(loaded.model.mlm_logits(hidden[0]), want[: len(alone)], atol=1e-5, rtol=0)
    found = loaded.model(ids, causal=causal)
    assert found.equal(logits)
    if not causal:
        found.sum().backward()
        assert loaded.model.layers[0].qkv.weight.grad is not None
        (words,) = loaded.fill(texts[0], top=1)
        place = int((ids[0] == loaded.tokenizer.mask_id).nonzero()[0])
        assert words[0][1] == pytest.approx(float(logits[0, place].softmax(-1).max()), abs=1e-6)
    with pytest.raises(ValueError, match="takes at most 40; shorten the text"):
        loaded.logits("fox " * 100)


def test_a_torch_loader_reads_a_dataset() -> None:
    dataset = megabert.Dataset(DATA)
    stored = next(iter(DataLoader(dataset, batch_size=4)))
    want = dataset.read(np.arange(4))
    np.testing.assert_array_equal(stored["ids"].numpy(), want.ids)
    np.testing.assert_array_equal(stored["bounds"].numpy(), want.bounds)
    assert sum(len(batch["ids"]) for batch in DataLoader(dataset, batch_size=100)) == len(dataset) == dataset.rows
    with pytest.raises(IndexError, match=f"has rows 0 to {dataset.rows - 1}"):
        dataset[dataset.rows]


def test_batches_are_those_of_a_run() -> None:
    dataset = megabert.Dataset(DATA)
    tokenizer = Tokenizer.load(dataset.tokenizer_path)
    run = Loader(dataset, tokenizer, global_batch=8, micro_batch=8, seed=3, start_step=2)
    ours = megabert.batches(dataset, rows=8, seed=3, start=2)
    for _ in range(2):
        want, batch = next(run).batches[0], next(ours)
        assert batch.row_ids.tolist() == want.row_ids.tolist() and batch.input_ids.equal(want.input_ids)
        assert batch.mlm_labels.equal(want.mlm_labels)
