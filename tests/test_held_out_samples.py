"""Held-out samples say what the model's own logits say, at the places that evaluation hides, and change nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megabert import config as configuration
from megabert import evaluation
from megabert.config import Config
from megabert.data.batch import Batch
from megabert.data.tokenizer import Tokenizer
from megabert.evaluation import HeldOutSamples
from megabert.model import BertForPreTraining
from tests.helpers import runs

DATA = Path(__file__).parent / "data" / "golden" / "dataset"
CPU = torch.device("cpu")
TINY = ["model.layers=2", "model.hidden=32", "model.heads=2", "model.max_positions=64", "batch.micro_size=2"]


def made(*overrides: str, causal: bool = False) -> tuple[Config, Tokenizer, BertForPreTraining, list[Batch]]:
    """A random model, and the batches of its samples."""
    held_out = evaluation.held_out(str(DATA))
    tokenizer = Tokenizer.load(DATA / "tokenizer.model")
    more = ["data.masking.strategy=causal", "model.nsp=false"] if causal else []
    cfg = configuration.load("tiny", [*TINY, f"model.vocab_size={tokenizer.vocab_size}", *overrides, *more])
    model = runs.model(cfg.model)
    batches = evaluation.fixed_batches(held_out, tokenizer, cfg, rows=evaluation.SAMPLE_ROWS)
    return cfg, tokenizer, model, list(batches)


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_said_is_what_the_logits_of_every_position_say(causal: bool) -> None:
    _, tokenizer, model, batches = made(causal=causal)
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
        hidden_at = {int(p) - row * batch.input_ids.shape[1]: int(i) for p, i in labels(batch, row)}
        for mask in sample["masks"]:
            at = first + mask["at"] - causal
            assert sample["tokens"][mask["at"]] == tokenizer.tokens[hidden_at[at]]
            assert mask["shown"] == ("" if causal else tokenizer.tokens[batch.input_ids[row, at]])
            best = shares[at].topk(evaluation.SAMPLE_WORDS)
            assert [word for word, _ in mask["predicted"]] == [tokenizer.tokens[i] for i in best.indices]
            assert [p for _, p in mask["predicted"]] == pytest.approx(best.values.tolist(), abs=6e-5)
        window = [at for at in sorted(hidden_at) if first <= at < first + len(sample["tokens"]) - causal]
        assert len(sample["masks"]) == len(window) // (evaluation.CAUSAL_STRIDE if causal else 1)


def labels(batch: Batch, row: int) -> list[tuple[int, int]]:
    pairs = zip(batch.mlm_positions[row].tolist(), batch.mlm_labels[row].tolist(), strict=True)
    return [(p, i) for p, i in pairs if i != evaluation.IGNORE]


def test_the_masks_are_those_of_evaluation_whatever_the_micro_batch_is() -> None:
    looks: list[Any] = []
    for micro in (1, 2, 4):
        _, tokenizer, model, batches = made(f"batch.micro_size={micro}")
        looks.append(HeldOutSamples(batches, tokenizer, False).predict(model, CPU))
        assert all(len(batch.row_ids) == micro for batch in batches)
    places = [[(s["row"], s["tokens"], [m["at"] for m in s["masks"]]) for s in found] for found in looks]
    assert places[0] == places[1] == places[2]
    cfg, tokenizer, _, few = made("eval.rows=2")
    assert {int(r) for batch in few for r in batch.row_ids} == {0, 1} and cfg.eval.rows == 2
    nothing = [replace(batch, mlm_labels=torch.full_like(batch.mlm_labels, -100)) for batch in few]
    assert HeldOutSamples(nothing, tokenizer, False).predict(runs.model(cfg.model), CPU) == []
