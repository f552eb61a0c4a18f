"""The peer's causal half is BertLMHeadModel's, and its budget is minutes or tokens."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from transformers import BertLMHeadModel

from benchmarks.peers import hf_plain_loop as loop
from benchmarks.peers.hf_config import bert_config
from megabert.config import ModelConfig

SIZE = ModelConfig(layers=2, hidden=32, heads=2, vocab_size=50, max_positions=16, dropout=0.0, attention_dropout=0.0)


def padded_batch() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch as the collator gives it, 15% hidden, and the ids before."""
    torch.manual_seed(3)
    original = torch.randint(5, 50, (4, 12))
    real = torch.arange(12) < torch.tensor([12, 9, 5, 12])[:, None]
    original = original.where(real, 0)
    hidden = (torch.rand(4, 12) < 0.3) & real
    labels = original.where(hidden, -100)
    return {"input_ids": original.where(~hidden, 4), "attention_mask": real.long(), "labels": labels}, original


def test_left_to_right_is_the_loss_of_the_causal_model_of_the_same_weights() -> None:
    batch, original = padded_batch()
    assert torch.equal(loop.unmasked(batch), original)
    model = loop.model_of(SIZE, dropout=0.0).eval()
    config = bert_config(SIZE)
    config.is_decoder = True
    causal = BertLMHeadModel(config).eval()
    causal.load_state_dict(model.state_dict())
    labels = original.where(batch["attention_mask"].bool(), -100)
    with torch.no_grad():
        expected = causal(input_ids=original, attention_mask=batch["attention_mask"], labels=labels).loss
        found = model(**loop.left_to_right(batch, original)).loss
        masked = model(**batch).loss
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert float(masked) != pytest.approx(float(expected), rel=1e-3)


def test_the_budget_is_of_tokens_where_they_are_given() -> None:
    minutes, tokens = loop.Recipe(minutes=2, batch=1), loop.Recipe(minutes=0, batch=1, tokens=1000)
    assert loop.budget_used(minutes, 60.0, 10**9) == 0.5 and loop.budget_used(minutes, 999.0, 0) == 1.0
    assert loop.budget_used(tokens, 10**9, 250) == 0.25 and loop.budget_used(tokens, 0.0, 2000) == 1.0
    assert [loop.rate(minutes, used) for used in (0.0, 0.03, 0.06, 1.0)] == pytest.approx([0.0, 2.5e-4, 5e-4, 0.0])
    assert loop.rate(loop.Recipe(minutes=1, batch=1, warmup=0.0), 0.0) == 5e-4
