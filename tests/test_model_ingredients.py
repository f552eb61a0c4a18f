"""What recipes change in the model: starts, an untied decoder."""

from __future__ import annotations

from typing import Any

import torch

from megabert.config import ModelConfig, OpsConfig
from megabert.model import BertForPreTraining, parameter_count
from tests.test_model import PLAIN, SMALL, VOCAB, backends, batch, encoder_inputs, gradients, model


@torch.no_grad()
def test_layers_that_start_at_zero_are_nothing_and_all_else_starts_as_before() -> None:
    def fresh(**changes: Any) -> BertForPreTraining:
        torch.manual_seed(0)
        return BertForPreTraining(ModelConfig(**SMALL, norm="pre", **changes), PLAIN, dtype=torch.float32).eval()

    plain, zero = fresh(), fresh(zero_init=True)
    outputs = ("attention_output.weight", "feed_forward_output.weight")
    for (name, p), (_, other) in zip(zero.named_parameters(), plain.named_parameters(), strict=True):
        assert p.equal(torch.zeros_like(p) if name.endswith(outputs) else other), name
    inputs = encoder_inputs(batch([[30], [12, 20]], 32))
    states = zero.hidden_states(**inputs)
    assert all(state.equal(states[0]) for state in states[1:-1])  # the residual stream; the last one is normed


@backends
def test_a_decoder_of_its_own_gets_the_loss_s_gradient_and_the_embedding_does_not(choice: OpsConfig) -> None:
    built = model(choice, tied=False, dropout=0.0, attention_dropout=0.0)
    inputs = batch([[30], [12, 20]], 32)
    _, grads = gradients(built, inputs)
    decoder, embedding = grads["embeddings.word.decoder"], grads["embeddings.word.weight"]
    seen = torch.zeros(1024, dtype=torch.bool)
    seen[inputs["input_ids"].long().flatten()] = True
    assert embedding[~seen].abs().max() == 0 and embedding[seen].abs().max() > 0
    assert decoder[:VOCAB].abs().min(1).values.max() > 0 and decoder[VOCAB:].abs().max() == 0
    assert built.embeddings.word.decoder is not None
    assert built.embeddings.word.decoder[VOCAB:].abs().max() == 0
    assert parameter_count(built.cfg) == parameter_count(model().cfg) + VOCAB * 64
    logits = built.mlm_logits(torch.randn(5, 64))
    with torch.no_grad():
        built.embeddings.word.weight.zero_()
    assert logits.shape == (5, VOCAB) and logits.abs().max() > 0


@torch.no_grad()
def test_a_bias_of_log_frequencies_predicts_them() -> None:
    built = model()
    counts = torch.arange(VOCAB)
    built.start_from_frequencies(counts)
    shares = (
        built.mlm_logits(torch.zeros(1, 64)) - built.mlm(torch.zeros(1, 64)) @ built.embeddings.word.weight[:VOCAB].T
    )
    torch.testing.assert_close(shares.softmax(-1)[0], (counts + 1) / (counts + 1).sum(), rtol=1e-4, atol=1e-7)
    assert built.embeddings.word.bias[VOCAB:].abs().max() == 0
