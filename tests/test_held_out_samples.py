"""Held-out samples say what the model's own logits say, at the places that evaluation hides, and change nothing."""

from dataclasses import replace

import pytest
import torch

from megabert import config as configuration
from megabert import evaluation
from megabert.data.tokenizer import Tokenizer
from megabert.evaluation import HeldOutSamples
from tests.helpers import runs
from tests.helpers.golden_runs import DATA

CPU = torch.device("cpu")
TINY = ["model.layers=2", "model.hidden=32", "model.heads=2", "model.max_positions=64", "batch.micro_size=2"]
CAUSAL = ["data.masking.strategy=causal", "model.nsp=false"]


def made(*overrides):
    """A random model, its tokenizer, and the batches of its samples."""
    tokenizer = Tokenizer.load(DATA / "tokenizer.model")
    cfg = configuration.load("tiny", [*TINY, f"model.vocab_size={tokenizer.vocab_size}", *overrides])
    held_out = evaluation.held_out(str(DATA))
    batches = list(evaluation.fixed_batches(held_out, tokenizer, cfg, rows=evaluation.SAMPLE_ROWS))
    return runs.model(cfg.model), tokenizer, batches


@pytest.mark.parametrize("causal", [False, True])
def test_samples_say_what_the_logits_say(causal):
    model, tokenizer, batches = made(*CAUSAL * causal)
    model.train()
    before = torch.get_rng_state()
    found = HeldOutSamples(batches, tokenizer, causal).predict(model, CPU)
    assert model.training and torch.equal(torch.get_rng_state(), before)
    assert [sample["row"] for sample in found] == [0, 1, 2]  # of two micro-batches of two rows
    model.eval()
    for sample in found:
        batch = batches[sample["row"] // 2]
        row = sample["row"] % 2
        names = ("input_ids", "segment_ids", "position_ids", "key_start", "key_end", "lengths")
        with torch.no_grad():
            hidden = model.encode(*(batch.inputs()[name][row : row + 1] for name in names))
            shares = model.mlm_logits(hidden[0]).softmax(-1)
        lengths = batch.lengths[row].tolist()
        first = sum(lengths[: lengths.index(max(lengths))])
        assert len(sample["tokens"]) == min(max(lengths), evaluation.SAMPLE_TOKENS)
        places = batch.mlm_positions[row] - row * batch.input_ids.shape[1]
        pairs = zip(places.tolist(), batch.mlm_labels[row].tolist(), strict=True)
        hidden_at = {place: label for place, label in pairs if label != evaluation.IGNORE}
        for mask in sample["masks"]:
            at = first + mask["at"] - causal
            assert sample["tokens"][mask["at"]] == tokenizer.tokens[hidden_at[at]]
            assert mask["shown"] == ("" if causal else tokenizer.tokens[batch.input_ids[row, at]])
            best = shares[at].topk(evaluation.SAMPLE_WORDS)
            assert [word for word, _ in mask["predicted"]] == [tokenizer.tokens[i] for i in best.indices]
            assert [p for _, p in mask["predicted"]] == pytest.approx(best.values.tolist(), abs=6e-5)
        window = [at for at in sorted(hidden_at) if first <= at < first + len(sample["tokens"]) - causal]
        assert len(sample["masks"]) == len(window) // (evaluation.CAUSAL_STRIDE if causal else 1)


def test_masks_are_evaluations_whatever_the_micro_batch():
    looks = []
    for micro in (1, 2, 4):
        model, tokenizer, batches = made(f"batch.micro_size={micro}")
        found = HeldOutSamples(batches, tokenizer, False).predict(model, CPU)
        looks.append([(s["row"], s["tokens"], [m["at"] for m in s["masks"]]) for s in found])
        assert all(len(batch.row_ids) == micro for batch in batches)
    assert looks[0] == looks[1] == looks[2]
    model, tokenizer, few = made("eval.rows=2")
    assert {int(r) for batch in few for r in batch.row_ids} == {0, 1}
    nothing = [replace(batch, mlm_labels=torch.full_like(batch.mlm_labels, -100)) for batch in few]
    assert HeldOutSamples(nothing, tokenizer, False).predict(model, CPU) == []
