"""A byte-level BPE from its tokenizer.json to a trained, filled, exported model."""

from __future__ import annotations

import json

import pytest

from tests.helpers import fast_tokenizers
from tests.integration.conftest import command


@pytest.mark.slow
def test_a_byte_level_bpe_goes_through_every_command(corpus, tmp_path):
    texts = [json.loads(line)["text"] for line in (corpus / "topics.jsonl").read_text().splitlines()]
    file = fast_tokenizers.write(tmp_path / "tokenizer.json", texts=texts[:20], size=1000)
    data, run, output = tmp_path / "data", tmp_path / "run", tmp_path / "hf"
    for call in (
        ("data_prep", "build", "--input", corpus, "--output", data, "--seq-len", 64, "--tokenizer", file, "--nsp", "--workers", 1),
        ("megabert", "train", "--config", "tiny", "--data", data, "--run", run, "model.layers=1", "model.hidden=32",
         "model.heads=2", "batch.global_size=16", "batch.micro_size=16", "schedule.total_steps=2", "schedule.warmup_steps=1",
         "peak_tflops=1.0", "data.workers=0"),
        ("megabert", "evaluate", "--model", run, "--data", data),
        ("megabert", "export", "--model", run, "--output", output),
        ("megabert", "fill", "--model", output, "--top", 1, "The [MASK] of a <mask>."),
    ):  # fmt: skip
        done = command("-m", *call)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.strip().splitlines()) == 2
    for folder in (data, run):
        assert (folder / "tokenizer.json").read_bytes() == file.read_bytes()
    assert json.loads((output / "config.json").read_text())["pad_token_id"] == 1
