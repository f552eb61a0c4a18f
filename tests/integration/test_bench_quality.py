"""The quality benchmark compares like with like: same sequences, same score for the same weights, ratios by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megabert import config
from megabert.data.shards import Dataset
from megabert.data.tokenizer import Tokenizer
from megabert.evaluation import batch_sums, fixed_batches
from megabert.hf.hf_names import from_huggingface
from megabert.model import BertForPreTraining

pytest.importorskip("transformers")
from benchmarks.common import curves
from benchmarks.peers import hf_plain_loop


def curve(*points: tuple[float, float]) -> list[dict[str, float]]:
    return [{"seconds": s, curves.LOSS: loss, curves.ACCURACY: 0.0} for s, loss in points]


def test_the_time_to_a_loss_is_linear_between_points() -> None:
    ours = curve((0, 10.0), (60, 6.0), (120, 4.0), (180, 5.0), (240, 3.0))
    assert curves.reached(ours, 5.0) == 90.0
    assert curves.reached(ours, 6.0) == 60.0
    assert curves.reached(ours, 3.5) == 225.0
    assert curves.reached(ours, 11.0) == 0.0
    assert curves.reached(ours, 2.9) is None


def test_the_ratio_is_their_time_over_ours() -> None:
    runs = {
        "a": {"system": "megabert", "curve": curve((0, 10.0), (600, 4.0))},
        "b": {"system": "megabert", "curve": curve((0, 10.0), (600, 5.0))},
        "hf": {"system": "huggingface", "curve": curve((0, 10.0), (1800, 4.5))},
    }
    report = {"runs": runs}
    curves.compare(report)
    assert runs["a"]["reached_peer_seconds"] == 550.0
    assert runs["a"]["ratio"] == report["ratio"] == round(1800 / 550, 3)
    assert runs["b"]["ratio"] is None


def test_time_and_tokens_are_told_apart(tmp_path: Path) -> None:
    """Twice as fast and token for token the same: 2 in seconds, 1 in tokens."""
    curves_ = {
        "megabert": [(0, 0, 10.0), (300, 1000, 6.0), (600, 2000, 4.0)],
        "huggingface": [(0, 0, 10.0), (600, 1000, 6.0)],
    }
    runs = {
        system: {
            "system": system,
            "curve": [
                {"seconds": s, "tokens": t, "step": t // 10, curves.LOSS: loss, curves.ACCURACY: 0.0}
                for s, t, loss in points
            ],
        }
        for system, points in curves_.items()
    }
    report = {"runs": runs, "settings": {"config": "mini", "threads": 2}}
    curves.compare(report)
    assert (report["ratio"], report["ratio_tokens"]) == (2.0, 1.0)
    assert runs["megabert"]["loss_at_peer_tokens"] == 6.0
    assert runs["megabert"]["tokens_per_update"] == runs["huggingface"]["tokens_per_update"] == 10.0
    assert [c["ratio"] for c in report["comparisons"]] == [2.0, 1.0]
    assert "Hugging Face's BertForMaskedLM in a plain loop, not tuned" in curves.caption(report)
    runs["huggingface"]["tuning"] = [{"lr": 1e-3}]
    assert "tuned on a grid" in curves.caption(report)
    pytest.importorskip("matplotlib")
    curves.plot(report, tmp_path / "plot.svg")
    assert "million real tokens" in (tmp_path / "plot.svg").read_text()


def test_the_peer_has_our_settings_and_what_differs_is_said(dataset: Path) -> None:
    from benchmarks import bench_quality

    args = bench_quality.parse(["--data", str(dataset), "--ours", "optimizer.beta2=0.97"])
    cfg = bench_quality.our_config(args)
    o = cfg.optimizer
    same = {"lr": o.lr, "beta1": o.beta1, "beta2": o.beta2, "eps": o.eps, "clip": o.clip}
    recipe = hf_plain_loop.Recipe(minutes=1, batch=18, dropout=cfg.model.dropout, weight_decay=o.weight_decay, **same)
    assert bench_quality.differs(recipe, cfg) == {
        "update": {"ours": "16 packed rows", "peer": "18 padded sequences, one a row"}
    }
    other = hf_plain_loop.Recipe(minutes=1, batch=18)
    assert {"beta2", "eps", "lr", "dropout", "update"} == set(bench_quality.differs(other, cfg))
    assert bench_quality.differs(other, cfg)["beta2"] == {"ours": 0.97, "peer": 0.999}
    optimizer = hf_plain_loop.optimizer_of(torch.nn.Linear(2, 2), recipe)
    assert optimizer.defaults["betas"] == (0.9, 0.97) and optimizer.defaults["eps"] == o.eps
    manifest = Dataset(dataset).manifest
    rows = manifest.statistics["tokens"] / manifest.rows
    assert bench_quality.tokens_an_update(args) == pytest.approx(16 * rows) and 16 * rows < 16 * 64


def test_the_peer_sees_every_sequence_once_and_whole(dataset) -> None:
    data = Dataset(dataset)
    sequences = hf_plain_loop.Sequences(data)
    assert len(sequences) == data.manifest.statistics["sequences"]
    assert sequences.lengths.sum() == data.manifest.statistics["tokens"]
    for index in range(0, len(sequences), 37):
        row = sequences[index]
        ids, special = row["input_ids"], row["special_tokens_mask"]
        assert ids[0] == 2 and ids[-1] == 3 and 0 not in ids and ids.count(3) in (1, 2)
        assert special == [int(i in (0, 2, 3, 4)) for i in ids]


def test_the_peers_batches_are_padded_and_masked_by_its_own_collator(dataset) -> None:
    tokenizer = Tokenizer.load(dataset / "tokenizer.model")
    sequences = hf_plain_loop.Sequences(Dataset(dataset))
    recipe = hf_plain_loop.Recipe(minutes=1, batch=64)
    torch.manual_seed(0)
    stream = hf_plain_loop.batches(sequences, hf_plain_loop.collator(tokenizer), recipe)
    tokens = chosen = shown = 0
    for _ in range(20):
        batch = next(stream)
        real = batch["attention_mask"] == 1
        assert batch["input_ids"].shape[1] == real.sum(1).max()
        assert (batch["input_ids"][~real] == 0).all() and (batch["labels"][~real] == -100).all()
        picked = batch["labels"] != -100
        assert not np.isin(batch["labels"][picked].numpy(), [0, 2, 3, 4]).any()
        tokens += int(real.sum()) - 3 * len(real)
        chosen += int(picked.sum())
        shown += int((batch["input_ids"][picked] == 4).sum())
    assert abs(chosen / tokens - 0.15) < 0.01
    assert abs(shown / chosen - 0.80) < 0.02


def test_huggingface_weights_get_the_score_that_huggingface_gives_them(dataset) -> None:
    """Our evaluation of mapped weights over packed rows against their model on each sequence alone: 1e-4 in fp32."""
    cfg = config.load(
        "mini",
        [
            "model.nsp=false",
            "model.norm=post",
            "model.vocab_size=2000",
            "model.layers=2",
            "eval.rows=32",
            "batch.micro_size=32",
            "batch.global_size=32",
        ],
    )
    tokenizer = Tokenizer.load(dataset / "tokenizer.model")
    torch.manual_seed(1)
    theirs = hf_plain_loop.model_of(cfg.model, 0.1).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # away from the near-uniform start, where every model scores alike
            parameter.add_(torch.randn_like(parameter) * 0.05)
    ours = BertForPreTraining(cfg.model, cfg.ops)
    ours.load_state_dict(from_huggingface(theirs.state_dict(), cfg.model))
    batches = list(fixed_batches(Dataset(dataset), tokenizer, cfg))
    loss, correct, predictions = batch_sums(ours, batches, torch.device("cpu"))[:3].tolist()

    expected_loss = expected_correct = expected_predictions = 0.0
    for batch in batches:
        labels = torch.full((batch.input_ids.numel(),), -100)
        used = batch.mlm_labels != -100
        labels[batch.mlm_positions[used].long()] = batch.mlm_labels[used]
        labels = labels.view(batch.input_ids.shape)
        for row, lengths in enumerate(batch.lengths.tolist()):
            start = 0
            for length in filter(None, lengths):
                part = slice(start, start + length)
                with torch.no_grad():
                    logits = theirs(
                        input_ids=batch.input_ids[row, part].long()[None],
                        token_type_ids=batch.segment_ids[row, part].long()[None],
                    ).logits[0]
                target = labels[row, part]
                expected_loss += F.cross_entropy(logits.double(), target, ignore_index=-100, reduction="sum").item()
                expected_correct += (logits.argmax(-1) == target).sum().item()
                expected_predictions += (target != -100).sum().item()
                start += length
    assert predictions == expected_predictions > 100
    assert loss / predictions == pytest.approx(expected_loss / predictions, abs=1e-4)
    assert abs(correct - expected_correct) <= 1  # two logits may tie to rounding
