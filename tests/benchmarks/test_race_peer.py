"""The race's peer: Hugging Face's loop sees the same sequences and starts causal as its own models do."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from transformers import BertLMHeadModel

from benchmarks.peers import hf_plain_loop as loop
from benchmarks.peers.hf_step import bert_config
from megabert.config import ModelConfig
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from tests.conftest import ROOT

SIZE = ModelConfig(layers=2, hidden=32, heads=2, vocab_size=50, max_positions=16, dropout=0.0, attention_dropout=0.0)
GOLDEN = ROOT / "tests/data/golden/dataset"


def padded_batch() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch as the collator gives it, 30% masked, and the ids before."""
    torch.manual_seed(3)
    original = torch.randint(5, 50, (4, 12))
    real = torch.arange(12) < torch.tensor([12, 9, 5, 12])[:, None]
    original = original.where(real, 0)
    masked = (torch.rand(4, 12) < 0.3) & real
    labels = original.where(masked, -100)
    return {"input_ids": original.where(~masked, 4), "attention_mask": real.long(), "labels": labels}, original


def test_causal_loss_is_that_of_the_causal_model() -> None:
    batch, original = padded_batch()
    assert torch.equal(loop.unmasked(batch), original)
    model = loop.model_of(SIZE, dropout=0.0).eval()
    decoder = bert_config(SIZE)
    decoder.is_decoder = True
    causal = BertLMHeadModel(decoder).eval()
    causal.load_state_dict(model.state_dict())
    labels = original.where(batch["attention_mask"].bool(), -100)
    with torch.no_grad():
        expected = causal(input_ids=original, attention_mask=batch["attention_mask"], labels=labels).loss
        found = model(**loop.causal_batch(batch, original)).loss
        masked = model(**batch).loss
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert float(masked) != pytest.approx(float(expected), rel=1e-3)


def test_budget_is_tokens_where_they_are_given() -> None:
    minutes, tokens = loop.PeerRecipe(minutes=2, batch=1), loop.PeerRecipe(minutes=0, batch=1, tokens=1000)
    assert loop.budget_used(minutes, 60.0, 10**9) == 0.5 and loop.budget_used(minutes, 999.0, 0) == 1.0
    assert loop.budget_used(tokens, 10**9, 250) == 0.25 and loop.budget_used(tokens, 0.0, 2000) == 1.0
    assert [loop.rate(minutes, used) for used in (0.0, 0.03, 0.06, 1.0)] == pytest.approx([0.0, 2.5e-4, 5e-4, 0.0])
    assert loop.rate(loop.PeerRecipe(minutes=1, batch=1, warmup=0.0), 0.0) == 5e-4


def test_peer_sees_every_sequence_once_and_whole() -> None:
    data = Dataset(GOLDEN)
    sequences = loop.Sequences(data)
    assert len(sequences) == data.manifest.statistics["sequences"]
    assert sequences.lengths.sum() == data.manifest.statistics["tokens"]
    for index in range(0, len(sequences), 37):
        row = sequences[index]
        ids, special = row["input_ids"], row["special_tokens_mask"]
        assert ids[0] == 2 and ids[-1] == 3 and 0 not in ids and ids.count(3) in (1, 2)
        assert special == [int(i in (0, 2, 3, 4)) for i in ids]


def test_peer_batches_are_padded_and_masked_by_its_collator() -> None:
    sequences, tokenizer = loop.Sequences(Dataset(GOLDEN)), Tokenizer.load(GOLDEN / "tokenizer.model")
    torch.manual_seed(0)
    stream = loop.batches(sequences, loop.collator(tokenizer.vocab_size), loop.PeerRecipe(minutes=1, batch=64))
    tokens = chosen = shown = 0
    for _ in range(20):
        batch = next(stream)
        real = batch["attention_mask"] == 1
        assert batch["input_ids"].shape[1] == real.sum(1).max()
        assert (batch["input_ids"][~real] == 0).all() and (batch["labels"][~real] == -100).all()
        picked = batch["labels"] != -100
        assert not torch.isin(batch["labels"][picked], torch.tensor([0, 2, 3, 4])).any()
        tokens += int(real.sum()) - 3 * len(real)
        chosen += int(picked.sum())
        shown += int((batch["input_ids"][picked] == 4).sum())
    assert abs(chosen / tokens - 0.15) < 0.01 and abs(shown / chosen - 0.80) < 0.02
