"""The walk of a model out into the world and back, with the commands as they are typed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megabert import hf as pretrained
from megabert.data.shards import Dataset
from megabert.evaluation import fixed_batches
from megabert.model import BertForPreTraining
from tests.integration.conftest import command

SHORT = (
    *("schedule.total_steps=4", "schedule.warmup_steps=1", "eval.interval=0", "eval.rows=64", "log.interval=1"),
    *("batch.global_size=16", "batch.micro_size=8", "data.workers=1", "peak_tflops=1.0", "precision=fp32"),
)
SMALL = ("model.layers=2", "model.hidden=64", "model.heads=2", "model.max_positions=64", "zero.stage=3")


def run(*args: object, **kwargs) -> str:
    done = command(*args, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.dist
@pytest.mark.slow
def test_trained_exported_loaded_converted_and_trained_on(dataset: Path, corpus: Path, tmp_path: Path) -> None:
    """Two ranks at ZeRO-3; the export against transformers on packed rows; a run that continues from it."""
    import transformers

    first, folder = tmp_path / "first", tmp_path / "hf"
    train = ("megabert/train.py", "--data", dataset)
    run(*train, "--config", "tiny", "--run", first, *SHORT, *SMALL, ranks=2)
    output = run("-m", "megabert", "export", "--model", first, "--output", folder)
    assert "BertForPreTraining of step 4, 2,000 tokens" in output
    card = (folder / "README.md").read_text()
    assert "| updates | 4 |" in card and "| masked-LM loss, held out | not measured |" not in card
    assert "| schedule.total_steps | 4 |" in card

    found = pretrained.load(first)
    peer = transformers.BertForPreTraining.from_pretrained(folder).eval()
    ours: BertForPreTraining = found.model(torch.device("cpu"))
    batches = fixed_batches(Dataset(dataset), found.tokenizer, found.config)  # few held-out rows have several pairs
    inputs = max(batches, key=lambda batch: batch.sequences).inputs()
    names = ("input_ids", "segment_ids", "position_ids", "key_start", "key_end", "lengths")
    sequences = 0
    with torch.no_grad():
        hidden = ours.encode(**{name: inputs[name] for name in names})
        for row, lengths in enumerate(inputs["lengths"].tolist()):
            start = 0
            for length in filter(None, lengths):
                here = slice(start, start + length)
                alone = {"input_ids": inputs["input_ids"][row : row + 1, here].long()}
                want = peer(**alone, token_type_ids=inputs["segment_ids"][row : row + 1, here].long())
                assert (ours.mlm_logits(hidden[row, here]) - want.prediction_logits[0]).abs().max() <= 1e-5
                nsp = ours.nsp_logits(hidden[row, start : start + 1])
                assert (nsp - want.seq_relationship_logits).abs().max() <= 1e-5
                start, sequences = start + length, sequences + 1
    assert sequences > len(inputs["lengths"])  # packed

    back, data = tmp_path / "back", tmp_path / "data"
    output = run("-m", "megabert", "convert", "--model", folder, "--run", back)
    assert f"--tokenizer {back / 'tokenizer.model'}" in output and f"--config {back / 'config.toml'}" in output
    weights = pretrained.load(back).weights
    assert all(weights[name].equal(found.weights[name]) for name in weights.keys() | found.weights.keys())
    build = ("-m", "data_prep", "build", "--input", corpus, "--output", data, "--seq-len", 64, "--workers", 1)
    run(*build, "--tokenizer", back / "tokenizer.model", "--held-out", 0.05, "--nsp")
    train = ("megabert/train.py", "--data", data, "--config", back / "config.toml")
    output = run(*train, "--run", tmp_path / "second", *SHORT)
    assert f"starting from the weights of {back} at step 0" in output
    refused = command(*train, "--run", back, *SHORT)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "converted from hf" in refused.stderr
    table = run("-m", "megabert", "fill", "--model", tmp_path / "second", "the value of the [MASK] is")
    assert table.count("%") == 5
