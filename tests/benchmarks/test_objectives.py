"""Objectives beside masked LM: their masks, causal rows, the two models of replaced tokens, equal FLOPs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks import objectives
from benchmarks.objectives import OBJECTIVES, RATE, MaskedLm, Masker, ReplacedTokens, encoder_inputs, unmasked
from megabert.config import from_dict
from megabert.data.batch import Batch
from megabert.data.loader import Loader
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from tests.conftest import ROOT

DATA = Dataset(ROOT / "tests/data/golden/dataset")
TOKENIZER = Tokenizer.load(DATA.tokenizer_path)
CONFIG = from_dict(
    {
        "model": {"kind": "modern", "layers": 2, "hidden": 32, "heads": 2, "nsp": False, "norm": "pre"}
        | {"vocab_size": TOKENIZER.vocab_size, "dropout": 0.0, "attention_dropout": 0.0},
        "batch": {"global_size": 16, "micro_size": 16},
        "optimizer": {"name": "muon", "lr": 3e-3},
        "schedule": {"name": "wsd", "decay_share": 0.3, "by": "tokens", "budget_tokens": 60_000}
        | {"budget_warmup": 0.06, "total_steps": 1_000_000_000},
    }
)


def batch_of(step: int = 0) -> Batch:
    (batch,) = Loader(DATA, TOKENIZER, global_batch=8, micro_batch=8, seed=step).__iter__().__next__().batches
    return batch


def test_masks_hide_their_share_of_ordinary_tokens() -> None:
    masker, ids = Masker(TOKENIZER, 1), unmasked(batch_of())
    assert not (ids == TOKENIZER.mask_id).any()
    maskable = (~masker.special[ids.long()]).sum(1)
    rates = torch.linspace(0.1, 0.8, len(ids))
    masks = masker.draw(ids, rates)
    assert masks.labels.equal(ids.flatten()[masks.at].long()) and not masker.special[masks.labels].any()
    counts = torch.bincount(masks.at // ids.shape[1], minlength=len(ids))
    assert counts.equal((rates * maskable).round().long())
    changed = (masks.ids != ids).flatten().nonzero()[:, 0]
    assert torch.isin(changed, masks.at).all()
    shares = [(masks.ids.flatten()[masks.at] == value).float().mean() for value in (TOKENIZER.mask_id, masks.labels)]
    assert shares[0] == pytest.approx(0.8, abs=0.08) and shares[1] == pytest.approx(0.1, abs=0.06)


def test_adaptive_masks_prefer_what_is_mispredicted() -> None:
    masked_lm, ids = MaskedLm("adaptive", CONFIG, TOKENIZER, 1), unmasked(batch_of())
    common = int(ids.flatten()[~masked_lm.masker.special[ids.flatten().long()]].mode().values)
    for _ in range(objectives.ADAPT_EVERY):
        masked_lm.adapt(torch.full((50,), common), torch.zeros(50, dtype=torch.bool))
    assert masked_lm.masker.weights[common] < 0.25
    before = Masker(TOKENIZER, 1).draw(ids, torch.full((len(ids),), RATE))
    after = masked_lm.masker.draw(ids, torch.full((len(ids),), RATE))
    assert len(after.at) == len(before.at)
    assert (after.labels == common).sum() < 0.6 * (before.labels == common).sum()


@torch.no_grad()
def test_causal_rows_see_what_is_before_them() -> None:
    """The hidden states of a mixed batch are those of a causal batch and of a masked one."""
    batch, masked_lm = batch_of(), MaskedLm("mixed", CONFIG, TOKENIZER, 1).eval()
    ids = unmasked(batch)
    masks = masked_lm.masker.draw(ids, torch.full((len(ids),), RATE))
    mixed, both = objectives.with_causal_rows(batch, ids, masks)
    places = torch.arange(1, ids.shape[1] + 1, dtype=torch.int32).expand_as(ids)
    causal = replace(batch, key_end=torch.where(batch.key_end > 0, places, 0))
    seed = torch.zeros(1, dtype=torch.int64)
    found = masked_lm.model.encode(**encoder_inputs(mixed, both.ids), seed=seed, causal=True)
    first = objectives.CAUSAL_ROWS
    wanted = masked_lm.model.encode(**encoder_inputs(causal, ids), seed=seed, causal=True)
    torch.testing.assert_close(found[:first], wanted[:first])
    wanted = masked_lm.model.encode(**encoder_inputs(batch, masks.ids), seed=seed)
    torch.testing.assert_close(found[first:], wanted[first:])
    row, place = both.at // ids.shape[1], both.at % ids.shape[1]
    rows = row < first
    assert both.labels[rows].equal(ids[row[rows], place[rows] + 1].long())
    tokens = batch.lengths[:first].sum() - (batch.lengths[:first] > 0).sum()
    assert rows.sum() == tokens  # all but the last of each sequence


def test_the_models_of_replaced_tokens_share_embeddings_one_way() -> None:
    module = ReplacedTokens(CONFIG, TOKENIZER, 1)
    ids = unmasked(batch_of())
    module.original(batch_of(), ids).sum().backward()
    assert module.generator.embeddings.word.weight.grad is None
    assert module.difference.grad is not None and module.difference.grad.abs().max() > 0
    assert module.model.embeddings.word.weight.grad is None
    module.difference.data.add_(1.0)
    assert (module.table() - module.generator.embeddings.word.weight).min() > 0.99


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_learns_within_the_flops(objective: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = objectives.train(objective, 3, CONFIG, DATA, TOKENIZER)
    updates = int(capsys.readouterr().err.split(": ")[1].split()[0])
    tokens = DATA.manifest.statistics["tokens"] / DATA.manifest.rows * CONFIG.batch.global_size
    assert updates <= math.ceil(60_000 / tokens) + 3
    if isinstance(module, ReplacedTokens):
        assert updates < 0.9 * 60_000 / tokens
        (good, likely), (_, unlikely) = module.scores(["the", "of the the the"], TOKENIZER)
        assert good == "the" and likely < 0 and unlikely < 0
    else:
        assert module(batch_of(9))[0] < 0.97 * math.log(TOKENIZER.vocab_size)
