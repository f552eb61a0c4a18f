"""Rows of 8,192 tokens from text to Hugging Face, with the commands as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megabert import hf
from megabert.data.shards import Dataset
from megabert.model import unpacked_inputs
from tests.helpers.wordpiece import DATA
from tests.integration.conftest import command, metrics

LENGTH = 8192
SMALL = (
    *("model.kind=modern", "model.norm=pre", "model.nsp=false", "model.layers=4", "model.hidden=64", "model.heads=2"),
    *(f"model.max_positions={LENGTH}", "model.window=128", "model.bias=false", "model.rope_theta=160000.0"),
    *("model.dropout=0.0", "model.attention_dropout=0.0", "batch.global_size=2", "batch.micro_size=1"),
    *("schedule.total_steps=4", "schedule.warmup_steps=1", "log.interval=1", "precision=fp32", "data.workers=1"),
    *("eval.rows=2", "peak_tflops=1.0"),
)


def run(*args: object) -> str:
    done = command(*args, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def books(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three novels where they are; else Python's language reference as six long documents."""
    novels = sorted((DATA / "novels").glob("*.txt"))
    if novels:
        return novels[:3]
    topics = [json.loads(line)["text"] for line in (corpus / "topics.jsonl").read_text().splitlines()]
    folder = tmp_path_factory.mktemp("books")
    for number in range(6):
        (folder / f"{number}.txt").write_text("\n".join(topics[number::6]))
    return sorted(folder.iterdir())


@pytest.mark.slow
def test_rows_of_8192_tokens_as_commands(books: list[Path], tmp_path: Path) -> None:
    """Built, trained, evaluated, exported; transformers' logits of a whole row are ours."""
    transformers = pytest.importorskip("transformers")
    data, trained, folder = tmp_path / "data", tmp_path / "run", tmp_path / "hf"
    build = ("--seq-len", LENGTH, "--vocab-size", 2000, "--held-out", 0.4, "--text-documents", "file", "--workers", 1)
    run("-m", "data_prep", "build", "--input", *books, "--output", data, *build)
    run("-m", "data_prep", "verify", data)
    run("megabert/train.py", "--config", "tiny", "--data", data, "--run", trained, *SMALL)
    losses = [line["train/loss"] for line in metrics(trained) if "train/loss" in line]
    assert len(losses) == 4 and losses[-1] < losses[0]
    scored = run("-m", "megabert", "evaluate", "--model", trained, "--data", data, "--rows", 2)
    assert json.loads(scored)["eval/predictions"] > 2000
    run("-m", "megabert", "export", "--model", trained, "--output", folder)

    found, rows = hf.load(trained), Dataset(data)
    # the fullest row, as one sequence
    row = max(rows.read(np.arange(len(rows))).ids, key=np.count_nonzero)
    ids = torch.from_numpy(row[row != 0].astype(np.int64))[None]
    assert ids.shape[1] > 0.99 * LENGTH
    peer = transformers.ModernBertForMaskedLM.from_pretrained(folder).eval()
    ours = found.model(torch.device("cpu"))
    with torch.no_grad():
        logits = ours.mlm_logits(ours.encode(**unpacked_inputs(ids))[0])
        wanted = peer(input_ids=ids).logits[0]
    assert (logits - wanted).abs().max() < 1e-4 and wanted.std() > 0.01
